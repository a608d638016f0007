"""A GPU in software: torch's and vLLM's CUDA wheels, NCCL's process groups and the product on a CPU.

Memory of the device is memory files, and kernels are those of the CPU. The libraries of `native/` stand in for NVIDIA's
driver, runtime, NCCL and NVML; nothing of torch, vLLM or the product is changed, and no file of a package:

    python -m tests.software_gpu --gpus 2 -- python -c "import torch; print(torch.randn(3, device='cuda:1'))"

    python, torch, vLLM, cuda-bindings, ProcessGroupNCCL     the real ones
        libcudart.so.13    runtime.cpp       calls the driver; names a kernel that has no code of the CPU
        libnccl.so.2       nccl.cpp, nccl_*  messages over shared memory, in the order of streams
        libcuda.so.1       memory, virtual memory and its rules, streams that run as late as they may, and
                           checker.cpp: what is touched or released without a wait is reported with both operations;
                           timeline.cpp: what could go on at once, by bytes and bandwidths
        libnvidia-ml.so.1  nvml.cpp          what programs ask before they touch CUDA
    operators.so           operators of aten on CUDA tensors run their CPU kernels over the same memory
    site/                  loads operators.so at `import torch`, and has the operators that only CUDA has

Tests of memory need libcuda.so.1 alone: `load_driver` of device.py puts the real cuda-bindings over it, beside a torch
without CUDA.

It proves interfaces, contents, bytes, order and behaviour under shortage. Of speed it says what an order of calls
allows at best; it says nothing of hardware's own kernels, of the driver's locks and of access between real GPUs.
"""
