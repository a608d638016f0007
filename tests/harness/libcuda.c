/* The virtual memory calls of CUDA's driver on a machine without a GPU: a libcuda.so.1 for libcuda.py.
 *
 * Physical memory is a memory file, an address range a reserved mapping of this process, an exported descriptor that of
 * the file. So tensors over it work, other processes can import it, and touching what is not mapped or has no access
 * ends the process, as it ends a CUDA context. New memory is full of garbage. One device, no kernels, no streams.
 *
 * It allows what NVIDIA documents, and no more than is used here:
 *     nothing before cuInit, and nothing in a forked child
 *     sizes and addresses are multiples of the granularity
 *     memory is mapped whole, inside one reserved range, where nothing is mapped; a mapping is unmapped whole, and a
 *     range with what is mapped in it, also nothing (seen on an H100 with driver 580)
 *     a range in which something is mapped is not given back
 *     a handle is used until it is released, and its number then given away again; memory goes with its last handle
 *     and mapping
 *     only memory that was created for it can be exported, once it is there
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Values and structures of cuda.h. */
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, NOT_FOUND = 500 };
enum { PINNED = 1, ON_DEVICE = 1, FILE_DESCRIPTOR = 1, READ_WRITE = 3, GPU_DIRECT_RDMA_WITH_VMM = 110 };
typedef uint64_t Address, Handle;
typedef struct { int type, id; } Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    struct { unsigned char compression, is_for_rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} Properties;
typedef struct { Location location; int flags; } Access;

/* What a test sets. */
size_t test_granule = 65536;
size_t test_total_nbytes = SIZE_MAX;
int test_missing_attribute = 0;
char test_failing_call[64] = "";
int test_failing_code = 0;

typedef struct Memory {
    struct Memory *next;
    Handle handle;
    size_t nbytes;
    ino_t inode;
    int fd, has_handle, num_mappings, is_exportable;
} Memory;
typedef struct Range { struct Range *next; Address start; size_t nbytes; void *whole; } Range;
typedef struct Mapping { struct Mapping *next; Address start; size_t nbytes; Memory *memory; int has_access; } Mapping;

static Memory *memories;
static Range *ranges;
static Mapping *mappings;
static const Handle first_handle = 0x1000;
static pid_t user;
static int context;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void unlock(int *unused) { (void)unused, pthread_mutex_unlock(&lock); }

#define LOCKED __attribute__((cleanup(unlock), unused)) int locked = pthread_mutex_lock(&lock)
#define ENTER \
    if (user != getpid()) return NOT_INITIALIZED; \
    LOCKED; \
    if (!strcmp(test_failing_call, __func__)) return test_failing_code
#define REMOVE(list, item) \
    for (__typeof__(item) *at = &(list); *at; at = &(*at)->next) \
        if (*at == (item)) { *at = (item)->next; break; }
#define ADD(list, item) (item)->next = (list), (list) = (item)
#define FIND(found, list, condition) for (found = (list); found && !(condition); found = found->next)

static int is_whole(uint64_t nbytes) { return nbytes && nbytes % test_granule == 0; }

static Memory *memory_of(Handle handle) {
    Memory *found;
    FIND(found, memories, found->handle == handle && found->has_handle);
    return found;
}

static Mapping *mapping_of(Address start, size_t nbytes) {
    Mapping *found;
    FIND(found, mappings, found->start == start && found->nbytes == nbytes);
    return found;
}

static Mapping *mapping_in(Address start, size_t nbytes) {
    Mapping *found;
    FIND(found, mappings, found->start < start + nbytes && start < found->start + found->nbytes);
    return found;
}

static int is_mapped_in(Address start, size_t nbytes) { return mapping_in(start, nbytes) != NULL; }

static Handle new_memory(int fd, size_t nbytes, ino_t inode, int is_exportable) {
    Handle handle = first_handle;
    for (Memory *user = memories; user; handle += user != NULL) FIND(user, memories, user->handle == handle);
    Memory *made = calloc(1, sizeof *made);
    *made = (Memory){NULL, handle, nbytes, inode, fd, 1, 0, is_exportable};
    ADD(memories, made);
    return made->handle;
}

