"""Tests. Their folders mirror hybrid_engine, megatron_patches, benchmarks and examples.

    harness/      launcher of ranks, marks, kills at every step, small disks
    zoo/          small models: a registry of families for transformers, Megatron and vLLM
    hybrid_engine/end_to_end      both engines in one job; tools/verify/matrix.py: every layout
    gpu/          checks of the code for GPUs (make gpu-check); most of them also run on the CPU
    faults/       real jobs, broken on purpose (make test-faults)
    megatron_lm/  Megatron-LM's own unit tests, with and without our hooks

Marks:

    ranks     starts processes that form a group. Set by `on_ranks`, `on_engines`, the fixtures
              `ranks` and `engines`; a test that starts programs (torchrun, `run_ranks`) must carry
              it, or fails
    engines   builds Megatron or vLLM on ranks. Set by `on_engines` and the fixture `engines`; a
              rank that does so without it fails
    slow      takes more than a few seconds
    faults    deselected unless `-m faults` is given
    gpu       needs a CUDA device, or as many devices as its argument

`make test-fast` is `-m "not ranks and not slow"`, for use after every change. `make test` runs all
but `faults`.

The body of a test on ranks runs on every rank; its asserts are about that rank, or about all of
them after a collective, and travel back:

    @on_ranks(2)                                              # or `on_engines(2)`
    def test_the_total_is_the_same_on_all_ranks() -> None:  # its own imports and process group
        dist.init_process_group("gloo")
        ...
        assert total == 3

What compares runs on different numbers of ranks launches functions that return observations, with
the fixtures `ranks` or `engines` (tests/harness/launch.py).

A test has one reason to fail. Tests of a module share launches, because starting ranks takes longer
than most tests; a failed call fails only its own tests.

`make test` runs two files at a time, so a test inspects only its own processes, ports and names.
"""
