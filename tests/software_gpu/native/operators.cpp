// operators.so: torch's operators for CUDA, computed by the CPU.
//
// Device memory of the software GPU is memory of this process, so that a CPU tensor can cover the bytes of a CUDA
// tensor. Every operator of aten with a kernel for the CPU gets the same kernel for CUDA: `run_boxed` replaces the
// CUDA tensors among the arguments by CPU tensors over the same bytes, calls the operator again, which then
// dispatches to the CPU's kernel, and copies new results to device memory. Operators of Python are added by
// `software_gpu_adopt`.
//
// Each tensor is declared to the checker of libcuda; the operator's schema specifies which are written. During the
// capture of a CUDA graph nothing is computed: the graph gets a `Recorded` operator, which computes at its launch.
//
// Unchanged from torch: views, allocation, item(), and copies that are plain copies of memory.
#include "interface.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/Resize.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

// -- bytes of a tensor ---------------------------------------------------------------------------------------------

uint64_t address_of(const Tensor& tensor) {
    return reinterpret_cast<uint64_t>(tensor.const_data_ptr());
}

// From the first to the last element; torch has no negative strides.
size_t extent_nbytes(const Tensor& tensor) {
    if (tensor.numel() == 0) {
        return 0;
    }
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
        last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    return (last + 1) * tensor.element_size();
}

struct Axis {
    int64_t size;
    int64_t nbytes;  // from one index to the next
};

// A tensor as rows without gaps, which begin at the indices of `outer`.
struct Rows {
    int64_t row_nbytes;
    std::vector<Axis> outer;
    int64_t num_rows = 1;
};

Rows rows_of(const Tensor& tensor) {
    std::vector<Axis> axes;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
        if (tensor.size(dim) != 1 && tensor.stride(dim) != 0) {
            axes.push_back({tensor.size(dim), tensor.stride(dim) * static_cast<int64_t>(tensor.element_size())});
        }
    }
    std::sort(axes.begin(), axes.end(), [](const Axis& left, const Axis& right) { return left.nbytes < right.nbytes; });
    Rows rows{static_cast<int64_t>(tensor.element_size()), {}};
    for (const Axis& axis : axes) {
        if (rows.outer.empty() && axis.nbytes == rows.row_nbytes) {
            rows.row_nbytes *= axis.size;
        } else {
            rows.outer.push_back(axis);
            rows.num_rows *= axis.size;
        }
    }
    return rows;
}

void each_row(const Rows& rows, size_t depth, uint64_t address, const std::function<void(uint64_t)>& visit) {
    if (depth == rows.outer.size()) {
        visit(address);
        return;
    }
    for (int64_t index = 0; index < rows.outer[depth].size; ++index) {
        each_row(rows, depth + 1, address + index * rows.outer[depth].nbytes, visit);
    }
}

void declare_access(cudaStream_t stream, const Tensor& tensor, bool writes, const char* operator_name) {
    if (tensor.numel() == 0) {
        return;
    }
    Rows rows = rows_of(tensor);
    if (rows.num_rows > SOFTWARE_GPU_MOST_ROWS) {
        software_gpu_access(stream, address_of(tensor), extent_nbytes(tensor), writes, operator_name);
        return;
    }
    each_row(rows, 0, address_of(tensor), [&](uint64_t address) {
        software_gpu_access(stream, address, rows.row_nbytes, writes, operator_name);
    });
}

void check_accessible(const Tensor& tensor, const char* operator_name) {
    TORCH_CHECK(
        software_gpu_is_accessible(address_of(tensor), extent_nbytes(tensor)),
        "CUDA error: an illegal memory access was encountered (", operator_name, " on ", tensor.sizes(), " at ",
        tensor.const_data_ptr(), ", which has no memory)"
    );
}

