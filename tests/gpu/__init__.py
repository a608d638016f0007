"""Checks of the code for GPUs: `make gpu-check`, or `pytest tests/gpu --device cuda`; see
docs/gpu.md.

    conftest.py               a process per class, records, the time budget
    needs.py                  requirements of each stage on the machine
    test_stage1_memory.py     one GPU without vLLM: driver, buffers, offloads, reads by a process
    test_stage2a_alone.py     one GPU: vLLM's libraries, Megatron and vLLM, each alone
    test_stage2b_together.py  both engines in one process
    test_stage2c_fresh.py     completions of a separate vLLM equal stage 2b's
    test_stage2d_server.py    `vllm serve` on the trainer's GPU, filled by the trainer
    test_stage3_ranks.py      two GPUs or more: cases of `verify`
    small_job.py              the configuration of stage 2
    process_state.py          state of the process that vLLM could change or leave behind

benchmarks/ (offload_figures.py, pull_figures.py) measures, and prints the figures of larger models.
Limits are far from the expected values: they detect failures. None was tuned on a GPU. **Nothing
here has run on one yet.**
"""
