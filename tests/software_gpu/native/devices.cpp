// Devices, contexts, errors and modules of a simulated H100. Modules are loaded and their kernels have names, but GPU
// code cannot run: launching it is an error with the kernel's name.
#include "driver.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <unistd.h>

namespace software_gpu {

constexpr int64_t kContextNbytes = int64_t(500) << 20;  // approximately the memory of a context on hardware
constexpr int kDriverVersion = 13000;
constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;

// -- devices -----------------------------------------------------------------------------------------------------

static int number_in_environment(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text ? atoi(text) : otherwise;
}

// The machine's devices that this process sees, in its order. Determined once, as by the real driver.
static const std::vector<int>& visible_devices() {
    static const std::vector<int>* visible;
    if (visible) {
        return *visible;
    }
    auto* devices = new std::vector<int>;
    int num_of_machine = number_in_environment("SOFTWARE_GPU_COUNT", 1);
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int device = 0; device < num_of_machine; device++) {
            devices->push_back(device);
        }
    } else {
        std::string rest = text;
        for (char* part = strtok(rest.data(), ","); part; part = strtok(nullptr, ",")) {
            char* end = part;
            long device = strtol(part, &end, 10);
            bool is_known = end != part && device >= 0 && device < num_of_machine;
            if (!is_known) {
                break;  // entries after a wrong one are invisible too
            }
            devices->push_back(device);
        }
    }
    visible = devices;
    return *visible;
}

int num_devices() { return visible_devices().size(); }

int machine_device(int device) { return visible_devices().at(device); }

size_t device_nbytes() {
    static const char* text = getenv("SOFTWARE_GPU_NBYTES");
    return text ? strtoull(text, nullptr, 0) : size_t(80) << 30;
}

bool can_access_peer(int device, int other) {
    static const bool are_peers = number_in_environment("SOFTWARE_GPU_PEERS", 1);
    return device != other && are_peers;
}

static pid_t initialized_process;

CUresult driver_state() { return initialized_process == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED; }

// -- contexts ----------------------------------------------------------------------------------------------------

constexpr int kMostDevices = 16;
constexpr int kNoDevice = -1;

static char context_tokens[kMostDevices];
static bool has_context[kMostDevices];
static thread_local int device_of_thread = kNoDevice;
static thread_local std::vector<int> stack_of_thread;

static CUcontext context_token(int device) {
    return device < 0 ? nullptr : reinterpret_cast<CUcontext>(&context_tokens[device]);
}

static int device_of(CUcontext context) {
    return context ? reinterpret_cast<char*>(context) - context_tokens : kNoDevice;
}

int current_device() { return std::max(device_of_thread, 0); }

int device_of_context() { return device_of_thread == kNoDevice ? kAnyDevice : device_of_thread; }

CUcontext primary_context(int device) {
    if (!has_context[device]) {
        has_context[device] = true;
        take(device, kContextNbytes);
    }
    return context_token(device);
}

// -- attributes --------------------------------------------------------------------------------------------------

static std::map<int, int>& attributes() {
    static std::map<int, int> of_an_h100 = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
        // An H100 has 132. vLLM starts this many programs of a kernel, which run sequentially here.
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 8},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 52428800},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
        {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
        {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    };
    return of_an_h100;
}

int attribute(int device, CUdevice_attribute attribute) {
    if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) {
        return 16 + machine_device(device);
    }
    auto entry = attributes().find(attribute);
    return entry == attributes().end() ? 0 : entry->second;
}

static const char* description_of(CUresult error) {
    switch (error) {
        case CUDA_SUCCESS:
            return "no error";
        case CUDA_ERROR_OUT_OF_MEMORY:
            return "out of memory";
        case CUDA_ERROR_INVALID_VALUE:
            return "invalid argument";
        case CUDA_ERROR_NOT_INITIALIZED:
            return "initialization error";
        case CUDA_ERROR_INVALID_HANDLE:
            return "invalid resource handle";
        case CUDA_ERROR_NOT_SUPPORTED:
            return "operation not supported";
        case CUDA_ERROR_ILLEGAL_ADDRESS:
            return "an illegal memory access was encountered";
        case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
            return "operation not permitted when stream is capturing";
        case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
            return "operation failed due to a previous error during capture";
        case CUDA_ERROR_STREAM_CAPTURE_UNJOINED:
            return "capturing stream has unjoined work";
        case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
            return "dependency created on uncaptured work in another stream";
        case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return "operation would make the legacy stream depend on a capturing blocking stream";
        case CUDA_ERROR_CAPTURED_EVENT:
            return "operation not permitted on an event last recorded in a capturing stream";
        case CUDA_ERROR_NO_BINARY_FOR_GPU:
            return "no kernel image is available for execution on the device";
        default:
            return "unknown error";
    }
}

