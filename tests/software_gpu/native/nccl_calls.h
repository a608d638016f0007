// Attributes of NCCL's calls on which ranks must agree, and messages of failed calls.
#pragma once
#include "interface.h"

#include <cstddef>
#include <cstdint>
#include <nccl.h>
#include <string>

namespace software_gpu::nccl {

// -- errors ---------------------------------------------------------------------------------------------------------

// Store the text for ncclGetLastError, and return the result.
ncclResult_t fail(ncclResult_t result, const std::string& text);
ncclResult_t invalid_argument(const std::string& text);
const std::string& last_error();  // of this thread
// The result of NCCL, or error of the driver, that a test has injected. Counts the call.
ncclResult_t injected_result(const char* name);
// Likewise for failures after the call has returned, such as a broken link; only ncclCommGetAsyncError reports them.
ncclResult_t injected_result_on_the_way(const char* name);

// -- calls ----------------------------------------------------------------------------------------------------------

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

const char* name_of(Call call);
std::string name_of(ncclDataType_t type);
std::string name_of(ncclRedOp_t operation);
size_t nbytes_of(ncclDataType_t type);

// Attributes on which all ranks must agree: of a collective call, or of a send and its receive.
struct Meaning {
    Call call;
    ncclDataType_t type = ncclInt8;
    uint64_t count = 0;
    ncclRedOp_t operation = ncclSum;
    int root = 0;

    bool operator==(const Meaning&) const = default;

    std::string text() const {
        return std::string(name_of(call)) + " of " + std::to_string(count) + " " + name_of(type) + " (" +
               name_of(operation) + ", root " + std::to_string(root) + ")";
    }
};

}  // namespace software_gpu::nccl
