// libcudart.so.13: functions of the CUDA runtime that torch and vLLM link, on the driver's public functions.
//
// NVIDIA's runtime needs undocumented tables of the driver, so it is replaced completely. The driver counts and
// checks calls; the runtime counts nothing. GPU kernels cannot run: a launch is an error with the kernel's name.
#include "interface.h"

#include <algorithm>
#include <cstring>
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace software_gpu {

// -- errors --------------------------------------------------------------------------------------------------------

static thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t fail(cudaError_t error) {
    last_error = error;
    return error;
}

// Errors of the driver and of the runtime have the same values.
static cudaError_t from_driver(CUresult result) {
    auto error = static_cast<cudaError_t>(result);
    bool is_failure = error != cudaSuccess && error != cudaErrorNotReady;
    return is_failure ? fail(error) : error;
}

// -- devices and contexts ------------------------------------------------------------------------------------------

// Checked each time, because a forked child has no driver.
static CUresult initialize_driver() { return cuInit(0); }

// The primary context of each device, which the runtime shares with the driver's callers, retained once.
class PrimaryContexts {
public:
    CUresult make_current(int device) {
        CUcontext context = nullptr;
        if (CUresult error = context_of(device, &context)) {
            return error;
        }
        return cuCtxSetCurrent(context);
    }

private:
    CUresult context_of(int device, CUcontext* context) {
        std::lock_guard guard(mutex_);
        if (!contexts_.contains(device)) {
            if (CUresult error = cuDevicePrimaryCtxRetain(context, device)) {
                return error;
            }
            contexts_[device] = *context;
        }
        *context = contexts_[device];
        return CUDA_SUCCESS;
    }

    std::mutex mutex_;
    std::unordered_map<int, CUcontext> contexts_;
};

// Never destroyed: other libraries call the runtime while the process ends.
static PrimaryContexts& primary_contexts() {
    static auto* contexts = new PrimaryContexts;
    return *contexts;
}

// The device of this thread while it has no context.
static thread_local int selected_device = 0;

static CUcontext current_context() {
    CUcontext context = nullptr;
    return cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : nullptr;
}

static int current_device() {
    CUdevice device = selected_device;
    if (current_context()) {
        cuCtxGetDevice(&device);
    }
    return device;
}

// Give this thread the context of its device, unless it has one already.
static CUresult prepare_thread() {
    if (CUresult error = initialize_driver()) {
        return error;
    }
    return current_context() ? CUDA_SUCCESS : primary_contexts().make_current(selected_device);
}

template <class Call>
static cudaError_t with_driver(Call call) {
    CUresult error = initialize_driver();
    return from_driver(error ? error : call());
}

template <class Call>
static cudaError_t with_context(Call call) {
    CUresult error = prepare_thread();
    return from_driver(error ? error : call());
}

static int attribute_of(int device, CUdevice_attribute attribute) {
    int value = 0;
    cuDeviceGetAttribute(&value, attribute, device);
    return value;
}

// -- properties of a device ----------------------------------------------------------------------------------------

template <class Number>
struct Property {
    Number cudaDeviceProp::*field;
    CUdevice_attribute attribute;
};

static const Property<int> int_properties[] = {
    {&cudaDeviceProp::major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
    {&cudaDeviceProp::minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
    {&cudaDeviceProp::multiProcessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
    {&cudaDeviceProp::warpSize, CU_DEVICE_ATTRIBUTE_WARP_SIZE},
    {&cudaDeviceProp::regsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK},
    {&cudaDeviceProp::regsPerMultiprocessor, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR},
    {&cudaDeviceProp::maxThreadsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK},
    {&cudaDeviceProp::maxThreadsPerMultiProcessor, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR},
    {&cudaDeviceProp::maxBlocksPerMultiProcessor, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR},
    {&cudaDeviceProp::l2CacheSize, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE},
    {&cudaDeviceProp::memoryBusWidth, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH},
    {&cudaDeviceProp::asyncEngineCount, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT},
    {&cudaDeviceProp::integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED},
    {&cudaDeviceProp::canMapHostMemory, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY},
    {&cudaDeviceProp::hostRegisterSupported, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED},
    {&cudaDeviceProp::canUseHostPointerForRegisteredMem,
     CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM},
    {&cudaDeviceProp::unifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING},
    {&cudaDeviceProp::managedMemory, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY},
    {&cudaDeviceProp::pageableMemoryAccess, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS},
    {&cudaDeviceProp::concurrentManagedAccess, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS},
    {&cudaDeviceProp::memoryPoolsSupported, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED},
    {&cudaDeviceProp::concurrentKernels, CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS},
    {&cudaDeviceProp::cooperativeLaunch, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH},
    {&cudaDeviceProp::clusterLaunch, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH},
    {&cudaDeviceProp::streamPrioritiesSupported, CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED},
    {&cudaDeviceProp::pciDomainID, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID},
    {&cudaDeviceProp::pciBusID, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID},
    {&cudaDeviceProp::pciDeviceID, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID},
};

static const Property<size_t> size_properties[] = {
    {&cudaDeviceProp::totalConstMem, CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY},
    {&cudaDeviceProp::sharedMemPerBlock, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK},
    {&cudaDeviceProp::sharedMemPerBlockOptin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN},
    {&cudaDeviceProp::sharedMemPerMultiprocessor, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR},
    {&cudaDeviceProp::reservedSharedMemPerBlock, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK},
    {&cudaDeviceProp::memPitch, CU_DEVICE_ATTRIBUTE_MAX_PITCH},
    {&cudaDeviceProp::textureAlignment, CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT},
    {&cudaDeviceProp::texturePitchAlignment, CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT},
};

static void fill_properties(cudaDeviceProp& properties, int device) {
    for (const auto& [field, attribute] : int_properties) {
        properties.*field = attribute_of(device, attribute);
    }
    for (const auto& [field, attribute] : size_properties) {
        properties.*field = attribute_of(device, attribute);
    }
    properties.maxThreadsDim[0] = attribute_of(device, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X);
    properties.maxThreadsDim[1] = attribute_of(device, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y);
    properties.maxThreadsDim[2] = attribute_of(device, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z);
    properties.maxGridSize[0] = attribute_of(device, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X);
    properties.maxGridSize[1] = attribute_of(device, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y);
    properties.maxGridSize[2] = attribute_of(device, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z);
}

// -- kernels and variables that the libraries register -------------------------------------------------------------

// A variable of device code. All devices share its memory, because only kernels could distinguish copies.
struct Variable {
    size_t nbytes;
    std::unique_ptr<char[]> memory;
};

class Registry {
public:
    void add_kernel(const void* stub, const char* name) {
        std::lock_guard guard(mutex_);
        kernel_names_[stub] = name;
    }

    std::string kernel_name(const void* stub) {
        std::lock_guard guard(mutex_);
        auto entry = kernel_names_.find(stub);
        return entry == kernel_names_.end() ? "a kernel that nobody registered" : entry->second;
    }

    void add_variable(const void* symbol, size_t nbytes) {
        std::lock_guard guard(mutex_);
        variables_[symbol] = Variable{nbytes, nullptr};
    }

    // Initially zeros; null for an unregistered symbol.
    char* variable_memory(const void* symbol) {
        std::lock_guard guard(mutex_);
        auto entry = variables_.find(symbol);
        if (entry == variables_.end()) {
            return nullptr;
        }
        Variable& variable = entry->second;
        if (!variable.memory) {
            variable.memory = std::make_unique<char[]>(variable.nbytes);
        }
        return variable.memory.get();
    }

private:
    std::mutex mutex_;
    std::unordered_map<const void*, const char*> kernel_names_;  // by the host function that launches it
    std::unordered_map<const void*, Variable> variables_;
};

// Never destroyed: libraries unregister their code while the process ends.
static Registry& registry() {
    static auto* entries = new Registry;
    return *entries;
}

static std::string readable(const std::string& symbol) {
    int status = 0;
    std::unique_ptr<char, decltype(&free)> name(abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), free);
    return status == 0 ? name.get() : symbol;
}

static cudaError_t launch(const void* stub) {
    std::string symbol = registry().kernel_name(stub);
    // torch.cuda._sleep delays later work of the stream, which may run late here anyway.
    if (symbol.find("spin_kernel") != std::string::npos) {
        return cudaSuccess;
    }
    software_gpu_report("KERNEL", readable(symbol).c_str());
    return fail(cudaErrorNoKernelImageForDevice);
}

// Arguments of `kernel<<<grid, block, shared_nbytes, stream>>>`, kept until the kernel's stub reads them.
struct LaunchConfiguration {
    dim3 grid;
    dim3 block;
    size_t shared_nbytes;
    void* stream;
};

static thread_local std::vector<LaunchConfiguration> launch_configurations;

static int max_blocks_per_multiprocessor(int block_size) {
    int num_threads = attribute_of(current_device(), CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
    return std::max(1, num_threads / std::max(1, block_size));
}

// -- streams -------------------------------------------------------------------------------------------------------

struct StreamCallback {
    cudaStreamCallback_t function;
    cudaStream_t stream;
    void* argument;

    static void run(void* self) {
        std::unique_ptr<StreamCallback> callback(static_cast<StreamCallback*>(self));
        callback->function(callback->stream, cudaSuccess, callback->argument);
    }
};

// -- memory --------------------------------------------------------------------------------------------------------

static CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

static CUdeviceptr* address_in(void** pointer) { return reinterpret_cast<CUdeviceptr*>(pointer); }

static CUdeviceptr pointer_attribute(CUpointer_attribute attribute, const void* pointer) {
    CUdeviceptr value = 0;
    cuPointerGetAttribute(&value, attribute, address_of(pointer));
    return value;
}

static void describe_pointer(cudaPointerAttributes& attributes, const void* pointer) {
    attributes = {};
    attributes.device = cudaInvalidDeviceId;
    unsigned type = 0;
    if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address_of(pointer)) != CUDA_SUCCESS) {
        attributes.type = cudaMemoryTypeUnregistered;
        attributes.hostPointer = const_cast<void*>(pointer);
        return;
    }
    bool is_host = type == CU_MEMORYTYPE_HOST;
    attributes.type = is_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes.device = int(pointer_attribute(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer));
    attributes.devicePointer = const_cast<void*>(pointer);
    attributes.hostPointer = is_host ? const_cast<void*>(pointer) : nullptr;
}

}  // namespace software_gpu

using namespace software_gpu;

extern "C" {

// -- errors --------------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
    const char* name = nullptr;
    cuGetErrorName(static_cast<CUresult>(error), &name);
    return name ? name : "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
    const char* text = nullptr;
    cuGetErrorString(static_cast<CUresult>(error), &text);
    return text ? text : "unrecognized error code";
}

// -- devices -------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* num_devices) {
    *num_devices = 0;
    if (cudaError_t error = with_driver([&] { return cuDeviceGetCount(num_devices); })) {
        return error;
    }
    return *num_devices ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
    *device = current_device();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    int num_devices = 0;
    if (cudaError_t error = cudaGetDeviceCount(&num_devices)) {
        return error;
    }
    if (device < 0 || device >= num_devices) {
        return fail(cudaErrorInvalidDevice);
    }
    selected_device = device;
    return with_driver([&] { return primary_contexts().make_current(device); });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    return with_driver([&] { return cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), device); });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    *properties = {};
    CUuuid uuid = {};
    CUresult error = initialize_driver();
    error = error ? error : cuDeviceGetName(properties->name, sizeof properties->name, device);
    error = error ? error : cuDeviceTotalMem(&properties->totalGlobalMem, device);
    error = error ? error : cuDeviceGetUuid(&uuid, device);
    if (error) {
        return from_driver(error);
    }
    memcpy(&properties->uuid, &uuid, sizeof uuid);
    fill_properties(*properties, device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int room, int device) {
    return with_driver([&] { return cuDeviceGetPCIBusId(id, room, device); });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return with_context([&] { return cuCtxGetStreamPriorityRange(least, greatest); });
}

