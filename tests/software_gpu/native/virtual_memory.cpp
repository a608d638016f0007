// CUDA's virtual memory management: address ranges, physical memory, mappings, access, descriptors for other processes.
//
// The rules are the driver's, as far as the product can break them: sizes and addresses are multiples of the
// granularity; memory is mapped as a whole and at most once at an address; unmapping a range must not split a
// mapping; physical memory is freed when its handles and mappings are gone. The number of a released handle is
// reused, the lowest first, and an empty range may be unmapped: both were observed on an H100 with driver 580. Bytes
// are taken while any process has a handle, a mapping or an open descriptor ("once all shareable handles are closed
// and the allocation is released", cuMemExportToShareableHandle in cuda.h).
#include "driver.h"

#include <cstdlib>
#include <fcntl.h>
#include <pthread.h>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace software_gpu {

struct Allocation {
    uint64_t handle;
    int descriptor;
    size_t nbytes;
    int device;
    bool is_exportable;
    uint64_t file;      // system's id of the memory file
    bool is_shared;     // exported or imported
    int num_handles = 1;
    int num_mappings = 0;
};

constexpr uint64_t kFirstHandle = 0x1000;

static std::map<uint64_t, std::unique_ptr<Allocation>>& allocations() {
    static auto* all = new std::map<uint64_t, std::unique_ptr<Allocation>>;
    return *all;
}

static Allocation* allocation_of(CUmemGenericAllocationHandle handle) {
    auto entry = allocations().find(handle);
    bool is_held = entry != allocations().end() && entry->second->num_handles > 0;
    return is_held ? entry->second.get() : nullptr;
}

// A forked child has no driver. It closes descriptors that it was given; those of the driver would keep memory.
static void close_in_child() {
    for (const auto& [handle, allocation] : allocations()) {
        close(allocation->descriptor);
    }
}

static CUmemGenericAllocationHandle add_allocation(Allocation allocation) {
    static const int is_registered = pthread_atfork(nullptr, nullptr, close_in_child);
    (void)is_registered;
    allocation.handle = kFirstHandle;
    while (allocations().count(allocation.handle)) {
        allocation.handle++;
    }
    allocations()[allocation.handle] = std::make_unique<Allocation>(allocation);
    return allocation.handle;
}

static void free_if_unused(Allocation* allocation) {
    if (allocation->num_handles > 0 || allocation->num_mappings > 0) {
        return;
    }
    timeline_call("free");
    drop(allocation->file);
    close(allocation->descriptor);
    allocations().erase(allocation->handle);
}

// The granularity: 2 MiB as on hardware, or less for tests with many small pieces.
static size_t page_nbytes() {
    static const char* text = getenv("SOFTWARE_GPU_PAGE_NBYTES");
    static const size_t nbytes = text ? strtoull(text, nullptr, 0) : size_t(2) << 20;
    return nbytes;
}

static bool is_whole_pages(size_t nbytes) { return nbytes > 0 && nbytes % page_nbytes() == 0; }

// -- address ranges ----------------------------------------------------------------------------------------------