static void free_unused(Memory *memory) {
    if (memory->has_handle || memory->num_mappings) return;
    REMOVE(memories, memory);
    close(memory->fd);
    free(memory);
}

static size_t taken(void) {
    size_t sum = 0;
    for (Memory *one = memories, *first; one; one = one->next) {
        FIND(first, memories, first->inode == one->inode);
        if (first == one) sum += one->nbytes;
    }
    return sum;
}

/* What a test asks: bytes that handles and mappings of this process keep; how many of what; what may be touched. */
size_t test_taken(void) { LOCKED; return taken(); }

void test_counts(size_t *handles, size_t *num_mappings, size_t *num_ranges) {
    LOCKED;
    for (Memory *one = memories; one; one = one->next) *handles += one->has_handle;
    for (Mapping *one = mappings; one; one = one->next) ++*num_mappings;
    for (Range *one = ranges; one; one = one->next) ++*num_ranges;
}

size_t test_mapped(uint64_t (*found)[2], size_t most) {
    LOCKED;
    size_t count = 0;
    for (Mapping *one = mappings; one; one = one->next)
        if (one->has_access && count++ < most) found[count - 1][0] = one->start, found[count - 1][1] = one->nbytes;
    return count;
}

/* The driver's calls. */
int cuInit(unsigned flags) {
    if (!user) user = getpid();
    return user != getpid() ? NOT_INITIALIZED : flags ? INVALID_VALUE : SUCCESS;
}

int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { ENTER; *device = ordinal; return ordinal ? INVALID_DEVICE : SUCCESS; }
int cuCtxGetCurrent(void **current) { ENTER; *current = &context; return SUCCESS; }
int cuCtxSetCurrent(void *wanted) { ENTER; return wanted == &context ? SUCCESS : INVALID_VALUE; }

int cuDevicePrimaryCtxRetain(void **primary, int device) {
    ENTER;
    *primary = &context;
    return device ? INVALID_DEVICE : SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER;
    *value = attribute != test_missing_attribute;
    return device ? INVALID_DEVICE : SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == INVALID_VALUE ? "invalid argument" : "another error";
    return SUCCESS;
}

static int are_valid(const Properties *wanted) {
    int may_be_sent = !wanted->flags.is_for_rdma || test_missing_attribute != GPU_DIRECT_RDMA_WITH_VMM;
    return wanted->type == PINNED && wanted->location.type == ON_DEVICE && !wanted->location.id && may_be_sent;
}

int cuMemGetAllocationGranularity(size_t *nbytes, const Properties *properties, int option) {
    ENTER;
    *nbytes = test_granule;
    return are_valid(properties) && !option ? SUCCESS : INVALID_VALUE;
}

int cuMemAddressReserve(Address *start, size_t nbytes, size_t alignment, Address hint, uint64_t flags) {
    ENTER;
    if (!is_whole(nbytes) || alignment || hint || flags) return INVALID_VALUE;
    Range *made = calloc(1, sizeof *made);
    made->whole = mmap(NULL, nbytes + test_granule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made->whole == MAP_FAILED) return free(made), OUT_OF_MEMORY;
    *start = made->start = ((Address)made->whole + test_granule - 1) / test_granule * test_granule;
    made->nbytes = nbytes;
    ADD(ranges, made);
    return SUCCESS;
}

int cuMemAddressFree(Address start, size_t nbytes) {
    ENTER;
    Range *found;
    FIND(found, ranges, found->start == start && found->nbytes == nbytes);
    if (!found || is_mapped_in(start, nbytes)) return INVALID_VALUE;
    REMOVE(ranges, found);
    munmap(found->whole, nbytes + test_granule);
    free(found);
    return SUCCESS;
}

