// A communicator: its calls, the thread that carries them out, and its device memory.
#pragma once
#include "nccl_collectives.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace software_gpu::nccl {

// Memory that a call reads or writes on a stream.
struct Access {
    CUstream stream;
    uint64_t address;
    size_t nbytes;
    bool writes;
    const char* name;

    bool is_possible() const { return software_gpu_is_accessible(address, nbytes); }
};

// A call, or a group of sends and receives, for the thread of a communicator.
struct Work {
    Call call;
    std::function<void(Exchange&)> carry_out;
    std::vector<Access> accesses = {};
    std::vector<SoftwareGpuMessage*> messages = {};     // its place on each of its streams
    std::shared_ptr<std::promise<void>> end = nullptr;  // set at the end
};

int64_t memory_of_each_communicator();

class Communicator : public std::enable_shared_from_this<Communicator> {
public:
    Communicator(const std::string& name, int rank, int num_ranks, int device) :
        name_(name), rank_(rank), num_ranks_(num_ranks), device_(device), mailboxes_(name, num_ranks) {}

    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }
    int device() const { return device_; }
    ncclResult_t async_error() const { return async_error_; }

    ncclResult_t open();
    ncclResult_t wait_until_all_joined();

    // Queue work on its streams, or add it to the graph into which they are captured.
    ncclResult_t enqueue(Work work);
    ncclResult_t finalize();
    void destroy();
    // Return when no bytes are moved any more, even if other ranks are dead.
    void abort();
    // Cancel all calls; the communicator can then only be destroyed.
    void interrupt();

    ncclResult_t split(int color, int key, std::shared_ptr<Communicator>* part);
    ncclResult_t shrink(const std::vector<int>& excluded_ranks, std::shared_ptr<Communicator>* rest);

    ncclResult_t suspend();
    ncclResult_t resume();
    bool is_suspended() const { return is_suspended_; }
    int64_t memory_nbytes() const { return memory_nbytes_; }

private:
    // A call in a graph, which runs it at each launch.
    struct Replay {
        std::shared_ptr<Communicator> communicator;
        Work work;

        static void run(void* self);
        static void release(void* self) { delete static_cast<Replay*>(self); }
    };

    ncclResult_t check_usable();
    void put_on_streams(Work& work);
    ncclResult_t capture(const Work& work, CUstream stream);
    ncclResult_t push(Work work);
    ncclResult_t run_and_wait(Work work);
    ncclResult_t wait_for_all_ranks(Call call);
    void run_thread();
    void finish(Work& work);
    void move_bytes(Work& work);
    bool take_memory();
    void give_memory();

    const std::string name_;
    const int rank_;
    const int num_ranks_;
    const int device_;
    const int64_t memory_nbytes_ = memory_of_each_communicator();
    bool has_memory_ = false;
    bool is_suspended_ = false;
    int num_children_ = 0;
    Mailboxes mailboxes_;

    // Guards the queue and its state. Held while work is queued on streams, because both must have the same order.
    std::mutex queue_mutex_;
    std::condition_variable queue_changed_;
    std::deque<Work> queue_;
    bool is_busy_ = false;
    bool is_closing_ = false;

    std::mutex exchange_mutex_;  // held while bytes are moved
    std::atomic<bool> is_interrupted_ = false;
    std::atomic<ncclResult_t> async_error_ = ncclSuccess;
    std::thread thread_;
};

}  // namespace software_gpu::nccl