// A CPU tensor over the same bytes. The caller keeps the memory alive.
Tensor over_same_bytes(const Tensor& tensor) {
    auto options = tensor.options().device(at::kCPU).pinned_memory(false).requires_grad(false);
    if (tensor.numel() == 0) {
        // With a separate storage, so that a kernel may resize an empty `out`.
        return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    }
    void* bytes = const_cast<void*>(tensor.const_data_ptr());
    Tensor view = at::from_blob(bytes, tensor.sizes(), tensor.strides(), [](void*) {}, options);
    view._set_conj(tensor.is_conj());
    view._set_neg(tensor.is_neg());
    return view;
}

// -- arguments and results -----------------------------------------------------------------------------------------

bool is_list_of_optional_tensors(const IValue& value) {
    return value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType;
}

// Call `visit` with each tensor in a value.
void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
    if (value.isTensor()) {
        if (value.toTensor().defined()) {
            visit(value.toTensor());
        }
    } else if (value.isTensorList()) {
        for (const Tensor& tensor : value.toTensorVector()) {
            visit(tensor);
        }
    } else if (is_list_of_optional_tensors(value)) {
        for (const IValue& element : value.toListRef()) {
            each_tensor(element, visit);
        }
    }
}

using Replace = std::function<Tensor(const Tensor&)>;

// The value with each of its tensors replaced.
IValue with_tensors(const IValue& value, const Replace& replace) {
    if (value.isTensor()) {
        return value.toTensor().defined() ? IValue(replace(value.toTensor())) : value;
    }
    if (value.isTensorList()) {
        c10::List<Tensor> tensors;
        for (const Tensor& tensor : value.toTensorVector()) {
            tensors.push_back(replace(tensor));
        }
        return tensors;
    }
    if (is_list_of_optional_tensors(value)) {
        c10::List<std::optional<Tensor>> tensors;
        for (const IValue& element : value.toListRef()) {
            if (element.isTensor() && element.toTensor().defined()) {
                tensors.push_back(replace(element.toTensor()));
            } else {
                tensors.push_back(std::nullopt);
            }
        }
        return tensors;
    }
    return value;
}

bool writes_argument(const c10::FunctionSchema& schema, size_t index) {
    const auto* alias = schema.arguments()[index].alias_info();
    return alias && alias->isWrite();
}

// The argument that is returned as a result, for results like `Tensor(a!)`.
std::optional<size_t> argument_of_result(const c10::FunctionSchema& schema, size_t index) {
    const auto* result_alias = schema.returns()[index].alias_info();
    if (!result_alias || !result_alias->isWrite()) {
        return std::nullopt;
    }
    for (size_t argument = 0; argument < schema.arguments().size(); ++argument) {
        const auto* alias = schema.arguments()[argument].alias_info();
        if (alias && alias->beforeSets() == result_alias->beforeSets()) {
            return argument;
        }
    }
    return std::nullopt;
}

// -- one call of an operator ---------------------------------------------------------------------------------------

struct Call {
    const c10::OperatorHandle& op;
    const char* name;                // of the operator; lives as long as the operator is registered
    std::vector<IValue> arguments;
    c10::Device device{at::kCUDA, 0};
    cudaStream_t stream = nullptr;

    Call(const c10::OperatorHandle& op, Stack& stack) : op(op), name(op.schema().name().c_str()) {
        size_t num_arguments = op.schema().arguments().size();
        arguments.assign(stack.end() - num_arguments, stack.end());
        stack.resize(stack.size() - num_arguments);
        device = find_device();
    }

private:
    c10::Device find_device() const {
        std::optional<c10::Device> found;
        for (const IValue& argument : arguments) {
            if (argument.isDevice() && argument.toDevice().is_cuda() && !found) {
                found = argument.toDevice();
            }
            each_tensor(argument, [&](const Tensor& tensor) { found = found_also(found, tensor); });
        }
        if (found && found->has_index()) {
            return *found;
        }
        return {at::kCUDA, c10::cuda::current_device()};
    }

    std::optional<c10::Device> found_also(std::optional<c10::Device> found, const Tensor& tensor) const {
        if (!tensor.is_cuda()) {
            return found;
        }
        TORCH_CHECK(
            !found || !found->has_index() || *found == tensor.device(),
            "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
            tensor.device(), "! (", name, ")"
        );
        return tensor.device();
    }
};