cudaError_t cudaDeviceCanAccessPeer(int* can_access, int device, int peer) {
    return with_driver([&] { return cuDeviceCanAccessPeer(can_access, device, peer); });
}

// Devices that can access each other may always do so.
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    int can_access = 0;
    if (cudaError_t error = cudaDeviceCanAccessPeer(&can_access, current_device(), peer)) {
        return error;
    }
    return can_access ? cudaSuccess : fail(cudaErrorPeerAccessUnsupported);
}

cudaError_t cudaDeviceSynchronize() {
    return with_context([] { return cuCtxSynchronize(); });
}

// vLLM looks it up but does not call it.
cudaError_t cudaDeviceReset() { return fail(cudaErrorNotSupported); }

cudaError_t cudaDriverGetVersion(int* version) { return from_driver(cuDriverGetVersion(version)); }

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** function, unsigned version, unsigned long long flags,
    cudaDriverEntryPointQueryResult* status
) {
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SUCCESS;
    CUresult error = cuGetProcAddress(symbol, function, int(version), flags, &found);
    bool is_missing = found != CU_GET_PROC_ADDRESS_SUCCESS;
    if (is_missing) {
        *function = nullptr;
    }
    if (status) {
        *status = static_cast<cudaDriverEntryPointQueryResult>(found);
    }
    // The status reports a missing symbol; the call itself succeeds.
    return is_missing ? cudaSuccess : from_driver(error);
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }

