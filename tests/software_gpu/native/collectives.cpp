// libnccl.so.2: NCCL for processes of one machine, over shared memory.
//
// A communicator has a thread, which carries out its calls one by one in the order in which they were made. A call
// first waits for what its stream has before it, and its stream goes on after it, as with a kernel of NCCL. All
// calls are made of sends and receives. Reductions add in the order of the ranks, so all ranks get the same bits.
// Ranks that disagree about a call, or about its size, are reported; hardware would hang or mix up bytes.
#include "interface.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <future>
#include <linux/futex.h>
#include <map>
#include <memory>
#include <mutex>
#include <nccl.h>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace software_gpu {

// -- errors --------------------------------------------------------------------------------------------------------

static thread_local std::string last_error_text;

static ncclResult_t fail(ncclResult_t result, const std::string& text) {
    last_error_text = text;
    return result;
}

static ncclResult_t invalid_argument(const std::string& text) { return fail(ncclInvalidArgument, text); }

// What a test asked for: a result of NCCL, or an error of the driver.
static ncclResult_t injected_result(const char* name) {
    int error = software_gpu_count(name);
    if (!error) {
        return ncclSuccess;
    }
    bool is_result = error > ncclSuccess && error < ncclNumResults;
    return fail(is_result ? ncclResult_t(error) : ncclUnhandledCudaError, std::string(name) + " fails as a test asked");
}

// -- calls ---------------------------------------------------------------------------------------------------------

enum class Call : uint32_t {
    send,
    receive,
    broadcast,
    reduce,
    all_reduce,
    all_gather,
    reduce_scatter,
    all_to_all,
    split,
    suspend,
    resume,
    num_calls,
};

static const char* name_of(Call call) {
    static const char* const names[] = {
        "ncclSend",
        "ncclRecv",
        "ncclBroadcast",
        "ncclReduce",
        "ncclAllReduce",
        "ncclAllGather",
        "ncclReduceScatter",
        "ncclAlltoAll",
        "ncclCommSplit",
        "ncclCommSuspend",
        "ncclCommResume",
    };
    return call < Call::num_calls ? names[static_cast<uint32_t>(call)] : "an unknown call";
}

// -- elements and reductions ---------------------------------------------------------------------------------------

static size_t nbytes_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64:
            return 8;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32:
            return 4;
        case ncclFloat16:
        case ncclBfloat16:
            return 2;
        default:
            return 1;
    }
}

template <class Number>
static Number combine(ncclRedOp_t operation, Number left, Number right) {
    switch (operation) {
        case ncclProd:
            return left * right;
        case ncclMax:
            return std::max(left, right);
        case ncclMin:
            return std::min(left, right);
        default:  // a mean is a sum that is divided at last
            return left + right;
    }
}

// What each rank contributes to a reduction: the same number of elements, one rank's after another's.
struct Contributions {
    const char* bytes;
    int num_ranks;
    size_t count;
};

// Elements are combined as numbers, which are wider where elements are narrow floats.
template <class Element, class Number>
static void reduce_as(ncclRedOp_t operation, const Contributions& contributions, char* result) {
    auto* elements = reinterpret_cast<const Element*>(contributions.bytes);
    auto* results = reinterpret_cast<Element*>(result);
    for (size_t i = 0; i < contributions.count; i++) {
        auto value = static_cast<Number>(elements[i]);
        for (int rank = 1; rank < contributions.num_ranks; rank++) {
            auto other = static_cast<Number>(elements[rank * contributions.count + i]);
            value = combine<Number>(operation, value, other);
        }
        if (operation == ncclAvg) {
            value = static_cast<Number>(value / contributions.num_ranks);
        }
        results[i] = static_cast<Element>(value);
    }
}

static void reduce(ncclDataType_t type, ncclRedOp_t operation, const Contributions& contributions, char* result) {
    switch (type) {
        case ncclInt8:
            return reduce_as<int8_t, int8_t>(operation, contributions, result);
        case ncclUint8:
            return reduce_as<uint8_t, uint8_t>(operation, contributions, result);
        case ncclInt32:
            return reduce_as<int32_t, int32_t>(operation, contributions, result);
        case ncclUint32:
            return reduce_as<uint32_t, uint32_t>(operation, contributions, result);
        case ncclInt64:
            return reduce_as<int64_t, int64_t>(operation, contributions, result);
        case ncclUint64:
            return reduce_as<uint64_t, uint64_t>(operation, contributions, result);
        case ncclFloat16:
            return reduce_as<__half, float>(operation, contributions, result);
        case ncclFloat32:
            return reduce_as<float, float>(operation, contributions, result);
        case ncclFloat64:
            return reduce_as<double, double>(operation, contributions, result);
        case ncclBfloat16:
            return reduce_as<__nv_bfloat16, float>(operation, contributions, result);
        case ncclFloat8e4m3:
            return reduce_as<__nv_fp8_e4m3, float>(operation, contributions, result);
        case ncclFloat8e5m2:
            return reduce_as<__nv_fp8_e5m2, float>(operation, contributions, result);
        default:
            return;  // the public functions refuse other types
    }
}

