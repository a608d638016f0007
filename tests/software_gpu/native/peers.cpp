// Order between processes: unfinished accesses of each process to memory that several processes have mapped.
//
// Vector clocks are limited to a process. A write of a process to exported memory is over for others only after its
// host has waited, because only then can it notify them. Accesses that no host has waited for are therefore kept in a
// table shared by all processes, by memory file. A conflicting access, where one of the two is a write, is reported.
#include "driver.h"

#include <csignal>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace software_gpu {

constexpr size_t kMostEntries = 1 << 16;
constexpr size_t kMostWhat = 40;

struct Entry {
    uint64_t file;
    uint64_t start;  // in the file
    uint64_t end;
    int pid;         // 0: free
    bool writes;
    uint64_t stream;
    uint64_t number;
    char what[kMostWhat];
};

struct Table {
    std::atomic<int> owner;  // pid of the current user
    size_t num_used;         // later entries are free
    Entry entries[kMostEntries];
};

static Table& table() {
    static Table* shared = static_cast<Table*>(map_shared_memory("accesses", sizeof(Table)));
    return *shared;
}

static bool is_other_living(int pid) { return pid && pid != getpid() && (kill(pid, 0) == 0 || errno != ESRCH); }

static bool overlaps(const Entry& entry, const SharedAccess& access) {
    return entry.file == access.file && entry.start < access.end && access.start < entry.end;
}

static void report_conflict(const SharedAccess& access, bool writes, const char* what) {
    for (size_t i = 0; i < table().num_used; i++) {
        const Entry& entry = table().entries[i];
        bool conflicts = overlaps(entry, access) && (entry.writes || writes) && is_other_living(entry.pid);
        if (conflicts) {
            report(
                "RACE", "%s %s bytes [%lu, %lu) of shared memory, and the host of process %d has not waited for %s, "
                "which %s [%lu, %lu)",
                what, writes ? "writes" : "reads", access.start, access.end, entry.pid, entry.what,
                entry.writes ? "writes" : "reads", entry.start, entry.end
            );
            return;
        }
    }
}

static Entry* free_entry() {
    for (size_t i = 0; i < table().num_used; i++) {
        int pid = table().entries[i].pid;
        bool is_free = !pid || (pid != getpid() && !is_other_living(pid));
        if (is_free) {
            return &table().entries[i];
        }
    }
    return table().num_used < kMostEntries ? &table().entries[table().num_used++] : nullptr;
}

// An entry of the same operation that the access only extends.
static Entry* touching_entry(const Stream& stream, const SharedAccess& access, bool writes) {
    for (size_t i = 0; i < table().num_used; i++) {
        Entry& entry = table().entries[i];
        bool is_own = entry.pid == getpid() && entry.stream == uint64_t(&stream) && entry.writes == writes &&
            entry.number == stream.num_put;
        bool touches = entry.file == access.file && entry.start <= access.end && access.start <= entry.end;
        if (is_own && touches) {
            return &entry;
        }
    }
    return nullptr;
}

void check_shared_access(const Stream& stream, const SharedAccess& access, bool writes, const char* what) {
    SharedHeld held(table().owner);
    report_conflict(access, writes, what);
    Entry* entry = touching_entry(stream, access, writes);
    if (entry) {
        entry->start = std::min(entry->start, access.start);
        entry->end = std::max(entry->end, access.end);
        return;
    }
    entry = free_entry();
    if (!entry) {
        report("FULL", "no room for accesses to shared memory: they are not checked");
        return;
    }
    *entry = {access.file, access.start, access.end, getpid(), writes, uint64_t(&stream), stream.num_put, {}};
    strncpy(entry->what, what, kMostWhat - 1);
}

void forget_shared_accesses(const Stream& stream, uint64_t number) {
    SharedHeld held(table().owner);
    for (size_t i = 0; i < table().num_used; i++) {
        Entry& entry = table().entries[i];
        bool is_over = entry.pid == getpid() && entry.stream == uint64_t(&stream) && entry.number <= number;
        if (is_over) {
            entry.pid = 0;
        }
    }
    while (table().num_used && !table().entries[table().num_used - 1].pid) {
        table().num_used--;
    }
}

}  // namespace software_gpu
