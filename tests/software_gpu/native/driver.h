// Declarations shared by the files of libcuda.so.1: the lock, regions of memory, streams with clocks, accounts.
//
// Each public function of the driver takes the lock once, by `driver_call`; functions below it do not take it.
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

// Held by a thread inside the driver. Waits release it, so that other threads can finish the awaited work.
class Held {
public:
    Held();
    ~Held();
    Held(const Held&) = delete;

    // Release the lock until a notification, or for some milliseconds.
    static void wait();
    // Run a function of the caller, which may call the driver itself.
    static void run_released(const std::function<void()>& function);
    // Wake up waiting threads.
    static void notify();
};

// -- devices -----------------------------------------------------------------------------------------------------

constexpr int kHost = -1;

// Devices that this process sees are numbered from 0; CUDA_VISIBLE_DEVICES selects them.
int num_devices();
int machine_device(int device);
constexpr int kAnyDevice = -1;
int current_device();
int device_of_context();  // of this thread, or kAnyDevice
void set_current_device(int device);
bool can_access_peer(int device, int other);
size_t device_nbytes();
// Return the context of a device; the first call for a device takes a context's memory.
CUcontext primary_context(int device);
int attribute(int device, CUdevice_attribute attribute);

// -- accounts ----------------------------------------------------------------------------------------------------

// Bytes of a device taken by all processes of this machine; kept in shared memory.
void* map_shared_memory(const char* name, size_t nbytes);
bool take(int device, int64_t nbytes);
void give(int device, int64_t nbytes);
int64_t taken(int device);
bool has_free(int device, int64_t nbytes);
// Physical memory, identified by the number of its file. It is taken while any process holds it. A process registers
// each of its handles; the result is false if the device has too little memory.
bool hold(int device, uint64_t file, int64_t nbytes);
void drop(uint64_t file);
// From now on the memory is also taken while any process has a descriptor of it open.
void keep_while_open(uint64_t file);

// A lock on a table of shared memory that names its owner; the lock of a dead process can be taken over.
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
    int descriptor = -1;          // memory file of an allocation by cuMemAlloc
    bool is_registered = false;   // ordinary host memory registered by the program
    Allocation* allocation = nullptr;
    std::map<int, CUmemAccess_flags> rights = {};  // access of each device to mapped memory; missing: none
    uint64_t shared_file = 0;     // system's id of the memory file, if another process may have it
    uint64_t id = 0;

    uint64_t end() const { return start + nbytes; }
};

// A reserved address range without memory.
struct Reservation {
    uint64_t start;
    size_t nbytes;
    void* mapping;                // starts before the aligned `start`
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

// Whether a device may access all of the bytes.
bool is_accessible(uint64_t address, size_t nbytes, int device = kAnyDevice);
bool may_touch(const Region& region, int device);
// Whether some of the bytes are mapped for other devices only.
bool is_withheld(uint64_t address, size_t nbytes, int device);
// Whether it is ordinary host memory, which copies may access and kernels may not.
bool is_pageable(uint64_t address);

// Prefix of the names of memory files, followed by the number of the device.
constexpr char kMemoryFileName[] = "software_gpu.device";
// Create a memory file of a device, filled with a pattern so that new memory is not zero; -1 if memory is short.
int new_memory_file(int device, size_t nbytes);
int device_of_memory_file(int descriptor);
// The system's id of a file.
uint64_t file_number(int descriptor);

// -- order -------------------------------------------------------------------------------------------------------

struct Stream;
struct Graph;

// Knowledge about other streams: all operations up to a number are over before the next operation.
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
    // Call `use` with the start of each overlapping access after a number, and the access.
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

// Declare the accesses of a stream's last operation; report unordered conflicting accesses.
void check_access(Stream& stream, uint64_t start, size_t nbytes, bool writes, const char* what);
// Likewise among the branches of a graph, for the branch whose node runs.
void check_access_in_graph(Graph& graph, uint64_t start, size_t nbytes, bool writes, const char* what);
// Report operations on memory that is released without a wait for them, after running them.
void check_release(uint64_t start, size_t nbytes, const char* what);
// Bytes of a memory file that several processes may have mapped.
struct SharedAccess {
    uint64_t file;
    uint64_t start;
    uint64_t end;
};

// Positions of bytes in memory files that another process may have; false if there are none.
bool find_shared(uint64_t start, size_t nbytes, std::vector<SharedAccess>& accesses);
// Bytes of physical memory that this process has mapped at more than one address.
struct Place {
    uint64_t start;  // the same number for all addresses of a byte, larger than any address
    size_t nbytes;
};
std::vector<Place> aliased_places(uint64_t start, size_t nbytes);
// Publish pending accesses to bytes that other processes may have from now on.
void publish_accesses(const Region& region);
// Report conflicting accesses of other processes; keep this process's accesses until its host has waited for them.
void check_shared_access(const Stream& stream, const SharedAccess& access, bool writes, const char* what);
void forget_shared_accesses(const Stream& stream, uint64_t number);
void host_waited_for(Stream& stream, uint64_t number, const Clock& known);
void host_waited_for_all(int device);
// A thread has learned by a query that a stream is over up to a number. Other threads, such as NCCL's watchdog, have
// not.
void thread_heard_of(const Stream& stream, uint64_t number, const Clock& known);

// -- streams -----------------------------------------------------------------------------------------------------

struct Operation {
    uint64_t number = 0;
    std::function<void()> run;                     // runs without the driver's lock if `is_released`
    std::function<bool(bool is_waiting)> is_ready;  // also runs required earlier work; none: always ready
    bool is_released = false;
};

struct Touched {
    uint64_t start;
    size_t nbytes;
    bool writes;
    const char* what;
};

// Earliest start of a stream's last operation, and the state of timeline.cpp before it.
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
    std::thread::id launcher;                      // thread that computes an operation now, without the lock
    int depth = 0;                                 // nesting depth of that thread's launches
    uint64_t open_number = 0;                      // number of the operation being computed
    Clock known;
    Accesses reads;
    Accesses writes;
    StreamTimes times;
    bool has_shared_accesses = false;              // in the table of peers.cpp
    std::shared_ptr<Graph> graph;                  // while it is captured
    Graph* launched = nullptr;                     // while it runs one for the first time

