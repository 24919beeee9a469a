/*
 * mgctl in a container: carries its command line to the node's metagpu daemon, and the answer back.
 *
 * What a command means is the daemon's business, who asks too: it takes that from the kernel. So
 * this program needs nothing of the image it runs in, and stays the same while commands change.
 *
 * Request: two bytes of length, then texts that each end in a zero: first one line of facts,
 *     mgctl/1 tty=0|1 columns=N rows=N old=0|1
 * then the arguments. `old` says that variables of MetaGPU's own mgctl are set.
 *
 * Answer: frames of one letter and four bytes of a number, both numbers big-endian:
 *     o N   the next N bytes are for stdout
 *     e N   ... for stderr
 *     x N   the end; exit with status N
 *
 * metagpu/plugins/frames.py is the other side.
 */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define SOCKET_VARIABLE "METAGPU_SOCKET"
#define DEFAULT_SOCKET "/run/metagpu/mgctl.sock"

enum {
    REQUEST_LIMIT = 4096, /* bytes of a request behind its length, as the daemon allows */
    PATIENCE = 30,        /* seconds until a silent daemon is given up */
    FAILED = 1,
    MISUSED = 2,
    FRAME_HEAD = 5,
};

static _Noreturn void die(int status, const char *format, ...)
{
    char text[512];
    va_list values;

    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    dprintf(STDERR_FILENO, "mgctl: %s\n", text);
    exit(status);
}

static bool is_set(const char *variable)
{
    const char *value = getenv(variable);
    return value != NULL && *value != '\0';
}

/* Lays the request out behind its two bytes of length; gives the size of all of it. */
static size_t pack(unsigned char *request, int argc, char **argv)
{
    unsigned char *text = request + 2;
    struct winsize window = {0};
    bool tty = ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0;
    bool old = is_set("MG_CTL_ADDR") || is_set("MG_CTL_TOKEN");

    size_t used = 1 + (size_t)sprintf((char *)text, "mgctl/1 tty=%d columns=%u rows=%u old=%d",
                                      tty, window.ws_col, window.ws_row, old);

    for (int i = 1; i < argc; i++) {
        size_t size = strlen(argv[i]) + 1;
        if (size > REQUEST_LIMIT - used)
            die(MISUSED, "the arguments are longer than %d bytes", REQUEST_LIMIT);
        memcpy(text + used, argv[i], size);
        used += size;
    }
    request[0] = (unsigned char)(used >> 8);
    request[1] = (unsigned char)used;
    return used + 2;
}

static int reach(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval patience = {.tv_sec = PATIENCE};
    int daemon = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (strlen(path) >= sizeof address.sun_path)
        die(FAILED, "%s is too long for a socket's path", path);
    strcpy(address.sun_path, path);

    /* The times hold for connecting too: a daemon may be there and too busy to accept. */
    if (daemon < 0 || setsockopt(daemon, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) ||
        setsockopt(daemon, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience))
        die(FAILED, "no socket can be made: %s", strerror(errno));
    if (connect(daemon, (struct sockaddr *)&address, sizeof address) == 0)
        return daemon;

    if (errno == ENOENT)
        die(FAILED, "there is no %s: metagpu does not run on this node now, or this container "
                    "holds no share of a GPU; " SOCKET_VARIABLE " may name another path", path);
    if (errno == EAGAIN)
        die(FAILED, "metagpu on %s does not take a call within %d s", path, PATIENCE);
    die(FAILED, "nobody answers on %s (%s): metagpu does not run on this node now", path,
        strerror(errno));
}

static bool put(int file, const unsigned char *data, size_t size)
{
    while (size > 0) {
        ssize_t done = write(file, data, size);
        if (done < 0 && errno != EINTR)
            return false;
        if (done > 0) {
            data += done;
            size -= (size_t)done;
        }
    }
    return true;
}

static void take(int daemon, unsigned char *data, size_t size)
{
    while (size > 0) {
        ssize_t done = read(daemon, data, size);
        if (done == 0 || (done < 0 && errno == ECONNRESET))
            die(FAILED, "metagpu broke off its answer; it may have been restarted: try again");
        if (done < 0 && errno == EAGAIN)
            die(FAILED, "metagpu has said nothing for %d s; try again", PATIENCE);
        if (done < 0 && errno != EINTR)
            die(FAILED, "the answer cannot be read: %s", strerror(errno));
        if (done > 0) {
            data += done;
            size -= (size_t)done;
        }
    }
}

static void copy(int daemon, int out, size_t size)
{
    unsigned char buffer[4096];

    while (size > 0) {
        size_t part = size < sizeof buffer ? size : sizeof buffer;
        take(daemon, buffer, part);
        if (!put(out, buffer, part))
            exit(FAILED); /* who read us has gone: there is nobody to tell */
        size -= part;
    }
}

int main(int argc, char **argv)
{
    unsigned char request[2 + REQUEST_LIMIT];
    size_t size = pack(request, argc, argv);
    const char *path = is_set(SOCKET_VARIABLE) ? getenv(SOCKET_VARIABLE) : DEFAULT_SOCKET;
    int daemon = reach(path);

    /* A daemon that refuses answers before it has read all: what it says is worth hearing. */
    signal(SIGPIPE, SIG_IGN);
    put(daemon, request, size);

    for (;;) {
        unsigned char head[FRAME_HEAD];
        take(daemon, head, sizeof head);
        uint32_t number = (uint32_t)head[1] << 24 | head[2] << 16 | head[3] << 8 | head[4];

        switch (head[0]) {
        case 'o':
            copy(daemon, STDOUT_FILENO, number);
            break;
        case 'e':
            copy(daemon, STDERR_FILENO, number);
            break;
        case 'x':
            return (int)(number & 0xff);
        default:
            die(FAILED, "%s is not metagpu's: it answers what is no answer", path);
        }
    }
}
