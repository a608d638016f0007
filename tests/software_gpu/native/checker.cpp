// Happens-before over streams, events and waits of the host, by vector clocks.
//
// Every operation of a stream has a number. A clock holds, for each other stream, the number up to which everything
// is over. A stream advances its clock by waiting for an event, and the host by synchronizing; all later operations
// know what the host knows. An access with a higher number conflicts if it overlaps and one of the two is a write.
// Order between processes is in peers.cpp.
#include "driver.h"

#include <algorithm>
#include <iterator>

namespace software_gpu {

// Never destroyed: threads may run until the process has ended.
static Clock& host_clock = *new Clock;
static thread_local Clock heard_by_thread;

void learn(Clock& clock, const Stream* stream, uint64_t number) {
    uint64_t& known = clock[stream];
    known = std::max(known, number);
}

void learn(Clock& clock, const Clock& other) {
    for (const auto& [stream, number] : other) {
        learn(clock, stream, number);
    }
}

static uint64_t known_of(const Clock& clock, const Stream* stream) {
    auto known = clock.find(stream);
    return known == clock.end() ? 0 : known->second;
}

// -- accesses of one stream --------------------------------------------------------------------------------------

void Accesses::add(uint64_t start, uint64_t end, uint64_t number, const char* what) {
    auto next = by_start_.upper_bound(start);
    if (next != by_start_.begin()) {
        auto previous = std::prev(next);
        Access earlier = previous->second;
        if (earlier.end > start) {
            if (previous->first < start) {
                previous->second.end = start;
            } else {
                by_start_.erase(previous);
            }
            if (earlier.end > end) {
                by_start_[end] = earlier;
            }
        }
    }
    auto covered = by_start_.lower_bound(start);
    while (covered != by_start_.end() && covered->first < end) {
        Access earlier = covered->second;
        covered = by_start_.erase(covered);
        if (earlier.end > end) {
            by_start_[end] = earlier;
            break;
        }
    }
    by_start_[start] = {end, number, what};
}

void Accesses::each_overlapping(
    uint64_t start, uint64_t end, uint64_t after, const std::function<void(uint64_t, const Access&)>& use
) const {
    auto entry = by_start_.upper_bound(start);
    if (entry != by_start_.begin() && std::prev(entry)->second.end > start) {
        --entry;
    }
    for (; entry != by_start_.end() && entry->first < end; ++entry) {
        if (entry->second.number > after) {
            use(entry->first, entry->second);
        }
    }
}

const Accesses::Access* Accesses::overlapping(uint64_t start, uint64_t end, uint64_t after, uint64_t* at) const {
    const Access* latest = nullptr;
    each_overlapping(start, end, after, [&](uint64_t access_start, const Access& access) {
        if (!latest || access.number > latest->number) {
            latest = &access;
            *at = access_start;
        }
    });
    return latest;
}

void Accesses::forget_up_to(uint64_t number) {
    std::erase_if(by_start_, [number](const auto& entry) { return entry.second.number <= number; });
}

static uint64_t known_by_host(const Stream& stream) {
    return std::max(known_of(host_clock, &stream), known_of(heard_by_thread, &stream));
}

// -- what conflicts ----------------------------------------------------------------------------------------------

static bool report_conflict(
    const Stream& stream, uint64_t start, size_t nbytes, bool writes, const char* what, const Stream& other
) {
    uint64_t known = std::max(known_by_host(other), known_of(stream.known, &other));
    if (other.num_put <= known) {
        return false;
    }
    uint64_t at = 0;
    bool other_writes = true;
    const auto* access = other.writes.overlapping(start, start + nbytes, known, &at);
    if (!access && writes) {
        other_writes = false;
        access = other.reads.overlapping(start, start + nbytes, known, &at);
    }
    if (!access) {
        return false;
    }
    report(
        "RACE", "%s %s [%#lx, +%zu) on stream %p, and nothing there waits for %s, which %s [%#lx, +%zu) on stream %p",
        what, writes ? "writes" : "reads", start, nbytes, static_cast<const void*>(&stream), access->what,
        other_writes ? "writes" : "reads", at, access->end - at, static_cast<const void*>(&other)
    );
    return true;
}

static void add_access(Stream& stream, uint64_t start, size_t nbytes, bool writes, const char* what) {
    Accesses& accesses = writes ? stream.writes : stream.reads;
    accesses.add(start, start + nbytes, stream.num_put, what);
}

static void check_other_streams(Stream& stream, uint64_t start, size_t nbytes, bool writes, const char* what) {
    for (Stream* other : all_streams()) {
        if (other != &stream && report_conflict(stream, start, nbytes, writes, what, *other)) {
            break;
        }
    }
}

void check_access(Stream& stream, uint64_t start, size_t nbytes, bool writes, const char* what) {
    if (!nbytes) {
        return;
    }
    check_other_streams(stream, start, nbytes, writes, what);
    for (const Place& place : aliased_places(start, nbytes)) {
        check_other_streams(stream, place.start, place.nbytes, writes, what);
        add_access(stream, place.start, place.nbytes, writes, what);
    }
    std::vector<SharedAccess> shared;
    if (find_shared(start, nbytes, shared)) {
        for (const SharedAccess& access : shared) {
            check_shared_access(stream, access, writes, what);
        }
        stream.has_shared_accesses = true;
    }
    add_access(stream, start, nbytes, writes, what);
}

void check_access_in_graph(Graph& graph, uint64_t start, size_t nbytes, bool writes, const char* what) {
    Stream& branch = *graph.running;
    for (const auto& [stream, other] : graph.branches) {
        if (other.get() != &branch && report_conflict(branch, start, nbytes, writes, what, *other)) {
            break;
        }
    }
    add_access(branch, start, nbytes, writes, what);
}

static void report_release(Stream& stream, const Accesses& accesses, uint64_t start, size_t nbytes, const char* what) {
    uint64_t at = 0;
    const auto* access = accesses.overlapping(start, start + nbytes, known_by_host(stream), &at);
    if (!access) {
        return;
    }
    uint64_t number = access->number;
    report(
        "RELEASE", "%s [%#lx, +%zu), and the host has not waited for %s, which %s [%#lx, +%zu) on stream %p", what,
        start, nbytes, access->what, &accesses == &stream.writes ? "writes" : "reads", at, access->end - at,
        static_cast<const void*>(&stream)
    );
    run_up_to(stream, number);
}

void check_release(uint64_t start, size_t nbytes, const char* what) {
    for (Stream* stream : all_streams()) {
        report_release(*stream, stream->writes, start, nbytes, what);
        report_release(*stream, stream->reads, start, nbytes, what);
    }
}

// -- what the host knows -----------------------------------------------------------------------------------------

static void host_learns(Stream& stream, uint64_t number) {
    if (number <= known_of(host_clock, &stream)) {
        return;
    }
    learn(host_clock, &stream, number);
    stream.reads.forget_up_to(number);
    stream.writes.forget_up_to(number);
    if (stream.has_shared_accesses) {
        forget_shared_accesses(stream, number);
        stream.has_shared_accesses = number < stream.num_put;
    }
}

void host_waited_for(Stream& stream, uint64_t number, const Clock& known) {
    host_learns(stream, number);
    timeline_host_waits(stream, number);
    for (const auto& [other, other_number] : known) {
        host_learns(*const_cast<Stream*>(other), other_number);
    }
}

// Only up to operations that are over: another thread may have queued more meanwhile.
void host_waited_for_all(int device) {
    for (Stream* stream : all_streams()) {
        if (device < 0 || stream->device == device) {
            host_learns(*stream, stream->num_over());
            timeline_host_waits(*stream, stream->num_over());
        }
    }
}

void thread_heard_of(const Stream& stream, uint64_t number, const Clock& known) {
    learn(heard_by_thread, &stream, number);
    learn(heard_by_thread, known);
}

// -- memory that another process gets ----------------------------------------------------------------------------

void publish_accesses(const Region& region) {
    for (Stream* stream : all_streams()) {
        for (bool writes : {false, true}) {
            const Accesses& accesses = writes ? stream->writes : stream->reads;
            auto publish = [&](uint64_t start, const Accesses::Access& access) {
                uint64_t first = std::max(start, region.start);
                std::vector<SharedAccess> shared;
                find_shared(first, std::min(access.end, region.end()) - first, shared);
                for (const SharedAccess& part : shared) {
                    check_shared_access(*stream, part, writes, access.what);
                }
                stream->has_shared_accesses = true;
            };
            accesses.each_overlapping(region.start, region.end(), known_of(host_clock, stream), publish);
        }
    }
}

}  // namespace software_gpu