// -- shared memory -------------------------------------------------------------------------------------------------

constexpr size_t kChannelNbytes = size_t(128) << 10;
constexpr size_t kCacheLineNbytes = 64;
constexpr auto kJoinTimeout = std::chrono::minutes(5);

// Wakes a rank up, in whichever process it is.
class Bell {
public:
    uint32_t num_rings() const { return num_rings_; }

    void ring() {
        num_rings_++;
        syscall(SYS_futex, &num_rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    // Return at the next ring after those that were heard, or a little later if there is none.
    void wait(uint32_t num_heard) {
        timespec timeout = {.tv_sec = 0, .tv_nsec = 20'000'000};
        syscall(SYS_futex, &num_rings_, FUTEX_WAIT, num_heard, &timeout, nullptr, 0);
    }

private:
    alignas(kCacheLineNbytes) std::atomic<uint32_t> num_rings_;
};

// Bytes on their way from one rank to another: a ring, which one thread writes and one thread reads.
class Channel {
public:
    // As many as there is room for; returns how many.
    size_t write(const char* source, size_t nbytes) {
        uint64_t at = num_written_.load(std::memory_order_relaxed);
        size_t room = kChannelNbytes - (at - num_read_.load(std::memory_order_acquire));
        nbytes = std::min(nbytes, room);
        size_t up_to_end = std::min(nbytes, kChannelNbytes - at % kChannelNbytes);
        memcpy(bytes_ + at % kChannelNbytes, source, up_to_end);
        memcpy(bytes_, source + up_to_end, nbytes - up_to_end);
        num_written_.store(at + nbytes, std::memory_order_release);
        return nbytes;
    }

    // As many as have arrived; returns how many.
    size_t read(char* target, size_t nbytes) {
        uint64_t at = num_read_.load(std::memory_order_relaxed);
        size_t num_arrived = num_written_.load(std::memory_order_acquire) - at;
        nbytes = std::min(nbytes, num_arrived);
        size_t up_to_end = std::min(nbytes, kChannelNbytes - at % kChannelNbytes);
        memcpy(target, bytes_ + at % kChannelNbytes, up_to_end);
        memcpy(target + up_to_end, bytes_, nbytes - up_to_end);
        num_read_.store(at + nbytes, std::memory_order_release);
        return nbytes;
    }

private:
    alignas(kCacheLineNbytes) std::atomic<uint64_t> num_written_;
    alignas(kCacheLineNbytes) std::atomic<uint64_t> num_read_;
    char bytes_[kChannelNbytes];
};

// The shared memory of a communicator: how many ranks have it, a bell for each, a channel from each to each.
class Mailboxes {
public:
    Mailboxes(const std::string& name, int num_ranks) : name_("/" + name), num_ranks_(num_ranks) {
        size_t num_channels = size_t(num_ranks) * num_ranks;
        nbytes_ = sizeof(Bell) * (1 + num_ranks) + sizeof(Channel) * num_channels;
    }

    ~Mailboxes() {
        if (memory_) {
            munmap(memory_, nbytes_);
        }
    }

    // New shared memory is zero, which is what empty mailboxes are.
    bool open() {
        int descriptor = shm_open(name_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
        if (descriptor < 0) {
            return false;
        }
        void* memory = MAP_FAILED;
        if (ftruncate(descriptor, nbytes_) == 0) {
            memory = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        }
        close(descriptor);
        if (memory == MAP_FAILED) {
            return false;
        }
        memory_ = static_cast<char*>(memory);
        return true;
    }

    // The last rank removes the name, so that nothing is left when processes die.
    void join() {
        if (++num_joined() == uint32_t(num_ranks_)) {
            remove_name();
        }
    }

    bool have_all_joined() { return num_joined() == uint32_t(num_ranks_); }

    void remove_name() { shm_unlink(name_.c_str()); }

    Bell& bell(int rank) { return reinterpret_cast<Bell*>(memory_)[1 + rank]; }

    Channel& channel(int from, int to) {
        auto* channels = reinterpret_cast<Channel*>(memory_ + sizeof(Bell) * (1 + num_ranks_));
        return channels[size_t(from) * num_ranks_ + to];
    }

private:
    std::atomic<uint32_t>& num_joined() { return *reinterpret_cast<std::atomic<uint32_t>*>(memory_); }

    std::string name_;
    int num_ranks_;
    size_t nbytes_;
    char* memory_ = nullptr;
};

static_assert(sizeof(Bell) == kCacheLineNbytes && sizeof(Channel) % kCacheLineNbytes == 0);

// -- sends and receives --------------------------------------------------------------------------------------------

// Ends a call that is not carried out to its end, with what the communicator says from then on.
struct Interrupted {
    ncclResult_t result;
};

// Goes before the bytes, so that both ends notice when they mean different things.
struct Envelope {
    uint64_t nbytes;
    Call call;

    bool operator==(const Envelope&) const = default;
};

// Bytes to send or to receive, and how far that is.
struct Parcel {
    char* bytes;
    Envelope envelope;      // to send, or expected
    Envelope arrived = {};  // of one that is received
    size_t envelope_at = 0;
    size_t bytes_at = 0;

    bool is_over() const { return envelope_at == sizeof(Envelope) && bytes_at == envelope.nbytes; }
};

// Parcels from one rank to another, which keep their order.
class Lane {
public:
    Lane(Channel& channel, Bell& bell_of_peer, bool sends) :
        channel_(channel), bell_of_peer_(bell_of_peer), sends_(sends) {}

    void add(const Parcel& parcel) { parcels_.push_back(parcel); }

    bool is_over() const { return parcels_.empty(); }

    // The parcel whose other end means something else.
    const Parcel* contradiction() const {
        if (sends_ || parcels_.empty()) {
            return nullptr;
        }
        const Parcel& first = parcels_.front();
        bool is_known = first.envelope_at == sizeof(Envelope);
        return is_known && first.arrived != first.envelope ? &first : nullptr;
    }

    // Move what can be moved now; returns whether anything was.
    bool advance() {
        bool has_moved = false;
        while (!parcels_.empty()) {
            has_moved |= advance(parcels_.front());
            if (contradiction() || !parcels_.front().is_over()) {
                break;
            }
            parcels_.pop_front();
        }
        if (has_moved) {
            bell_of_peer_.ring();
        }
        return has_moved;
    }

private:
    bool advance(Parcel& parcel) {
        Envelope& envelope = sends_ ? parcel.envelope : parcel.arrived;
        size_t num_moved = move(reinterpret_cast<char*>(&envelope), sizeof envelope, parcel.envelope_at);
        if (parcel.envelope_at == sizeof envelope && envelope == parcel.envelope) {
            num_moved += move(parcel.bytes, parcel.envelope.nbytes, parcel.bytes_at);
        }
        return num_moved > 0;
    }

    size_t move(char* bytes, size_t nbytes, size_t& at) {
        size_t num_left = nbytes - at;
        size_t num_moved = sends_ ? channel_.write(bytes + at, num_left) : channel_.read(bytes + at, num_left);
        at += num_moved;
        return num_moved;
    }

    Channel& channel_;
    Bell& bell_of_peer_;
    bool sends_;
    std::deque<Parcel> parcels_;
};

// Sends and receives of one rank that go on at the same time. A rank may send to itself, as to any other.
class Exchange {
public:
    Exchange(Mailboxes& mailboxes, int rank, int num_ranks, Call call, const std::atomic<bool>& is_interrupted) :
        mailboxes_(mailboxes), rank_(rank), num_ranks_(num_ranks), call_(call), is_interrupted_(is_interrupted) {}

    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }

    // Ranks without this one.
    std::vector<int> peers() const {
        std::vector<int> ranks;
        for (int rank = 0; rank < num_ranks_; rank++) {
            if (rank != rank_) {
                ranks.push_back(rank);
            }
        }
        return ranks;
    }

    void send(int peer, const char* bytes, size_t nbytes) { add(peer, const_cast<char*>(bytes), nbytes, true); }
    void receive(int peer, char* bytes, size_t nbytes) { add(peer, bytes, nbytes, false); }

    // Carry out what was added. Throws Interrupted.
    void run() {
        Bell& bell = mailboxes_.bell(rank_);
        while (!lanes_.empty()) {
            if (is_interrupted_) {
                throw Interrupted{ncclSuccess};
            }
            uint32_t num_heard = bell.num_rings();
            if (!advance()) {
                bell.wait(num_heard);
            }
        }
    }

private:
    struct LaneId {
        int peer;
        bool sends;

        auto operator<=>(const LaneId&) const = default;
    };

    // Nothing is sent for no bytes: NCCL lets one end leave out such a call.
    void add(int peer, char* bytes, size_t nbytes, bool sends) {
        if (!nbytes) {
            return;
        }
        LaneId id{peer, sends};
        auto lane = lanes_.find(id);
        if (lane == lanes_.end()) {
            Channel& channel = sends ? mailboxes_.channel(rank_, peer) : mailboxes_.channel(peer, rank_);
            lane = lanes_.emplace(id, Lane(channel, mailboxes_.bell(peer), sends)).first;
        }
        lane->second.add({.bytes = bytes, .envelope = {nbytes, call_}});
    }

    bool advance() {
        bool has_moved = false;
        for (auto& [id, lane] : lanes_) {
            has_moved |= lane.advance();
            if (const Parcel* parcel = lane.contradiction()) {
                report_contradiction(id.peer, *parcel);
                throw Interrupted{ncclInvalidUsage};
            }
        }
        std::erase_if(lanes_, [](const auto& entry) { return entry.second.is_over(); });
        return has_moved;
    }

    void report_contradiction(int peer, const Parcel& parcel) {
        auto described = [](const Envelope& envelope) {
            return std::to_string(envelope.nbytes) + " bytes by " + name_of(envelope.call);
        };
        std::string text = "rank " + std::to_string(rank_) + " expects " + described(parcel.envelope) + " from rank " +
                           std::to_string(peer) + ", which sends " + described(parcel.arrived);
        software_gpu_report("NCCL", text.c_str());
    }

    Mailboxes& mailboxes_;
    int rank_;
    int num_ranks_;
    Call call_;
    const std::atomic<bool>& is_interrupted_;
    std::map<LaneId, Lane> lanes_;
};

// -- collectives ---------------------------------------------------------------------------------------------------

struct Collective {
    Collective(
        Call call, const void* source, void* destination, size_t count, ncclDataType_t type,
        ncclRedOp_t operation = ncclSum, int root = 0
    )
        : call(call), source(static_cast<const char*>(source)), destination(static_cast<char*>(destination)),
          count(count), type(type), operation(operation), root(root) {}

    Call call;
    const char* source;
    char* destination;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t operation;
    int root;

    size_t nbytes() const { return count * nbytes_of(type); }
};

static void copy_block(char* destination, const char* source, size_t nbytes) {
    if (destination != source) {
        memmove(destination, source, nbytes);
    }
}

// Tell all others the own block of a buffer, and get theirs.
static void share_blocks(Exchange& exchange, char* blocks, size_t nbytes) {
    for (int peer : exchange.peers()) {
        exchange.send(peer, blocks + exchange.rank() * nbytes, nbytes);
        exchange.receive(peer, blocks + peer * nbytes, nbytes);
    }
    exchange.run();
}

static void broadcast(Exchange& exchange, const Collective& task) {
    if (exchange.rank() != task.root) {
        exchange.receive(task.root, task.destination, task.nbytes());
        exchange.run();
        return;
    }
    for (int peer : exchange.peers()) {
        exchange.send(peer, task.source, task.nbytes());
    }
    exchange.run();
    copy_block(task.destination, task.source, task.nbytes());
}

static void all_gather(Exchange& exchange, const Collective& task) {
    copy_block(task.destination + exchange.rank() * task.nbytes(), task.source, task.nbytes());
    share_blocks(exchange, task.destination, task.nbytes());
}

static void all_to_all(Exchange& exchange, const Collective& task) {
    size_t nbytes = task.nbytes();
    // In place, a block could be overwritten before it is sent.
    std::vector<char> kept;
    const char* source = task.source;
    if (source == task.destination) {
        kept.assign(source, source + nbytes * exchange.num_ranks());
        source = kept.data();
    }
    for (int peer : exchange.peers()) {
        exchange.send(peer, source + peer * nbytes, nbytes);
        exchange.receive(peer, task.destination + peer * nbytes, nbytes);
    }
    exchange.run();
    size_t own_at = exchange.rank() * nbytes;
    copy_block(task.destination + own_at, source + own_at, nbytes);
}

static void reduce_to_root(Exchange& exchange, const Collective& task) {
    size_t nbytes = task.nbytes();
    if (exchange.rank() != task.root) {
        exchange.send(task.root, task.source, nbytes);
        exchange.run();
        return;
    }
    std::vector<char> contributions(nbytes * exchange.num_ranks());
    for (int peer : exchange.peers()) {
        exchange.receive(peer, contributions.data() + peer * nbytes, nbytes);
    }
    exchange.run();
    copy_block(contributions.data() + task.root * nbytes, task.source, nbytes);
    reduce(task.type, task.operation, {contributions.data(), exchange.num_ranks(), task.count}, task.destination);
}

// A rank's part of elements that all ranks share as evenly as they can.
struct Slice {
    size_t start;
    size_t count;

    static Slice of(size_t count, int rank, int num_ranks) {
        size_t start = count * rank / num_ranks;
        size_t end = count * (rank + 1) / num_ranks;
        return {start, end - start};
    }
};

// Get all ranks' contributions to the own slice, and reduce them.
static void reduce_slice(
    Exchange& exchange, const Collective& task, const std::function<Slice(int)>& slice_of, char* result
) {
    size_t element_nbytes = nbytes_of(task.type);
    size_t count = slice_of(exchange.rank()).count;
    size_t nbytes = count * element_nbytes;
    std::vector<char> contributions(nbytes * exchange.num_ranks());
    for (int peer : exchange.peers()) {
        Slice slice = slice_of(peer);
        exchange.send(peer, task.source + slice.start * element_nbytes, slice.count * element_nbytes);
        exchange.receive(peer, contributions.data() + peer * nbytes, nbytes);
    }
    exchange.run();
    const char* own = task.source + slice_of(exchange.rank()).start * element_nbytes;
    copy_block(contributions.data() + exchange.rank() * nbytes, own, nbytes);
    reduce(task.type, task.operation, {contributions.data(), exchange.num_ranks(), count}, result);
}

static void reduce_scatter(Exchange& exchange, const Collective& task) {
    auto slice_of = [&](int rank) { return Slice{rank * task.count, task.count}; };
    reduce_slice(exchange, task, slice_of, task.destination);
}

// Each rank reduces a slice, and all get all slices.
static void all_reduce(Exchange& exchange, const Collective& task) {
    size_t element_nbytes = nbytes_of(task.type);
    auto slice_of = [&](int rank) { return Slice::of(task.count, rank, exchange.num_ranks()); };
    Slice own = slice_of(exchange.rank());
    char* own_result = task.destination + own.start * element_nbytes;
    reduce_slice(exchange, task, slice_of, own_result);
    for (int peer : exchange.peers()) {
        Slice slice = slice_of(peer);
        exchange.send(peer, own_result, own.count * element_nbytes);
        exchange.receive(peer, task.destination + slice.start * element_nbytes, slice.count * element_nbytes);
    }
    exchange.run();
}

static void carry_out(Exchange& exchange, const Collective& task) {
    switch (task.call) {
        case Call::broadcast:
            return broadcast(exchange, task);
        case Call::reduce:
            return reduce_to_root(exchange, task);
        case Call::all_reduce:
            return all_reduce(exchange, task);
        case Call::all_gather:
            return all_gather(exchange, task);
        case Call::reduce_scatter:
            return reduce_scatter(exchange, task);
        case Call::all_to_all:
            return all_to_all(exchange, task);
        default:
            throw Interrupted{ncclInternalError};
    }
}

// -- communicators -------------------------------------------------------------------------------------------------

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
    std::shared_ptr<std::promise<void>> end = nullptr;  // for who waits for it
};

static int64_t memory_of_each_communicator() {
    const char* nbytes = getenv("SOFTWARE_GPU_NCCL_NBYTES");
    return nbytes ? strtoll(nbytes, nullptr, 0) : 0;
}

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

