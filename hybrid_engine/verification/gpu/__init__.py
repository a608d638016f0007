"""What is measured on a GPU, without either engine; benchmarks/gpu.py prints it.

    offload_figures.py    offload, onload and reshard on one GPU
    pull_figures.py       two processes that read each other's device memory
    timings.py            the clock, and the floors: plain copies of as many bytes
    flat_models.py        what is moved: a model as both sides hold it, without either engine
    targets.py            a GPU, or the CPU with
    fake_cuda_driver.py     a model of CUDA's driver, which the tests have too
"""
