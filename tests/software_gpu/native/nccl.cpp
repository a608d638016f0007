// libnccl.so.2: NCCL for processes of one machine, over shared memory. Its public functions.
//
// A communicator has a thread, which carries out its calls in their order. A call first waits for earlier work of its
// stream, and the stream continues after it, as with a kernel of NCCL. All calls consist of sends and receives: a
// rank publishes in shared memory where its bytes are and their meaning, and the other copies them from there.
// Mismatching calls, types, counts, operations or roots are reported, and both ranks fail; hardware would hang or mix
// up bytes. Reductions add in the order of ranks, so that all ranks get the same bits.
//
//   nccl.cpp                 public functions
//   nccl_groups.cpp          calls between ncclGroupStart and ncclGroupEnd, and their reads and writes
//   nccl_communicator.cpp    communicators: the queue of calls, the thread, abort, parts, suspension
//   nccl_collectives.cpp     collectives as exchanges of blocks
//   nccl_reductions.cpp      their arithmetic
//   nccl_exchange.cpp        messages between two ranks in shared memory, and their rendezvous
//   nccl_calls.cpp           attributes on which ranks must agree; errors
#include "nccl_groups.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

using namespace software_gpu::nccl;

static int current_device() {
    CUdevice device = 0;
    // A thread without a context uses the first device, as in the runtime.
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

extern "C" {

// -- the library ----------------------------------------------------------------------------------------------------

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

const char* ncclGetLastError(ncclComm_t) { return last_error().c_str(); }

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

// -- communicators --------------------------------------------------------------------------------------------------

// A unique name of the shared memory. It has the prefix of the accounts' name, so that the launcher finds leftovers.
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

// A non-blocking communicator also blocks: each of its calls is over when it returns.
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

// Every buffer counts as registered.
ncclResult_t ncclCommRegister(const ncclComm_t, void* buffer, size_t, void** handle) {
    return public_call("ncclCommRegister", [&] {
        *handle = buffer;
        return ncclSuccess;
    });
}

ncclResult_t ncclCommDeregister(const ncclComm_t, void*) {
    return public_call("ncclCommDeregister", [] { return ncclSuccess; });
}

// -- memory of communicators ----------------------------------------------------------------------------------------

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 7)  // which introduced them

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

// -- groups ---------------------------------------------------------------------------------------------------------

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

// -- sends, receives and collectives --------------------------------------------------------------------------------

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
    return add_collective({{Call::broadcast, type, count, ncclSum, root}, source, destination}, comm, stream);
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
    return add_collective({{Call::reduce, type, count, operation, root}, source, destination}, comm, stream);
}

ncclResult_t ncclAllReduce(
    const void* source, void* destination, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm,
    cudaStream_t stream
) {
    return add_collective({{Call::all_reduce, type, count, operation}, source, destination}, comm, stream);
}

ncclResult_t ncclReduceScatter(
    const void* source, void* destination, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm,
    cudaStream_t stream
) {
    return add_collective({{Call::reduce_scatter, type, count, operation}, source, destination}, comm, stream);
}

ncclResult_t ncclAllGather(
    const void* source, void* destination, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream
) {
    return add_collective({{Call::all_gather, type, count}, source, destination}, comm, stream);
}

ncclResult_t ncclAlltoAll(
    const void* source, void* destination, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream
) {
    return add_collective({{Call::all_to_all, type, count}, source, destination}, comm, stream);
}

}  // extern "C"
