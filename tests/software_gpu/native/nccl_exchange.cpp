// Rendezvous of ranks, and transfers of bytes between them.
#include "nccl_exchange.h"

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace software_gpu::nccl {

// -- bells ----------------------------------------------------------------------------------------------------------

void Bell::ring() {
    num_rings_++;
    syscall(SYS_futex, &num_rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::wait(uint32_t num_heard) {
    timespec timeout = {.tv_sec = 0, .tv_nsec = 20'000'000};
    syscall(SYS_futex, &num_rings_, FUTEX_WAIT, num_heard, &timeout, nullptr, 0);
}

// -- the shared memory of a communicator ----------------------------------------------------------------------------

static_assert(sizeof(Bell) == kCacheLineNbytes && sizeof(Slot) % kCacheLineNbytes == 0);

Mailboxes::Mailboxes(const std::string& name, int num_ranks) : name_("/" + name), num_ranks_(num_ranks) {
    nbytes_ = sizeof(Bell) * (1 + num_ranks) + sizeof(Slot) * num_ranks * num_ranks;
}

Mailboxes::~Mailboxes() {
    if (memory_) {
        munmap(memory_, nbytes_);
    }
}

bool Mailboxes::open() {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
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

void Mailboxes::join() {
    if (++num_joined() == uint32_t(num_ranks_)) {
        remove_name();
    }
}

void Mailboxes::remove_name() { shm_unlink(name_.c_str()); }

Slot& Mailboxes::slot(int from, int to) {
    auto* slots = reinterpret_cast<Slot*>(memory_ + sizeof(Bell) * (1 + num_ranks_));
    return slots[size_t(from) * num_ranks_ + to];
}

// -- sends and receives ---------------------------------------------------------------------------------------------

// Copy bytes of any process of this machine, as Mailboxes::open permits. Throws Interrupted.
static void copy_from(const Slot& slot, char* target, size_t nbytes) {
    size_t num_copied = 0;
    while (num_copied < nbytes) {
        iovec own{target + num_copied, nbytes - num_copied};
        iovec other{reinterpret_cast<void*>(slot.address + num_copied), own.iov_len};
        ssize_t num_read = process_vm_readv(slot.pid, &own, 1, &other, 1, 0);
        if (num_read <= 0) {
            if (errno == EPERM || errno == ENOSYS) {
                software_gpu_report("NCCL", "process_vm_readv is forbidden here: ranks cannot read from each other");
            }
            throw Interrupted{ncclRemoteError};  // or the other process has ended
        }
        num_copied += num_read;
    }
}

void Lane::refuse() {
    slot_.is_refused = true;
    bell_of_peer_.ring();
}

bool Lane::advance() {
    bool has_moved = false;
    while (!is_over() && !is_contradicted() && (sends_ ? send(parcels_.front()) : receive())) {
        has_moved = true;
        bell_of_peer_.ring();
    }
    return has_moved;
}

bool Lane::send(Parcel& parcel) {
    if (slot_.num_sent != slot_.num_taken) {
        return false;
    }
    if (parcel.is_sent) {
        parcels_.pop_front();
        return true;
    }
    slot_.meaning = parcel.meaning;
    slot_.pid = getpid();
    slot_.address = uint64_t(parcel.bytes);
    slot_.num_sent++;
    parcel.is_sent = true;
    return true;
}

bool Lane::receive() {
    if (!is_there()) {
        return false;
    }
    copy_from(slot_, first().bytes, first().nbytes);
    slot_.num_taken++;
    parcels_.pop_front();
    return true;
}

std::vector<int> Exchange::peers() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < num_ranks_; rank++) {
        if (rank != rank_) {
            ranks.push_back(rank);
        }
    }
    return ranks;
}

void Exchange::run() {
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

Lane& Exchange::lane(LaneId id) {
    auto entry = lanes_.find(id);
    if (entry == lanes_.end()) {
        Slot& slot = id.sends ? mailboxes_.slot(rank_, id.peer) : mailboxes_.slot(id.peer, rank_);
        entry = lanes_.emplace(id, Lane(slot, mailboxes_.bell(id.peer), id.sends)).first;
    }
    return entry->second;
}

bool Exchange::advance() {
    bool has_moved = false;
    for (auto& [id, lane] : lanes_) {
        has_moved |= lane.advance();
        if (lane.is_contradicted()) {
            report_contradiction(id.peer, lane);
            lane.refuse();
            throw Interrupted{ncclInvalidUsage};
        }
        if (lane.is_refused()) {
            throw Interrupted{ncclInvalidUsage};
        }
    }
    std::erase_if(lanes_, [](const auto& entry) { return entry.second.is_over(); });
    return has_moved;
}

void Exchange::report_contradiction(int peer, const Lane& lane) {
    std::string text = "rank " + std::to_string(rank_) + " calls " + lane.first().meaning.text() + ", and rank " +
                       std::to_string(peer) + " calls " + lane.meaning_of_peer().text();
    software_gpu_report("NCCL", text.c_str());
}

}  // namespace software_gpu::nccl