    bool is_blocking() const { return !(flags & CU_STREAM_NON_BLOCKING); }
    bool is_open_elsewhere() const { return depth && launcher != std::this_thread::get_id(); }
    // Number up to which all is over. Waits of a thread during a computation are part of the computation.
    uint64_t num_over() const { return is_open_elsewhere() ? open_number - 1 : num_done; }
};

// Operations queued on captured streams, in their order, which also is the order between the streams.
struct Graph {
    struct Node {
        Operation operation;
        Stream* branch;
        Clock known;                               // by its branch, about the others
        std::vector<Touched> accesses = {};
    };

    uint64_t id = new_id();
    CUstreamCaptureMode mode;
    std::thread::id thread = std::this_thread::get_id();  // the capturing thread
    Stream* origin;                                // stream of the capture
    bool is_open = true;                           // until its capture ends
    bool is_valid = true;                          // until a forbidden call
    std::vector<Node> nodes = {};
    std::map<Stream*, std::unique_ptr<Stream>> branches = {};  // of captured streams; removed after the first launch
    Stream* running = nullptr;                     // branch whose node runs
};

Stream& stream_of(CUstream handle);
std::vector<Stream*> all_streams();
// Queue an operation on a stream. It runs when a thread waits for it, and not before.
Operation& put(Stream& stream, std::function<void()> run);
// Run a stream's operations up to a number. Without `is_waiting`, stop at work that another thread has to finish.
bool run_up_to(Stream& stream, uint64_t number, bool is_waiting = true);
void run_all(int device);
// Error of a call that waits, or that a graph cannot repeat, if a capture forbids such calls to this thread.
// Invalidates the capture.
CUresult refuse_unsafe_call();
// Likewise for a call that waits for a whole device.
CUresult refuse_wait_for_device(int device);
// An error that persists until the process ends, as after an illegal address.
CUresult lasting_error();
void set_lasting_error(CUresult error);

// -- the timeline ------------------------------------------------------------------------------------------------

// Events of the timeline: a call of the host; a queued operation and its bytes; a wait of a stream or of the host.
void timeline_call(const char* name);
void timeline_put(Stream& stream);
void timeline_use(Stream& stream, uint64_t address, size_t nbytes, bool writes);
void timeline_wait(Stream& stream, const Stream& other, uint64_t number);
void timeline_host_waits(const Stream& stream, uint64_t number);

// -- public functions --------------------------------------------------------------------------------------------

// CUDA_SUCCESS after cuInit in this process. A child forked afterwards has no driver and cannot get one.
CUresult driver_state();

// Count a call, fail it if a test requested that, and run it under the lock.
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

// Likewise for a call that a capture may forbid.
template <class Body>
CUresult unsafe_call(const char* name, Body body) {
    return driver_call(name, [&] {
        CUresult error = refuse_unsafe_call();
        return error ? error : body();
    });
}

}  // namespace software_gpu