cudaError_t cudaProfilerStop() { return cudaSuccess; }

// -- memory --------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t nbytes) {
    *pointer = nullptr;
    return with_context([&] { return nbytes ? cuMemAlloc(address_in(pointer), nbytes) : CUDA_SUCCESS; });
}

cudaError_t cudaFree(void* pointer) {
    return with_context([&] { return pointer ? cuMemFree(address_of(pointer)) : CUDA_SUCCESS; });
}

cudaError_t cudaMallocAsync(void** pointer, size_t nbytes, cudaStream_t stream) {
    *pointer = nullptr;
    return with_context([&] { return nbytes ? cuMemAllocAsync(address_in(pointer), nbytes, stream) : CUDA_SUCCESS; });
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
    return with_context([&] { return pointer ? cuMemFreeAsync(address_of(pointer), stream) : CUDA_SUCCESS; });
}

cudaError_t cudaHostAlloc(void** pointer, size_t nbytes, unsigned flags) {
    *pointer = nullptr;
    return with_context([&] { return nbytes ? cuMemHostAlloc(pointer, nbytes, flags) : CUDA_SUCCESS; });
}

cudaError_t cudaMallocHost(void** pointer, size_t nbytes) { return cudaHostAlloc(pointer, nbytes, 0); }

cudaError_t cudaFreeHost(void* pointer) {
    return with_context([&] { return pointer ? cuMemFreeHost(pointer) : CUDA_SUCCESS; });
}