int cuMemCreate(Handle *handle, size_t nbytes, const Properties *properties, uint64_t flags) {
    ENTER;
    struct stat file;
    if (!is_whole(nbytes) || !are_valid(properties) || flags) return INVALID_VALUE;
    if (taken() + nbytes > test_total_nbytes) return OUT_OF_MEMORY;
    int fd = memfd_create("test_libcuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, nbytes) || fstat(fd, &file)) return close(fd), OUT_OF_MEMORY;
    void *pages = mmap(NULL, nbytes, PROT_WRITE, MAP_SHARED, fd, 0);
    if (pages == MAP_FAILED) return close(fd), OUT_OF_MEMORY;
    munmap(memset(pages, 0xA5, nbytes), nbytes);
    *handle = new_memory(fd, nbytes, file.st_ino, properties->handle_types == FILE_DESCRIPTOR);
    return SUCCESS;
}

int cuMemRelease(Handle handle) {
    ENTER;
    Memory *memory = memory_of(handle);
    if (!memory) return INVALID_VALUE;
    memory->has_handle = 0;
    free_unused(memory);
    return SUCCESS;
}

int cuMemMap(Address start, size_t nbytes, size_t offset, Handle handle, uint64_t flags) {
    ENTER;
    Memory *memory = memory_of(handle);
    Range *range;
    FIND(range, ranges, range->start <= start && start + nbytes <= range->start + range->nbytes);
    if (!memory || !range || memory->nbytes != nbytes || start % test_granule) return INVALID_VALUE;
    if (offset || flags || is_mapped_in(start, nbytes)) return INVALID_VALUE;
    void *pages = mmap((void *)start, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0);
    if (pages == MAP_FAILED) return OUT_OF_MEMORY;
    Mapping *made = calloc(1, sizeof *made);
    *made = (Mapping){NULL, start, nbytes, memory, 0};
    ADD(mappings, made);
    memory->num_mappings++;
    return SUCCESS;
}

int cuMemSetAccess(Address start, size_t nbytes, const Access *access, size_t count) {
    ENTER;
    Mapping *mapping = mapping_of(start, nbytes);
    if (!mapping || count != 1 || access->location.type != ON_DEVICE || access->location.id) return INVALID_VALUE;
    if (access->flags != READ_WRITE) return INVALID_VALUE;
    mapping->has_access = !mprotect((void *)start, nbytes, PROT_READ | PROT_WRITE);
    return mapping->has_access ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemUnmap(Address start, size_t nbytes) {
    ENTER;
    Range *range;
    FIND(range, ranges, range->start <= start && start + nbytes <= range->start + range->nbytes);
    if (!range || !is_whole(nbytes)) return INVALID_VALUE;
    for (Mapping *one = mappings; one; one = one->next) {
        int is_touched = one->start < start + nbytes && start < one->start + one->nbytes;
        int is_inside = start <= one->start && one->start + one->nbytes <= start + nbytes;
        if (is_touched && !is_inside) return INVALID_VALUE;
    }
    for (Mapping *one; (one = mapping_in(start, nbytes));) {
        mmap((void *)one->start, one->nbytes, PROT_NONE, MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        REMOVE(mappings, one);
        one->memory->num_mappings--;
        free_unused(one->memory);
        free(one);
    }
    return SUCCESS;
}

int cuMemExportToShareableHandle(int *descriptor, Handle handle, int type, uint64_t flags) {
    ENTER;
    Memory *memory = memory_of(handle);
    if (!memory || !memory->is_exportable || type != FILE_DESCRIPTOR || flags) return INVALID_VALUE;
    *descriptor = fcntl(memory->fd, F_DUPFD, 0);
    return *descriptor < 0 ? OUT_OF_MEMORY : SUCCESS;
}

int cuMemImportFromShareableHandle(Handle *handle, void *descriptor, int type) {
    ENTER;
    char path[64], name[64] = "";
    struct stat file;
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)descriptor);
    if (type != FILE_DESCRIPTOR || readlink(path, name, sizeof name - 1) < 0) return INVALID_VALUE;
    if (strncmp(name, "/memfd:test_libcuda", 19) || fstat((int)(intptr_t)descriptor, &file)) return INVALID_VALUE;
    int fd = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return OUT_OF_MEMORY;
    *handle = new_memory(fd, file.st_size, file.st_ino, 0);
    return SUCCESS;
}

/* How cuda-bindings find the calls. Those that are not here it refuses by name, when they are called. */
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    Dl_info own;
    dladdr((void *)cuInit, &own);
    void *library = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(library, strcmp(name, "cuGetProcAddress") ? name : "cuGetProcAddress_v2");
    dlclose(library);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
