// Communicators. Each has a thread, which carries out its calls in their order.
#include "nccl_communicator.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>

namespace software_gpu::nccl {

constexpr auto kJoinTimeout = std::chrono::minutes(5);

int64_t memory_of_each_communicator() {
    const char* nbytes = getenv("SOFTWARE_GPU_NCCL_NBYTES");
    return nbytes ? strtoll(nbytes, nullptr, 0) : 0;
}

// Signals are handled by threads of the program.
static void block_signals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

ncclResult_t Communicator::open() {
    if (!take_memory()) {
        return fail(ncclUnhandledCudaError, "the device has no memory for a communicator");
    }
    if (!mailboxes_.open()) {
        give_memory();
        return fail(ncclSystemError, "no shared memory for " + name_);
    }
    mailboxes_.join();
    // The thread keeps the communicator alive, because an abort does not wait for it.
    thread_ = std::thread([self = shared_from_this()] {
        block_signals();
        self->run_thread();
    });
    return ncclSuccess;
}

ncclResult_t Communicator::wait_until_all_joined() {
    auto deadline = std::chrono::steady_clock::now() + kJoinTimeout;
    while (!mailboxes_.have_all_joined()) {
        if (std::chrono::steady_clock::now() > deadline) {
            mailboxes_.remove_name();
            return fail(ncclSystemError, "not all ranks have joined " + name_);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return ncclSuccess;
}

ncclResult_t Communicator::check_usable() {
    if (is_suspended_) {
        return fail(ncclInvalidUsage, "the communicator is suspended");
    }
    if (async_error_ != ncclSuccess) {
        return fail(async_error_, "an earlier call of the communicator failed");
    }
    if (is_interrupted_) {
        return fail(ncclInvalidUsage, "the communicator was aborted");
    }
    return ncclSuccess;
}

// -- calls of a communicator ----------------------------------------------------------------------------------------

static void declare_accesses(const std::vector<Access>& accesses, CUstream stream) {
    for (const Access& access : accesses) {
        if (access.stream == stream) {
            software_gpu_access(stream, access.address, access.nbytes, access.writes, access.name);
        }
    }
}

static std::vector<CUstream> streams_of(const std::vector<Access>& accesses) {
    std::vector<CUstream> streams;
    for (const Access& access : accesses) {
        if (std::find(streams.begin(), streams.end(), access.stream) == streams.end()) {
            streams.push_back(access.stream);
        }
    }
    return streams;
}

ncclResult_t Communicator::enqueue(Work work) {
    if (ncclResult_t result = check_usable()) {
        return result;
    }
    CUstream first_stream = work.accesses.front().stream;
    if (software_gpu_is_capturing(first_stream)) {
        return capture(work, first_stream);
    }
    return push(std::move(work));
}

ncclResult_t Communicator::push(Work work) {
    std::lock_guard guard(queue_mutex_);
    if (is_closing_) {
        return fail(ncclInvalidUsage, "the communicator is gone");
    }
    put_on_streams(work);
    queue_.push_back(std::move(work));
    queue_changed_.notify_all();
    return ncclSuccess;
}

void Communicator::put_on_streams(Work& work) {
    for (CUstream stream : streams_of(work.accesses)) {
        work.messages.push_back(software_gpu_enqueue_message(stream, name_of(work.call)));
        declare_accesses(work.accesses, stream);
    }
}

// The driver keeps the accesses with the graph and checks them at each launch.
ncclResult_t Communicator::capture(const Work& work, CUstream stream) {
    auto* replay = new Replay{shared_from_this(), {work.call, work.carry_out}};
    if (software_gpu_capture(stream, Replay::run, replay, Replay::release)) {
        return fail(ncclUnhandledCudaError, "the capture of the stream is invalid");
    }
    for (CUstream each : streams_of(work.accesses)) {
        declare_accesses(work.accesses, each);
    }
    return ncclSuccess;
}

// The launch of a graph waits here, so that calls keep the order of the program's calls and launches.
void Communicator::Replay::run(void* self) {
    auto* replay = static_cast<Replay*>(self);
    if (replay->communicator->run_and_wait(replay->work) != ncclSuccess) {
        std::string text = std::string("a graph repeats ") + name_of(replay->work.call) + ": " + last_error();
        software_gpu_report("NCCL", text.c_str());
    }
}

ncclResult_t Communicator::run_and_wait(Work work) {
    work.end = std::make_shared<std::promise<void>>();
    auto end = work.end->get_future();
    if (ncclResult_t result = push(std::move(work))) {
        return result;
    }
    end.wait();
    if (is_interrupted_) {
        ncclResult_t error = async_error_;
        return fail(error ? error : ncclInternalError, "the communicator was aborted");
    }
    return ncclSuccess;
}

ncclResult_t Communicator::wait_for_all_ranks(Call call) {
    return run_and_wait({call, [call](Exchange& exchange) {
        std::vector<char> blocks(exchange.num_ranks());
        share_blocks(exchange, {call}, blocks.data(), 1);
    }});
}

// -- the thread of a communicator -----------------------------------------------------------------------------------

void Communicator::run_thread() {
    std::unique_lock lock(queue_mutex_);
    while (true) {
        queue_changed_.wait(lock, [&] { return !queue_.empty() || is_closing_; });
        if (queue_.empty()) {
            return;
        }
        Work work = std::move(queue_.front());
        queue_.pop_front();
        is_busy_ = true;
        lock.unlock();
        finish(work);
        lock.lock();
        is_busy_ = false;
        queue_changed_.notify_all();
    }
}

// Streams continue even if nothing was moved: an abort lets the program end.
void Communicator::finish(Work& work) {
    for (SoftwareGpuMessage* message : work.messages) {
        software_gpu_run_before_message(message);
    }
    move_bytes(work);
    for (SoftwareGpuMessage* message : work.messages) {
        software_gpu_end_message(message);
    }
    if (work.end) {
        work.end->set_value();
    }
}

void Communicator::move_bytes(Work& work) {
    bool is_possible = std::all_of(work.accesses.begin(), work.accesses.end(), std::mem_fn(&Access::is_possible));
    std::lock_guard guard(exchange_mutex_);
    if (is_interrupted_) {
        return;
    }
    try {
        if (!is_possible) {
            throw Interrupted{ncclUnhandledCudaError};
        }
        if (ncclResult_t result = injected_result_on_the_way(name_of(work.call))) {
            throw Interrupted{result};
        }
        Exchange exchange(mailboxes_, rank_, num_ranks_, is_interrupted_);
        work.carry_out(exchange);
    } catch (const Interrupted& interrupted) {
        async_error_ = interrupted.result;
        is_interrupted_ = true;
    }
}

// -- the end of a communicator --------------------------------------------------------------------------------------

ncclResult_t Communicator::finalize() {
    std::unique_lock lock(queue_mutex_);
    queue_changed_.wait(lock, [&] { return queue_.empty() && !is_busy_; });
    return async_error_;
}

void Communicator::destroy() {
    {
        std::lock_guard guard(queue_mutex_);
        is_closing_ = true;
        queue_changed_.notify_all();
    }
    thread_.join();
    give_memory();
}

void Communicator::interrupt() {
    is_interrupted_ = true;
    mailboxes_.bell(rank_).ring();
    // Buffers may be freed from here on.
    std::lock_guard until_nothing_moves(exchange_mutex_);
}

void Communicator::abort() {
    {
        std::lock_guard guard(queue_mutex_);
        is_closing_ = true;
        queue_changed_.notify_all();
    }
    interrupt();
    // It may wait for a stream that needs another communicator, which the program aborts next.
    thread_.detach();
    give_memory();
}

// -- communicators of some ranks ------------------------------------------------------------------------------------

ncclResult_t Communicator::split(int color, int key, std::shared_ptr<Communicator>* part) {
    struct Choice {
        int color;
        int key;
    };
    if (ncclResult_t result = check_usable()) {
        return result;
    }
    std::vector<Choice> choices(num_ranks_);
    choices[rank_] = {color, key};
    ncclResult_t result = run_and_wait({Call::split, [&choices](Exchange& exchange) {
        share_blocks(exchange, {Call::split}, reinterpret_cast<char*>(choices.data()), sizeof(Choice));
    }});
    int child = num_children_++;
    if (result || color == NCCL_SPLIT_NOCOLOR) {
        return result;
    }
    int num_members = 0;
    int rank_there = 0;
    for (int rank = 0; rank < num_ranks_; rank++) {
        if (choices[rank].color != color) {
            continue;
        }
        num_members++;
        bool is_before = choices[rank].key < key || (choices[rank].key == key && rank < rank_);
        rank_there += is_before;
    }
    std::string name = name_ + "." + std::to_string(child) + "." + std::to_string(color);
    *part = std::make_shared<Communicator>(name, rank_there, num_members, device_);
    return (*part)->open();
}

ncclResult_t Communicator::shrink(const std::vector<int>& excluded_ranks, std::shared_ptr<Communicator>* rest) {
    int num_members = 0;
    int rank_there = 0;
    for (int rank = 0; rank < num_ranks_; rank++) {
        bool is_excluded = std::find(excluded_ranks.begin(), excluded_ranks.end(), rank) != excluded_ranks.end();
        if (is_excluded) {
            continue;
        }
        num_members++;
        rank_there += rank < rank_;
    }
    // Excluded ranks may be dead, so no rank is consulted; the remaining ranks count their children alike.
    std::string name = name_ + "." + std::to_string(num_children_++) + ".rest";
    *rest = std::make_shared<Communicator>(name, rank_there, num_members, device_);
    return (*rest)->open();
}

// -- memory of a communicator ---------------------------------------------------------------------------------------

bool Communicator::take_memory() {
    has_memory_ = software_gpu_take(device_, memory_nbytes_);
    return has_memory_;
}

void Communicator::give_memory() {
    if (has_memory_) {
        software_gpu_give(device_, memory_nbytes_);
        has_memory_ = false;
    }
}

ncclResult_t Communicator::suspend() {
    if (ncclResult_t result = check_usable()) {
        return result;
    }
    if (ncclResult_t result = wait_for_all_ranks(Call::suspend)) {
        return result;
    }
    give_memory();
    is_suspended_ = true;
    return ncclSuccess;
}

ncclResult_t Communicator::resume() {
    if (!is_suspended_) {
        return fail(ncclInvalidUsage, "the communicator is not suspended");
    }
    if (!take_memory()) {
        return fail(ncclUnhandledCudaError, "the device has no memory for a communicator");
    }
    is_suspended_ = false;
    return wait_for_all_ranks(Call::resume);
}

}  // namespace software_gpu::nccl