cudaError_t cudaHostRegister(void* pointer, size_t nbytes, unsigned flags) {
    return with_context([&] { return cuMemHostRegister(pointer, nbytes, flags); });
}

cudaError_t cudaHostUnregister(void* pointer) {
    return with_context([&] { return cuMemHostUnregister(pointer); });
}

cudaError_t cudaHostGetDevicePointer(void** on_device, void* pointer, unsigned flags) {
    return with_context([&] { return cuMemHostGetDevicePointer(address_in(on_device), pointer, flags); });
}

cudaError_t cudaMemGetInfo(size_t* free_nbytes, size_t* total_nbytes) {
    return with_context([&] { return cuMemGetInfo(free_nbytes, total_nbytes); });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    return with_driver([&] {
        describe_pointer(*attributes, pointer);
        return CUDA_SUCCESS;
    });
}

// Addresses determine the kind of a copy.
cudaError_t cudaMemcpy(void* target, const void* source, size_t nbytes, cudaMemcpyKind) {
    return with_context([&] { return cuMemcpy(address_of(target), address_of(source), nbytes); });
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
    return with_context([&] { return cuMemcpyAsync(address_of(target), address_of(source), nbytes, stream); });
}

// Addresses determine the owner of the memory.
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t nbytes, cudaStream_t stream) {
    return with_context([&] {
        return cuMemcpyPeerAsync(address_of(target), nullptr, address_of(source), nullptr, nbytes, stream);
    });
}