// Indices may be on the CPU; lists of tensors on different devices are computed one by one.
bool takes_tensors_of_the_cpu(const std::string& name) {
    return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 ||
        name.rfind("aten::_unsafe_index", 0) == 0 || name.rfind("aten::_foreach", 0) == 0;
}

// A kernel of the device cannot read the CPU's memory. Here it could, which would hide a missing `.cuda()`.
void check_no_tensor_of_the_cpu(const Call& call) {
    bool has_cuda = false;
    const Tensor* of_cpu = nullptr;
    for (const IValue& argument : call.arguments) {
        each_tensor(argument, [&](const Tensor& tensor) {
            has_cuda = has_cuda || tensor.is_cuda();
            if (tensor.is_cpu() && tensor.dim() > 0) {
                of_cpu = &tensor;
            }
        });
    }
    TORCH_CHECK(
        !has_cuda || !of_cpu || takes_tensors_of_the_cpu(call.name),
        "Expected all tensors to be on the same device, but found at least two devices, ", call.device,
        " and cpu! (", call.name, ")"
    );
}

// -- random numbers ------------------------------------------------------------------------------------------------

// Increment of the generator's offset per random operator, as for one draw per thread of a CUDA kernel.
constexpr uint64_t kOffsetOfACall = 4;

bool is_random(const Call& call) {
    return call.op.hasTag(at::Tag::nondeterministic_seeded);
}

// Seed and offset of the CUDA generator; during a capture, their addresses at the launch of the graph.
at::PhiloxCudaState take_random_state(const Call& call) {
    at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(call.device.index());
    for (const IValue& argument : call.arguments) {
        if (argument.isGenerator() && argument.toGenerator().defined()) {
            generator = argument.toGenerator();
        }
    }
    auto* implementation = at::check_generator<at::CUDAGeneratorImpl>(generator);
    std::lock_guard<std::mutex> lock(generator.mutex());
    return implementation->philox_cuda_state(kOffsetOfACall);
}

// Seed of the CPU's generator for a call.
uint64_t seed_of(const at::PhiloxCudaState& state) {
    uint64_t seed = state.captured_ ? *state.seed_.ptr : state.seed_.val;
    uint64_t offset = state.captured_ ? *state.offset_.ptr + state.offset_intragraph_ : state.offset_.val;
    constexpr uint64_t kPrime = 1000003;  // so that seeds and offsets of neighbours have different sums
    return seed * kPrime + offset;
}

// Draws of a call come from a seed, even if the kernel takes no generator.
class SeededDefaultGenerator {
public:
    explicit SeededDefaultGenerator(uint64_t seed) : generator_(at::globalContext().defaultGenerator(at::kCPU)) {
        std::lock_guard<std::mutex> lock(generator_.mutex());
        before_ = generator_.get_state();
        generator_.set_current_seed(seed);
    }
    ~SeededDefaultGenerator() {
        std::lock_guard<std::mutex> lock(generator_.mutex());
        generator_.set_state(before_);
    }
    SeededDefaultGenerator(const SeededDefaultGenerator&) = delete;

private:
    at::Generator generator_;
    Tensor before_;
};

// Call the operator with CPU arguments. Leaves the results on the stack.
void call_with_seed(const c10::OperatorHandle& op, Stack& stack, const at::PhiloxCudaState* random_state) {
    if (!random_state) {
        op.callBoxed(stack);
        return;
    }
    const auto& parameters = op.schema().arguments();
    for (size_t index = 0; index < parameters.size(); ++index) {
        const auto* type = parameters[index].type()->castRaw<c10::OptionalType>();
        bool takes_generator = type && type->getElementType()->kind() == c10::TypeKind::GeneratorType;
        if (takes_generator) {
            stack[stack.size() - parameters.size() + index] = at::detail::createCPUGenerator(seed_of(*random_state));
            op.callBoxed(stack);
            return;
        }
    }
    SeededDefaultGenerator seeded(seed_of(*random_state));
    op.callBoxed(stack);
}

// -- workspaces of matrix products ---------------------------------------------------------------------------------

