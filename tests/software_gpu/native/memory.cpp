// Device memory and page-locked host memory: allocation, attributes of pointers, handles for other processes. Device
// memory is a memory file, so that other processes can map it.
#include "driver.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace software_gpu {

constexpr size_t kAllocationNbytes = 512;              // cuMemAlloc rounds up to a multiple
constexpr size_t kMostPatternNbytes = size_t(64) << 20;  // larger memory stays zero, because filling it takes long
constexpr unsigned char kPattern = 0xA5;

std::map<uint64_t, Region>& regions() {
    static auto* all = new std::map<uint64_t, Region>;  // never destroyed, because code runs at exit
    return *all;
}

std::map<uint64_t, Reservation>& reservations() {
    static auto* all = new std::map<uint64_t, Reservation>;
    return *all;
}

template <class Range>
static Range* range_at(std::map<uint64_t, Range>& ranges, uint64_t address) {
    auto next = ranges.upper_bound(address);
    if (next == ranges.begin()) {
        return nullptr;
    }
    Range& range = std::prev(next)->second;
    return address < range.end() ? &range : nullptr;
}

Region* region_at(uint64_t address) { return range_at(regions(), address); }

Reservation* reservation_at(uint64_t address) { return range_at(reservations(), address); }

uint64_t new_id() {
    static uint64_t last;
    return ++last;
}

Region& add_region(Region region) {
    region.id = new_id();
    return regions()[region.start] = region;
}

static bool has_right(const Region& region, int device) {
    auto entry = region.rights.find(device);
    return entry != region.rights.end() && entry->second != CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

bool may_touch(const Region& region, int device) {
    if (region.kind == RegionKind::host) {
        return true;
    }
    if (region.kind == RegionKind::mapped && device == kAnyDevice) {
        return std::any_of(region.rights.begin(), region.rights.end(), [&](const auto& right) {
            return has_right(region, right.first);
        });
    }
    if (region.kind == RegionKind::mapped) {
        return has_right(region, device);
    }
    return device == kAnyDevice || device == region.device || can_access_peer(device, region.device);
}

bool is_accessible(uint64_t address, size_t nbytes, int device) {
    uint64_t end = address + nbytes;
    while (address < end) {
        Region* region = region_at(address);
        if (!region || !may_touch(*region, device)) {
            return false;
        }
        address = region->end();
    }
    return true;
}

bool is_withheld(uint64_t address, size_t nbytes, int device) {
    uint64_t end = address + nbytes;
    auto next = regions().upper_bound(address);
    for (next = next == regions().begin() ? next : std::prev(next); next != regions().end(); next++) {
        const Region& region = next->second;
        if (region.start >= end) {
            return false;
        }
        bool overlaps = address < region.end() && region.kind == RegionKind::mapped;
        if (overlaps && may_touch(region, kAnyDevice) && !may_touch(region, device)) {
            return true;
        }
    }
    return false;
}

bool is_pageable(uint64_t address) { return !region_at(address) && !reservation_at(address); }

int new_memory_file(int device, size_t nbytes) {
    std::string name = kMemoryFileName + std::to_string(machine_device(device));
    int descriptor = memfd_create(name.c_str(), MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, nbytes) != 0) {
        return -1;
    }
    if (nbytes <= kMostPatternNbytes) {
        void* mapping = mmap(nullptr, nbytes, PROT_WRITE, MAP_SHARED, descriptor, 0);
        memset(mapping, kPattern, nbytes);
        munmap(mapping, nbytes);
    }
    return descriptor;
}

int device_of_memory_file(int descriptor) {
    char link[64];
    char name[256] = {};
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    if (readlink(link, name, sizeof name - 1) < 0) {
        return -1;
    }
    int machine = -1;
    if (sscanf(name, "/memfd:software_gpu.device%d", &machine) != 1) {
        return -1;
    }
    for (int device = 0; device < num_devices(); device++) {
        if (machine_device(device) == machine) {
            return device;
        }
    }
    return -1;
}

uint64_t file_number(int descriptor) {
    struct stat status;
    return fstat(descriptor, &status) == 0 ? status.st_ino : 0;
}