    // Put work on its streams, or into the graph that they are captured into.
    ncclResult_t enqueue(Work work);
    ncclResult_t finalize();
    void destroy();
    // Return when nothing is moved any more, even if other ranks are dead.
    void abort();
    // Give up all calls; the communicator can only be destroyed then.
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
    void capture(const Work& work, CUstream stream);
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

    // Guards the queue and what follows it. Held while work is put on its streams: both have to have the same order.
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

// Signals are for the threads of the program.
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
    // The thread keeps the communicator alive: an abort does not wait for it.
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

// -- calls of a communicator ---------------------------------------------------------------------------------------

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
        capture(work, first_stream);
        return ncclSuccess;
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

// The driver keeps the accesses with the graph, and checks them at each launch.
void Communicator::capture(const Work& work, CUstream stream) {
    auto* replay = new Replay{shared_from_this(), {work.call, work.carry_out}};
    software_gpu_capture(stream, Replay::run, replay, Replay::release);
    for (CUstream each : streams_of(work.accesses)) {
        declare_accesses(work.accesses, each);
    }
}

// The launch of a graph waits here, so that calls keep the order in which the program makes them and launches graphs.
void Communicator::Replay::run(void* self) {
    auto* replay = static_cast<Replay*>(self);
    if (replay->communicator->run_and_wait(replay->work) != ncclSuccess) {
        std::string text = std::string("a graph repeats ") + name_of(replay->work.call) + ": " + last_error_text;
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
    return run_and_wait({call, [](Exchange& exchange) {
        std::vector<char> blocks(exchange.num_ranks());
        share_blocks(exchange, blocks.data(), 1);
    }});
}

// -- the thread of a communicator ----------------------------------------------------------------------------------

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

// Streams go on even if nothing was moved: an abort lets the program end.
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
        Exchange exchange(mailboxes_, rank_, num_ranks_, work.call, is_interrupted_);
        work.carry_out(exchange);
    } catch (const Interrupted& interrupted) {
        async_error_ = interrupted.result;
        is_interrupted_ = true;
    }
}