// torch gives cuBLAS memory of its allocator for each thread and stream, at the first product there, and keeps it.
// The memory comes from the pool from which the thread then allocates.
constexpr int64_t kWorkspaceNbytes = 1 << 20;

const std::unordered_set<std::string> kMatrixProducts = {
    "aten::mm",       "aten::addmm",    "aten::addmm_",      "aten::_addmm_activation", "aten::bmm",  "aten::baddbmm",
    "aten::baddbmm_", "aten::addbmm",   "aten::addbmm_",     "aten::mv",                "aten::addmv", "aten::addmv_",
    "aten::dot",      "aten::vdot",     "aten::_int_mm",     "aten::_scaled_mm",        "aten::_grouped_mm",
};

using Workspaces = std::map<std::pair<c10::DeviceIndex, cudaStream_t>, Tensor>;

// The workspace of this call; undefined for an operator without one.
Tensor workspace_of(const Call& call) {
    if (!kMatrixProducts.count(call.name)) {
        return {};
    }
    // Never freed, like torch's: at the end of the process its allocator may be gone.
    static thread_local auto* workspaces = new Workspaces;
    Tensor& workspace = (*workspaces)[{call.device.index(), call.stream}];
    if (!workspace.defined()) {
        workspace = at::empty({kWorkspaceNbytes}, at::TensorOptions().dtype(at::kByte).device(call.device));
    }
    return workspace;
}

void declare_workspace(const Tensor& workspace, const Call& call) {
    if (workspace.defined()) {
        check_accessible(workspace, call.name);
        declare_access(call.stream, workspace, true, call.name);
    }
}

// -- running now ---------------------------------------------------------------------------------------------------

struct Written {
    Tensor on_device;
    Tensor view;
};

// An argument for the CPU's kernel; written tensors are added to `written`.
IValue argument_for_cpu(const Call& call, size_t index, std::vector<Written>& written) {
    const IValue& argument = call.arguments[index];
    if (argument.isDevice()) {
        return c10::Device(at::kCPU);
    }
    if (argument.isGenerator()) {
        return IValue();
    }
    bool writes = writes_argument(call.op.schema(), index);
    return with_tensors(argument, [&](const Tensor& tensor) {
        if (!tensor.is_cuda()) {
            return tensor;
        }
        check_accessible(tensor, call.name);
        Tensor view = over_same_bytes(tensor);
        if (writes) {
            written.push_back({tensor, view});
        }
        return view;
    });
}

void declare_arguments(const Call& call) {
    for (size_t index = 0; index < call.arguments.size(); ++index) {
        bool writes = writes_argument(call.op.schema(), index);
        each_tensor(call.arguments[index], [&](const Tensor& tensor) {
            if (tensor.is_cuda()) {
                declare_access(call.stream, tensor, writes, call.name);
            }
        });
    }
}

// A kernel of the driver during the block.
class Launch {
public:
    explicit Launch(const Call& call) : stream_(call.stream) {
        C10_CUDA_CHECK(cudaError_t(software_gpu_begin_kernel(stream_, call.name)));
    }
    // The rest of a kernel that allocated memory.
    explicit Launch(cudaStream_t stream) : stream_(stream) { software_gpu_continue_kernel(stream_); }
    ~Launch() { software_gpu_end_kernel(stream_); }
    Launch(const Launch&) = delete;

private:
    cudaStream_t stream_;
};

// New device memory for a result that the CPU's kernel created or resized.
Tensor allocate_like(const Tensor& result, const Call& call) {
    bool keeps_strides = result.is_non_overlapping_and_dense();
    auto options = result.options().device(call.device);
    Tensor allocated = keeps_strides ? at::empty_strided(result.sizes(), result.strides(), options)
                                     : at::empty(result.sizes(), options);
    allocated._set_conj(result.is_conj());
    allocated._set_neg(result.is_neg());
    return allocated;
}

Tensor move_to_device(const Tensor& result, const Call& call) {
    if (!result.is_cpu()) {
        return result;
    }
    Tensor moved = allocate_like(result, call);
    Launch rest(call.stream);
    declare_access(call.stream, moved, true, call.name);
    over_same_bytes(moved).copy_(result);
    return moved;
}

