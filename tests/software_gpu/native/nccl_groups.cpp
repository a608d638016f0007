// Conversion of calls to work of communicators, with reads and writes.
#include "nccl_groups.h"

namespace software_gpu::nccl {

thread_local Group group;

// Sends and receives of a group are concurrent, even on different streams, so that their order is free.
static Work work_of(const std::vector<PointToPoint>& batch) {
    Work work{Call::send, [batch](Exchange& exchange) {
        for (const PointToPoint& each : batch) {
            if (each.sends) {
                exchange.send(each.meaning, each.peer, each.bytes);
            } else {
                exchange.receive(each.meaning, each.peer, each.bytes, each.nbytes);
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

// All ranks carry out a communicator's collectives first, and then its sends and receives.
static ncclResult_t carry_out(Group& group) {
    ncclResult_t result = group.error;
    for (const auto& communicator : group.joining) {
        result = result ? result : communicator->wait_until_all_joined();
    }
    for (auto& [communicator, collectives, batch] : group.asked) {
        for (Work& work : collectives) {
            result = result ? result : communicator->enqueue(std::move(work));
        }
        if (!batch.empty()) {
            result = result ? result : communicator->enqueue(work_of(batch));
        }
    }
    return result;
}

ncclResult_t end_group() {
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

// -- calls that a group is made of ----------------------------------------------------------------------------------

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

ncclResult_t add_point_to_point(
    Call call, const void* bytes, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream
) {
    return grouped_call(name_of(call), [&] {
        if (ncclResult_t result = check_call(comm, type, peer)) {
            return result;
        }
        auto* start = static_cast<char*>(const_cast<void*>(bytes));
        size_t nbytes = count * nbytes_of(type);
        if (nbytes) {
            Meaning meaning{Call::send, type, count};
            group.of(comm->communicator).batch.push_back({call == Call::send, meaning, peer, start, nbytes, stream});
        }
        return ncclSuccess;
    });
}

// Number of blocks of a collective that this rank reads and writes.
struct NumBlocks {
    int source;
    int destination;

    static NumBlocks of(const Collective& task, int rank, int num_ranks) {
        bool is_root = rank == task.meaning.root;
        switch (task.meaning.call) {
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
            accesses.push_back({stream, uint64_t(start), nbytes, writes, name_of(task.meaning.call)});
        }
    };
    auto num_blocks = NumBlocks::of(task, rank, num_ranks);
    size_t nbytes = num_blocks.destination * task.nbytes();
    add(task.source, num_blocks.source * task.nbytes(), false);
    // A block that is already in its place is not written.
    size_t own_at = num_blocks.destination > 1 ? rank * task.nbytes() : 0;
    bool moves_bytes_only = task.meaning.call == Call::broadcast || task.meaning.call == Call::all_gather;
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
    Work work{task.meaning.call, [task](Exchange& exchange) { carry_out(exchange, task); }};
    work.accesses = accesses_of(task, communicator.rank(), communicator.num_ranks(), stream);
    return work;
}

ncclResult_t add_collective(const Collective& task, ncclComm_t comm, cudaStream_t stream) {
    return grouped_call(name_of(task.meaning.call), [&] {
        if (ncclResult_t result = check_call(comm, task.meaning.type, task.meaning.root)) {
            return result;
        }
        if (task.meaning.operation < 0 || task.meaning.operation >= ncclNumOps) {
            return invalid_argument("unknown reduction " + std::to_string(task.meaning.operation));
        }
        if (task.meaning.count) {
            auto& communicator = comm->communicator;
            group.of(communicator).collectives.push_back(work_of(task, *communicator, stream));
        }
        return ncclSuccess;
    });
}

}  // namespace software_gpu::nccl