// -- the end of a communicator -------------------------------------------------------------------------------------

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

// -- communicators of some ranks -----------------------------------------------------------------------------------

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
        share_blocks(exchange, reinterpret_cast<char*>(choices.data()), sizeof(Choice));
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
    // Those excluded may be dead, so nobody is asked; all that remain count their children alike.
    std::string name = name_ + "." + std::to_string(num_children_++) + ".rest";
    *rest = std::make_shared<Communicator>(name, rank_there, num_members, device_);
    return (*rest)->open();
}

// -- memory of a communicator --------------------------------------------------------------------------------------

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

// -- groups --------------------------------------------------------------------------------------------------------

struct PointToPoint {
    bool sends;
    int peer;
    char* bytes;
    size_t nbytes;
    CUstream stream;
};

// What a thread asks for between ncclGroupStart and ncclGroupEnd.
struct Group {
    using Owner = std::shared_ptr<Communicator>;

    int depth = 0;
    ncclResult_t error = ncclSuccess;
    std::vector<Owner> joining;
    std::vector<std::pair<Owner, Work>> collectives;
    std::map<Owner, std::vector<PointToPoint>> batches;
};

static thread_local Group group;

// Sends and receives of a group go on together, also if they are on different streams, so their order is free.
static Work work_of(const std::vector<PointToPoint>& batch) {
    Work work{Call::send, [batch](Exchange& exchange) {
        for (const PointToPoint& each : batch) {
            if (each.sends) {
                exchange.send(each.peer, each.bytes, each.nbytes);
            } else {
                exchange.receive(each.peer, each.bytes, each.nbytes);
            }
        }
        exchange.run();
    }};
    for (const PointToPoint& each : batch) {
        const char* name = name_of(each.sends ? Call::send : Call::receive);
        work.accesses.push_back({each.stream, uint64_t(each.bytes), each.nbytes, !each.sends, name});
    }
    return work;
}

