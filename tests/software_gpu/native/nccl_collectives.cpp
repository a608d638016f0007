// Implementation of collectives by exchanges of blocks.
#include "nccl_collectives.h"

#include <cstring>
#include <functional>
#include <vector>

namespace software_gpu::nccl {

static void copy_block(char* destination, const char* source, size_t nbytes) {
    if (destination != source) {
        memmove(destination, source, nbytes);
    }
}

void share_blocks(Exchange& exchange, const Meaning& meaning, char* blocks, size_t nbytes) {
    for (int peer : exchange.peers()) {
        exchange.send(meaning, peer, blocks + exchange.rank() * nbytes);
        exchange.receive(meaning, peer, blocks + peer * nbytes, nbytes);
    }
    exchange.run();
}

// All ranks exchange messages with all others, even without bytes for them, so that they detect mismatches.
static void broadcast(Exchange& exchange, const Collective& task) {
    for (int peer : exchange.peers()) {
        exchange.send(task.meaning, peer, task.source);
        exchange.receive(task.meaning, peer, task.destination, peer == task.meaning.root ? task.nbytes() : 0);
    }
    exchange.run();
    if (exchange.rank() == task.meaning.root) {
        copy_block(task.destination, task.source, task.nbytes());
    }
}

static void all_gather(Exchange& exchange, const Collective& task) {
    copy_block(task.destination + exchange.rank() * task.nbytes(), task.source, task.nbytes());
    share_blocks(exchange, task.meaning, task.destination, task.nbytes());
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
        exchange.send(task.meaning, peer, source + peer * nbytes);
        exchange.receive(task.meaning, peer, task.destination + peer * nbytes, nbytes);
    }
    exchange.run();
    size_t own_at = exchange.rank() * nbytes;
    copy_block(task.destination + own_at, source + own_at, nbytes);
}

// A rank's part of elements that all ranks share as evenly as possible.
struct Slice {
    size_t start;
    size_t count;

    static Slice of(size_t count, int rank, int num_ranks) {
        size_t start = count * rank / num_ranks;
        size_t end = count * (rank + 1) / num_ranks;
        return {start, end - start};
    }
};

// Receive all ranks' contributions to this rank's slice, and reduce them.
static void reduce_slice(
    Exchange& exchange, const Collective& task, const std::function<Slice(int)>& slice_of, char* result
) {
    size_t element_nbytes = nbytes_of(task.meaning.type);
    size_t count = slice_of(exchange.rank()).count;
    size_t nbytes = count * element_nbytes;
    std::vector<char> contributions(nbytes * exchange.num_ranks());
    for (int peer : exchange.peers()) {
        exchange.send(task.meaning, peer, task.source + slice_of(peer).start * element_nbytes);
        exchange.receive(task.meaning, peer, contributions.data() + peer * nbytes, nbytes);
    }
    exchange.run();
    const char* own = task.source + slice_of(exchange.rank()).start * element_nbytes;
    copy_block(contributions.data() + exchange.rank() * nbytes, own, nbytes);
    reduce(task.meaning.type, task.meaning.operation, {contributions.data(), exchange.num_ranks(), count}, result);
}

static void reduce_to_root(Exchange& exchange, const Collective& task) {
    auto slice_of = [&](int rank) { return Slice{0, rank == task.meaning.root ? task.meaning.count : 0}; };
    reduce_slice(exchange, task, slice_of, task.destination);
}

static void reduce_scatter(Exchange& exchange, const Collective& task) {
    uint64_t count = task.meaning.count;
    auto slice_of = [count](int rank) { return Slice{rank * count, count}; };
    reduce_slice(exchange, task, slice_of, task.destination);
}

// Each rank reduces a slice, and all ranks get all slices.
static void all_reduce(Exchange& exchange, const Collective& task) {
    size_t element_nbytes = nbytes_of(task.meaning.type);
    auto slice_of = [&](int rank) { return Slice::of(task.meaning.count, rank, exchange.num_ranks()); };
    char* own_result = task.destination + slice_of(exchange.rank()).start * element_nbytes;
    reduce_slice(exchange, task, slice_of, own_result);
    for (int peer : exchange.peers()) {
        Slice slice = slice_of(peer);
        exchange.send(task.meaning, peer, own_result);
        char* result = task.destination + slice.start * element_nbytes;
        exchange.receive(task.meaning, peer, result, slice.count * element_nbytes);
    }
    exchange.run();
}

void carry_out(Exchange& exchange, const Collective& task) {
    switch (task.meaning.call) {
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

}  // namespace software_gpu::nccl