// -- modules -----------------------------------------------------------------------------------------------------

static CUresult refuse_kernel(const char* name) {
    report("KERNEL", "%s has no code of the CPU", name);
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
}

// This library, the only place where names are looked up.
static void* own_library() {
    static void* library = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void*>(&own_library), &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    return library;
}

// The newest version of a function; programs request it by its base name.
static void* function_named(const char* name) {
    for (const char* suffix : {"_v3", "_v2", ""}) {
        std::string symbol = std::string(name) + suffix;
        if (void* function = dlsym(own_library(), symbol.c_str())) {
            return function;
        }
    }
    return nullptr;
}

}  // namespace software_gpu

using namespace software_gpu;

extern "C" {

// Override an attribute of all devices from now on, to test a GPU other than an H100.
void software_gpu_set_attribute(int attribute, int value) { attributes()[attribute] = value; }

CUresult cuInit(unsigned) {
    if (!initialized_process) {
        initialized_process = getpid();
    }
    CUresult error = driver_state();
    return error || num_devices() ? error : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int* version) {
    *version = kDriverVersion;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* num) {
    *num = num_devices();
    return driver_state();
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    if (ordinal < 0 || ordinal >= num_devices()) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *device = ordinal;
    return driver_state();
}

CUresult cuDeviceGetName(char* name, int room, CUdevice) {
    snprintf(name, room, "NVIDIA H100 80GB HBM3");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    *uuid = {};
    uuid->bytes[0] = char(0xfa);
    uuid->bytes[15] = char(machine_device(device) + 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* nbytes, CUdevice) {
    *nbytes = device_nbytes();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute name, CUdevice device) {
    *value = attribute(device, name);
    return driver_state();
}

CUresult cuDeviceGetPCIBusId(char* text, int room, CUdevice device) {
    snprintf(text, room, "0000:%02x:00.0", 16 + machine_device(device));
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice other) {
    *can = can_access_peer(device, other);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice device, CUdevice other) {
    *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED && can_access_peer(device, other);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    return driver_call("cuDevicePrimaryCtxRetain", [&] {
        *context = primary_context(device);
        return CUDA_SUCCESS;
    });
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
    Held held;
    *flags = 0;
    *is_active = has_context[device];
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice, unsigned) { return CUDA_SUCCESS; }

CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = context_token(device_of_thread);
    return driver_state();
}

CUresult cuCtxSetCurrent(CUcontext context) {
    device_of_thread = device_of(context);
    return driver_state();
}

CUresult cuCtxPushCurrent(CUcontext context) {
    stack_of_thread.push_back(device_of_thread);
    return cuCtxSetCurrent(context);
}

CUresult cuCtxPopCurrent(CUcontext* context) {
    if (stack_of_thread.empty()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (context) {
        *context = context_token(device_of_thread);
    }
    device_of_thread = stack_of_thread.back();
    stack_of_thread.pop_back();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
    if (device_of_thread == kNoDevice) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *device = device_of_thread;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
    *id = 1 + (context ? device_of(context) : current_device());
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned* flags) {
    *flags = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = kLeastPriority;
    *greatest = kGreatestPriority;
    return CUDA_SUCCESS;
}

static CUresult synchronize(int device) {
    return unsafe_call("cuCtxSynchronize", [&] {
        if (CUresult error = refuse_wait_for_device(device)) {
            return error;
        }
        run_all(device);
        host_waited_for_all(device);
        return lasting_error();
    });
}

#undef cuCtxSynchronize
CUresult cuCtxSynchronize(void) { return synchronize(current_device()); }

CUresult cuCtxSynchronize_v2(CUcontext context) {
    return synchronize(context ? device_of(context) : current_device());
}

CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = description_of(error);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }

CUresult cuProfilerStart(void) { return CUDA_SUCCESS; }

CUresult cuProfilerStop(void) { return CUDA_SUCCESS; }

// -- modules -----------------------------------------------------------------------------------------------------

CUresult cuModuleLoadData(CUmodule* module, const void*) {
    *module = reinterpret_cast<CUmodule>(calloc(1, 1));
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    *function = reinterpret_cast<CUfunction>(strdup(name));
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) {
    *value = 0;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }

CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

CUresult cuLaunchKernel(
    CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**
) {
    return refuse_kernel(reinterpret_cast<const char*>(function));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction function, void**, void**) {
    return refuse_kernel(reinterpret_cast<const char*>(function));
}

CUresult cuGetExportTable(const void**, const CUuuid*) { return CUDA_ERROR_NOT_FOUND; }

#undef cuGetProcAddress
CUresult cuGetProcAddress_v2(
    const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* result
) {
    *function = function_named(name);
    if (result) {
        *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
}