// All ranks carry out the collectives of a group first, and its sends and receives after them.
static ncclResult_t carry_out(Group& asked) {
    ncclResult_t result = asked.error;
    for (const auto& communicator : asked.joining) {
        result = result ? result : communicator->wait_until_all_joined();
    }
    for (auto& [communicator, work] : asked.collectives) {
        result = result ? result : communicator->enqueue(std::move(work));
    }
    for (const auto& [communicator, batch] : asked.batches) {
        result = result ? result : communicator->enqueue(work_of(batch));
    }
    return result;
}

static ncclResult_t end_group() {
    if (group.depth == 0) {
        return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    }
    if (--group.depth > 0) {
        return ncclSuccess;
    }
    Group asked;
    std::swap(asked, group);
    return carry_out(asked);
}

// Count a call, fail it if a test asked for that, and otherwise do it.
template <class Body>
static ncclResult_t public_call(const char* name, Body body) {
    ncclResult_t result = injected_result(name);
    return result ? result : body();
}

// The same for a call that adds to a group, which is a group by itself elsewhere. The group ends with its first error.
template <class Body>
static ncclResult_t grouped_call(const char* name, Body body) {
    group.depth++;
    ncclResult_t result = public_call(name, body);
    group.error = group.error ? group.error : result;
    ncclResult_t result_of_end = end_group();
    return result ? result : result_of_end;
}

}  // namespace software_gpu

