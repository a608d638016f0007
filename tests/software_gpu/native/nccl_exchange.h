// Messages between the ranks of a communicator, in shared memory: presence, meaning, and position of the bytes.
#pragma once
#include "nccl_calls.h"

#include <atomic>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace software_gpu::nccl {

constexpr size_t kCacheLineNbytes = 64;

// Wakes up a rank in any process.
class Bell {
public:
    uint32_t num_rings() const { return num_rings_; }
    void ring();

    // Return at the next ring after the known ones, or a little later if there is none.
    void wait(uint32_t num_heard);

private:
    alignas(kCacheLineNbytes) std::atomic<uint32_t> num_rings_;
};

// A message from one rank to another. Its bytes stay in place until the other rank has copied them.
struct Slot {
    alignas(kCacheLineNbytes) std::atomic<uint32_t> num_sent;
    std::atomic<uint32_t> num_taken;
    std::atomic<bool> is_refused;
    Meaning meaning;
    int pid;
    uint64_t address;
};

// Ends a call early, with the communicator's result from then on.
struct Interrupted {
    ncclResult_t result;
};

// Shared memory of a communicator: the number of its ranks, a bell for each, and a slot for each pair.
class Mailboxes {
public:
    Mailboxes(const std::string& name, int num_ranks);
    ~Mailboxes();

    // New shared memory is zero, like empty mailboxes.
    bool open();

    // The last rank removes the name, so that nothing is left when processes die.
    void join();

    bool have_all_joined() { return num_joined() == uint32_t(num_ranks_); }
    void remove_name();

    Bell& bell(int rank) { return reinterpret_cast<Bell*>(memory_)[1 + rank]; }
    Slot& slot(int from, int to);

private:
    std::atomic<uint32_t>& num_joined() { return *reinterpret_cast<std::atomic<uint32_t>*>(memory_); }

    std::string name_;
    int num_ranks_;
    size_t nbytes_;
    char* memory_ = nullptr;
};

// -- sends and receives ---------------------------------------------------------------------------------------------

struct Parcel {
    Meaning meaning;
    char* bytes;
    size_t nbytes;  // to receive; the sender does not know which part of its bytes the other end takes
    bool is_sent = false;
};

// Parcels from one rank to another, which keep their order.
class Lane {
public:
    Lane(Slot& slot, Bell& bell_of_peer, bool sends) : slot_(slot), bell_of_peer_(bell_of_peer), sends_(sends) {}

    void add(const Parcel& parcel) { parcels_.push_back(parcel); }
    const Parcel& first() const { return parcels_.front(); }
    bool is_over() const { return parcels_.empty(); }
    // Whether the other end has a mismatching message.
    bool is_contradicted() const { return is_there() && slot_.meaning != first().meaning; }
    bool is_refused() const { return sends_ && slot_.is_refused; }
    Meaning meaning_of_peer() const { return slot_.meaning; }

    void refuse();

    // Do all possible work; return whether there was any. Throws Interrupted.
    bool advance();

private:
    bool is_there() const { return !sends_ && !is_over() && slot_.num_sent != slot_.num_taken; }

    bool send(Parcel& parcel);
    bool receive();

    Slot& slot_;
    Bell& bell_of_peer_;
    bool sends_;
    std::deque<Parcel> parcels_;
};

// Concurrent sends and receives of a rank. A rank may also send to itself.
class Exchange {
public:
    Exchange(Mailboxes& mailboxes, int rank, int num_ranks, const std::atomic<bool>& is_interrupted) :
        mailboxes_(mailboxes), rank_(rank), num_ranks_(num_ranks), is_interrupted_(is_interrupted) {}

    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }

    // All ranks except this one.
    std::vector<int> peers() const;

    void send(const Meaning& meaning, int peer, const char* bytes) {
        lane({peer, true}).add({meaning, const_cast<char*>(bytes), 0});
    }
    void receive(const Meaning& meaning, int peer, char* bytes, size_t nbytes) {
        lane({peer, false}).add({meaning, bytes, nbytes});
    }

    // Carry out the added transfers. Throws Interrupted.
    void run();

private:
    struct LaneId {
        int peer;
        bool sends;

        auto operator<=>(const LaneId&) const = default;
    };

    Lane& lane(LaneId id);
    bool advance();
    void report_contradiction(int peer, const Lane& lane);

    Mailboxes& mailboxes_;
    int rank_;
    int num_ranks_;
    const std::atomic<bool>& is_interrupted_;
    std::map<LaneId, Lane> lanes_;
};

}  // namespace software_gpu::nccl
