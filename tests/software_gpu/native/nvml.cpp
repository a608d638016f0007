// libnvidia-ml.so.1: queries of vLLM's platform, torch and users of NCCL before they use CUDA.
//
// It lists all devices of the machine, regardless of CUDA_VISIBLE_DEVICES, with libcuda's numbers, ids and names.
// There is no header of NVML here, so its structs and constants are defined below.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sched.h>
#include <string>

namespace software_gpu {

enum Result {
    kSuccess = 0,
    kInvalidArgument = 2,
    kNotSupported = 3,
    kNotFound = 6,
    kInsufficientSize = 7,
};

// A handle is the device's number plus 1, so that none is null.
using DeviceHandle = struct Device*;

struct Memory {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
};

struct VersionedMemory {
    unsigned version;
    unsigned long long total;
    unsigned long long reserved;
    unsigned long long free;
    unsigned long long used;
};

struct PciInfo {
    char legacy_bus_id[16];
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned device_id;
    unsigned subsystem_id;
    char bus_id[32];
};

constexpr unsigned kFirstBus = 16;
constexpr unsigned kDeviceId = 0x233010de;  // of an H100
constexpr int kCudaDriverVersion = 13000;
constexpr char kDriverVersion[] = "580.65.06";
constexpr char kUuidPrefix[] = "GPU-fa000000-0000-0000-0000-0000000000";  // two digits of the device follow

enum PeerStatus {
    kPeersReachable = 0,
    kPeersNotSupported = 5,
};

static unsigned num_devices() {
    const char* count = getenv("SOFTWARE_GPU_COUNT");
    return count ? strtoul(count, nullptr, 0) : 1;
}

static unsigned long long device_nbytes() {
    const char* nbytes = getenv("SOFTWARE_GPU_NBYTES");
    return nbytes ? strtoull(nbytes, nullptr, 0) : 80ull << 30;
}

static bool are_peers_reachable() {
    const char* peers = getenv("SOFTWARE_GPU_PEERS");
    return !peers || atoi(peers);
}

static DeviceHandle handle_of(unsigned index) { return reinterpret_cast<DeviceHandle>(uintptr_t(index) + 1); }

static unsigned index_of(DeviceHandle device) { return unsigned(reinterpret_cast<uintptr_t>(device) - 1); }

static bool is_device(DeviceHandle device) { return device && index_of(device) < num_devices(); }

static std::string uuid_of(unsigned index) {
    char digits[9];
    snprintf(digits, sizeof digits, "%02x", index + 1);
    return std::string(kUuidPrefix) + digits;
}

static Result write_text(const std::string& text, char* target, unsigned room) {
    if (text.size() >= room) {
        return kInsufficientSize;
    }
    memcpy(target, text.c_str(), text.size() + 1);
    return kSuccess;
}

static Result find_device(unsigned index, Result otherwise, DeviceHandle* device) {
    if (index >= num_devices()) {
        return otherwise;
    }
    *device = handle_of(index);
    return kSuccess;
}

// All processors that this process may use are equally near to a device.
static Result write_processors(unsigned num_words, unsigned long* words) {
    cpu_set_t processors;
    if (sched_getaffinity(0, sizeof processors, &processors) != 0) {
        return kNotSupported;
    }
    constexpr unsigned bits_of_word = 8 * sizeof *words;
    memset(words, 0, num_words * sizeof *words);
    for (unsigned processor = 0; processor < CPU_SETSIZE && processor < num_words * bits_of_word; processor++) {
        if (CPU_ISSET(processor, &processors)) {
            words[processor / bits_of_word] |= 1ul << (processor % bits_of_word);
        }
    }
    return kSuccess;
}

}  // namespace software_gpu

using namespace software_gpu;

extern "C" {

// -- the library ---------------------------------------------------------------------------------------------------

Result nvmlInit() { return kSuccess; }

Result nvmlInit_v2() { return kSuccess; }

Result nvmlInitWithFlags(unsigned) { return kSuccess; }

Result nvmlShutdown() { return kSuccess; }

const char* nvmlErrorString(Result result) {
    switch (result) {
        case kSuccess:
            return "Success";
        case kInvalidArgument:
            return "Invalid Argument";
        case kNotSupported:
            return "Not Supported";
        case kNotFound:
            return "Not Found";
        case kInsufficientSize:
            return "Insufficient Size";
        default:
            return "Unknown Error";
    }
}

Result nvmlSystemGetDriverVersion(char* version, unsigned room) { return write_text(kDriverVersion, version, room); }

Result nvmlSystemGetNVMLVersion(char* version, unsigned room) {
    return write_text(std::string("13.") + kDriverVersion, version, room);
}

Result nvmlSystemGetCudaDriverVersion(int* version) {
    *version = kCudaDriverVersion;
    return kSuccess;
}

Result nvmlSystemGetCudaDriverVersion_v2(int* version) { return nvmlSystemGetCudaDriverVersion(version); }

// -- finding devices -----------------------------------------------------------------------------------------------

Result nvmlDeviceGetCount_v2(unsigned* count) {
    *count = num_devices();
    return kSuccess;
}

Result nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }

Result nvmlDeviceGetHandleByIndex_v2(unsigned index, DeviceHandle* device) {
    return find_device(index, kInvalidArgument, device);
}

Result nvmlDeviceGetHandleByIndex(unsigned index, DeviceHandle* device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

Result nvmlDeviceGetHandleByUUID(const char* uuid, DeviceHandle* device) {
    for (unsigned index = 0; index < num_devices(); index++) {
        if (uuid_of(index) == uuid) {
            *device = handle_of(index);
            return kSuccess;
        }
    }
    return kNotFound;
}

Result nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, DeviceHandle* device) {
    unsigned bus = 0;
    if (sscanf(bus_id, "%*x:%x", &bus) != 1 || bus < kFirstBus) {
        return kNotFound;
    }
    return find_device(bus - kFirstBus, kNotFound, device);
}

Result nvmlDeviceGetHandleByPciBusId(const char* bus_id, DeviceHandle* device) {
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

Result nvmlDeviceGetIndex(DeviceHandle device, unsigned* index) {
    if (!is_device(device)) {
        return kInvalidArgument;
    }
    *index = index_of(device);
    return kSuccess;
}

// -- one device ----------------------------------------------------------------------------------------------------

Result nvmlDeviceGetName(DeviceHandle, char* name, unsigned room) {
    return write_text("NVIDIA H100 80GB HBM3", name, room);
}

Result nvmlDeviceGetUUID(DeviceHandle device, char* uuid, unsigned room) {
    return write_text(uuid_of(index_of(device)), uuid, room);
}

Result nvmlDeviceGetCudaComputeCapability(DeviceHandle, int* major, int* minor) {
    *major = 9;
    *minor = 0;
    return kSuccess;
}

// Used memory is in libcuda's accounts, which are inaccessible without CUDA; so all memory counts as free.
Result nvmlDeviceGetMemoryInfo(DeviceHandle, Memory* memory) {
    *memory = {device_nbytes(), device_nbytes(), 0};
    return kSuccess;
}

Result nvmlDeviceGetMemoryInfo_v2(DeviceHandle, VersionedMemory* memory) {
    *memory = {memory->version, device_nbytes(), 0, device_nbytes(), 0};
    return kSuccess;
}

Result nvmlDeviceGetPciInfo_v3(DeviceHandle device, PciInfo* info) {
    *info = {};
    info->bus = kFirstBus + index_of(device);
    info->device_id = kDeviceId;
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:00.0", info->domain, info->bus);
    snprintf(info->legacy_bus_id, sizeof info->legacy_bus_id, "%04X:%02X:00.0", info->domain, info->bus);
    return kSuccess;
}

Result nvmlDeviceGetComputeRunningProcesses_v3(DeviceHandle, unsigned* count, void*) {
    *count = 0;
    return kSuccess;
}

Result nvmlDeviceGetComputeRunningProcesses_v2(DeviceHandle device, unsigned* count, void* processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}

Result nvmlDeviceGetComputeRunningProcesses(DeviceHandle device, unsigned* count, void* processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}

Result nvmlDeviceGetCpuAffinity(DeviceHandle, unsigned num_words, unsigned long* words) {
    return write_processors(num_words, words);
}

Result nvmlDeviceGetCpuAffinityWithinScope(DeviceHandle, unsigned num_words, unsigned long* words, unsigned) {
    return write_processors(num_words, words);
}

Result nvmlDeviceGetNumaNodeId(DeviceHandle, unsigned*) { return kNotSupported; }

// -- between devices -----------------------------------------------------------------------------------------------

Result nvmlDeviceGetP2PStatus(DeviceHandle, DeviceHandle, int, int* status) {
    *status = are_peers_reachable() ? kPeersReachable : kPeersNotSupported;
    return kSuccess;
}

// No link has a known end, and no fabric connects machines.
Result nvmlDeviceGetNvLinkState(DeviceHandle, unsigned, int*) { return kNotSupported; }

Result nvmlDeviceGetNvLinkRemoteDeviceType(DeviceHandle, unsigned, int*) { return kNotSupported; }

Result nvmlDeviceGetNvLinkRemotePciInfo_v2(DeviceHandle, unsigned, PciInfo*) { return kNotSupported; }

Result nvmlDeviceGetGpuFabricInfo(DeviceHandle, void*) { return kNotSupported; }

Result nvmlDeviceGetGpuFabricInfoV(DeviceHandle, void*) { return kNotSupported; }

}  // extern "C"
