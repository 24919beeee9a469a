/*
 * mgctl in a container: sends its command line to the node's metagpu daemon, and prints the answer.
 *
 * The daemon parses the command, and asks the kernel for the caller's identity. So this program
 * needs nothing of the image it runs in, and stays the same when commands change. Where no daemon
 * answers, it has the help of its own build.
 *
 * Request: two bytes of length, then texts that each end in a zero: first one line of facts,
 *     mgctl/1 tty=0|1 columns=N rows=N old=0|1
 * then the arguments. `old=1` means that variables of MetaGPU's own mgctl are set.
 *
 * Answer: frames of one letter and a number of four bytes; all numbers are big-endian:
 *     o N   the next N bytes are for stdout
 *     e N   the next N bytes are for stderr
 *     x N   the end; exit with status N
 *
 * metagpu/plugins/pod_api/frames.py is the daemon's side.
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

#include "hook.h"
#include "usage.h" /* HELP, VERSION and WORDS of the daemon's side: made by build.py */

#define SOCKET_VARIABLE "METAGPU_SOCKET"
#define DEFAULT_SOCKET "/run/metagpu/mgctl.sock"

enum {
    REQUEST_LIMIT = 4096, /* bytes of a request behind its length; the daemon has the same limit */
    TEXT_LIMIT = 512,     /* bytes of an error */
    TIMEOUT = 30,         /* seconds to wait for a silent daemon */
    FAILED = 1,
    USAGE_ERROR = 2,
    FRAME_HEAD = 5,
};

static bool wants_json; /* the form of an error; all else of a command line is the daemon's */

static void print_object(const char *text)
{
    char escaped[6 * TEXT_LIMIT], *end = escaped;

    for (; *text != '\0'; text++) {
        if ((unsigned char)*text < ' ')
            end += sprintf(end, "\\u%04x", *text);
        else if (*text == '"' || *text == '\\')
            end += sprintf(end, "\\%c", *text);
        else
            *end++ = *text;
    }
    *end = '\0';
    dprintf(STDERR_FILENO, "{\"reason\": \"no_daemon\", \"error\": \"%s\"}\n", escaped);
}

static _Noreturn void die(int status, const char *format, ...)
{
    char text[TEXT_LIMIT];
    va_list values;

    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    if (wants_json && status == FAILED)
        print_object(text);
    else
        dprintf(STDERR_FILENO, "mgctl: %s\n", text);
    exit(status);
}

/* Returns whether an argument is `-o json` in one of its forms; `next` is the one behind it. */
static bool asks_json(const char *argument, const char *next)
{
    const char *forms[] = {"--output=", "-o=", "-o"};

    if (strcmp(argument, "-o") == 0 || strcmp(argument, "--output") == 0)
        return next != NULL && strcmp(next, "json") == 0;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        size_t size = strlen(forms[i]);
        if (strncmp(argument, forms[i], size) == 0 && strcmp(argument + size, "json") == 0)
            return true;
    }
    return false;
}

/* Answers what needs no daemon, where none answers: help, version, and an unknown command. */
static void answer_alone(char **argv)
{
    static const char *const words[] = {WORDS};
    char *alone[] = {argv[0], "--help", NULL};
    const char *command = NULL;
    bool version = false;

    if (argv[1] == NULL)
        argv = alone;
    for (argv++; *argv != NULL; argv++) {
        if (strcmp(*argv, "-h") == 0 || strcmp(*argv, "--help") == 0) {
            dprintf(STDOUT_FILENO, "%s", HELP);
            exit(0);
        }
        version |= strcmp(*argv, "--version") == 0;
        bool has_value = strcmp(*argv, "-o") == 0 || strcmp(*argv, "--output") == 0 ||
                         strcmp(*argv, "--sort-by") == 0;
        if (has_value && argv[1] != NULL)
            argv++;
        else if (**argv != '-' && command == NULL)
            command = *argv;
    }
    if (command == NULL && version) {
        dprintf(STDOUT_FILENO, "mgctl %s\n", VERSION);
        exit(0);
    }
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (command == NULL || strcmp(command, words[i]) == 0)
            return;
    die(USAGE_ERROR, "unknown command '%.40s'; `mgctl --help` lists the commands", command);
}

