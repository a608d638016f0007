// Calls of a thread between ncclGroupStart and ncclGroupEnd, which are carried out at the end.
#pragma once
#include "nccl_communicator.h"

#include <memory>
#include <vector>

// The program's handle.
struct ncclComm {
    std::shared_ptr<software_gpu::nccl::Communicator> communicator;
};

namespace software_gpu::nccl {

struct PointToPoint {
    bool sends;
    Meaning meaning;
    int peer;
    char* bytes;
    size_t nbytes;
    CUstream stream;
};

// Calls of a thread between ncclGroupStart and ncclGroupEnd.
struct Group {
    // Of one communicator.
    struct Asked {
        std::shared_ptr<Communicator> communicator;
        std::vector<Work> collectives = {};
        std::vector<PointToPoint> batch = {};
    };

    int depth = 0;
    ncclResult_t error = ncclSuccess;
    std::vector<std::shared_ptr<Communicator>> joining;
    std::vector<Asked> asked;  // in the order of first calls, which is the same for all ranks

    Asked& of(const std::shared_ptr<Communicator>& communicator) {
        for (Asked& each : asked) {
            if (each.communicator == communicator) {
                return each;
            }
        }
        return asked.emplace_back(Asked{communicator});
    }
};

extern thread_local Group group;

// End a group. An inner group ends together with the outermost.
ncclResult_t end_group();

// Count a call, fail it if a test requested that, and otherwise execute it.
template <class Body>
ncclResult_t public_call(const char* name, Body body) {
    ncclResult_t result = injected_result(name);
    return result ? result : body();
}

// Likewise for a call that adds to a group, or is a group by itself. The group ends with its first error.
template <class Body>
ncclResult_t grouped_call(const char* name, Body body) {
    group.depth++;
    ncclResult_t result = public_call(name, body);
    group.error = group.error ? group.error : result;
    ncclResult_t result_of_end = end_group();
    return result ? result : result_of_end;
}

// Add a send or a receive, or a collective, to the group of this thread.
ncclResult_t add_point_to_point(
    Call call, const void* bytes, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream
);
ncclResult_t add_collective(const Collective& task, ncclComm_t comm, cudaStream_t stream);

}  // namespace software_gpu::nccl