// A kernel may have resized an empty `out`.
void move_resized(const std::vector<Written>& written, const Call& call) {
    for (const Written& each : written) {
        bool had_memory = each.on_device.numel() != 0;
        if (each.view.sizes() == each.on_device.sizes() && (had_memory || each.view.numel() == 0)) {
            continue;
        }
        at::native::resize_output(each.on_device, each.view.sizes());
        Launch rest(call.stream);
        declare_access(call.stream, each.on_device, true, call.name);
        over_same_bytes(each.on_device).copy_(each.view);
    }
}

bool has_mask(const Call& call) {
    bool found = false;
    for (const IValue& argument : call.arguments) {
        each_tensor(argument, [&](const Tensor& tensor) {
            found = found || tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
        });
    }
    return found;
}

// Whether CUDA's kernel makes the host wait for the stream, to read the result or its size.
bool host_waits_for(const Call& call) {
    std::string name = call.name;
    if (name == "aten::index") {
        return has_mask(call);
    }
    if (name == "aten::repeat_interleave") {
        return call.arguments.back().isNone();  // the size of the output
    }
    return call.op.hasTag(at::Tag::dynamic_output_shape) || call.op.hasTag(at::Tag::data_dependent_output);
}

// Whether CUDA processes a list of tensors with multi-tensor kernels: all are dense and have the same layout.
bool are_taken_together(const std::vector<c10::List<Tensor>>& lists) {
    for (const c10::List<Tensor>& list : lists) {
        for (size_t index = 0; index < list.size(); ++index) {
            Tensor tensor = list.get(index);
            Tensor first = lists.front().get(index);
            if (!tensor.is_non_overlapping_and_dense() || tensor.sizes() != first.sizes() ||
                tensor.strides() != first.strides()) {
                return false;
            }
        }
    }
    return true;
}

// Number of kernels that CUDA launches for the operator.
size_t num_kernels(const Call& call) {
    constexpr size_t kTensorsOfAKernel = 64;
    if (strncmp(call.name, "aten::_foreach_", strlen("aten::_foreach_"))) {
        return 1;
    }
    std::vector<c10::List<Tensor>> lists;
    for (const IValue& argument : call.arguments) {
        if (argument.isTensorList()) {
            lists.push_back(argument.toTensorList());
        }
    }
    size_t num_tensors = lists.empty() ? 1 : lists.front().size();
    return are_taken_together(lists) ? (num_tensors + kTensorsOfAKernel - 1) / kTensorsOfAKernel : num_tensors;
}

// Leave CPU results on the stack, and return the written tensors.
std::vector<Written> compute(const Call& call, Stack& stack) {
    std::optional<at::PhiloxCudaState> random_state;
    if (is_random(call)) {
        random_state = take_random_state(call);
    }
    Tensor workspace = workspace_of(call);
    Launch launch(call);
    for (size_t more = num_kernels(call); more > 1; --more) {
        software_gpu_count("kernel");
    }
    declare_arguments(call);
    declare_workspace(workspace, call);
    std::vector<Written> written;
    for (size_t index = 0; index < call.arguments.size(); ++index) {
        stack.push_back(argument_for_cpu(call, index, written));
    }
    call_with_seed(call.op, stack, random_state ? &*random_state : nullptr);
    return written;
}

void run_now(const Call& call, Stack& stack) {
    move_resized(compute(call, stack), call);
    size_t num_results = call.op.schema().returns().size();
    for (size_t index = 0; index < num_results; ++index) {
        IValue& result = stack[stack.size() - num_results + index];
        if (auto argument = argument_of_result(call.op.schema(), index)) {
            result = call.arguments[*argument];
        } else {
            result = with_tensors(result, [&](const Tensor& tensor) { return move_to_device(tensor, call); });
        }
    }
    C10_CUDA_KERNEL_LAUNCH_CHECK();  // as in torch; reports errors of earlier calls of the thread
    if (host_waits_for(call)) {
        C10_CUDA_CHECK(cudaStreamSynchronize(call.stream));
    }
}

