"""A GPU in software: torch's and vLLM's CUDA wheels, NCCL's process groups and the product on a
CPU.

Device memory is made of memory files, and kernels are those of the CPU. The libraries of `native/`
replace NVIDIA's driver, runtime, NCCL and NVML; torch, vLLM, the product and the files of packages
are unchanged:

    python -m tests.software_gpu --gpus 2 -- python -c "import torch; print(torch.randn(3,
    device='cuda:1'))"

    python, torch, vLLM, cuda-bindings, ProcessGroupNCCL     the real ones
        libcudart.so.13    runtime.cpp       calls the driver; names kernels without code of the CPU
        libnccl.so.2       nccl.cpp, nccl_*  messages over shared memory, in the order of streams
        libcuda.so.1       memory, virtual memory and its rules, streams that run late,
                           checker.cpp: reports accesses and releases without a wait, with both
                           operations; timeline.cpp: possible overlap, by bytes and bandwidths
        libnvidia-ml.so.1  nvml.cpp          queries of programs before they use CUDA
    operators.so           operators of aten on CUDA tensors run their CPU kernels
    site/                  loads operators.so at `import torch`; has what exists only for CUDA

Tests of memory need only libcuda.so.1: `load_driver` of device.py uses the real cuda-bindings with
it, and a torch without CUDA.

It proves interfaces, contents, bytes, order and behaviour under shortage. It gives a lower bound
for the time of a sequence of calls, and no information about kernels of hardware, locks of the
driver and access between real GPUs.
"""
