// What the libraries of the software GPU offer one another beside CUDA's own interface, and tests by ctypes.
//
//   libcuda.so.1     memory.cpp, virtual_memory.cpp, streams.cpp, checker.cpp, devices.cpp, accounts.cpp
//   libcudart.so.13  runtime.cpp, on libcuda
//   libnccl.so.2     nccl.cpp and nccl_*.cpp, on libcuda
//   libnvidia-ml.so.1 nvml.cpp, alone
//   operators.so     operators.cpp, on torch, libcudart and libcuda
//
// Addresses are addresses of this process: memory of the device is a memory file that is mapped here.
#pragma once
#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// -- kernels: code of the CPU that runs at once, in the thread that launches it ------------------------------------

// Put a kernel on `stream`, and run everything that was put there before it. Accesses of the kernel are declared next.
// Until its end, whoever waits for the stream in another thread waits; a kernel within it is a part of it. Returns an
// error of the driver where a capture of another stream forbids the kernel; it has not begun then.
int software_gpu_begin_kernel(CUstream stream, const char* name);
void software_gpu_end_kernel(CUstream stream);

// Go on with a kernel that ended meanwhile, so that its thread could ask for memory. No thread waits for another
// one's memory within a kernel: who has the allocator's lock may be waiting for the kernel's end.
void software_gpu_continue_kernel(CUstream stream);

// What has gaps is said row by row, and of more rows than these all from the first to the last.
enum { SOFTWARE_GPU_MOST_ROWS = 1024 };

// Say that the last operation on `stream` reads or writes these bytes. Reports a conflict with an operation of
// another stream that nothing orders before it, and an address that is not mapped. `what` must live for ever.
void software_gpu_access(CUstream stream, uint64_t address, size_t nbytes, int writes, const char* what);

// Whether the device of this thread's context may touch all bytes now, or without a context any device: false for a
// reserved address range without memory, or without access for this device.
int software_gpu_is_accessible(uint64_t address, size_t nbytes);

// -- messages: operations of a stream that another thread carries out ----------------------------------------------

typedef struct SoftwareGpuMessage SoftwareGpuMessage;

// Put a message on `stream`: what is put there later waits for its end. Accesses of the message are declared next.
SoftwareGpuMessage* software_gpu_enqueue_message(CUstream stream, const char* name);

// Run, or wait for, what its stream has before the message. Called by the thread that carries it out.
void software_gpu_run_before_message(SoftwareGpuMessage* message);

// The message is over, and its stream goes on. Frees it.
void software_gpu_end_message(SoftwareGpuMessage* message);

// -- graphs --------------------------------------------------------------------------------------------------------

// Whether what is put on `stream` becomes part of a graph instead of running.
int software_gpu_is_capturing(CUstream stream);

// Add a function to the graph that `stream` is captured into; `release(argument)` is called when the graph goes. Returns
// an error of the driver if the capture is invalid. What the function touches is declared next.
int software_gpu_capture(CUstream stream, void (*run)(void*), void* argument, void (*release)(void*));

// -- accounts ------------------------------------------------------------------------------------------------------

// Count a call of `name`, and return the error that a test asked for at this call (0: none).
int software_gpu_count(const char* name);

// The same for what is no call of the program's, and is not counted: "ncclSend on its way".
int software_gpu_asked_failure(const char* name);

// Let calls of `name` fail with `error`: so many of them, from the one with this number from now on (1: the next one).
// Without any the order is taken back.
void software_gpu_fail(const char* name, uint64_t first, uint64_t num, int error);

// Write all counts since the process began, "name number\n" in the order of names; returns the bytes that it takes.
size_t software_gpu_counts(char* text, size_t room);

// Take bytes of the current device's memory for something that is not an allocation; false if there are not so many.
int software_gpu_take(int device, int64_t nbytes);
void software_gpu_give(int device, int64_t nbytes);

// Say something about the program: to stderr, and to the file named by SOFTWARE_GPU_REPORTS.
void software_gpu_report(const char* kind, const char* text);

#ifdef __cplusplus
}
#endif