// -- recording into a graph ----------------------------------------------------------------------------------------

// An operator of a CUDA graph. Its tensors cover addresses that the graph's memory pool keeps, as on a GPU.
struct Recorded {
    c10::OperatorHandle op;
    std::vector<IValue> arguments;
    std::vector<Tensor> results;  // in the order of the schema, without those that are arguments
    std::optional<at::PhiloxCudaState> random_state;
    std::optional<Tensor> workspace;
};

// Whether `over_same_bytes` created it; an ordinary CPU tensor has its own storage.
bool is_over_device_memory(const Tensor& tensor) {
    return tensor.numel() != 0 && !tensor.storage().resizable();
}

void check_recorded_memory(const Recorded& recorded) {
    if (recorded.workspace) {
        check_accessible(*recorded.workspace, recorded.op.schema().name().c_str());
    }
    for (const IValue& argument : recorded.arguments) {
        each_tensor(argument, [&](const Tensor& tensor) {
            if (is_over_device_memory(tensor)) {
                check_accessible(tensor, recorded.op.schema().name().c_str());
            }
        });
    }
}

void copy_results(const Recorded& recorded, const Stack& stack) {
    size_t num_copied = 0;
    for (size_t index = 0; index < stack.size(); ++index) {
        if (argument_of_result(recorded.op.schema(), index)) {
            continue;
        }
        each_tensor(stack[index], [&](const Tensor& result) {
            const Tensor& memory = recorded.results.at(num_copied++);
            TORCH_CHECK(
                memory.sizes() == result.sizes(), "the result was ", memory.sizes(), " at the capture and is ",
                result.sizes(), " now"
            );
            memory.copy_(result);
        });
    }
}

// Called at the launch of the graph. A launch cannot raise errors, so they are reported.
void run_recorded(void* argument) {
    const auto& recorded = *static_cast<const Recorded*>(argument);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
        check_recorded_memory(recorded);
        Stack stack = recorded.arguments;
        call_with_seed(recorded.op, stack, recorded.random_state ? &*recorded.random_state : nullptr);
        copy_results(recorded, stack);
    } catch (const std::exception& error) {
        std::string text = recorded.op.schema().name() + " in a graph: " + error.what();
        software_gpu_report("GRAPH", text.c_str());
    }
}

void release_recorded(void* argument) {
    delete static_cast<Recorded*>(argument);
}

// Results of the kernel on copies of the written tensors: the shapes are right, and no memory changes.
Stack results_on_copies(const Call& call) {
    Stack stack;
    for (size_t index = 0; index < call.arguments.size(); ++index) {
        std::vector<Written> written;
        IValue argument = argument_for_cpu(call, index, written);
        bool writes = writes_argument(call.op.schema(), index);
        stack.push_back(with_tensors(argument, [&](const Tensor& tensor) { return writes ? tensor.clone() : tensor; }));
    }
    at::PhiloxCudaState any_state(0, 0);
    call_with_seed(call.op, stack, is_random(call) ? &any_state : nullptr);
    return stack;
}

// During a capture memory has arbitrary contents, so that the CPU's kernel may refuse an index. Shapes do not need
// it.
Stack results_without_memory(const Call& call) {
    Stack stack;
    for (const IValue& argument : call.arguments) {
        if (argument.isDevice()) {
            stack.push_back(c10::Device(at::kMeta));
        } else if (argument.isGenerator()) {
            stack.push_back(IValue());
        } else {
            stack.push_back(with_tensors(argument, [](const Tensor& tensor) {
                auto options = tensor.options().device(at::kMeta);
                return tensor.is_cuda() ? at::empty_strided(tensor.sizes(), tensor.strides(), options) : tensor;
            }));
        }
    }
    call.op.callBoxed(stack);
    return stack;
}

Stack results_of_capture(const Call& call) {
    const auto& schema = call.op.schema();
    bool has_new_results = false;
    for (size_t index = 0; index < schema.returns().size(); ++index) {
        has_new_results = has_new_results || !argument_of_result(schema, index);
    }
    if (!has_new_results) {
        return Stack(schema.returns().size());
    }
    try {
        return results_on_copies(call);
    } catch (const c10::Error&) {
        return results_without_memory(call);
    }
}

