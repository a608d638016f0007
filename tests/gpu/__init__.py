"""Checks on GPUs of what was written for GPUs: `make gpu-check`, or `pytest tests/gpu --device cuda`; docs/gpu.md.

    conftest.py               a process for each class, records, the budget
    needs.py                  what a stage needs of a machine
    test_stage1_memory.py     one GPU without vLLM: the driver, buffers, offloads, reads of another process
    test_stage2a_alone.py     one GPU: vLLM's libraries, Megatron, vLLM, each alone
    test_stage2b_together.py  then both engines in one process
    test_stage2c_fresh.py     a vLLM of its own says the same
    test_stage2d_server.py    and so does `vllm serve` on the trainer's GPU, which that one fills
    test_stage3_ranks.py      two GPUs or more: cases of `verify`
    small_job.py              the configuration of stage 2
    process_state.py          what vLLM may change in the process, or leave there

What is measured is in benchmarks/ (offload_figures.py, pull_figures.py), which prints it for larger models. Limits are
far from what is expected: they find what does not work. None was tuned on a GPU. **Nothing here has run on one yet.**
"""
