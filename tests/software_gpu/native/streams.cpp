// Streams, events, copies and graphs.
//
// A copy runs when a thread waits for it, as late as permitted: a program that forgets to wait reads old bytes.
// Kernels run at once, in the launching thread, after all earlier work of their stream. For other threads they are
// pending until they end.
#include "driver.h"

#include <chrono>
#include <cstring>
#include <utility>

namespace software_gpu {

constexpr int kQueriesPerStep = 3;  // a program that only queries must eventually see the end

// -- queues ------------------------------------------------------------------------------------------------------

static std::vector<Stream*>& created_streams() {
    static auto* all = new std::vector<Stream*>;
    return *all;
}

// The default stream of a device; it and blocking streams wait for each other.
static Stream& default_stream(int device) {
    static auto* all = new std::map<int, Stream*>;
    Stream*& stream = (*all)[device];
    if (!stream) {
        stream = new Stream;
        stream->device = device;
        created_streams().push_back(stream);
    }
    return *stream;
}

static bool is_default(const Stream& stream) { return &stream == &default_stream(stream.device); }

Stream& stream_of(CUstream handle) {
    bool names_default = !handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD;
    return names_default ? default_stream(current_device()) : *reinterpret_cast<Stream*>(handle);
}

std::vector<Stream*> all_streams() { return created_streams(); }

static bool is_over(const Stream& stream, uint64_t number) { return stream.num_over() >= number; }

static void put_wait(Stream& stream, Stream& other, uint64_t number) {
    learn(stream.known, &other, number);
    if (is_over(other, number)) {  // in reality; by the timeline it may continue
        timeline_wait(stream, other, number);
        return;
    }
    Operation operation;
    operation.number = ++stream.num_put;
    operation.run = [] {};
    operation.is_ready = [&other, number](bool is_waiting) { return run_up_to(other, number, is_waiting); };
    stream.queue.push_back(std::move(operation));
    timeline_wait(stream, other, number);
}

// The order between the default stream and blocking streams.
static void put_implicit_waits(Stream& stream) {
    if (!stream.is_blocking()) {
        return;
    }
    if (!is_default(stream)) {
        Stream& first = default_stream(stream.device);
        learn(stream.known, first.known);
        put_wait(stream, first, first.num_put);
        return;
    }
    for (Stream* other : created_streams()) {
        if (other != &stream && other->device == stream.device && other->is_blocking()) {
            learn(stream.known, other->known);
            put_wait(stream, *other, other->num_put);
        }
    }
}

// The record of a captured stream among its graph's branches.
static Stream& branch_of(const Stream& stream) { return *stream.graph->branches.at(const_cast<Stream*>(&stream)); }

static Operation& put_into_graph(Stream& stream, std::function<void()> run) {
    Stream& branch = branch_of(stream);
    Operation operation{.number = ++branch.num_put, .run = std::move(run), .is_ready = nullptr};
    stream.graph->nodes.push_back({std::move(operation), &branch, branch.known});
    return stream.graph->nodes.back().operation;
}

Operation& put(Stream& stream, std::function<void()> run) {
    if (stream.graph) {
        return put_into_graph(stream, std::move(run));
    }
    put_implicit_waits(stream);
    stream.queue.push_back({.number = ++stream.num_put, .run = std::move(run), .is_ready = nullptr});
    timeline_put(stream);
    return stream.queue.back();
}

// From here on the calling thread computes a stream's last operation; for others the stream is not over.
static void open_launch(Stream& stream) {
    if (stream.depth++ == 0) {
        stream.launcher = std::this_thread::get_id();
        stream.open_number = stream.num_done;
    }
}

static void close_launch(Stream& stream) {
    stream.depth--;
    Held::notify();
}

static void run_operation(const Operation& operation) {
    if (operation.is_released) {
        Held::run_released(operation.run);
    } else {
        operation.run();
    }
}

// Whether the queue's first operation may run now. Awaited work may run meanwhile and change the queue.
static bool is_first_ready(Stream& stream, bool is_waiting) {
    auto is_ready = stream.queue.front().is_ready;
    return !is_ready || is_ready(is_waiting);
}

bool run_up_to(Stream& stream, uint64_t number, bool is_waiting) {
    number = std::min(number, stream.num_put);
    while (!is_over(stream, number)) {
        uint64_t first = stream.is_open_elsewhere() || stream.queue.empty() ? 0 : stream.queue.front().number;
        bool can_run = first && is_first_ready(stream, is_waiting);
        if (!can_run) {
            if (!is_waiting) {
                return false;
            }
            Held::wait();
            continue;
        }
        bool is_unchanged =
            !stream.is_open_elsewhere() && !stream.queue.empty() && stream.queue.front().number == first;
        if (!is_unchanged) {
            continue;
        }
        Operation operation = std::move(stream.queue.front());
        stream.queue.pop_front();
        stream.num_done = operation.number;
        open_launch(stream);
        run_operation(operation);
        close_launch(stream);
    }
    return true;
}

void run_all(int device) {
    for (Stream* stream : all_streams()) {
        if (stream->device == device) {
            run_up_to(*stream, stream->num_put);
        }
    }
}

static CUresult error_after_all;

CUresult lasting_error() { return error_after_all; }

void set_lasting_error(CUresult error) { error_after_all = error; }

// A copy of the clock, because other threads may queue more on the stream meanwhile.
static CUresult wait_for(Stream& stream, uint64_t number, Clock known) {
    run_up_to(stream, number);
    host_waited_for(stream, number, known);
    return lasting_error();
}

static CUresult wait_for_stream(Stream& stream) { return wait_for(stream, stream.num_put, stream.known); }

// Return whether a stream is over up to a number, and run some of its work now and then.
static CUresult ask_for(Stream& stream, uint64_t number, const Clock& known) {
    static thread_local int num_unready_answers;
    if (is_over(stream, number)) {
        thread_heard_of(stream, number, known);
        return lasting_error();
    }
    if (++num_unready_answers % kQueriesPerStep == 0) {
        run_up_to(stream, number, false);
    }
    return CUDA_ERROR_NOT_READY;
}

// Open a kernel or a graph, which the calling thread computes until `close_launch`.
static void begin_launch(Stream& stream) {
    put_implicit_waits(stream);
    while (!is_over(stream, stream.num_put)) {  // other threads may queue more meanwhile
        run_up_to(stream, stream.num_put);
    }
    stream.num_done = ++stream.num_put;
    timeline_put(stream);
    open_launch(stream);
}

// -- calls forbidden during captures ----------------------------------------------------------------------------
//
// According to the driver's manual at cuThreadExchangeStreamCaptureMode and, for the runtime, "Prohibited and
// Unhandled Operations" of stream capture.

static thread_local CUstreamCaptureMode mode_of_thread = CU_STREAM_CAPTURE_MODE_GLOBAL;

static CUresult invalidate(Graph& graph, CUresult error) {
    bool was_valid = std::exchange(graph.is_valid, false);
    return was_valid ? error : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

static bool forbids_unsafe_calls(const Graph& graph) {
    if (mode_of_thread == CU_STREAM_CAPTURE_MODE_RELAXED) {
        return false;
    }
    if (graph.thread == std::this_thread::get_id()) {
        return graph.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    }
    return mode_of_thread == CU_STREAM_CAPTURE_MODE_GLOBAL && graph.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

// Invalidate the captures with a captured stream that meets a condition.
static CUresult refuse_if(CUresult error, const std::function<bool(const Stream&)>& is_forbidden) {
    CUresult answer = CUDA_SUCCESS;
    for (Stream* stream : all_streams()) {
        if (stream->graph && is_forbidden(*stream)) {
            answer = invalidate(*stream->graph, error);
        }
    }
    return answer;
}

CUresult refuse_unsafe_call() {
    auto is_forbidden = [](const Stream& stream) { return forbids_unsafe_calls(*stream.graph); };
    return refuse_if(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, is_forbidden);
}

CUresult refuse_wait_for_device(int device) {
    auto is_there = [device](const Stream& stream) { return stream.device == device; };
    return refuse_if(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, is_there);
}

// Work queued on the default stream would wait for blocking streams, including captured ones.
static CUresult refuse_work_on(const Stream& stream) {
    if (stream.graph) {
        return stream.graph->is_valid ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (!is_default(stream)) {
        return CUDA_SUCCESS;
    }
    auto is_waited_for = [&](const Stream& other) { return other.device == stream.device && other.is_blocking(); };
    return refuse_if(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, is_waited_for);
}

static CUresult refuse_wait_for(const Stream& stream) {
    if (stream.graph) {
        return invalidate(*stream.graph, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    CUresult error = refuse_work_on(stream);
    return error ? error : refuse_unsafe_call();
}

// -- accesses ----------------------------------------------------------------------------------------------------

static void check_address(uint64_t start, size_t nbytes, const char* what) {
    if (!is_accessible(start, nbytes)) {
        const char* why = is_pageable(start) ? "no memory of the device or page-locked memory" : "not mapped";
        report("ILLEGAL ADDRESS", "%s touches [%#lx, +%zu), which is %s", what, start, nbytes, why);
        set_lasting_error(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
}

static void check_address_of_copy(uint64_t start, size_t nbytes, const char* what) {
    if (!is_pageable(start)) {
        check_address(start, nbytes, what);
    }
}

static void declare_access(Stream& stream, uint64_t start, size_t nbytes, bool writes, const char* what) {
    if (stream.graph) {
        stream.graph->nodes.back().accesses.push_back({start, nbytes, writes, what});
        return;
    }
    check_access(stream, start, nbytes, writes, what);
    timeline_use(stream, start, nbytes, writes);
    if (stream.launched) {
        check_access_in_graph(*stream.launched, start, nbytes, writes, what);
    }
}

// -- copies and fills --------------------------------------------------------------------------------------------

// Rows of bytes with the same distance from one to the next.
struct Rows {
    uint64_t start;
    size_t row_nbytes;
    size_t num;
    size_t pitch;

    uint64_t row(size_t number) const { return start + number * pitch; }
    size_t extent() const { return (num - 1) * pitch + row_nbytes; }
    bool has_gaps() const { return num > 1 && pitch != row_nbytes; }
};

static void declare_rows(Stream& stream, const Rows& rows, bool writes, const char* what) {
    if (!rows.has_gaps() || rows.num > SOFTWARE_GPU_MOST_ROWS) {
        declare_access(stream, rows.start, rows.extent(), writes, what);
        return;
    }
    for (size_t i = 0; i < rows.num; i++) {
        declare_access(stream, rows.row(i), rows.row_nbytes, writes, what);
    }
}

static void copy_rows(const Rows& dst, const Rows& src) {
    for (size_t i = 0; i < dst.num; i++) {
        check_address_of_copy(dst.row(i), dst.row_nbytes, "a copy to");
        check_address_of_copy(src.row(i), src.row_nbytes, "a copy from");
        if (lasting_error()) {
            return;
        }
        memmove(reinterpret_cast<void*>(dst.row(i)), reinterpret_cast<void*>(src.row(i)), dst.row_nbytes);
    }
}

// Copy of ordinary memory for an asynchronous copy, because the caller may change the memory afterwards.
static std::shared_ptr<std::vector<char>> staged(const Rows& src) {
    auto bytes = std::make_shared<std::vector<char>>(src.num * src.row_nbytes);
    for (size_t i = 0; i < src.num; i++) {
        memcpy(bytes->data() + i * src.row_nbytes, reinterpret_cast<void*>(src.row(i)), src.row_nbytes);
    }
    return bytes;
}

// A copy is performed by its stream's device, which needs access to the mapped memory of both sides. Only a copy
// between contexts uses the device of each side; torch and llama.cpp (its #4620) copy virtual memory between devices
// that way.
static CUresult copy(const Rows& dst, const Rows& src, Stream& stream, bool is_async, bool is_between_contexts) {
    bool is_withheld_from = is_withheld(src.start, src.extent(), stream.device);
    if (!is_between_contexts && (is_withheld_from || is_withheld(dst.start, dst.extent(), stream.device))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult refused = is_async ? refuse_work_on(stream) : refuse_unsafe_call();
    if (refused || lasting_error()) {
        return refused ? refused : lasting_error();
    }
    bool is_staged = is_async && is_pageable(src.start) && !stream.graph;
    if (is_staged) {
        auto bytes = staged(src);
        put(stream, [dst, src, bytes] {
            copy_rows(dst, {uint64_t(bytes->data()), src.row_nbytes, src.num, src.row_nbytes});
        });
    } else {
        put(stream, [dst, src] { copy_rows(dst, src); });
        declare_rows(stream, src, false, "a copy from");
    }
    declare_rows(stream, dst, true, "a copy to");
    bool host_waits = !is_async || is_pageable(dst.start);
    return host_waits && !stream.graph ? wait_for_stream(stream) : lasting_error();
}

static CUresult copy_bytes(
    const char* name, uint64_t dst, uint64_t src, size_t nbytes, CUstream stream, bool is_async,
    bool is_between_contexts = false
) {
    return driver_call(name, [&] {
        if (!nbytes) {
            return CUDA_SUCCESS;
        }
        Rows to{dst, nbytes, 1, nbytes};
        Rows from{src, nbytes, 1, nbytes};
        return copy(to, from, stream_of(stream), is_async, is_between_contexts);
    });
}

static CUresult copy_2d(const char* name, const CUDA_MEMCPY2D& task, CUstream stream, bool is_async) {
    return driver_call(name, [&] {
        if (!task.WidthInBytes || !task.Height) {
            return CUDA_SUCCESS;
        }
        bool from_host = task.srcMemoryType == CU_MEMORYTYPE_HOST;
        bool to_host = task.dstMemoryType == CU_MEMORYTYPE_HOST;
        uint64_t src = from_host ? uint64_t(task.srcHost) : task.srcDevice;
        uint64_t dst = to_host ? uint64_t(task.dstHost) : task.dstDevice;
        src += task.srcY * task.srcPitch + task.srcXInBytes;
        dst += task.dstY * task.dstPitch + task.dstXInBytes;
        Rows from{src, task.WidthInBytes, task.Height, task.srcPitch};
        Rows to{dst, task.WidthInBytes, task.Height, task.dstPitch};
        return copy(to, from, stream_of(stream), is_async, false);
    });
}

static void fill_rows(const Rows& rows, unsigned value, size_t value_nbytes) {
    for (size_t i = 0; i < rows.num; i++) {
        check_address(rows.row(i), rows.row_nbytes, "a fill of");
        if (lasting_error()) {
            return;
        }
        char* row = reinterpret_cast<char*>(rows.row(i));
        for (size_t at = 0; at < rows.row_nbytes; at += value_nbytes) {
            memcpy(row + at, &value, value_nbytes);
        }
    }
}

static CUresult fill(
    const char* name, uint64_t dst, unsigned value, size_t value_nbytes, size_t num_values, CUstream stream
) {
    return driver_call(name, [&] {
        if (!num_values) {
            return CUDA_SUCCESS;
        }
        size_t nbytes = num_values * value_nbytes;
        Rows rows{dst, nbytes, 1, nbytes};
        if (is_pageable(dst)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (CUresult error = refuse_work_on(stream_of(stream))) {
            return error;
        }
        put(stream_of(stream), [rows, value, value_nbytes] { fill_rows(rows, value, value_nbytes); });
        declare_rows(stream_of(stream), rows, true, "a fill of");
        return lasting_error();
    });
}

// -- events ------------------------------------------------------------------------------------------------------

struct Event {
    unsigned flags = 0;
    Stream* stream = nullptr;  // stream of the last record
    uint64_t number = 0;
    Clock known;
    std::shared_ptr<Graph> graph;
    std::shared_ptr<double> milliseconds = std::make_shared<double>(0);
};

static Event& event_of(CUevent handle) { return *reinterpret_cast<Event*>(handle); }

static double now_milliseconds() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(now).count();
}

static CUresult record(Event& event, Stream& stream) {
    if (CUresult error = refuse_work_on(stream)) {
        return error;
    }
    event.graph = stream.graph;
    if (stream.graph) {
        event.known = branch_of(stream).known;
        learn(event.known, &branch_of(stream), branch_of(stream).num_put);
        return CUDA_SUCCESS;
    }
    auto milliseconds = std::make_shared<double>(0);  // of this record; an earlier one may still be in a queue
    put(stream, [milliseconds] { *milliseconds = now_milliseconds(); });
    event.milliseconds = milliseconds;
    event.stream = &stream;
    event.number = stream.num_put;
    event.known = stream.known;
    return lasting_error();
}

static CUresult refuse_wait_for(const Event& event) {
    if (!event.graph) {
        return refuse_unsafe_call();
    }
    return event.graph->is_open ? invalidate(*event.graph, CUDA_ERROR_CAPTURED_EVENT) : CUDA_ERROR_CAPTURED_EVENT;
}

// Add the stream to the capture of the event, unless it is part of it.
static CUresult wait_for_captured_event(Stream& stream, const Event& event) {
    if (!event.graph->is_open) {
        return CUDA_SUCCESS;
    }
    if (!event.graph->is_valid) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (is_default(stream)) {
        return invalidate(*event.graph, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    if (stream.graph && stream.graph != event.graph) {
        invalidate(*stream.graph, CUDA_ERROR_STREAM_CAPTURE_MERGE);
        return invalidate(*event.graph, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    }
    stream.graph = event.graph;
    stream.graph->branches.try_emplace(&stream, std::make_unique<Stream>());
    learn(branch_of(stream).known, event.known);
    return CUDA_SUCCESS;
}

static CUresult wait_for_event(Stream& stream, const Event& event) {
    if (event.graph) {
        return wait_for_captured_event(stream, event);
    }
    if (!event.stream || event.stream == &stream) {
        return CUDA_SUCCESS;
    }
    if (stream.graph) {
        return invalidate(*stream.graph, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    learn(stream.known, event.known);
    put_wait(stream, *event.stream, event.number);
    return CUDA_SUCCESS;
}

static bool has_happened(Event& event) { return !event.stream || is_over(*event.stream, event.number); }

// -- graphs ------------------------------------------------------------------------------------------------------

struct GraphHandle {
    std::shared_ptr<Graph> graph;
};

// Advance a branch to its position when the node was captured; the other branches are there already.
static void go_on_to(Graph& graph, const Graph::Node& node) {
    graph.running = node.branch;
    node.branch->num_put = node.operation.number;
    node.branch->known = node.known;
}

static void run_node(const Graph::Node& node, Stream& stream) {
    if (stream.launched) {
        go_on_to(*stream.launched, node);
    }
    for (const Touched& access : node.accesses) {
        if (node.operation.is_released) {  // copies and fills do so themselves
            check_address(access.start, access.nbytes, access.what);
        }
        declare_access(stream, access.start, access.nbytes, access.writes, access.what);
    }
    if (!lasting_error()) {
        run_operation(node.operation);
    }
}

// The order between branches is constant, so the first launch checks it. The end of the capture would be too early:
// Triton's kernels declare their accesses when they run.
static void launch(Graph& graph, Stream& stream) {
    begin_launch(stream);
    bool is_first = graph.branches.size() > 1 && !graph.running;
    stream.launched = is_first ? &graph : nullptr;
    for (const Graph::Node& node : graph.nodes) {
        run_node(node, stream);
    }
    if (is_first) {
        stream.launched = nullptr;
        graph.branches.clear();
    }
    close_launch(stream);
}

static CUstreamCaptureStatus capture_status(const Stream& stream) {
    if (!stream.graph) {
        return CU_STREAM_CAPTURE_STATUS_NONE;
    }
    return stream.graph->is_valid ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
}

// The reason why a capture cannot become a graph.
static CUresult fault_of(const Graph& graph) {
    if (!graph.is_valid) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    const Clock& joined = graph.branches.at(graph.origin)->known;
    for (const auto& [stream, branch] : graph.branches) {
        auto known = joined.find(branch.get());
        uint64_t num_joined = known == joined.end() ? 0 : known->second;
        if (stream != graph.origin && num_joined < branch->num_put) {
            return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        }
    }
    return CUDA_SUCCESS;
}

}  // namespace software_gpu

using namespace software_gpu;

struct SoftwareGpuMessage {
    Stream* stream;
    uint64_t number;
    std::shared_ptr<bool> is_over;
};

extern "C" {

// -- for the other libraries -------------------------------------------------------------------------------------

int software_gpu_begin_kernel(CUstream handle, const char* name) {
    count("kernel");
    count(name);
    if (CUresult error = driver_state()) {
        return error;
    }
    Held held;
    if (CUresult error = refuse_work_on(stream_of(handle))) {
        return error;
    }
    begin_launch(stream_of(handle));
    return CUDA_SUCCESS;
}

void software_gpu_continue_kernel(CUstream handle) {
    Held held;
    begin_launch(stream_of(handle));
}

void software_gpu_end_kernel(CUstream handle) {
    Held held;
    close_launch(stream_of(handle));
}

void software_gpu_access(CUstream handle, uint64_t address, size_t nbytes, int writes, const char* what) {
    if (!nbytes) {
        return;
    }
    Held held;
    check_address(address, nbytes, what);
    declare_access(stream_of(handle), address, nbytes, writes, what);
}

SoftwareGpuMessage* software_gpu_enqueue_message(CUstream handle, const char*) {
    Held held;
    Stream& stream = stream_of(handle);
    auto is_over = std::make_shared<bool>(false);
    Operation& operation = put(stream, [] {});
    operation.is_ready = [is_over](bool) { return *is_over; };
    return new SoftwareGpuMessage{&stream, stream.num_put, is_over};
}

void software_gpu_run_before_message(SoftwareGpuMessage* message) {
    Held held;
    run_up_to(*message->stream, message->number - 1);
}

void software_gpu_end_message(SoftwareGpuMessage* message) {
    Held held;
    *message->is_over = true;
    Held::notify();
    delete message;
}

int software_gpu_is_capturing(CUstream handle) {
    Held held;
    return stream_of(handle).graph != nullptr;
}

int software_gpu_capture(CUstream handle, void (*run)(void*), void* argument, void (*release)(void*)) {
    std::shared_ptr<void> owned(argument, release);  // released without the lock
    Held held;
    if (CUresult error = refuse_work_on(stream_of(handle))) {
        return error;
    }
    Operation& operation = put(stream_of(handle), [run, owned] { run(owned.get()); });
    operation.is_released = true;
    return CUDA_SUCCESS;
}

// -- copies and fills --------------------------------------------------------------------------------------------

CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t nbytes) {
    return copy_bytes("cuMemcpy", dst, src, nbytes, nullptr, false);
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
    return copy_bytes("cuMemcpyAsync", dst, src, nbytes, stream, true);
}

CUresult cuMemcpyHtoD(CUdeviceptr dst, const void* src, size_t nbytes) {
    return copy_bytes("cuMemcpy", dst, uint64_t(src), nbytes, nullptr, false);
}

CUresult cuMemcpyDtoH(void* dst, CUdeviceptr src, size_t nbytes) {
    return copy_bytes("cuMemcpy", uint64_t(dst), src, nbytes, nullptr, false);
}

// The host does not wait for it, as on hardware.
CUresult cuMemcpyDtoD(CUdeviceptr dst, CUdeviceptr src, size_t nbytes) {
    return copy_bytes("cuMemcpy", dst, src, nbytes, nullptr, true);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void* src, size_t nbytes, CUstream stream) {
    return copy_bytes("cuMemcpyAsync", dst, uint64_t(src), nbytes, stream, true);
}

CUresult cuMemcpyDtoHAsync(void* dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
    return copy_bytes("cuMemcpyAsync", uint64_t(dst), src, nbytes, stream, true);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
    return copy_bytes("cuMemcpyAsync", dst, src, nbytes, stream, true);
}

CUresult cuMemcpyPeerAsync(
    CUdeviceptr dst, CUcontext, CUdeviceptr src, CUcontext, size_t nbytes, CUstream stream
) {
    return copy_bytes("cuMemcpyPeerAsync", dst, src, nbytes, stream, true, true);
}

CUresult cuMemcpy2D(const CUDA_MEMCPY2D* task) { return copy_2d("cuMemcpy2D", *task, nullptr, false); }

CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D* task) { return copy_2d("cuMemcpy2D", *task, nullptr, false); }

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* task, CUstream stream) {
    return copy_2d("cuMemcpy2DAsync", *task, stream, true);
}

CUresult cuMemsetD8(CUdeviceptr dst, unsigned char value, size_t num) {
    return fill("cuMemset", dst, value, 1, num, nullptr);
}

CUresult cuMemsetD32(CUdeviceptr dst, unsigned value, size_t num) {
    return fill("cuMemset", dst, value, 4, num, nullptr);
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t num, CUstream stream) {
    return fill("cuMemset", dst, value, 1, num, stream);
}

CUresult cuMemsetD16Async(CUdeviceptr dst, unsigned short value, size_t num, CUstream stream) {
    return fill("cuMemset", dst, value, 2, num, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned value, size_t num, CUstream stream) {
    return fill("cuMemset", dst, value, 4, num, stream);
}

// -- streams -----------------------------------------------------------------------------------------------------

CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int priority) {
    return driver_call("cuStreamCreate", [&] {
        auto* stream = new Stream;
        stream->device = current_device();
        stream->flags = flags;
        stream->priority = priority;
        created_streams().push_back(stream);
        *handle = reinterpret_cast<CUstream>(stream);
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamCreate(CUstream* handle, unsigned flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

// Its record stays, because events and clocks refer to it.
CUresult cuStreamDestroy(CUstream handle) {
    return driver_call("cuStreamDestroy", [&] {
        Stream& stream = stream_of(handle);
        run_up_to(stream, stream.num_put);
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamSynchronize(CUstream handle) {
    return driver_call("cuStreamSynchronize", [&] {
        CUresult error = refuse_wait_for(stream_of(handle));
        return error ? error : wait_for_stream(stream_of(handle));
    });
}

CUresult cuStreamQuery(CUstream handle) {
    return driver_call("cuStreamQuery", [&] {
        Stream& stream = stream_of(handle);
        if (CUresult error = refuse_wait_for(stream)) {
            return error;
        }
        return ask_for(stream, stream.num_put, stream.known);
    });
}

CUresult cuStreamGetPriority(CUstream handle, int* priority) {
    Held held;
    *priority = stream_of(handle).priority;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
    Held held;
    *flags = stream_of(handle).flags;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
    Held held;
    *id = reinterpret_cast<uint64_t>(&stream_of(handle));
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
    Held held;
    *context = primary_context(stream_of(handle).device);
    return CUDA_SUCCESS;
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice* device) {
    Held held;
    *device = stream_of(handle).device;
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
    return driver_call("cuStreamWaitEvent", [&] {
        Stream& stream = stream_of(handle);
        if (stream.graph && flags & CU_EVENT_WAIT_EXTERNAL) {
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        CUresult error = refuse_work_on(stream);
        return error ? error : wait_for_event(stream, event_of(event));
    });
}

// Runs before the return: the host may wait for it by means that the driver does not see.
CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* argument) {
    return driver_call("cuLaunchHostFunc", [&] {
        Stream& stream = stream_of(handle);
        if (CUresult error = refuse_work_on(stream)) {
            return error;
        }
        Operation& operation = put(stream, [function, argument] { function(argument); });
        operation.is_released = true;
        if (!stream.graph) {
            run_up_to(stream, stream.num_put);
        }
        return CUDA_SUCCESS;
    });
}

// -- events ------------------------------------------------------------------------------------------------------

CUresult cuEventCreate(CUevent* handle, unsigned flags) {
    return driver_call("cuEventCreate", [&] {
        bool is_timed = !(flags & CU_EVENT_DISABLE_TIMING);
        if (is_timed && flags & CU_EVENT_INTERPROCESS) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        auto* event = new Event;
        event->flags = flags;
        *handle = reinterpret_cast<CUevent>(event);
        return CUDA_SUCCESS;
    });
}

CUresult cuEventDestroy(CUevent handle) {
    return driver_call("cuEventDestroy", [&] {
        delete &event_of(handle);
        return CUDA_SUCCESS;
    });
}

CUresult cuEventRecord(CUevent handle, CUstream stream) {
    return driver_call("cuEventRecord", [&] { return record(event_of(handle), stream_of(stream)); });
}

CUresult cuEventRecordWithFlags(CUevent handle, CUstream stream, unsigned flags) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuStreamIsCapturing(stream, &status);
    bool is_known = status == CU_STREAM_CAPTURE_STATUS_NONE || !(flags & CU_EVENT_RECORD_EXTERNAL);
    return is_known ? cuEventRecord(handle, stream) : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuEventQuery(CUevent handle) {
    return driver_call("cuEventQuery", [&] {
        const Event& event = event_of(handle);
        if (CUresult error = refuse_wait_for(event)) {
            return error;
        }
        return event.stream ? ask_for(*event.stream, event.number, event.known) : lasting_error();
    });
}

CUresult cuEventSynchronize(CUevent handle) {
    return driver_call("cuEventSynchronize", [&] {
        const Event& event = event_of(handle);
        if (CUresult error = refuse_wait_for(event)) {
            return error;
        }
        return event.stream ? wait_for(*event.stream, event.number, event.known) : lasting_error();
    });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    return driver_call("cuEventElapsedTime", [&] {
        Event& first = event_of(start);
        Event& second = event_of(end);
        bool are_timed = !((first.flags | second.flags) & CU_EVENT_DISABLE_TIMING);
        if (!are_timed || !first.stream || !second.stream) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
        if (!has_happened(first) || !has_happened(second)) {
            return CUDA_ERROR_NOT_READY;
        }
        *milliseconds = float(*second.milliseconds - *first.milliseconds);
        return CUDA_SUCCESS;
    });
}

// -- graphs ------------------------------------------------------------------------------------------------------

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    return driver_call("cuStreamBeginCapture", [&] {
        Stream& stream = stream_of(handle);
        if (stream.graph || is_default(stream)) {
            return CUDA_ERROR_ILLEGAL_STATE;
        }
        run_up_to(stream, stream.num_put);
        stream.graph = std::make_shared<Graph>(Graph{.mode = mode, .origin = &stream});
        stream.graph->branches[&stream] = std::make_unique<Stream>();
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    return driver_call("cuStreamEndCapture", [&] {
        *graph = nullptr;
        std::shared_ptr<Graph> captured = stream_of(handle).graph;
        if (!captured) {
            return CUDA_ERROR_ILLEGAL_STATE;
        }
        if (captured->origin != &stream_of(handle)) {
            return invalidate(*captured, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        bool is_own = captured->thread == std::this_thread::get_id();
        if (!is_own && captured->mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
            return invalidate(*captured, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        for (Stream* stream : all_streams()) {
            if (stream->graph == captured) {
                stream->graph = nullptr;
            }
        }
        captured->is_open = false;
        if (CUresult error = fault_of(*captured)) {
            return error;
        }
        for (const auto& [stream, branch] : captured->branches) {
            branch->num_put = 0;  // before the first launch
        }
        *graph = reinterpret_cast<CUgraph>(new GraphHandle{captured});
        return CUDA_SUCCESS;
    });
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
    Held held;
    *status = capture_status(stream_of(handle));
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo(
    CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph, const CUgraphNode** dependencies,
    const CUgraphEdgeData** edges, size_t* num_dependencies
) {
    Held held;
    Stream& stream = stream_of(handle);
    *status = capture_status(stream);
    if (id) {
        *id = stream.graph ? stream.graph->id : 0;
    }
    if (graph) {
        *graph = nullptr;  // it has no handle before its capture ends
    }
    if (dependencies) {
        *dependencies = nullptr;
    }
    if (edges) {
        *edges = nullptr;
    }
    if (num_dependencies) {
        *num_dependencies = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    std::swap(mode_of_thread, *mode);
    return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode*, size_t* num) {
    Held held;
    *num = reinterpret_cast<GraphHandle*>(graph)->graph->nodes.size();
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
    return driver_call("cuGraphInstantiate", [&] {
        auto* handle = reinterpret_cast<GraphHandle*>(graph);
        *executable = reinterpret_cast<CUgraphExec>(new GraphHandle{handle->graph});
        return CUDA_SUCCESS;
    });
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream handle) {
    return driver_call("cuGraphLaunch", [&] {
        std::shared_ptr<Graph> graph = reinterpret_cast<GraphHandle*>(executable)->graph;  // kept alive
        Stream& stream = stream_of(handle);
        if (stream.graph) {
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        if (CUresult error = refuse_work_on(stream)) {
            return error;
        }
        launch(*graph, stream);
        return lasting_error();
    });
}

CUresult cuGraphUpload(CUgraphExec, CUstream) { return CUDA_SUCCESS; }

static void release_graph(void* handle) {
    std::shared_ptr<Graph> graph;
    {
        Held held;
        graph = reinterpret_cast<GraphHandle*>(handle)->graph;
        delete reinterpret_cast<GraphHandle*>(handle);
    }
    // Its contents are released without the lock, because destructors of tensors may call the driver.
}

CUresult cuGraphDestroy(CUgraph graph) {
    release_graph(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec executable) {
    release_graph(executable);
    return CUDA_SUCCESS;
}
}