using namespace software_gpu;

// What the program holds.
struct ncclComm {
    std::shared_ptr<Communicator> communicator;
};

namespace software_gpu {

static ncclResult_t check_call(ncclComm_t comm, ncclDataType_t type, int peer) {
    if (!comm) {
        return invalid_argument("no communicator");
    }
    if (type < 0 || type >= ncclNumTypes) {
        return invalid_argument("unknown data type " + std::to_string(type));
    }
    if (peer < 0 || peer >= comm->communicator->num_ranks()) {
        return invalid_argument("rank " + std::to_string(peer) + " is not of this communicator");
    }
    return ncclSuccess;
}

static ncclResult_t add_point_to_point(
    Call call, const void* bytes, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream
) {
    return grouped_call(name_of(call), [&] {
        if (ncclResult_t result = check_call(comm, type, peer)) {
            return result;
        }
        auto* start = static_cast<char*>(const_cast<void*>(bytes));
        size_t nbytes = count * nbytes_of(type);
        if (nbytes) {
            group.batches[comm->communicator].push_back({call == Call::send, peer, start, nbytes, stream});
        }
        return ncclSuccess;
    });
}

// How many blocks of a collective this rank reads and writes.
struct NumBlocks {
    int source;
    int destination;

    static NumBlocks of(const Collective& task, int rank, int num_ranks) {
        bool is_root = rank == task.root;
        switch (task.call) {
            case Call::broadcast:
                return {is_root ? 1 : 0, 1};
            case Call::reduce:
                return {1, is_root ? 1 : 0};
            case Call::all_gather:
                return {1, num_ranks};
            case Call::reduce_scatter:
                return {num_ranks, 1};
            case Call::all_to_all:
                return {num_ranks, num_ranks};
            default:
                return {1, 1};
        }
    }
};

static std::vector<Access> accesses_of(const Collective& task, int rank, int num_ranks, CUstream stream) {
    std::vector<Access> accesses;
    auto add = [&](const char* start, size_t nbytes, bool writes) {
        if (nbytes) {
            accesses.push_back({stream, uint64_t(start), nbytes, writes, name_of(task.call)});
        }
    };
    auto num_blocks = NumBlocks::of(task, rank, num_ranks);
    size_t nbytes = num_blocks.destination * task.nbytes();
    add(task.source, num_blocks.source * task.nbytes(), false);
    // A block that is in its place already is not written.
    size_t own_at = num_blocks.destination > 1 ? rank * task.nbytes() : 0;
    bool moves_bytes_only = task.call == Call::broadcast || task.call == Call::all_gather;
    bool is_in_place = moves_bytes_only && num_blocks.source && task.source == task.destination + own_at;
    if (!is_in_place) {
        add(task.destination, nbytes, true);
    } else if (nbytes) {
        size_t own_end = own_at + task.nbytes();
        add(task.destination, own_at, true);
        add(task.destination + own_end, nbytes - own_end, true);
    }
    return accesses;
}

static Work work_of(const Collective& task, const Communicator& communicator, CUstream stream) {
    Work work{task.call, [task](Exchange& exchange) { carry_out(exchange, task); }};
    work.accesses = accesses_of(task, communicator.rank(), communicator.num_ranks(), stream);
    return work;
}

static ncclResult_t add_collective(const Collective& task, ncclComm_t comm, cudaStream_t stream) {
    return grouped_call(name_of(task.call), [&] {
        if (ncclResult_t result = check_call(comm, task.type, task.root)) {
            return result;
        }
        if (task.operation < 0 || task.operation >= ncclNumOps) {
            return invalid_argument("unknown reduction " + std::to_string(task.operation));
        }
        if (task.count) {
            auto& communicator = comm->communicator;
            group.collectives.emplace_back(communicator, work_of(task, *communicator, stream));
        }
        return ncclSuccess;
    });
}

// -- making communicators ------------------------------------------------------------------------------------------

static int current_device() {
    CUdevice device = 0;
    // A thread without a context uses the first device, as with the runtime.
    return cuCtxGetDevice(&device) == CUDA_SUCCESS ? device : 0;
}

static void give_out(const std::shared_ptr<Communicator>& communicator, ncclComm_t* comm) {
    group.joining.push_back(communicator);
    *comm = new ncclComm{communicator};
}

static ncclResult_t make_communicator(
    const char* call_name, ncclComm_t* comm, int num_ranks, const ncclUniqueId& id, int rank, int device
) {
    return grouped_call(call_name, [&] {
        if (!comm || num_ranks < 1 || rank < 0 || rank >= num_ranks) {
            return invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(num_ranks));
        }
        std::string name(id.internal, strnlen(id.internal, sizeof id.internal));
        auto communicator = std::make_shared<Communicator>(name, rank, num_ranks, device);
        if (ncclResult_t result = communicator->open()) {
            return result;
        }
        give_out(communicator, comm);
        return ncclSuccess;
    });
}

}  // namespace software_gpu

