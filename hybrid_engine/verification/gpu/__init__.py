"""`python -m hybrid_engine check-gpu`: does what was written for GPUs work on this machine's?

    check_gpu.py          the stages: what each needs, its processes, what came of them
    machine.py            facts of the machine; gpus.py: its GPUs, and who has their memory
    needs.py              what a stage needs of each GPU that it runs on
    checks.py             what a check is; running checks, and reading results of a process that died

    memory_checks.py      stage 1, one GPU without vLLM, by the figures of
      offload_figures.py    offload, onload and reshard on one GPU
      pull_figures.py       two processes that read each other's device memory
      timings.py            the clock, and the floors: plain copies of as many bytes
      flat_models.py        what is moved: a model as both sides hold it, without either engine
      targets.py            a GPU, or the CPU with
      fake_cuda_driver.py     a model of CUDA's driver, which the tests have too
    part_checks.py        stage 2, one GPU with Megatron and vLLM: each alone; small_job.py is their configuration
    engine_checks.py      then both, by
      shortage.py           a device without memory, in which a wake-up fails
      process_state.py      what vLLM may change in the process, or leave there
      fresh_checks.py       a vLLM of its own, in another process, says the same
    rank_checks.py        stage 3, two or more GPUs: cases of `verify`

benchmarks/gpu.py prints the figures of stage 1 for larger models. **Nothing here has run on a GPU yet**; what runs
without one is `--device cpu`.
"""