cudaError_t cudaMemcpy2DAsync(
    void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width, size_t height,
    cudaMemcpyKind, cudaStream_t stream
) {
    CUDA_MEMCPY2D copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
    copy.srcDevice = address_of(source);
    copy.srcPitch = source_pitch;
    copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    copy.dstDevice = address_of(target);
    copy.dstPitch = target_pitch;
    copy.WidthInBytes = width;
    copy.Height = height;
    return with_context([&] { return cuMemcpy2DAsync(&copy, stream); });
}

cudaError_t cudaMemset(void* target, int value, size_t nbytes) {
    return with_context([&] { return cuMemsetD8(address_of(target), static_cast<unsigned char>(value), nbytes); });
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t nbytes, cudaStream_t stream) {
    auto byte = static_cast<unsigned char>(value);
    return with_context([&] { return cuMemsetD8Async(address_of(target), byte, nbytes, stream); });
}

cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
    *pointer = registry().variable_memory(symbol);
    return *pointer ? cudaSuccess : fail(cudaErrorInvalidSymbol);
}

cudaError_t cudaMemcpyToSymbol(
    const void* symbol, const void* source, size_t nbytes, size_t offset, cudaMemcpyKind kind
) {
    void* memory = nullptr;
    if (cudaError_t error = cudaGetSymbolAddress(&memory, symbol)) {
        return error;
    }
    return cudaMemcpy(static_cast<char*>(memory) + offset, source, nbytes, kind);
}

// -- memory and events of other processes --------------------------------------------------------------------------

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(CUipcMemHandle));

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
    auto* driver_handle = reinterpret_cast<CUipcMemHandle*>(handle);
    return with_context([&] { return cuIpcGetMemHandle(driver_handle, address_of(pointer)); });
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
    CUipcMemHandle driver_handle;
    memcpy(&driver_handle, &handle, sizeof handle);
    return with_context([&] { return cuIpcOpenMemHandle(address_in(pointer), driver_handle, flags); });
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) {
    return with_context([&] { return cuIpcCloseMemHandle(address_of(pointer)); });
}

// Streams of other processes cannot be waited for. Therefore an event is over when its handle is exported, and the
// event that another process opens was never recorded, which also counts as over.
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
    *handle = {};
    return with_context([&] { return cuEventSynchronize(event); });
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t) {
    return with_context([&] { return cuEventCreate(event, CU_EVENT_DISABLE_TIMING); });
}

// -- streams -------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    return with_context([&] { return cuStreamCreateWithPriority(stream, flags, priority); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return with_context([&] { return cuStreamDestroy(stream); });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return with_context([&] { return cuStreamSynchronize(stream); });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return with_context([&] { return cuStreamQuery(stream); });
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    return with_context([&] { return cuStreamGetPriority(stream, priority); });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return with_context([&] { return cuStreamWaitEvent(stream, event, flags); });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
    return with_context([&] { return cuLaunchHostFunc(stream, function, argument); });
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument, unsigned flags) {
    auto callback = std::make_unique<StreamCallback>(StreamCallback{function, stream, argument});
    cudaError_t error = cudaLaunchHostFunc(stream, StreamCallback::run, callback.get());
    if (error == cudaSuccess) {
        callback.release();
    }
    return error;
}

