// Parts of libcuda.so.1 that its files share: one lock, regions of memory, streams with their clocks, accounts.
//
// Each public function of the driver takes the lock once, by `driver_call`, and nothing below it takes it again.
#pragma once
#include "interface.h"

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace software_gpu {

// -- the lock ----------------------------------------------------------------------------------------------------

// Held by a thread that is inside the driver. Waits release it, so that others can finish what is waited for.
class Held {
public:
    Held();
    ~Held();
    Held(const Held&) = delete;

    // Let others in until something has happened, or for some milliseconds.
    static void wait();
    // Run something of the caller's, which may call the driver itself.
    static void run_released(const std::function<void()>& function);
    // Wake up who waits.
    static void notify();
};

// -- devices -----------------------------------------------------------------------------------------------------

constexpr int kHost = -1;

// Devices that this process sees are numbered from 0; CUDA_VISIBLE_DEVICES says which of the machine's they are.
int num_devices();
int machine_device(int device);
constexpr int kAnyDevice = -1;
int current_device();
int device_of_context();  // of this thread, or kAnyDevice
void set_current_device(int device);
bool can_access_peer(int device, int other);
size_t device_nbytes();
// The context of a device; the first call for it takes the memory that a context has.
CUcontext primary_context(int device);
int attribute(int device, CUdevice_attribute attribute);

// -- accounts ----------------------------------------------------------------------------------------------------

// Bytes of a device that all processes of this machine have taken; kept in shared memory.
void* map_shared_memory(const char* name, size_t nbytes);
bool take(int device, int64_t nbytes);
void give(int device, int64_t nbytes);
int64_t taken(int device);
bool has_free(int device, int64_t nbytes);
// Physical memory, by the number of its file, which several processes may hold: it is taken until none of them does.
// A process says so once for each of its handles of the memory; false if the device has not so many bytes.
bool hold(int device, uint64_t file, int64_t nbytes);
void drop(uint64_t file);
// From now on the memory is also taken while a descriptor of it is open, in any process.
void keep_while_open(uint64_t file);

// Held by a process that uses a table of shared memory, which names it; from one that has died it is taken.
class SharedHeld {
public:
    explicit SharedHeld(std::atomic<int>& owner);
    ~SharedHeld();
    SharedHeld(const SharedHeld&) = delete;

private:
    std::atomic<int>& owner_;
};

CUresult count(const char* name);
void report(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// -- regions of memory -------------------------------------------------------------------------------------------

enum class RegionKind { device, host, mapped, imported };

struct Allocation;  // physical memory of virtual_memory.cpp

// Bytes that an operation may touch.
struct Region {
    uint64_t start;
    size_t nbytes;
    RegionKind kind;
    int device;
    int descriptor = -1;          // the memory file of what cuMemAlloc gave
    bool is_registered = false;   // host memory of the program's own
    Allocation* allocation = nullptr;
    std::map<int, CUmemAccess_flags> rights = {};  // of mapped memory: what each device may do; none: nothing
    uint64_t shared_file = 0;     // what the system calls the memory file, once another process may have it
    uint64_t id = 0;

    uint64_t end() const { return start + nbytes; }
};

// An address range without memory of its own.
struct Reservation {
    uint64_t start;
    size_t nbytes;
    void* mapping;                // begins before `start`, which is aligned
    size_t mapping_nbytes;
    int device;
    uint64_t id;

    uint64_t end() const { return start + nbytes; }
};

// By their first addresses.
std::map<uint64_t, Region>& regions();
std::map<uint64_t, Reservation>& reservations();
Region* region_at(uint64_t address);
Reservation* reservation_at(uint64_t address);
Region& add_region(Region region);
uint64_t new_id();

// Whether a device may touch all of it.
bool is_accessible(uint64_t address, size_t nbytes, int device = kAnyDevice);
bool may_touch(const Region& region, int device);
// Whether some of it is mapped for other devices only.
bool is_withheld(uint64_t address, size_t nbytes, int device);
// Whether it is ordinary memory of the host, which copies may touch and kernels may not.
bool is_pageable(uint64_t address);

// What the name of each memory file begins with; the number of its device follows.
constexpr char kMemoryFileName[] = "software_gpu.device";
// A memory file of a device, filled with a pattern so that nobody takes new memory for zeros; -1 without memory.
int new_memory_file(int device, size_t nbytes);
int device_of_memory_file(int descriptor);
// What the system calls a file.
uint64_t file_number(int descriptor);

// -- order -------------------------------------------------------------------------------------------------------

struct Stream;
struct Graph;

// What is known of other streams: all that they had up to a number is over before what comes next.
using Clock = std::unordered_map<const Stream*, uint64_t>;
void learn(Clock& clock, const Stream* stream, uint64_t number);
void learn(Clock& clock, const Clock& other);

// The last access of each byte by one stream.
class Accesses {
public:
    struct Access {
        uint64_t end;
        uint64_t number;
        const char* what;
    };

    void add(uint64_t start, uint64_t end, uint64_t number, const char* what);
    // Call `use` with the start of each access after a number that overlaps, and the access.
    void each_overlapping(
        uint64_t start, uint64_t end, uint64_t after, const std::function<void(uint64_t, const Access&)>& use
    ) const;
    // The latest overlapping access after a number, or none.
    const Access* overlapping(uint64_t start, uint64_t end, uint64_t after, uint64_t* at) const;
    void forget_up_to(uint64_t number);
    bool empty() const { return by_start_.empty(); }

private:
    std::map<uint64_t, Access> by_start_;
};

// Say what the last operation of a stream touches, and report who else does without an order between them.
void check_access(Stream& stream, uint64_t start, size_t nbytes, bool writes, const char* what);
// The same among the branches of a graph, for the one whose node runs.
void check_access_in_graph(Graph& graph, uint64_t start, size_t nbytes, bool writes, const char* what);
// Report operations on memory that goes away although nobody waited for them; they are run first.
void check_release(uint64_t start, size_t nbytes, const char* what);
// Bytes of a memory file that several processes may have mapped.
struct SharedAccess {
    uint64_t file;
    uint64_t start;
    uint64_t end;
};

// Where bytes lie in memory files that another process may have; false if none of them does.
bool find_shared(uint64_t start, size_t nbytes, std::vector<SharedAccess>& accesses);
// Have other processes know what is pending on bytes that they may have from now on.
void publish_accesses(const Region& region);
// Report who else touches them, and keep what this process does until its host has waited for it.
void check_shared_access(const Stream& stream, const SharedAccess& access, bool writes, const char* what);
void forget_shared_accesses(const Stream& stream, uint64_t number);
void host_waited_for(Stream& stream, uint64_t number, const Clock& known);
void host_waited_for_all(int device);
// A thread that asked heard that a stream is over up to a number. Others, such as NCCL's watchdog, do not know.
void thread_heard_of(const Stream& stream, uint64_t number, const Clock& known);

// -- streams -----------------------------------------------------------------------------------------------------

struct Operation {
    uint64_t number = 0;
    std::function<void()> run;                     // without the driver's lock if `is_released`
    std::function<bool(bool is_waiting)> is_ready;  // also does what has to come before; none: always
    bool is_released = false;
};

struct Touched {
    uint64_t start;
    size_t nbytes;
    bool writes;
    const char* what;
};

// When the last operation of a stream begins at the earliest, and what timeline.cpp knew before it.
struct TimedOperation {
    double begin = 0;
    std::array<double, 4> nbytes = {};
    std::array<double, 4> engines_free_at = {};
    std::array<double, 4> seconds_busy = {};
};

struct StreamTimes {
    std::vector<double> ends = {};  // of operations, by number
    TimedOperation operation = {};
};

struct Stream {
    int device = 0;
    unsigned flags = 0;
    int priority = 0;
    uint64_t num_put = 0;
    uint64_t num_done = 0;
    std::deque<Operation> queue;
    std::thread::id launcher;                      // who computes an operation of it now, without the lock
    int depth = 0;                                 // of the launches of that thread, one within another
    uint64_t open_number = 0;                      // of the operation that is computed
    Clock known;
    Accesses reads;
    Accesses writes;
    StreamTimes times;
    bool has_shared_accesses = false;              // in the table of peers.cpp
    std::shared_ptr<Graph> graph;                  // while it is captured
    Graph* launched = nullptr;                     // while it runs one for the first time

    bool is_blocking() const { return !(flags & CU_STREAM_NON_BLOCKING); }
    bool is_open_elsewhere() const { return depth && launcher != std::this_thread::get_id(); }
    // Up to which number all is over. What a thread waits for while it computes is part of what it computes.
    uint64_t num_over() const { return is_open_elsewhere() ? open_number - 1 : num_done; }
};

// What was put on streams while they were captured, in that order, which keeps the order between them.
struct Graph {
    struct Node {
        Operation operation;
        Stream* branch;
        Clock known;                               // by its branch, of the others
        std::vector<Touched> accesses = {};
    };

    uint64_t id = new_id();
    CUstreamCaptureMode mode;
    std::thread::id thread = std::this_thread::get_id();  // that captures
    Stream* origin;                                // where the capture began
    bool is_open = true;                           // until its capture ends
    bool is_valid = true;                          // until something is done that a capture forbids
    std::vector<Node> nodes = {};
    std::map<Stream*, std::unique_ptr<Stream>> branches = {};  // of captured streams; gone after the first launch
    Stream* running = nullptr;                     // branch whose node runs
};

Stream& stream_of(CUstream handle);
std::vector<Stream*> all_streams();
// Put an operation on a stream; it runs when somebody waits for it, and not before.
Operation& put(Stream& stream, std::function<void()> run);
// Run what a stream has up to a number. Without `is_waiting` it stops at what another thread has to finish.
bool run_up_to(Stream& stream, uint64_t number, bool is_waiting = true);
void run_all(int device);
// The error of a call that waits, or does what no graph can repeat, while a capture forbids this thread such calls. The
// capture is invalid from then on.
CUresult refuse_unsafe_call();
// The same for a call that waits for all of a device.
CUresult refuse_wait_for_device(int device);
// An error that stays until the process ends, as after an illegal address.
CUresult lasting_error();
void set_lasting_error(CUresult error);

// -- the timeline ------------------------------------------------------------------------------------------------

// The host made a call; an operation was put on a stream, and touches bytes; a stream, or the host, waits for another.
void timeline_call(const char* name);
void timeline_put(Stream& stream);
void timeline_use(Stream& stream, uint64_t address, size_t nbytes, bool writes);
void timeline_wait(Stream& stream, const Stream& other, uint64_t number);
void timeline_host_waits(const Stream& stream, uint64_t number);

// -- public functions --------------------------------------------------------------------------------------------

// CUDA_SUCCESS after cuInit in this process. A child that is forked afterwards has no driver, and cannot get one.
CUresult driver_state();

// Count a call, fail it if a test asked for that, and run it under the lock.
template <class Body>
CUresult driver_call(const char* name, Body body) {
    if (CUresult error = driver_state()) {
        return error;
    }
    Held held;
    if (CUresult error = count(name)) {
        return error;
    }
    return body();
}

// The same for a call that a capture may forbid.
template <class Body>
CUresult unsafe_call(const char* name, Body body) {
    return driver_call(name, [&] {
        CUresult error = refuse_unsafe_call();
        return error ? error : body();
    });
}

}  // namespace software_gpu