static CUresult allocate(CUdeviceptr* address, size_t nbytes) {
    if (!nbytes) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t rounded = (nbytes + kAllocationNbytes - 1) / kAllocationNbytes * kAllocationNbytes;
    int device = current_device();
    if (!take(device, rounded)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    int descriptor = new_memory_file(device, rounded);
    void* mapping = MAP_FAILED;
    if (descriptor >= 0) {
        mapping = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    }
    if (mapping == MAP_FAILED) {
        give(device, rounded);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    add_region({uint64_t(mapping), rounded, RegionKind::device, device, descriptor});
    *address = uint64_t(mapping);
    return CUDA_SUCCESS;
}

static CUresult free_memory(CUdeviceptr address) {
    if (!address) {
        return CUDA_SUCCESS;
    }
    Region* region = region_at(address);
    if (!region || region->start != address || region->kind != RegionKind::device) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // The real function also waits for all work of the device.
    run_all(region->device);
    host_waited_for_all(region->device);
    check_release(region->start, region->nbytes, "memory of the device is freed");  // by streams of other devices
    munmap(reinterpret_cast<void*>(region->start), region->nbytes);
    close(region->descriptor);
    give(region->device, region->nbytes);
    regions().erase(address);
    return CUDA_SUCCESS;
}

static CUresult allocate_host(void** address, size_t nbytes) {
    void* mapping = mmap(nullptr, nbytes + !nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    add_region({uint64_t(mapping), nbytes, RegionKind::host, current_device()});
    *address = mapping;
    return CUDA_SUCCESS;
}

static CUresult free_host(void* address) {
    Region* region = region_at(uint64_t(address));
    bool is_ours = region && region->start == uint64_t(address) && region->kind == RegionKind::host;
    if (!is_ours || region->is_registered) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    check_release(region->start, region->nbytes, "memory of the host is freed");
    munmap(address, region->nbytes + !region->nbytes);
    regions().erase(region->start);
    return CUDA_SUCCESS;
}

static CUresult register_host(void* address, size_t nbytes) {
    uint64_t start = uint64_t(address);
    if (!nbytes) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    auto next = regions().lower_bound(start);
    bool overlaps = region_at(start) || (next != regions().end() && next->first < start + nbytes);
    if (overlaps) {
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    Region region{start, nbytes, RegionKind::host, current_device()};
    region.is_registered = true;
    add_region(region);
    return CUDA_SUCCESS;
}

static CUresult unregister_host(void* address) {
    Region* region = region_at(uint64_t(address));
    if (!region || region->start != uint64_t(address) || !region->is_registered) {
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    }
    check_release(region->start, region->nbytes, "memory of the host is unregistered");
    regions().erase(region->start);
    return CUDA_SUCCESS;
}

// -- attributes --------------------------------------------------------------------------------------------------

static CUresult pointer_attribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    Region* region = region_at(address);
    Reservation* reservation = reservation_at(address);
    if (!region && !reservation) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int device = region ? region->device : reservation->device;
    bool is_host = region && region->kind == RegionKind::host;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned*>(value) = is_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_CONTEXT:
            *static_cast<CUcontext*>(value) = primary_context(device);
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            *static_cast<uint64_t*>(value) = address;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *static_cast<int*>(value) = device;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            *static_cast<uint64_t*>(value) = region ? region->start : reservation->start;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            *static_cast<size_t*>(value) = region ? region->nbytes : reservation->nbytes;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
            *static_cast<unsigned char*>(value) = 0;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MAPPED:
            *static_cast<int*>(value) = region != nullptr;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
            *static_cast<uint64_t*>(value) = region ? region->id : reservation->id;
            return CUDA_SUCCESS;
        default:
            return CUDA_ERROR_INVALID_VALUE;
    }
}

// -- handles for other processes ---------------------------------------------------------------------------------

// Contents of a CUipcMemHandle: a memory file of a living process.
struct IpcHandle {
    int pid;
    int descriptor;
    uint64_t nbytes;
};

static CUresult open_ipc_handle(CUdeviceptr* address, const IpcHandle& handle) {
    if (handle.pid == getpid()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.descriptor);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int device = device_of_memory_file(descriptor);
    uint64_t file = file_number(descriptor);
    void* mapping = mmap(nullptr, handle.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (mapping == MAP_FAILED) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Region region{uint64_t(mapping), handle.nbytes, RegionKind::imported, device < 0 ? current_device() : device};
    region.shared_file = file;
    add_region(region);
    *address = uint64_t(mapping);
    return CUDA_SUCCESS;
}

static CUresult close_ipc_handle(CUdeviceptr address) {
    Region* region = region_at(address);
    if (!region || region->start != address || region->kind != RegionKind::imported) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    check_release(region->start, region->nbytes, "memory of another process is closed");
    munmap(reinterpret_cast<void*>(region->start), region->nbytes);
    regions().erase(address);
    return CUDA_SUCCESS;
}

}  // namespace software_gpu

using namespace software_gpu;

extern "C" {

int software_gpu_is_accessible(uint64_t address, size_t nbytes) {
    Held held;
    return is_accessible(address, nbytes, device_of_context());
}

// The device is that of the thread's context, which is required. The calls of virtual_memory.cpp specify the device:
// cuda.h lists no CUDA_ERROR_INVALID_CONTEXT among their errors, and an initialized driver suffices.
CUresult cuMemAlloc(CUdeviceptr* address, size_t nbytes) {
    return unsafe_call("cuMemAlloc", [&] {
        return device_of_context() == kAnyDevice ? CUDA_ERROR_INVALID_CONTEXT : allocate(address, nbytes);
    });
}

CUresult cuMemFree(CUdeviceptr address) {
    return unsafe_call("cuMemFree", [&] { return free_memory(address); });
}

CUresult cuMemAllocAsync(CUdeviceptr* address, size_t nbytes, CUstream) {
    return driver_call("cuMemAllocAsync", [&] { return allocate(address, nbytes); });
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream) {
    return driver_call("cuMemFreeAsync", [&] { return free_memory(address); });
}

CUresult cuMemGetInfo(size_t* free, size_t* total) {
    return driver_call("cuMemGetInfo", [&] {
        if (device_of_context() == kAnyDevice) {
            return CUDA_ERROR_INVALID_CONTEXT;
        }
        int64_t used = taken(current_device());
        *total = device_nbytes();
        *free = used > int64_t(*total) ? 0 : *total - used;
        return CUDA_SUCCESS;
    });
}

CUresult cuMemHostAlloc(void** address, size_t nbytes, unsigned) {
    return unsafe_call("cuMemHostAlloc", [&] { return allocate_host(address, nbytes); });
}

CUresult cuMemAllocHost(void** address, size_t nbytes) { return cuMemHostAlloc(address, nbytes, 0); }

CUresult cuMemFreeHost(void* address) {
    return unsafe_call("cuMemFreeHost", [&] { return free_host(address); });
}

CUresult cuMemHostRegister(void* address, size_t nbytes, unsigned) {
    return unsafe_call("cuMemHostRegister", [&] { return register_host(address, nbytes); });
}

CUresult cuMemHostUnregister(void* address) {
    return unsafe_call("cuMemHostUnregister", [&] { return unregister_host(address); });
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* on_device, void* address, unsigned) {
    return driver_call("cuMemHostGetDevicePointer", [&] {
        Region* region = region_at(uint64_t(address));
        if (!region || region->kind != RegionKind::host) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        *on_device = uint64_t(address);
        return CUDA_SUCCESS;
    });
}

CUresult cuMemHostGetFlags(unsigned* flags, void*) {
    *flags = 0;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr* start, size_t* nbytes, CUdeviceptr address) {
    return driver_call("cuMemGetAddressRange", [&] {
        Region* region = region_at(address);
        if (!region) {
            return CUDA_ERROR_NOT_FOUND;
        }
        if (start) {
            *start = region->start;
        }
        if (nbytes) {
            *nbytes = region->nbytes;
        }
        return CUDA_SUCCESS;
    });
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    return driver_call("cuPointerGetAttribute", [&] { return pointer_attribute(value, attribute, address); });
}

CUresult cuPointerGetAttributes(unsigned num, CUpointer_attribute* attributes, void** values, CUdeviceptr address) {
    return driver_call("cuPointerGetAttributes", [&] {
        for (unsigned i = 0; i < num; i++) {
            if (pointer_attribute(values[i], attributes[i], address) != CUDA_SUCCESS) {
                memset(values[i], 0, sizeof(int));  // the real driver's result for unknown memory
            }
        }
        return CUDA_SUCCESS;
    });
}

CUresult cuPointerSetAttribute(const void*, CUpointer_attribute, CUdeviceptr) { return CUDA_SUCCESS; }

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
    return driver_call("cuIpcGetMemHandle", [&] {
        Region* region = region_at(address);
        if (!region || region->descriptor < 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        region->shared_file = file_number(region->descriptor);
        publish_accesses(*region);
        IpcHandle own{getpid(), region->descriptor, region->nbytes};
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &own, sizeof own);
        return CUDA_SUCCESS;
    });
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned) {
    return driver_call("cuIpcOpenMemHandle", [&] {
        IpcHandle other;
        memcpy(&other, &handle, sizeof other);
        return open_ipc_handle(address, other);
    });
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    return driver_call("cuIpcCloseMemHandle", [&] { return close_ipc_handle(address); });
}
}
