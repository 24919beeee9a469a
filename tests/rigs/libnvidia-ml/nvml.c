/* A libnvidia-ml.so.1 of imaginary GPUs, for tests of the real pynvml.
 *
 * The file `control` in the library's own folder says how the library behaves; the library reads
 * the file again at every call. Without the file there are two GPUs of 16 GiB that work. Lines:
 *
 *   fail FUNCTION GPU CODE            the function returns this nvmlReturn_t
 *   hang FUNCTION GPU                 the function does not return while the line is there; once
 *                                     it is called, there is a file `hanging`
 *   set NAME GPU VALUE                a value; for the names, see `setting` below
 *   process GPU PID BYTES             a process on a GPU
 *   event NUMBER GPU TYPE DATA [GI CI]    an event; numbers count up
 *
 * FUNCTION is the name of a C function of NVML, and GPU an index; `*` stands for every function of
 * a GPU, and for every GPU. A function about no GPU, such as nvmlEventSetWait_v2, has the GPU `-`.
 * An event set gets the events of its GPUs that come after its creation, as from NVML.
 *
 * Types and numbers are those of the public header nvml.h.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15, MOST = 16, NO_GPU = -1,
       CONTROL_SIZE = 65536 };

typedef unsigned long long u64;
typedef struct { int index; } gpu_t;
typedef struct { u64 types[MOST]; int since; } set_t;
typedef struct { gpu_t *gpu; u64 type, data; unsigned gi, ci; } event_t;
typedef struct { unsigned pid; u64 memory; unsigned gi, ci; u64 protected_memory; } process_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory2_t;
typedef struct { unsigned field, scope; long long time, latency; unsigned type, code; u64 value; } field_t;
#define PROFILE unsigned id, p2p, slices, instances, processors, copy, decode, encode, jpeg, ofa; u64 memory
typedef struct { PROFILE; } profile_t;
typedef struct { unsigned version; PROFILE; char name[96]; } profile2_t;

static gpu_t gpus[MOST];
static int users;

/* Open a file in the library's own folder. */
static FILE *open_beside(const char *name, const char *mode)
{
    char path[4096];
    Dl_info self;

    if (!dladdr(&users, &self)) abort();
    snprintf(path, sizeof path, "%.*s%s", (int)(strrchr(self.dli_fname, '/') + 1 - self.dli_fname), self.dli_fname, name);
    return fopen(path, mode);
}

/* Read the control file into `text`; return the text. */
static char *control(char *text)
{
    FILE *file = open_beside("control", "re");
    size_t size = 0;

    if (file) {
        size = fread(text, 1, CONTROL_SIZE - 1, file);
        fclose(file);
    }
    text[size] = 0;
    return text;
}

static char *next_line(char **rest)
{
    char *line;
    while ((line = strsep(rest, "\n")) && !*line) continue;
    return line;
}

static int is_gpu(const char *word, int index)
{
    return index == NO_GPU ? !strcmp(word, "-") : !strcmp(word, "*") || atoi(word) == index;
}

static void rest_a_little(void)
{
    nanosleep(&(struct timespec){0, 5000000}, NULL);
}

/* Return the code that the control file has for a call; do not return while the call hangs. */
static int asked(const char *function, int index)
{
    for (;;) {
        char text[CONTROL_SIZE], *rest = control(text), *line, verb[8], name[64], gpu[8];
        int code = SUCCESS, hangs = 0, value;
        FILE *mark;

        while ((line = next_line(&rest))) {
            value = 0;
            if (sscanf(line, "%7s %63s %7s %d", verb, name, gpu, &value) < 3) continue;
            if (!is_gpu(gpu, index) || (strcmp(name, function) && (strcmp(name, "*") || index == NO_GPU)))
                continue;
            if (!strcmp(verb, "hang")) hangs = 1;
            if (!strcmp(verb, "fail")) code = value;
        }
        if (!hangs) return code;
        if ((mark = open_beside("hanging", "we"))) fclose(mark);
        rest_a_little();
    }
}

/* Return a number of the control file: gpus, cuda, entry (bytes of a process), memory, numa, mig,
 * ecc, action, types (of events). */
static u64 setting(const char *wanted, int index, u64 value)
{
    char text[CONTROL_SIZE], *rest = control(text), *line, name[64], gpu[8], found[32];

    while ((line = next_line(&rest)))
        if (sscanf(line, "set %63s %7s %31s", name, gpu, found) == 3 && !strcmp(name, wanted) && is_gpu(gpu, index))
            value = strtoull(found, NULL, 0);
    return value;
}