extern "C" {

// -- the library ---------------------------------------------------------------------------------------------------

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess:
            return "no error";
        case ncclUnhandledCudaError:
            return "unhandled cuda error";
        case ncclSystemError:
            return "unhandled system error";
        case ncclInternalError:
            return "internal error";
        case ncclInvalidArgument:
            return "invalid argument";
        case ncclInvalidUsage:
            return "invalid usage";
        case ncclRemoteError:
            return "remote process exited or there was a network error";
        case ncclInProgress:
            return "NCCL operation in progress";
        default:
            return "unknown result code";
    }
}

const char* ncclGetLastError(ncclComm_t) { return last_error_text.c_str(); }

ncclResult_t ncclMemAlloc(void** pointer, size_t nbytes) {
    return public_call("ncclMemAlloc", [&] {
        CUresult error = cuMemAlloc(reinterpret_cast<CUdeviceptr*>(pointer), nbytes);
        return error ? fail(ncclUnhandledCudaError, "cuMemAlloc fails") : ncclSuccess;
    });
}

ncclResult_t ncclMemFree(void* pointer) {
    return public_call("ncclMemFree", [&] {
        CUresult error = cuMemFree(reinterpret_cast<CUdeviceptr>(pointer));
        return error ? fail(ncclUnhandledCudaError, "cuMemFree fails") : ncclSuccess;
    });
}

// -- communicators -------------------------------------------------------------------------------------------------

// The name of the shared memory, which no other process takes at any time. It begins as the accounts' name does, so who
// started the processes finds what they left.
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> num_ids;
    const char* machine = getenv("SOFTWARE_GPU_ID");
    auto now = std::chrono::system_clock::now().time_since_epoch().count();
    std::string name = std::string("software_gpu.") + (machine ? machine : "0") + "." + std::to_string(getpid()) + "." +
                       std::to_string(num_ids++) + "." + std::to_string(now);
    *id = {};
    memcpy(id->internal, name.c_str(), std::min(name.size(), sizeof id->internal - 1));
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
    return make_communicator("ncclCommInitRank", comm, num_ranks, id, rank, current_device());
}

// A communicator that need not block does so all the same: each of its calls is over when it returns.
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
    return make_communicator("ncclCommInitRankConfig", comm, num_ranks, id, rank, current_device());
}

ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* comm, int num_ranks, int rank, int num_ids, ncclUniqueId* ids, ncclConfig_t*
) {
    if (num_ids < 1) {
        return invalid_argument("no unique id");
    }
    return make_communicator("ncclCommInitRankScalable", comm, num_ranks, ids[0], rank, current_device());
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int num_devices, const int* devices) {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    ncclGroupStart();
    for (int rank = 0; rank < num_devices; rank++) {
        int device = devices ? devices[rank] : rank;
        make_communicator("ncclCommInitAll", &comms[rank], num_devices, id, rank, device);
    }
    return ncclGroupEnd();
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t*) {
    return grouped_call("ncclCommSplit", [&] {
        *part = nullptr;
        std::shared_ptr<Communicator> communicator;
        ncclResult_t result = comm->communicator->split(color, key, &communicator);
        if (result == ncclSuccess && communicator) {
            give_out(communicator, part);
        }
        return result;
    });
}

