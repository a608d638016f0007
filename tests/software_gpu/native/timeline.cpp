// A simulated clock: the start and end of each operation on hardware of given speed.
//
//   host       each call of the driver takes its time; a wait lasts until the awaited work is over
//   stream     an operation starts after it is queued and after earlier and awaited operations are over
//   engine     copies from the host, to the host and between devices are sequential, and so are kernels;
//              a short copy waits for one turn of another stream's copies, not for all of them
//
// An operation takes the time of its slowest engine for its declared bytes. Time of programs outside of the driver
// and of other processes is not included: the result is a lower bound for this order of calls.
#include "driver.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

namespace software_gpu {

enum Engine { memory, to_host, from_host, link, kNumEngines };

// Bytes per second: HBM3 of an H100, PCIe 5 as measured on one, NVLink 4.
static constexpr std::array<double, kNumEngines> kRates = {3350e9, 55e9, 55e9, 450e9};
static constexpr double kLaunch = 5e-6;   // of the host, per queued operation
static constexpr double kCall = 1e-6;     // of the host, per other call
static constexpr double kShortest = 3e-6;  // of the device
static constexpr double kTurn = 64.0 * (1 << 20);  // bytes of a copy, as the product queues them

// Of the host, as measured on an H100 for chunks of 32 MiB; that of the release which frees is of whatever call frees.
struct Cost {
    const char* name;
    double seconds;
};
static constexpr Cost kCosts[] = {
    {"cuMemCreate", 18e-6}, {"cuMemMap", 56e-6}, {"cuMemUnmap", 34e-6}, {"free", 35e-6}
};

static std::atomic<double> host;
// Every byte counts this many times, so that a small model takes as long as a large one.
static std::atomic<double> scale{1};
static std::array<double, kNumEngines> engines_free_at;
static std::array<double, kNumEngines> seconds_busy;

static void advance_host(double seconds) {
    double now = host.load();
    while (!host.compare_exchange_weak(now, now + seconds)) {
    }
}

static void host_waits_until(double time) {
    double now = host.load();
    while (now < time && !host.compare_exchange_weak(now, time)) {
    }
}

static double end_of(const Stream& stream, uint64_t number) {
    const std::vector<double>& ends = stream.times.ends;
    return ends.empty() ? 0 : ends[std::min<uint64_t>(number, ends.size() - 1)];
}

static void set_end(Stream& stream, double end) {
    stream.times.ends.resize(stream.num_put + 1, end_of(stream, stream.num_put));
    stream.times.ends.back() = end;
}

void timeline_call(const char* name) {
    auto cost = std::find_if(std::begin(kCosts), std::end(kCosts), [&](const Cost& one) {
        return !strcmp(one.name, name);
    });
    advance_host(cost == std::end(kCosts) ? kCall : cost->seconds);
}

void timeline_put(Stream& stream) {
    advance_host(kLaunch);
    double begin = std::max(end_of(stream, stream.num_put - 1), host.load());
    stream.times.operation = {begin, {}, engines_free_at, seconds_busy};
    set_end(stream, begin);
}

void timeline_use(Stream& stream, uint64_t address, size_t nbytes, bool writes) {
    const Region* region = region_at(address);
    bool is_local = !region || (region->kind != RegionKind::host && region->device == stream.device);
    bool is_host = !region || region->kind == RegionKind::host;
    Engine used = is_host ? (writes ? to_host : from_host) : is_local ? memory : link;
    TimedOperation& operation = stream.times.operation;
    operation.nbytes[used] += nbytes;
    // The engine that it keeps busy: one other than its own memory, if it uses any.
    Engine engine = memory;
    for (Engine other : {to_host, from_host, link}) {
        engine = operation.nbytes[other] ? other : engine;
    }
    double seconds = kShortest;
    for (int each = 0; each < kNumEngines; each++) {
        seconds = std::max(seconds, operation.nbytes[each] * scale.load() / kRates[each]);
    }
    engines_free_at = operation.engines_free_at;
    seconds_busy = operation.seconds_busy;
    double begin = std::max(operation.begin, engines_free_at[engine]);
    double turn = kTurn / kRates[engine];
    if ((engine == to_host || engine == from_host) && seconds <= turn) {
        begin = std::min(begin, operation.begin + turn);
    }
    double end = begin + seconds;
    engines_free_at[engine] = std::max(engines_free_at[engine], end);
    seconds_busy[engine] += seconds;
    set_end(stream, end);
}

void timeline_wait(Stream& stream, const Stream& other, uint64_t number) {
    set_end(stream, std::max(end_of(stream, stream.num_put), end_of(other, number)));
}

void timeline_host_waits(const Stream& stream, uint64_t number) { host_waits_until(end_of(stream, number)); }

}  // namespace software_gpu

using namespace software_gpu;

extern "C" {

// Seconds since the process began: of the host's clock, and of each busy engine.
void software_gpu_timeline(double* seconds) {
    Held held;
    seconds[0] = host.load();
    std::copy(seconds_busy.begin(), seconds_busy.end(), seconds + 1);
}

void software_gpu_timeline_scale(double factor) { scale = factor; }

// The host computes, while the engines go on.
void software_gpu_timeline_compute(double seconds) { advance_host(seconds); }

}
