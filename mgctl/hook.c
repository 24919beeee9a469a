/*
 * metagpu-hook: the same program by another name. The container runtime starts it on the host, as
 * root, when a container's cgroup is there and its first process is not (OCI: createRuntime).
 *
 *     metagpu-hook SOCKET ignore|fail       with the container's state, JSON, as its input
 *
 * It passes the state to the daemon, which finds the cgroup, sets the limits and answers one line.
 * Without an answer the container starts all the same with `ignore`, and does not with `fail`,
 * where the program asks again until its deadline: a daemon may be between two versions.
 */
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "hook.h"

#define BEGIN "{\"command\":\"container-starting\",\"state\":"

enum {
    /* Bytes, as of the daemon. A pod's annotations have 256 KiB at most; CRI-O gives them twice,
     * as JSON in JSON, in which one byte can become twelve. */
    STATE_LIMIT = 16 << 20,
    ANSWER_LIMIT = 2048,
    IGNORE_SECONDS = 3, /* in all; the daemon goes on, and sets the limit afterwards */
    FAIL_SECONDS = 10,
};

static char request[STATE_LIMIT];
static int failed; /* the exit status without a good answer */

static _Noreturn void give_up(const char *problem)
{
    dprintf(STDERR_FILENO, "metagpu-hook: %s\n", problem);
    _exit(failed);
}

static void on_deadline(int number)
{
    (void)number;
    give_up("the daemon of metagpu did not answer in time"); /* nothing here holds a lock of stdio */
}

/* Reads the state, which becomes one line: in JSON the end of a line is white space. */
static size_t read_request(void)
{
    size_t used = sizeof BEGIN - 1;
    ssize_t size;

    memcpy(request, BEGIN, used);
    while ((size = read(STDIN_FILENO, request + used, sizeof request - 2 - used)) > 0)
        used += (size_t)size;
    if (size < 0 || used == sizeof request - 2)
        give_up("the state of the container cannot be read");
    for (size_t i = 0; i < used; i++)
        if (request[i] == '\n' || request[i] == '\r')
            request[i] = ' ';
    memcpy(request + used, "}\n", 2);
    return used + 2;
}

/* Sends the request and reads the answer, a text without its end of line; returns its success. */
static bool ask(const char *path, size_t size, char *answer)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int daemon = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    size_t used = 0;
    ssize_t part = 0;

    strcpy(address.sun_path, path);
    bool sent = daemon >= 0 && connect(daemon, (struct sockaddr *)&address, sizeof address) == 0;
    for (size_t done = 0; sent && done < size; done += (size_t)part)
        sent = (part = write(daemon, request + done, size - done)) > 0;
    while (sent && used < ANSWER_LIMIT - 1 && memchr(answer, '\n', used) == NULL) {
        if ((part = read(daemon, answer + used, ANSWER_LIMIT - 1 - used)) <= 0)
            break;
        used += (size_t)part;
    }
    close(daemon);
    answer[used] = '\0';
    answer[strcspn(answer, "\n")] = '\0';
    return sent && part > 0;
}

int run_hook(int argc, char **argv)
{
    const struct timespec pause = {.tv_nsec = 100 * 1000 * 1000};
    char answer[ANSWER_LIMIT];

    bool fails = argc == 3 && strcmp(argv[2], "fail") == 0;
    failed = fails ? EXIT_FAILURE : EXIT_SUCCESS;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGALRM, on_deadline);
    alarm(fails ? FAIL_SECONDS : IGNORE_SECONDS);
    if (argc != 3 || strlen(argv[1]) >= sizeof((struct sockaddr_un *)0)->sun_path)
        give_up("usage: metagpu-hook SOCKET ignore|fail");
    size_t size = read_request();

    while (!ask(argv[1], size, answer)) {
        if (!fails)
            give_up("no daemon of metagpu answers");
        nanosleep(&pause, NULL);
    }
    if (strncmp(answer, "{\"ok\"", 5) != 0)
        give_up(answer);
    return EXIT_SUCCESS;
}
