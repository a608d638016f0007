// Collective calls, each made of sends and receives between all ranks.
#pragma once
#include "nccl_exchange.h"

namespace software_gpu::nccl {

struct Collective {
    Collective(const Meaning& meaning, const void* source, void* destination) :
        meaning(meaning), source(static_cast<const char*>(source)), destination(static_cast<char*>(destination)) {}

    Meaning meaning;
    const char* source;
    char* destination;

    size_t nbytes() const { return meaning.count * nbytes_of(meaning.type); }
};

// Carry out this rank's part. Throws Interrupted.
void carry_out(Exchange& exchange, const Collective& task);

// Send this rank's block of a buffer to all others, and receive theirs.
void share_blocks(Exchange& exchange, const Meaning& meaning, char* blocks, size_t nbytes);

// Contributions of all ranks to a reduction, in the order of ranks and of equal size.
struct Contributions {
    const char* bytes;
    int num_ranks;
    size_t count;
};

void reduce(ncclDataType_t type, ncclRedOp_t operation, const Contributions& contributions, char* result);

}  // namespace software_gpu::nccl
