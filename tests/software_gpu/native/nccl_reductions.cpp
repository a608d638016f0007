// Arithmetic of reductions. Ranks are added in their order, so that all of them get the same bits.
#include "nccl_collectives.h"

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace software_gpu::nccl {

template <class Number>
static Number combine(ncclRedOp_t operation, Number left, Number right) {
    switch (operation) {
        case ncclProd:
            return left * right;
        case ncclMax:
            return std::max(left, right);
        case ncclMin:
            return std::min(left, right);
        default:  // a mean is a sum that is divided at the end
            return left + right;
    }
}

// Elements are combined as numbers of a type that is wider for narrow floats.
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

void reduce(ncclDataType_t type, ncclRedOp_t operation, const Contributions& contributions, char* result) {
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

}  // namespace software_gpu::nccl