ncclResult_t ncclCommShrink(
    ncclComm_t comm, int* excluded_ranks, int num_excluded, ncclComm_t* rest, ncclConfig_t*, int flags
) {
    return grouped_call("ncclCommShrink", [&] {
        if (flags & NCCL_SHRINK_ABORT) {
            comm->communicator->interrupt();
        }
        std::shared_ptr<Communicator> communicator;
        std::vector<int> excluded(excluded_ranks, excluded_ranks + num_excluded);
        ncclResult_t result = comm->communicator->shrink(excluded, &communicator);
        if (result == ncclSuccess) {
            give_out(communicator, rest);
        }
        return result;
    });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    return public_call("ncclCommFinalize", [&] { return comm->communicator->finalize(); });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    return public_call("ncclCommDestroy", [&] {
        if (comm) {
            comm->communicator->destroy();
            delete comm;
        }
        return ncclSuccess;
    });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    return public_call("ncclCommAbort", [&] {
        if (comm) {
            comm->communicator->abort();
            delete comm;
        }
        return ncclSuccess;
    });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    *error = comm->communicator->async_error();
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* num_ranks) {
    *num_ranks = comm->communicator->num_ranks();
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = comm->communicator->rank();
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
    *device = comm->communicator->device();
    return ncclSuccess;
}

// Every buffer is as good as a registered one.
ncclResult_t ncclCommRegister(const ncclComm_t, void* buffer, size_t, void** handle) {
    return public_call("ncclCommRegister", [&] {
        *handle = buffer;
        return ncclSuccess;
    });
}

ncclResult_t ncclCommDeregister(const ncclComm_t, void*) {
    return public_call("ncclCommDeregister", [] { return ncclSuccess; });
}

// -- memory of communicators ---------------------------------------------------------------------------------------

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 7)  // which brought them

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
    return public_call("ncclCommSuspend", [&] {
        if (flags != NCCL_SUSPEND_MEM) {
            return invalid_argument("only NCCL_SUSPEND_MEM is known");
        }
        return comm->communicator->suspend();
    });
}

ncclResult_t ncclCommResume(ncclComm_t comm) {
    return public_call("ncclCommResume", [&] { return comm->communicator->resume(); });
}

ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t statistic, uint64_t* value) {
    const Communicator& communicator = *comm->communicator;
    switch (statistic) {
        case ncclStatGpuMemSuspend:
        case ncclStatGpuMemTotal:
            *value = communicator.memory_nbytes();
            return ncclSuccess;
        case ncclStatGpuMemSuspended:
            *value = communicator.is_suspended();
            return ncclSuccess;
        case ncclStatGpuMemPersist:
            *value = 0;
            return ncclSuccess;
    }
    return invalid_argument("unknown statistic " + std::to_string(statistic));
}

#endif

// -- groups --------------------------------------------------------------------------------------------------------

ncclResult_t ncclGroupStart() {
    group.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    ncclResult_t result = injected_result("ncclGroupEnd");
    if (result && group.depth) {
        group.error = group.error ? group.error : result;
    }
    return end_group();
}

// -- sends, receives and collectives -------------------------------------------------------------------------------

ncclResult_t ncclSend(
    const void* source, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream
) {
    return add_point_to_point(Call::send, source, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(
    void* destination, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream
) {
    return add_point_to_point(Call::receive, destination, count, type, peer, comm, stream);
}

ncclResult_t ncclBroadcast(
    const void* source, void* destination, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t stream
) {
    return add_collective({Call::broadcast, source, destination, count, type, ncclSum, root}, comm, stream);
}

ncclResult_t ncclBcast(
    void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream
) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t ncclReduce(
    const void* source, void* destination, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root,
    ncclComm_t comm, cudaStream_t stream
) {
    return add_collective({Call::reduce, source, destination, count, type, operation, root}, comm, stream);
}

ncclResult_t ncclAllReduce(
    const void* source, void* destination, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm,
    cudaStream_t stream
) {
    return add_collective({Call::all_reduce, source, destination, count, type, operation}, comm, stream);
}

ncclResult_t ncclReduceScatter(
    const void* source, void* destination, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm,
    cudaStream_t stream
) {
    return add_collective({Call::reduce_scatter, source, destination, count, type, operation}, comm, stream);
}

ncclResult_t ncclAllGather(
    const void* source, void* destination, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream
) {
    return add_collective({Call::all_gather, source, destination, count, type}, comm, stream);
}

ncclResult_t ncclAlltoAll(
    const void* source, void* destination, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream
) {
    return add_collective({Call::all_to_all, source, destination, count, type}, comm, stream);
}

}  // extern "C"
