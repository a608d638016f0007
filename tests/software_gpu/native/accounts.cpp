// The lock, the bytes that each process has of each device, counts of calls, calls that a test lets fail, reports.
#include "driver.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
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

void Held::wait() { something_happened.wait_for(*lock_of_thread, std::chrono::milliseconds(20)); }

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

struct ProcessAccount {
    std::atomic<int> pid;
    std::atomic<int64_t> taken[kMostDevices];
};

static ProcessAccount* accounts;
static ProcessAccount* own_account;
static int own_pid;  // a forked child has an account of its own

static bool is_alive(int pid) { return pid == own_pid || kill(pid, 0) == 0 || errno != ESRCH; }

// Memory of all processes of one machine, which the launcher names; filled with zeros at first.
void* map_shared_memory(const char* name, size_t nbytes) {
    const char* id = getenv("SOFTWARE_GPU_ID");
    std::string path = std::string("/software_gpu.") + (id ? id : "0") + "." + name;
    int descriptor = shm_open(path.c_str(), O_CREAT | O_RDWR, 0600);
    if (descriptor < 0 || ftruncate(descriptor, nbytes) != 0) {
        perror("software GPU: shared memory");
        abort();
    }
    void* mapping = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    return mapping;
}

static void close_account() {
    if (own_account && own_pid == getpid()) {
        own_account->pid = 0;
    }
}

static ProcessAccount& account() {
    if (own_account && own_pid == getpid()) {
        return *own_account;
    }
    if (!accounts) {
        size_t nbytes = kMostProcesses * sizeof(ProcessAccount);
        accounts = static_cast<ProcessAccount*>(map_shared_memory("accounts", nbytes));
        atexit(close_account);
    }
    own_pid = getpid();
    for (int i = 0; i < kMostProcesses; i++) {
        int pid = accounts[i].pid;
        bool is_free = pid == 0 || !is_alive(pid);
        if (is_free && accounts[i].pid.compare_exchange_strong(pid, own_pid)) {
            own_account = &accounts[i];
            for (auto& nbytes : own_account->taken) {
                nbytes = 0;
            }
            return *own_account;
        }
    }
    fprintf(stderr, "software GPU: more than %d processes\n", kMostProcesses);
    abort();
}

int64_t taken(int device) {
    account();
    int64_t sum = 0;
    for (int i = 0; i < kMostProcesses; i++) {
        int pid = accounts[i].pid;
        if (pid && is_alive(pid)) {
            sum += accounts[i].taken[machine_device(device)];
        }
    }
    return sum;
}

bool take(int device, int64_t nbytes) {
    if (taken(device) + nbytes > int64_t(device_nbytes())) {
        return false;
    }
    account().taken[machine_device(device)] += nbytes;
    return true;
}

void give(int device, int64_t nbytes) { account().taken[machine_device(device)] -= nbytes; }

// -- counts and failures -----------------------------------------------------------------------------------------

struct Failure {
    uint64_t num_before;
    uint64_t num_left;
    int error;
};

// Of their own lock: other libraries count, too, outside of the driver's lock.
// They outlive threads that run until the process has ended.
static std::mutex& counts_mutex = *new std::mutex;
static std::map<std::string, uint64_t>& counts = *new std::map<std::string, uint64_t>;
static std::map<std::string, Failure>& failures = *new std::map<std::string, Failure>;

CUresult count(const char* name) {
    std::lock_guard guard(counts_mutex);
    counts[name]++;
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

// -- reports -----------------------------------------------------------------------------------------------------

// Where Python is: what it was running when it came here, if it is Python that called.
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

void software_gpu_report(const char* kind, const char* text) { write_report(kind, text); }
}
