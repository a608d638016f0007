// The lock, the bytes of each device per process, counts of calls, injected failures, and reports.
#include "driver.h"

#include <bitset>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <filesystem>
#include <sched.h>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace software_gpu {

// -- the lock ----------------------------------------------------------------------------------------------------

static std::mutex& mutex = *new std::mutex;
static std::condition_variable& something_happened = *new std::condition_variable;
static thread_local std::unique_lock<std::mutex>* lock_of_thread;

Held::Held() { lock_of_thread = new std::unique_lock(mutex); }

Held::~Held() {
    delete lock_of_thread;
    lock_of_thread = nullptr;
}

// Without Python's lock, which a kernel of another thread may need: its holder may be waiting for our lock.
void Held::wait() {
    using HasLock = int (*)();
    using GiveUp = void* (*)();
    using TakeAgain = void (*)(void*);
    static auto has_lock = reinterpret_cast<HasLock>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static auto give_up = reinterpret_cast<GiveUp>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    static auto take_again = reinterpret_cast<TakeAgain>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    void* python = has_lock && has_lock() ? give_up() : nullptr;
    something_happened.wait_for(*lock_of_thread, std::chrono::milliseconds(20));
    if (python) {
        run_released([python] { take_again(python); });
    }
}

void Held::notify() { something_happened.notify_all(); }

void Held::run_released(const std::function<void()>& function) {
    delete lock_of_thread;
    lock_of_thread = nullptr;
    function();
    lock_of_thread = new std::unique_lock(mutex);
}

// -- bytes taken -------------------------------------------------------------------------------------------------

constexpr int kMostProcesses = 256;
constexpr int kMostDevices = 16;
constexpr size_t kMostMemories = 1 << 16;

using Processes = std::bitset<kMostProcesses>;

struct ProcessAccount {
    int pid;  // 0: free
    int64_t taken[kMostDevices];
};

// Physical memory held by processes.
struct PhysicalMemory {
    uint64_t file;
    int64_t nbytes;
    int device;
    Processes holders;
    bool may_be_open;  // a descriptor was exported, which keeps the memory even without holders
};

struct Accounts {
    std::atomic<int> owner;
    ProcessAccount processes[kMostProcesses];
    size_t num_memories;  // later entries are free, and so are entries without holders
    PhysicalMemory memories[kMostMemories];
};