static bool is_set(const char *variable)
{
    const char *value = getenv(variable);
    return value != NULL && *value != '\0';
}

/* Writes the request behind its two bytes of length; returns the size of both. */
static size_t write_request(unsigned char *request, int argc, char **argv)
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
            die(USAGE_ERROR, "the arguments are longer than %d bytes", REQUEST_LIMIT);
        memcpy(text + used, argv[i], size);
        used += size;
    }
    request[0] = (unsigned char)(used >> 8);
    request[1] = (unsigned char)used;
    return used + 2;
}

static int connect_daemon(const char *path, char **argv)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval timeout = {.tv_sec = TIMEOUT};
    int daemon = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (strlen(path) >= sizeof address.sun_path)
        die(FAILED, "%s is too long for a socket's path", path);
    strcpy(address.sun_path, path);

    /* Both timeouts also limit `connect`: a daemon may be too busy to accept. */
    if (daemon < 0 || setsockopt(daemon, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) ||
        setsockopt(daemon, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout))
        die(FAILED, "cannot create a socket: %s", strerror(errno));
    if (connect(daemon, (struct sockaddr *)&address, sizeof address) == 0)
        return daemon;

    int problem = errno;
    answer_alone(argv);
    if (problem == ENOENT)
        die(FAILED, "there is no %s: metagpu does not run on this node now, or not for containers "
                    "(`mgctl: {inPods: false}`), or this container holds no share of a GPU; "
                    SOCKET_VARIABLE " may name another path", path);
    if (problem == EAGAIN)
        die(FAILED, "metagpu on %s did not accept the call within %d s", path, TIMEOUT);
    die(FAILED, "no daemon answers on %s (%s): metagpu does not run on this node now", path,
        strerror(problem));
}

static bool write_all(int file, const unsigned char *data, size_t size)
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

static void read_all(int daemon, unsigned char *data, size_t size)
{
    while (size > 0) {
        ssize_t done = read(daemon, data, size);
        if (done == 0 || (done < 0 && errno == ECONNRESET))
            die(FAILED, "metagpu broke off its answer; it may have been restarted: try again");
        if (done < 0 && errno == EAGAIN)
            die(FAILED, "metagpu sent nothing for %d s; try again", TIMEOUT);
        if (done < 0 && errno != EINTR)
            die(FAILED, "the answer cannot be read: %s", strerror(errno));
        if (done > 0) {
            data += done;
            size -= (size_t)done;
        }
    }
}

static void copy_bytes(int daemon, int out, size_t size)
{
    unsigned char buffer[4096];

    while (size > 0) {
        size_t part = size < sizeof buffer ? size : sizeof buffer;
        read_all(daemon, buffer, part);
        if (!write_all(out, buffer, part))
            exit(FAILED); /* the reader has closed the pipe */
        size -= part;
    }
}

int main(int argc, char **argv)
{
    if (argc > 0 && strcmp(argv[0], HOOK_NAME) == 0)
        return run_hook(argc, argv);
    for (int i = 1; i < argc; i++)
        wants_json |= asks_json(argv[i], argv[i + 1]);
    unsigned char request[2 + REQUEST_LIMIT];
    size_t size = write_request(request, argc, argv);
    const char *path = is_set(SOCKET_VARIABLE) ? getenv(SOCKET_VARIABLE) : DEFAULT_SOCKET;
    int daemon = connect_daemon(path, argv);

    /* A daemon that refuses may answer before it has read all: the answer is still read. */
    signal(SIGPIPE, SIG_IGN);
    write_all(daemon, request, size);

    for (;;) {
        unsigned char head[FRAME_HEAD];
        read_all(daemon, head, sizeof head);
        uint32_t number = (uint32_t)head[1] << 24 | head[2] << 16 | head[3] << 8 | head[4];

        switch (head[0]) {
        case 'o':
            copy_bytes(daemon, STDOUT_FILENO, number);
            break;
        case 'e':
            copy_bytes(daemon, STDERR_FILENO, number);
            break;
        case 'x':
            return (int)(number & 0xff);
        default:
            die(FAILED, "%s is not metagpu's socket: its answer has an unknown format", path);
        }
    }
}