// -- events --------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    return with_context([&] { return cuEventCreate(event, flags); });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return with_context([&] { return cuEventDestroy(event); });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return with_context([&] { return cuEventRecord(event, stream); });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return with_context([&] { return cuEventRecordWithFlags(event, stream, flags); });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return with_context([&] { return cuEventQuery(event); });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return with_context([&] { return cuEventSynchronize(event); });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return with_context([&] { return cuEventElapsedTime(milliseconds, start, end); });
}

// -- graphs --------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    return with_context([&] { return cuStreamBeginCapture(stream, static_cast<CUstreamCaptureMode>(mode)); });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    return with_context([&] { return cuStreamEndCapture(stream, graph); });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    auto* driver_status = reinterpret_cast<CUstreamCaptureStatus*>(status);
    return with_context([&] { return cuStreamIsCapturing(stream, driver_status); });
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, size_t* num_dependencies
) {
    cuuint64_t driver_id = 0;
    cudaError_t error = with_context([&] {
        return cuStreamGetCaptureInfo(
            stream, reinterpret_cast<CUstreamCaptureStatus*>(status), &driver_id, graph, dependencies,
            reinterpret_cast<const CUgraphEdgeData**>(edges), num_dependencies
        );
    });
    if (id) {
        *id = driver_id;
    }
    return error;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    auto* driver_mode = reinterpret_cast<CUstreamCaptureMode*>(mode);
    return with_context([&] { return cuThreadExchangeStreamCaptureMode(driver_mode); });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
    return with_context([&] { return cuGraphInstantiateWithFlags(executable, graph, flags); });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

// A graph needs no device memory, so there is nothing to upload.
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    return with_context([&] { return cuGraphLaunch(executable, stream); });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    return with_context([&] { return cuGraphExecDestroy(executable); });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    return with_context([&] { return cuGraphDestroy(graph); });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* num_nodes) {
    return with_context([&] { return cuGraphGetNodes(graph, nodes, num_nodes); });
}

// -- kernels -------------------------------------------------------------------------------------------------------

// Libraries register their device code in constructors, through functions called by code of nvcc.
void** __cudaRegisterFatBinary(void*) {
    // Only the functions below take the handle, and they do not need one.
    static void* handle = nullptr;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}

char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(
    void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*
) {
    registry().add_kernel(stub, name);
}

void __cudaRegisterVar(void**, char* symbol, char*, const char*, int, size_t nbytes, int, int) {
    registry().add_variable(symbol, nbytes);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_nbytes, void* stream) {
    launch_configurations.push_back({grid, block, shared_nbytes, stream});
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_nbytes, void* stream) {
    if (launch_configurations.empty()) {
        return fail(cudaErrorMissingConfiguration);
    }
    LaunchConfiguration configuration = launch_configurations.back();
    launch_configurations.pop_back();
    *grid = configuration.grid;
    *block = configuration.block;
    *shared_nbytes = configuration.shared_nbytes;
    *static_cast<void**>(stream) = configuration.stream;
    return cudaSuccess;
}

// A kernel is its stub.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
    *kernel = static_cast<cudaKernel_t>(const_cast<void*>(stub));
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launch(kernel); }

cudaError_t cudaLaunchKernel(const void* stub, dim3, dim3, void**, size_t, cudaStream_t) { return launch(stub); }

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* stub, void**) { return launch(stub); }

cudaError_t cudaLaunchCooperativeKernel(const void* stub, dim3, dim3, void**, size_t, cudaStream_t) {
    return launch(stub);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    int device = current_device();
    int major = attribute_of(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    int minor = attribute_of(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    *attributes = {};
    attributes->maxThreadsPerBlock = attribute_of(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    attributes->ptxVersion = 10 * major + minor;
    attributes->binaryVersion = attributes->ptxVersion;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, const void*, int block_size, size_t) {
    *num_blocks = max_blocks_per_multiprocessor(block_size);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* num_blocks, const void*, int block_size, size_t, unsigned
) {
    *num_blocks = max_blocks_per_multiprocessor(block_size);
    return cudaSuccess;
}

}  // extern "C"