// Memory of all processes of a machine, which the launcher names; initially zeros. Without a name the machine
// consists of this process.
void* map_shared_memory(const char* name, size_t nbytes) {
    const char* id = getenv("SOFTWARE_GPU_ID");
    if (!id) {
        return mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    std::string path = std::string("/software_gpu.") + id + "." + name;
    int descriptor = shm_open(path.c_str(), O_CREAT | O_RDWR, 0600);
    if (descriptor < 0 || ftruncate(descriptor, nbytes) != 0) {
        perror("software GPU: shared memory");
        abort();
    }
    void* mapping = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    return mapping;
}

SharedHeld::SharedHeld(std::atomic<int>& owner) : owner_(owner) {
    int nobody = 0;
    while (!owner_.compare_exchange_weak(nobody, getpid())) {
        bool has_died = nobody && kill(nobody, 0) != 0 && errno == ESRCH;
        if (has_died) {
            owner_.compare_exchange_strong(nobody, 0);
        }
        nobody = 0;
        sched_yield();
    }
}

SharedHeld::~SharedHeld() { owner_ = 0; }

static Accounts& accounts() {
    static auto* shared = static_cast<Accounts*>(map_shared_memory("accounts", sizeof(Accounts)));
    return *shared;
}

// The functions below require that the accounts are locked, up to those that lock them.

static Processes living_processes() {
    Processes living;
    for (int i = 0; i < kMostProcesses; i++) {
        int pid = accounts().processes[i].pid;
        living[i] = pid && (pid == getpid() || kill(pid, 0) == 0 || errno != ESRCH);
    }
    return living;
}

static int own_number;  // of this process's account

static void close_account() {
    ProcessAccount& own = accounts().processes[own_number];
    if (own.pid == getpid()) {  // not of the parent of a forked child
        own.pid = 0;
    }
}

static int new_number() {
    Processes living = living_processes();
    for (int i = 0; i < kMostProcesses; i++) {
        if (living[i]) {
            continue;
        }
        accounts().processes[i] = {getpid(), {}};
        for (size_t k = 0; k < accounts().num_memories; k++) {
            accounts().memories[k].holders.reset(i);  // the previous process with this number has died
        }
        atexit(close_account);
        return i;
    }
    fprintf(stderr, "software GPU: more than %d processes\n", kMostProcesses);
    abort();
}

static ProcessAccount& own_account() {
    static const int number = own_number = new_number();
    return accounts().processes[number];
}

static bool is_held(const PhysicalMemory& memory, const Processes& living) {
    return (memory.holders & living).any() || memory.may_be_open;
}

// Memory files of devices that any process has open. Does not include files in transit through a socket, and files of
// processes that this one may not inspect.
static std::set<uint64_t> open_memory_files() {
    std::set<uint64_t> files;
    const std::string prefix = std::string("/memfd:") + kMemoryFileName;
    std::error_code error;  // processes and files may disappear meanwhile
    for (const auto& process : std::filesystem::directory_iterator("/proc", error)) {
        if (!isdigit(process.path().filename().string()[0])) {
            continue;
        }
        std::filesystem::directory_iterator descriptors(process.path() / "fd", error);
        for (; !error && descriptors != std::filesystem::directory_iterator(); descriptors.increment(error)) {
            std::string name = std::filesystem::read_symlink(descriptors->path(), error).string();
            struct stat status;
            if (!error && name.starts_with(prefix) && stat(descriptors->path().c_str(), &status) == 0) {
                files.insert(status.st_ino);
            }
            error.clear();
        }
    }
    return files;
}

// Free exported memory that no process holds any more.
static void forget_closed(const Processes& living) {
    std::vector<PhysicalMemory*> unheld;
    for (size_t i = 0; i < accounts().num_memories; i++) {
        PhysicalMemory& memory = accounts().memories[i];
        if (memory.may_be_open && (memory.holders & living).none()) {
            unheld.push_back(&memory);
        }
    }
    if (unheld.empty()) {
        return;
    }
    std::set<uint64_t> open = open_memory_files();
    for (PhysicalMemory* memory : unheld) {
        memory->may_be_open = open.count(memory->file) > 0;
    }
}

static int64_t sum_of(int device) {
    Processes living = living_processes();
    forget_closed(living);
    int64_t sum = 0;
    for (int i = 0; i < kMostProcesses; i++) {
        sum += living[i] ? accounts().processes[i].taken[machine_device(device)] : 0;
    }
    for (size_t i = 0; i < accounts().num_memories; i++) {
        const PhysicalMemory& memory = accounts().memories[i];
        bool is_taken = memory.device == machine_device(device) && is_held(memory, living);
        sum += is_taken ? memory.nbytes : 0;
    }
    return sum;
}

static bool has_room(int device, int64_t nbytes) { return sum_of(device) + nbytes <= int64_t(device_nbytes()); }

static PhysicalMemory* memory_of(uint64_t file, const Processes& living) {
    for (size_t i = 0; i < accounts().num_memories; i++) {
        PhysicalMemory& memory = accounts().memories[i];
        if (memory.file == file && is_held(memory, living)) {
            return &memory;
        }
    }
    return nullptr;
}

static PhysicalMemory& free_entry(const Processes& living) {
    for (size_t i = 0; i < accounts().num_memories; i++) {
        PhysicalMemory& memory = accounts().memories[i];
        if (!is_held(memory, living)) {
            return memory;
        }
    }
    if (accounts().num_memories == kMostMemories) {
        fprintf(stderr, "software GPU: more than %zu pieces of memory\n", kMostMemories);
        abort();
    }
    return accounts().memories[accounts().num_memories++];
}

int64_t taken(int device) {
    SharedHeld held(accounts().owner);
    return sum_of(device);
}

bool has_free(int device, int64_t nbytes) {
    SharedHeld held(accounts().owner);
    return has_room(device, nbytes);
}

bool take(int device, int64_t nbytes) {
    SharedHeld held(accounts().owner);
    if (!has_room(device, nbytes)) {
        return false;
    }
    own_account().taken[machine_device(device)] += nbytes;
    return true;
}

void give(int device, int64_t nbytes) {
    SharedHeld held(accounts().owner);
    own_account().taken[machine_device(device)] -= nbytes;
}

// How many times this process holds each memory.
static std::map<uint64_t, int>& num_holds = *new std::map<uint64_t, int>;

bool hold(int device, uint64_t file, int64_t nbytes) {
    SharedHeld held(accounts().owner);
    own_account();
    Processes living = living_processes();
    PhysicalMemory* memory = memory_of(file, living);
    if (!memory && !has_room(device, nbytes)) {
        return false;
    }
    if (!memory) {
        memory = &free_entry(living);
        *memory = {file, nbytes, machine_device(device), {}, false};
    }
    memory->holders.set(own_number);
    num_holds[file]++;
    return true;
}

void drop(uint64_t file) {
    if (--num_holds[file] > 0) {
        return;
    }
    num_holds.erase(file);
    SharedHeld held(accounts().owner);
    memory_of(file, living_processes())->holders.reset(own_number);
    auto is_last_free = [] {
        const PhysicalMemory& last = accounts().memories[accounts().num_memories - 1];
        return last.holders.none() && !last.may_be_open;
    };
    while (accounts().num_memories && is_last_free()) {
        accounts().num_memories--;
    }
}

void keep_while_open(uint64_t file) {
    SharedHeld held(accounts().owner);
    memory_of(file, living_processes())->may_be_open = true;
}

// -- counts and failures -----------------------------------------------------------------------------------------

struct Failure {
    uint64_t num_before;
    uint64_t num_left;
    int error;
};

// With a separate lock, because other libraries also count, outside of the driver's lock.
// Never destroyed: threads may run until the process has ended.
static std::mutex& counts_mutex = *new std::mutex;
static std::map<std::string, uint64_t>& counts = *new std::map<std::string, uint64_t>;
static std::map<std::string, Failure>& failures = *new std::map<std::string, Failure>;

// The caller holds the lock of the counts.
static CUresult asked_failure(const char* name) {
    auto failure = failures.find(name);
    if (failure == failures.end() || failure->second.num_left == 0) {
        return CUDA_SUCCESS;
    }
    if (failure->second.num_before > 0) {
        failure->second.num_before--;
        return CUDA_SUCCESS;
    }
    failure->second.num_left--;
    return CUresult(failure->second.error);
}

CUresult count(const char* name) {
    timeline_call(name);
    std::lock_guard guard(counts_mutex);
    counts[name]++;
    return asked_failure(name);
}

// -- reports -----------------------------------------------------------------------------------------------------

// The Python frame that called the driver, if any.
static void write_python_stack(int descriptor) {
    using Write = void (*)(int, void*);
    using State = void* (*)();
    static auto write_stack = reinterpret_cast<Write>(dlsym(RTLD_DEFAULT, "_Py_DumpTraceback"));
    static auto state_of_thread = reinterpret_cast<State>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
    void* state = write_stack && state_of_thread ? state_of_thread() : nullptr;
    if (state) {
        write_stack(descriptor, state);
    }
}

static void write_report(const char* kind, const char* text) {
    fprintf(stderr, "SOFTWARE GPU %s: %s (pid %d)\n", kind, text, getpid());
    const char* path = getenv("SOFTWARE_GPU_REPORTS");
    int descriptor = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (descriptor >= 0) {
        dprintf(descriptor, "%s: %s (pid %d)\n", kind, text, getpid());
        write_python_stack(descriptor);
        close(descriptor);
    }
}

void report(const char* kind, const char* format, ...) {
    char text[1000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    write_report(kind, text);
}

}  // namespace software_gpu

// -- for the other libraries, and for tests ----------------------------------------------------------------------

using namespace software_gpu;

extern "C" {

int software_gpu_count(const char* name) { return count(name); }

int software_gpu_asked_failure(const char* name) {
    std::lock_guard guard(counts_mutex);
    return asked_failure(name);
}

void software_gpu_fail(const char* name, uint64_t first, uint64_t num, int error) {
    std::lock_guard guard(counts_mutex);
    failures[name] = {first - 1, num, error};
}

size_t software_gpu_counts(char* text, size_t room) {
    std::lock_guard guard(counts_mutex);
    std::string lines;
    for (const auto& [name, number] : counts) {
        lines += name + " " + std::to_string(number) + "\n";
    }
    if (lines.size() < room) {
        memcpy(text, lines.c_str(), lines.size() + 1);
    }
    return lines.size() + 1;
}

int software_gpu_take(int device, int64_t nbytes) {
    Held held;
    return take(device, nbytes);
}

void software_gpu_give(int device, int64_t nbytes) {
    Held held;
    give(device, nbytes);
}

// Leave `nbytes` of a device free and take the rest, replacing an earlier limit. If negative, leave all.
void software_gpu_leave(int device, int64_t free_nbytes) {
    static int64_t withheld[kMostDevices];
    Held held;
    give(device, withheld[device]);
    withheld[device] = free_nbytes < 0 ? 0 : int64_t(device_nbytes()) - taken(device) - free_nbytes;
    take(device, withheld[device]);
}

void software_gpu_report(const char* kind, const char* text) { write_report(kind, text); }
}