void record(const Call& call, Stack& stack) {
    if (host_waits_for(call)) {
        C10_CUDA_CHECK(cudaStreamSynchronize(call.stream));  // an error in a capture
    }
    Tensor workspace = workspace_of(call);
    auto recorded = std::make_unique<Recorded>(Recorded{call.op, {}, {}, {}, {}});
    if (workspace.defined()) {
        recorded->workspace = over_same_bytes(workspace);
    }
    std::vector<Written> written;
    for (size_t index = 0; index < call.arguments.size(); ++index) {
        IValue argument = argument_for_cpu(call, index, written);
        // The host's numbers may change before the launch, so they are copied, like arguments of a kernel.
        recorded->arguments.push_back(with_tensors(argument, [&](const Tensor& tensor) {
            return is_over_device_memory(tensor) ? tensor : tensor.clone();
        }));
    }
    Stack results = results_of_capture(call);
    if (is_random(call)) {
        recorded->random_state = take_random_state(call);
    }
    for (size_t index = 0; index < results.size(); ++index) {
        if (auto argument = argument_of_result(call.op.schema(), index)) {
            stack.push_back(call.arguments[*argument]);
            continue;
        }
        stack.push_back(with_tensors(results[index], [&](const Tensor& shape) {
            Tensor allocated = allocate_like(shape, call);
            recorded->results.push_back(over_same_bytes(allocated));
            return allocated;
        }));
    }
    std::vector<Tensor> new_results = recorded->results;
    C10_CUDA_CHECK(
        cudaError_t(software_gpu_capture(call.stream, run_recorded, recorded.release(), release_recorded))
    );
    declare_arguments(call);
    declare_workspace(workspace, call);
    for (const Tensor& result : new_results) {
        declare_access(call.stream, result, true, call.name);
    }
}

// The kernel for CUDA.
void run_boxed(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    Call call(op, *stack);
    check_no_tensor_of_the_cpu(call);
    c10::cuda::CUDAGuard on_device(call.device);
    call.stream = c10::cuda::getCurrentCUDAStream(call.device.index()).stream();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (software_gpu_is_capturing(call.stream)) {
        record(call, *stack);
    } else {
        run_now(call, *stack);
    }
}

// -- copies --------------------------------------------------------------------------------------------------------

// Whether torch's own code copies with cudaMemcpyAsync, or by steps that end in such copies.
bool is_copied_without_kernel(const Tensor& self, const Tensor& src) {
    if (!self.is_cuda() || !src.is_cuda() || self.numel() == 0) {
        return true;
    }
    bool is_same_type = self.scalar_type() == src.scalar_type();
    if (!is_same_type || self.is_conj() != src.is_conj() || self.is_neg() != src.is_neg()) {
        return false;
    }
    auto iterator = at::TensorIteratorConfig()
                        .add_output(self)
                        .add_const_input(src)
                        .resize_outputs(false)
                        .check_all_same_dtype(false)
                        .check_all_same_device(false)
                        .build();
    return iterator.is_contiguous();
}

// Between devices only whole memory is copied: the source's device first converts to the destination's layout.
void copy_between_devices(Tensor& self, const Tensor& src, bool non_blocking) {
    Tensor sent = at::empty(self.sizes(), src.options().dtype(self.scalar_type()));
    sent.copy_(src);
    Tensor received = at::empty_like(sent, self.options());
    received.copy_(sent, non_blocking);
    self.copy_(received);
}

Tensor& copy_(c10::DispatchKeySet, Tensor& self, const Tensor& src, bool non_blocking) {
    if (is_copied_without_kernel(self, src)) {
        // The CPU's and CUDA's `copy_` are the same function, which inspects the tensors.
        return at::_ops::copy_::redispatch(c10::DispatchKeySet(DispatchKey::CPU), self, src, non_blocking);
    }
    if (self.device() != src.device()) {
        copy_between_devices(self, src, non_blocking);
        return self;
    }
    static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    Stack stack{self, src, non_blocking};
    run_boxed(op, c10::DispatchKeySet(DispatchKey::CUDA), &stack);
    return self;
}

