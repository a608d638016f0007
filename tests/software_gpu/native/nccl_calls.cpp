// Names, sizes and errors of calls.
#include "nccl_calls.h"

namespace software_gpu::nccl {

static thread_local std::string last_error_text;

const std::string& last_error() { return last_error_text; }

ncclResult_t fail(ncclResult_t result, const std::string& text) {
    last_error_text = text;
    return result;
}

ncclResult_t invalid_argument(const std::string& text) { return fail(ncclInvalidArgument, text); }

static ncclResult_t result_of(int error, const std::string& name) {
    if (!error) {
        return ncclSuccess;
    }
    bool is_result = error > ncclSuccess && error < ncclNumResults;
    return fail(is_result ? ncclResult_t(error) : ncclUnhandledCudaError, name + " fails as a test asked");
}

ncclResult_t injected_result(const char* name) { return result_of(software_gpu_count(name), name); }

ncclResult_t injected_result_on_the_way(const char* name) {
    std::string on_its_way = std::string(name) + " on its way";
    return result_of(software_gpu_asked_failure(on_its_way.c_str()), on_its_way);
}

// -- names and sizes ------------------------------------------------------------------------------------------------

const char* name_of(Call call) {
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

size_t nbytes_of(ncclDataType_t type) {
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

std::string name_of(ncclDataType_t type) {
    static const char* const names[] = {
        "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16",
        "float8e4m3", "float8e5m2",
    };
    return names[type];
}

std::string name_of(ncclRedOp_t operation) {
    static const char* const names[] = {"sum", "product", "maximum", "minimum", "mean"};
    return names[operation];
}

}  // namespace software_gpu::nccl