static CUresult reserve(CUdeviceptr* start, size_t nbytes) {
    if (!is_whole_pages(nbytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t with_alignment = nbytes + page_nbytes();
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapping = mmap(nullptr, with_alignment, PROT_NONE, flags, -1, 0);
    if (mapping == MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    uint64_t aligned = (uint64_t(mapping) + page_nbytes() - 1) / page_nbytes() * page_nbytes();
    reservations()[aligned] = {aligned, nbytes, mapping, with_alignment, current_device(), new_id()};
    *start = aligned;
    return CUDA_SUCCESS;
}

static bool has_mappings(uint64_t start, size_t nbytes) {
    auto next = regions().lower_bound(start);
    return region_at(start) || (next != regions().end() && next->first < start + nbytes);
}

static CUresult free_reservation(CUdeviceptr start, size_t nbytes) {
    Reservation* reservation = reservation_at(start);
    bool is_whole = reservation && reservation->start == start && reservation->nbytes == nbytes;
    if (!is_whole || has_mappings(start, nbytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    munmap(reservation->mapping, reservation->mapping_nbytes);
    reservations().erase(start);
    return CUDA_SUCCESS;
}

// -- physical memory ---------------------------------------------------------------------------------------------

static CUresult check_properties(const CUmemAllocationProp& properties) {
    bool is_of_device = properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (properties.type != CU_MEM_ALLOCATION_TYPE_PINNED || !is_of_device) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int device = properties.location.id;
    if (device < 0 || device >= num_devices()) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    bool can_be_sent = attribute(device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    return properties.allocFlags.gpuDirectRDMACapable && !can_be_sent ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle* handle, size_t nbytes, const CUmemAllocationProp& properties) {
    CUresult error = check_properties(properties);
    if (error || !is_whole_pages(nbytes)) {
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    }
    int device = properties.location.id;
    if (!has_free(device, nbytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    int descriptor = new_memory_file(device, nbytes);
    uint64_t file = file_number(descriptor);
    if (descriptor < 0 || !hold(device, file, nbytes)) {
        close(descriptor);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    bool is_exportable = properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    *handle = add_allocation({0, descriptor, nbytes, device, is_exportable, file, false});
    return CUDA_SUCCESS;
}

static CUresult import(CUmemGenericAllocationHandle* handle, int descriptor) {
    struct stat status;
    if (fstat(descriptor, &status) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int device = device_of_memory_file(descriptor);
    if (device < 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (own < 0) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (!hold(device, status.st_ino, status.st_size)) {
        close(own);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = add_allocation({0, own, size_t(status.st_size), device, true, status.st_ino, true});
    return CUDA_SUCCESS;
}

static CUresult export_descriptor(int* descriptor, CUmemGenericAllocationHandle handle) {
    Allocation* allocation = allocation_of(handle);
    if (!allocation || !allocation->is_exportable) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    allocation->is_shared = true;
    for (const auto& [start, region] : regions()) {
        if (region.allocation == allocation) {
            publish_accesses(region);
        }
    }
    *descriptor = fcntl(allocation->descriptor, F_DUPFD, 0);
    if (*descriptor < 0) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    keep_while_open(allocation->file);
    return CUDA_SUCCESS;
}

// -- mappings ----------------------------------------------------------------------------------------------------

static CUresult map(CUdeviceptr start, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle) {
    Allocation* allocation = allocation_of(handle);
    Reservation* reservation = reservation_at(start);
    bool is_inside = reservation && start + nbytes <= reservation->end();
    bool is_whole = allocation && nbytes == allocation->nbytes && offset == 0 && start % page_nbytes() == 0;
    if (!is_inside || !is_whole || has_mappings(start, nbytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    void* place = reinterpret_cast<void*>(start);
    if (mmap(place, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->descriptor, 0) == MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    Region region{start, nbytes, RegionKind::mapped, allocation->device};
    region.allocation = allocation;
    add_region(region);
    allocation->num_mappings++;
    return CUDA_SUCCESS;
}

// Mappings inside a range, if they cover it and none extends beyond it; otherwise none.
static std::vector<Region*> mappings_of(uint64_t start, size_t nbytes) {
    std::vector<Region*> covering;
    uint64_t next = start;
    uint64_t end = start + nbytes;
    while (next < end) {
        Region* region = region_at(next);
        bool fits = region && region->kind == RegionKind::mapped && region->start == next && region->end() <= end;
        if (!fits) {
            return {};
        }
        covering.push_back(region);
        next = region->end();
    }
    return covering;
}

// Access of the process: the union over all devices. Operations check the access of their device.
static int protection_of(const Region& region) {
    int protection = PROT_NONE;
    for (const auto& [device, right] : region.rights) {
        protection |= right == CU_MEM_ACCESS_FLAGS_PROT_NONE ? 0 : PROT_READ;
        protection |= right == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_WRITE : 0;
    }
    return protection;
}

// Other devices keep their access.
static CUresult set_access(CUdeviceptr start, size_t nbytes, const CUmemAccessDesc* rights, size_t num_rights) {
    std::vector<Region*> mappings = mappings_of(start, nbytes);
    if (mappings.empty() || num_rights < 1) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < num_rights; i++) {
        int device = rights[i].location.id;
        if (rights[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        for (Region* region : mappings) {
            bool is_reachable = device == region->device || can_access_peer(device, region->device);
            if (device < 0 || device >= num_devices() || !is_reachable) {
                return CUDA_ERROR_INVALID_DEVICE;
            }
        }
    }
    for (size_t i = 0; i < num_rights; i++) {
        if (rights[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
            check_release(start, nbytes, "memory of the device loses access");
        }
    }
    for (Region* region : mappings_of(start, nbytes)) {  // may have changed
        for (size_t i = 0; i < num_rights; i++) {
            region->rights[rights[i].location.id] = rights[i].flags;
        }
        mprotect(reinterpret_cast<void*>(region->start), region->nbytes, protection_of(*region));
    }
    return CUDA_SUCCESS;
}

// Mappings that overlap a range; sets `are_whole` to whether all lie inside.
static std::vector<Region*> mappings_in(uint64_t start, size_t nbytes, bool& are_whole) {
    std::vector<Region*> touched;
    are_whole = true;
    for (auto& [first, region] : regions()) {
        if (region.kind == RegionKind::mapped && first < start + nbytes && start < region.end()) {
            touched.push_back(&region);
            are_whole &= start <= first && region.end() <= start + nbytes;
        }
    }
    return touched;
}

static CUresult unmap(CUdeviceptr start, size_t nbytes) {
    Reservation* reservation = reservation_at(start);
    bool are_whole;
    mappings_in(start, nbytes, are_whole);
    if (!is_whole_pages(nbytes) || !reservation || start + nbytes > reservation->end() || !are_whole) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    check_release(start, nbytes, "memory of the device is unmapped");
    for (Region* region : mappings_in(start, nbytes, are_whole)) {  // may have changed
        int flags = MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE;
        mmap(reinterpret_cast<void*>(region->start), region->nbytes, PROT_NONE, flags, -1, 0);
        Allocation* allocation = region->allocation;
        regions().erase(region->start);
        allocation->num_mappings--;
        free_if_unused(allocation);
    }
    return CUDA_SUCCESS;
}

// Call `use` with each region that has bytes of a range, and the first and last of these bytes.
static void each_region(
    uint64_t start, size_t nbytes, const std::function<void(const Region&, uint64_t, uint64_t)>& use
) {
    uint64_t end = start + nbytes;
    while (start < end) {
        const Region* region = region_at(start);
        if (!region) {
            break;
        }
        uint64_t last = std::min(end, region->end());
        use(*region, start, last);
        start = last;
    }
}

bool find_shared(uint64_t start, size_t nbytes, std::vector<SharedAccess>& accesses) {
    each_region(start, nbytes, [&](const Region& region, uint64_t first, uint64_t last) {
        const Allocation* allocation = region.allocation;
        uint64_t file = !allocation ? region.shared_file : allocation->is_shared ? allocation->file : 0;
        if (file) {
            accesses.push_back({file, first - region.start, last - region.start});
        }
    });
    return !accesses.empty();
}

std::vector<Place> aliased_places(uint64_t start, size_t nbytes) {
    constexpr uint64_t kFirstPlace = uint64_t(1) << 62;
    constexpr int kOffsetBits = 40;  // of an allocation, which is smaller than 1 TiB
    std::vector<Place> places;
    each_region(start, nbytes, [&](const Region& region, uint64_t first, uint64_t last) {
        if (region.allocation && region.allocation->num_mappings > 1) {
            uint64_t place = kFirstPlace + (region.allocation->handle << kOffsetBits);
            places.push_back({place + (first - region.start), last - first});
        }
    });
    return places;
}

}  // namespace software_gpu

using namespace software_gpu;

extern "C" {

// Numbers of this process for tests: physical memory and its bytes, mappings, address ranges.
void software_gpu_virtual_memory(
    uint64_t* num_allocations, uint64_t* num_mappings, uint64_t* num_reservations, uint64_t* nbytes
) {
    Held held;
    *num_allocations = allocations().size();
    *num_mappings = 0;
    for (const auto& [start, region] : regions()) {
        *num_mappings += region.kind == RegionKind::mapped;
    }
    *num_reservations = reservations().size();
    *nbytes = 0;
    std::set<uint64_t> files;
    for (const auto& [handle, allocation] : allocations()) {
        *nbytes += files.insert(allocation->file).second ? allocation->nbytes : 0;
    }
}

// Write (start, bytes) of accessible mappings, in order, as many as fit; return their number.
size_t software_gpu_mapped(uint64_t (*found)[2], size_t room) {
    Held held;
    size_t num = 0;
    for (const auto& [start, region] : regions()) {
        if (region.kind != RegionKind::mapped || !may_touch(region, kAnyDevice)) {
            continue;
        }
        if (num < room) {
            found[num][0] = start;
            found[num][1] = region.nbytes;
        }
        num++;
    }
    return num;
}

CUresult cuMemGetAllocationGranularity(
    size_t* nbytes, const CUmemAllocationProp* properties, CUmemAllocationGranularity_flags
) {
    return driver_call("cuMemGetAllocationGranularity", [&] {
        *nbytes = page_nbytes();
        return check_properties(*properties);
    });
}

CUresult cuMemAddressReserve(CUdeviceptr* start, size_t nbytes, size_t, CUdeviceptr, unsigned long long flags) {
    return driver_call("cuMemAddressReserve", [&] {
        return flags ? CUDA_ERROR_INVALID_VALUE : reserve(start, nbytes);
    });
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t nbytes) {
    return driver_call("cuMemAddressFree", [&] { return free_reservation(start, nbytes); });
}

CUresult cuMemCreate(
    CUmemGenericAllocationHandle* handle, size_t nbytes, const CUmemAllocationProp* properties, unsigned long long flags
) {
    return driver_call("cuMemCreate", [&] {
        return flags ? CUDA_ERROR_INVALID_VALUE : create(handle, nbytes, *properties);
    });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    return driver_call("cuMemRelease", [&] {
        Allocation* allocation = allocation_of(handle);
        if (!allocation) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        allocation->num_handles--;
        free_if_unused(allocation);
        return CUDA_SUCCESS;
    });
}

CUresult cuMemMap(
    CUdeviceptr start, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags
) {
    return driver_call("cuMemMap", [&] {
        return flags ? CUDA_ERROR_INVALID_VALUE : map(start, nbytes, offset, handle);
    });
}

CUresult cuMemSetAccess(CUdeviceptr start, size_t nbytes, const CUmemAccessDesc* rights, size_t num_rights) {
    return driver_call("cuMemSetAccess", [&] { return set_access(start, nbytes, rights, num_rights); });
}

CUresult cuMemUnmap(CUdeviceptr start, size_t nbytes) {
    return driver_call("cuMemUnmap", [&] { return unmap(start, nbytes); });
}

CUresult cuMemExportToShareableHandle(
    void* descriptor, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long
) {
    return driver_call("cuMemExportToShareableHandle", [&] {
        bool is_descriptor = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        return is_descriptor ? export_descriptor(static_cast<int*>(descriptor), handle) : CUDA_ERROR_NOT_SUPPORTED;
    });
}

CUresult cuMemImportFromShareableHandle(
    CUmemGenericAllocationHandle* handle, void* descriptor, CUmemAllocationHandleType type
) {
    return driver_call("cuMemImportFromShareableHandle", [&] {
        bool is_descriptor = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        return is_descriptor ? import(handle, int(intptr_t(descriptor))) : CUDA_ERROR_NOT_SUPPORTED;
    });
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
    return driver_call("cuMemRetainAllocationHandle", [&] {
        Region* region = region_at(uint64_t(address));
        if (!region || !region->allocation) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        region->allocation->num_handles++;
        *handle = region->allocation->handle;
        return CUDA_SUCCESS;
    });
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle) {
    return driver_call("cuMemGetAllocationPropertiesFromHandle", [&] {
        Allocation* allocation = allocation_of(handle);
        if (!allocation) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        *properties = {};
        properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        properties->location.id = allocation->device;
        if (allocation->is_exportable) {
            properties->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        }
        return CUDA_SUCCESS;
    });
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
    return driver_call("cuMemGetAccess", [&] {
        Region* region = region_at(address);
        if (!region || region->kind != RegionKind::mapped) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        auto right = region->rights.find(location->id);
        *flags = right == region->rights.end() ? CU_MEM_ACCESS_FLAGS_PROT_NONE : right->second;
        return CUDA_SUCCESS;
    });
}
}
