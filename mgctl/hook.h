/* The program's other name, by which the container runtime starts it. */
#define HOOK_NAME "metagpu-hook"

int run_hook(int argc, char **argv);