static int put(char *to, unsigned size, const char *text)
{
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

/* Leave the calling function unless NVML is initialised and the call works. */
#define ANSWER_FOR(index) \
    do { \
        int code_ = users ? asked(__func__, index) : UNINITIALIZED; \
        if (code_) return code_; \
    } while (0)
#define ANSWER() ANSWER_FOR(NO_GPU)
#define ANSWER_GPU(gpu) \
    do { \
        if ((gpu) < gpus || (gpu) >= gpus + MOST) return INVALID_ARGUMENT; \
        ANSWER_FOR((gpu)->index); \
    } while (0)

int nvmlInitWithFlags(unsigned flags)
{
    int code = asked(__func__, NO_GPU);
    (void)flags;
    if (code) return code;
    for (int index = 0; index < MOST; index++) gpus[index].index = index;
    users++;
    return SUCCESS;
}

int nvmlInit_v2(void)  /* NVIDIA's Go programs call this one */
{
    return nvmlInitWithFlags(0);
}

int nvmlShutdown(void)
{
    ANSWER();
    users--;
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    static _Thread_local char text[32];
    snprintf(text, sizeof text, "code %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    ANSWER();
    return put(text, size, "550.163.01");
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ANSWER();
    *version = (int)setting("cuda", NO_GPU, 12040);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    ANSWER();
    *count = (unsigned)setting("gpus", NO_GPU, 2);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu)
{
    ANSWER_FOR((int)index);
    if (index >= setting("gpus", NO_GPU, 2)) return INVALID_ARGUMENT;
    *gpu = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetIndex(gpu_t *gpu, unsigned *index)
{
    ANSWER_GPU(gpu);
    *index = (unsigned)gpu->index;
    return SUCCESS;
}

int nvmlDeviceGetUUID(gpu_t *gpu, char *text, unsigned size)
{
    char uuid[64];
    ANSWER_GPU(gpu);
    snprintf(uuid, sizeof uuid, "GPU-00000000-0000-4000-8000-%012d", gpu->index);
    return put(text, size, uuid);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, gpu_t **gpu)
{
    for (unsigned index = 0; index < setting("gpus", NO_GPU, 2); index++) {
        char own[64];
        if (nvmlDeviceGetUUID(&gpus[index], own, sizeof own)) continue;
        if (!strcmp(own, uuid)) return nvmlDeviceGetHandleByIndex_v2(index, gpu);
    }
    return NOT_FOUND;
}

int nvmlDeviceIsMigDeviceHandle(gpu_t *gpu, unsigned *is_mig)
{
    ANSWER_GPU(gpu);
    *is_mig = 0;
    return SUCCESS;
}

int nvmlDeviceGetName(gpu_t *gpu, char *text, unsigned size)
{
    ANSWER_GPU(gpu);
    return put(text, size, "Imaginary GPU");
}

int nvmlDeviceGetMinorNumber(gpu_t *gpu, unsigned *minor)
{
    ANSWER_GPU(gpu);
    *minor = (unsigned)gpu->index;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(gpu_t *gpu, pci_t *pci)
{
    ANSWER_GPU(gpu);
    *pci = (pci_t){.bus = 7 + (unsigned)gpu->index, .id = 0x20B010DE};
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
    return SUCCESS;
}

static u64 used_memory(gpu_t *gpu);

int nvmlDeviceGetMemoryInfo(gpu_t *gpu, memory_t *memory)
{
    ANSWER_GPU(gpu);
    memory->total = setting("memory", gpu->index, 16384) << 20;
    memory->used = used_memory(gpu) + (512 << 20);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(gpu_t *gpu, memory2_t *memory)
{
    ANSWER_GPU(gpu);
    memory->total = setting("memory", gpu->index, 16384) << 20;
    memory->reserved = 512 << 20;
    memory->used = used_memory(gpu);
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(gpu_t *gpu, int *major, int *minor)
{
    ANSWER_GPU(gpu);
    *major = 8, *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetArchitecture(gpu_t *gpu, unsigned *architecture)
{
    ANSWER_GPU(gpu);
    *architecture = 7;
    return SUCCESS;
}

int nvmlDeviceGetMemoryAffinity(gpu_t *gpu, unsigned words, u64 *nodes, unsigned scope)
{
    ANSWER_GPU(gpu);
    (void)scope;
    memset(nodes, 0, words * sizeof *nodes);
    nodes[0] = setting("numa", gpu->index, 1);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(gpu_t *gpu, unsigned *now, unsigned *pending)
{
    ANSWER_GPU(gpu);
    *now = *pending = (unsigned)setting("mig", gpu->index, 0);
    return SUCCESS;
}

int nvmlDeviceSetMigMode(gpu_t *gpu, unsigned mode, int *status)
{
    ANSWER_GPU(gpu);
    (void)mode;
    *status = SUCCESS;
    return SUCCESS;
}

int nvmlDeviceGetEccMode(gpu_t *gpu, unsigned *now, unsigned *pending)
{
    ANSWER_GPU(gpu);
    *now = *pending = 1;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(gpu_t *gpu, unsigned type, unsigned counter, u64 *count)
{
    ANSWER_GPU(gpu);
    (void)type, (void)counter;
    *count = setting("ecc", gpu->index, 0);
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(gpu_t *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    ANSWER_GPU(gpu);
    *corrected = *uncorrected = *pending = *failed = 0;
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(gpu_t *gpu, int count, field_t *fields)
{
    ANSWER_GPU(gpu);
    for (int at = 0; at < count; at++) {
        fields[at].type = 1;
        fields[at].code = (unsigned)asked("field", gpu->index);
        fields[at].value = setting("action", gpu->index, 0);
    }
    return SUCCESS;
}

int nvmlDeviceGetComputeMode(gpu_t *gpu, unsigned *mode)
{
    ANSWER_GPU(gpu);
    *mode = 0;
    return SUCCESS;
}

int nvmlDeviceSetComputeMode(gpu_t *gpu, unsigned mode)
{
    ANSWER_GPU(gpu);
    (void)mode;
    return SUCCESS;
}

/* Processes. */

static int next_process(char **rest, int index, unsigned *pid, u64 *memory)
{
    char *line, gpu[8];
    while ((line = next_line(rest)))
        if (sscanf(line, "process %7s %u %llu", gpu, pid, memory) == 3 && is_gpu(gpu, index)) return 1;
    return 0;
}

static u64 used_memory(gpu_t *gpu)
{
    char text[CONTROL_SIZE], *rest = control(text);
    u64 memory, sum = 0;
    unsigned pid;
    while (next_process(&rest, gpu->index, &pid, &memory)) sum += memory;
    return sum;
}

/* Fill the caller's array with entries of this many bytes. */
static int list_processes(gpu_t *gpu, unsigned *count, char *to, size_t entry)
{
    char text[CONTROL_SIZE], *rest = control(text);
    process_t found = {.gi = ~0u, .ci = ~0u};
    unsigned room = to ? *count : 0;

    for (*count = 0; next_process(&rest, gpu->index, &found.pid, &found.memory); ++*count)
        if (*count < room) memcpy(to + *count * entry, &found, entry);
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(gpu_t *gpu, unsigned *count, void *to)
{
    ANSWER_GPU(gpu);
    return list_processes(gpu, count, to, setting("entry", NO_GPU, 24));
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(gpu_t *gpu, unsigned *count, void *to)
{
    ANSWER_GPU(gpu);
    (void)to;
    *count = 0;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(gpu_t *gpu, unsigned *count, void *to)
{
    ANSWER_GPU(gpu);
    return list_processes(gpu, count, to, 24);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(gpu_t *gpu, unsigned *count, void *to)
{
    ANSWER_GPU(gpu);
    (void)to;
    *count = 0;
    return SUCCESS;
}

/* These two are there so that a test can find them, or find them missing. */
int nvmlDeviceGetConfComputeMemSizeInfo(gpu_t *gpu, void *to)
{
    ANSWER_GPU(gpu);
    (void)to;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetRunningProcessDetailList(gpu_t *gpu, void *to)
{
    ANSWER_GPU(gpu);
    (void)to;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetProcessUtilization(gpu_t *gpu, void *to, unsigned *count, u64 since)
{
    ANSWER_GPU(gpu);
    (void)to, (void)since;
    *count = 0;
    return NOT_FOUND;
}

int nvmlDeviceSetMemoryLimits_v1(gpu_t *gpu, void *limits)
{
    ANSWER_GPU(gpu);
    (void)limits;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetMemoryLimits_v1(gpu_t *gpu, void *limits)
{
    ANSWER_GPU(gpu);
    (void)limits;
    return NOT_SUPPORTED;
}

/* Connections. */

int nvmlDeviceGetTopologyCommonAncestor(gpu_t *one, gpu_t *other, unsigned *level)
{
    ANSWER_GPU(one);
    (void)other;
    *level = 50;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(gpu_t *gpu, unsigned link, unsigned *active)
{
    ANSWER_GPU(gpu);
    *active = 1;
    return link < 2 ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(gpu_t *gpu, unsigned link, unsigned *type)
{
    ANSWER_GPU(gpu);
    (void)link;
    *type = 0;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu_t *gpu, unsigned link, pci_t *pci)
{
    ANSWER_GPU(gpu);
    (void)link;
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 7 + (1 - gpu->index));
    return SUCCESS;
}

/* MIG: one profile, no instances. */

#define FILL(it) \
    ((it)->id = 19, (it)->slices = 1, (it)->instances = 7, (it)->processors = 14, (it)->copy = 1, \
     (it)->decode = (it)->encode = (it)->jpeg = (it)->ofa = (it)->p2p = 0, (it)->memory = 2048)

int nvmlDeviceGetGpuInstanceProfileInfo(gpu_t *gpu, unsigned kind, profile_t *profile)
{
    ANSWER_GPU(gpu);
    FILL(profile);
    return kind ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetGpuInstanceProfileInfoV(gpu_t *gpu, unsigned kind, profile2_t *profile)
{
    ANSWER_GPU(gpu);
    FILL(profile);
    return kind ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu_t *gpu, unsigned id, unsigned *places, unsigned *count)
{
    ANSWER_GPU(gpu);
    (void)id;
    *count = 7;
    for (unsigned at = 0; places && at < 7; at++) places[2 * at] = at, places[2 * at + 1] = 1;
    return SUCCESS;
}

int nvmlDeviceGetGpuInstances(gpu_t *gpu, unsigned id, void **to, unsigned *count)
{
    ANSWER_GPU(gpu);
    (void)id, (void)to;
    *count = 0;
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceById(gpu_t *gpu, unsigned id, void **to)
{
    ANSWER_GPU(gpu);
    (void)id, (void)to;
    return NOT_FOUND;
}

int nvmlDeviceGetMaxMigDeviceCount(gpu_t *gpu, unsigned *count)
{
    ANSWER_GPU(gpu);
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(gpu_t *gpu, unsigned index, gpu_t **device)
{
    ANSWER_GPU(gpu);
    (void)index, (void)device;
    return NOT_FOUND;
}

/* Events. */

static int next_event(int after, set_t *set, event_t *event)
{
    char text[CONTROL_SIZE], *rest = control(text), *line;
    int number, index;

    while ((line = next_line(&rest))) {
        *event = (event_t){.gi = ~0u, .ci = ~0u};
        if (sscanf(line, "event %d %d %llu %llu %u %u", &number, &index, &event->type, &event->data, &event->gi, &event->ci) < 4)
            continue;
        if (number <= after || (set && !(set->types[index] & event->type))) continue;
        event->gpu = &gpus[index];
        return number;
    }
    return 0;
}

int nvmlEventSetCreate(set_t **set)
{
    event_t event;
    int number;
    ANSWER();
    *set = calloc(1, sizeof **set);
    while ((number = next_event((*set)->since, NULL, &event))) (*set)->since = number;
    return SUCCESS;
}

int nvmlEventSetFree(set_t *set)
{
    ANSWER();
    free(set);
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(gpu_t *gpu, u64 *types)
{
    ANSWER_GPU(gpu);
    *types = setting("types", gpu->index, 0xF);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(gpu_t *gpu, u64 types, set_t *set)
{
    ANSWER_GPU(gpu);
    set->types[gpu->index] |= types;
    return SUCCESS;
}

int nvmlEventSetWait_v2(set_t *set, event_t *event, unsigned milliseconds)
{
    for (unsigned waited = 0;; waited += 5) {
        int number;
        ANSWER();
        for (int index = 0; index < MOST; index++)
            if (set->types[index] && asked("", index) == GPU_IS_LOST) return GPU_IS_LOST;
        if ((number = next_event(set->since, set, event))) {
            set->since = number;
            return SUCCESS;
        }
        if (waited >= milliseconds) return TIMEOUT;
        rest_a_little();
    }
}
