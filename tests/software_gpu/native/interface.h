// Functions that the libraries of the software GPU offer each other and tests (by ctypes), in addition to CUDA's.
//
//   libcuda.so.1     memory.cpp, virtual_memory.cpp, streams.cpp, checker.cpp, devices.cpp, accounts.cpp
//   libcudart.so.13  runtime.cpp, on libcuda
//   libnccl.so.2     nccl.cpp and nccl_*.cpp, on libcuda
//   libnvidia-ml.so.1 nvml.cpp, alone
//   operators.so     operators.cpp, on torch, libcudart and libcuda
//
// Addresses are those of this process: device memory is a memory file that is mapped here.
#pragma once
#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// -- kernels: code of the CPU that runs at once, in the thread that launches it ------------------------------------

// Begin a kernel on `stream` after running all earlier work of the stream. The kernel's accesses are declared next.
// Until its end other threads wait for the stream; a kernel within it is part of it. Returns an error of the driver,
// without beginning the kernel, if the capture of another stream forbids it.
int software_gpu_begin_kernel(CUstream stream, const char* name);
void software_gpu_end_kernel(CUstream stream);

// Continue a kernel that ended in the meantime so that its thread could allocate memory. No thread waits for another
// thread's memory during a kernel: the holder of the allocator's lock may be waiting for the kernel's end.
void software_gpu_continue_kernel(CUstream stream);

// Accesses with gaps are declared row by row; with more rows than this, as one range.
enum { SOFTWARE_GPU_MOST_ROWS = 1024 };

// Declare that the last operation on `stream` reads or writes these bytes. Reports a conflict with an unordered
// operation of another stream, and addresses that are not mapped. `what` must never be freed.
void software_gpu_access(CUstream stream, uint64_t address, size_t nbytes, int writes, const char* what);

// Whether the device of this thread's context, or without a context any device, may access all bytes now. False for a
// reserved address range without memory, or without access for this device.
int software_gpu_is_accessible(uint64_t address, size_t nbytes);

// -- messages: operations of a stream that another thread carries out ----------------------------------------------

typedef struct SoftwareGpuMessage SoftwareGpuMessage;

// Queue a message on `stream`: later work waits for its end. The message's accesses are declared next.
SoftwareGpuMessage* software_gpu_enqueue_message(CUstream stream, const char* name);

// Run or wait for the stream's work before the message. Called by the thread that carries it out.
void software_gpu_run_before_message(SoftwareGpuMessage* message);

// End the message, so that its stream continues. Frees the message.
void software_gpu_end_message(SoftwareGpuMessage* message);

// -- graphs --------------------------------------------------------------------------------------------------------

// Whether work queued on `stream` becomes part of a graph instead of running.
int software_gpu_is_capturing(CUstream stream);

// Add a function to the graph that `stream` is captured into; `release(argument)` is called when the graph is freed.
// Returns an error of the driver if the capture is invalid. The function's accesses are declared next.
int software_gpu_capture(CUstream stream, void (*run)(void*), void* argument, void (*release)(void*));

// -- accounts ------------------------------------------------------------------------------------------------------

// Count a call of `name`, and return the error that a test has injected into this call (0: none).
int software_gpu_count(const char* name);

// Likewise for events that are not calls of the program and not counted, such as "ncclSend on its way".
int software_gpu_asked_failure(const char* name);

// Make `num` calls of `name` fail with `error`, from call number `first` on (1: the next one). 0 calls cancel that.
void software_gpu_fail(const char* name, uint64_t first, uint64_t num, int error);

// Write all counts since the process began, "name number\n" sorted by name; return the required size in bytes.
size_t software_gpu_counts(char* text, size_t room);

// Take bytes of the current device's memory without an allocation; false if there are too few.
int software_gpu_take(int device, int64_t nbytes);
void software_gpu_give(int device, int64_t nbytes);

// Report a fault of the program to stderr, and to the file SOFTWARE_GPU_REPORTS.
void software_gpu_report(const char* kind, const char* text);

#ifdef __cplusplus
}
#endif
