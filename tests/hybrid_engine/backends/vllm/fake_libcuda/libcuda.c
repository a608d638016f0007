/* The part of CUDA's driver that vLLM's allocator calls (cumem_allocator.cpp), over this process's own memory.
 *
 * One device. An address without memory faults; fresh memory holds 0xA5. A mapping is refused twice, and so is its end,
 * as the driver documents it. No kernels, no streams, one thread.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };
enum { GRANULARITY = 2 << 20, MOST = 256 };

static struct { size_t nbytes; int is_held; } memories[MOST]; /* by handle; those with 0 bytes are free */
static struct { char *start; size_t nbytes; unsigned long long handle; } mappings[MOST];
static int context;
static size_t limit = (size_t)-1;

size_t fake_taken(void) {
    size_t sum = 0;
    for (int i = 1; i < MOST; i++) sum += memories[i].nbytes;
    return sum;
}

void fake_limit(size_t nbytes) { limit = nbytes; }

int cuCtxGetCurrent(void **found) { *found = &context; return SUCCESS; }
int cuCtxSetCurrent(void *wanted) { (void)wanted; return SUCCESS; }
int cuDevicePrimaryCtxRetain(void **found, int device) { (void)device; *found = &context; return SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { (void)attribute, (void)device; *value = 1; return SUCCESS; }

int cuGetErrorString(int error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : "invalid argument";
    return SUCCESS;
}

int cuMemGetAllocationGranularity(size_t *nbytes, const void *properties, int option) {
    (void)properties, (void)option;
    *nbytes = GRANULARITY;
    return SUCCESS;
}

int cuMemAddressReserve(char **start, size_t nbytes, size_t alignment, void *hint, unsigned long long flags) {
    (void)alignment, (void)hint, (void)flags;
    *start = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *start == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}

int cuMemAddressFree(char *start, size_t nbytes) { return munmap(start, nbytes) ? INVALID_VALUE : SUCCESS; }

int cuMemCreate(unsigned long long *handle, size_t nbytes, const void *properties, unsigned long long flags) {
    (void)properties, (void)flags;
    if (fake_taken() + nbytes > limit) return OUT_OF_MEMORY;
    for (*handle = 1; memories[*handle].nbytes; ++*handle)
        if (*handle == MOST - 1) return OUT_OF_MEMORY;
    memories[*handle].nbytes = nbytes;
    memories[*handle].is_held = 1;
    return SUCCESS;
}

/* Memory goes once neither a handle nor a mapping holds it. */
static void drop_unused(unsigned long long handle) {
    for (int i = 0; i < MOST; i++)
        if (mappings[i].start && mappings[i].handle == handle) return;
    if (!memories[handle].is_held) memories[handle].nbytes = 0;
}

int cuMemRelease(unsigned long long handle) {
    if (handle >= MOST || !memories[handle].is_held) return INVALID_VALUE;
    memories[handle].is_held = 0;
    drop_unused(handle);
    return SUCCESS;
}

static int mapping_of(char *start) {
    for (int i = 0; i < MOST; i++)
        if (mappings[i].start == start) return i;
    return -1;
}

int cuMemMap(char *start, size_t nbytes, size_t offset, unsigned long long handle, unsigned long long flags) {
    int at = mapping_of(NULL);
    (void)flags;
    if (offset || !start || mapping_of(start) >= 0 || at < 0) return INVALID_VALUE;
    if (handle >= MOST || !memories[handle].is_held || memories[handle].nbytes != nbytes) return INVALID_VALUE;
    mappings[at].start = start;
    mappings[at].nbytes = nbytes;
    mappings[at].handle = handle;
    return SUCCESS;
}

int cuMemSetAccess(char *start, size_t nbytes, const void *access, size_t count) {
    (void)access, (void)count;
    if (!start || mapping_of(start) < 0 || mprotect(start, nbytes, PROT_READ | PROT_WRITE)) return INVALID_VALUE;
    memset(start, 0xA5, nbytes);
    return SUCCESS;
}

int cuMemUnmap(char *start, size_t nbytes) {
    int at = start ? mapping_of(start) : -1;
    if (at < 0 || mappings[at].nbytes != nbytes) return INVALID_VALUE;
    madvise(start, nbytes, MADV_DONTNEED);
    mprotect(start, nbytes, PROT_NONE);
    mappings[at].start = NULL;
    drop_unused(mappings[at].handle);
    return SUCCESS;
}