// -- registration --------------------------------------------------------------------------------------------------

const std::unordered_set<std::string>& kept_operators() {
    static const std::unordered_set<std::string> names = {
        "aten::_cudnn_init_dropout_state",
        "aten::_efficientzerotensor",
        "aten::_fused_sdp_choice",
        "aten::_has_compatible_shallow_copy_type",
        "aten::_local_scalar_dense",
        "aten::_pin_memory",
        "aten::_resize_output_",
        "aten::copy_",
        "aten::empty",
        "aten::empty_strided",
        "aten::is_pinned",
        "aten::is_set_to",
        "aten::record_stream",
        "aten::resize_",
        "aten::resize_as_",
        "aten::set_",
    };
    return names;
}

bool is_view(const c10::FunctionSchema& schema) {
    return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
        return result.alias_info() && !result.alias_info()->isWrite();
    });
}

bool has_kernel_of_cpu(const c10::OperatorHandle& op) {
    return op.hasKernelForDispatchKey(DispatchKey::CPU) ||
        op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
        op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
        op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

// torch warns about the first replaced kernel, and here all kernels are replaced.
class Quietly : public c10::WarningHandler {
public:
    Quietly() : before_(c10::WarningUtils::get_warning_handler()) {
        c10::WarningUtils::set_warning_handler(this);
    }
    ~Quietly() override {
        c10::WarningUtils::set_warning_handler(before_);
    }
    void process(const c10::Warning&) override {}

private:
    c10::WarningHandler* before_;
};

void adopt(const c10::OperatorName& name) {
    // Never destroyed: at the end of the process the dispatcher may be destroyed first.
    static auto& registrations = *new std::vector<c10::RegistrationHandleRAII>();
    registrations.push_back(c10::Dispatcher::singleton().registerImpl(
        name, DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&run_boxed>(), std::nullopt, nullptr,
        "the software GPU"
    ));
}

// Attention runs as its component operators: its fused kernels have no counterpart of the same name.
void choose_plain_attention() {
    auto& context = at::globalContext();
    context.setSDPUseFlash(false);
    context.setSDPUseMemEfficient(false);
    context.setSDPUseCuDNN(false);
}

int64_t adopt_all_of_aten() {
    int64_t num_adopted = 0;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        auto op = dispatcher.findSchema(name);
        if (!op || name.name.rfind("aten::", 0) != 0 || kept_operators().count(name.name)) {
            continue;
        }
        if (op->hasKernelForDispatchKey(DispatchKey::CUDA) && !is_view(op->schema()) && has_kernel_of_cpu(*op)) {
            adopt(name);
            ++num_adopted;
        }
    }
    return num_adopted;
}

}  // namespace

// For Python: a CPU tensor over the bytes of a CUDA tensor, whose memory it does not keep alive.
TORCH_LIBRARY(software_gpu, library) {
    library.def("over_same_bytes(Tensor tensor) -> Tensor");
}

TORCH_LIBRARY_IMPL(software_gpu, CUDA, library) {
    library.impl("over_same_bytes", over_same_bytes);
}

// -- what the loader calls -----------------------------------------------------------------------------------------

extern "C" {

// Give every operator of aten the CPU's kernel; return their number.
int64_t software_gpu_adopt_aten() {
    Quietly quietly;
    c10::Dispatcher::singleton();
    static auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
    library->impl("copy_", copy_);
    choose_plain_attention();
    return adopt_all_of_aten();
}

// Let an operator of another library, which already has a kernel for the CPU, run it for CUDA; false without a
// schema.
int software_gpu_adopt(const char* name, const char* overload) {
    Quietly quietly;
    c10::OperatorName operator_name(name, overload);
    if (!c10::Dispatcher::singleton().findSchema(operator_name)) {
        return 0;
    }
    adopt(operator_name);
    return 1;
}

}
