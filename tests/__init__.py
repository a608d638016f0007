"""Tests. Their folders mirror hybrid_engine, megatron_patches, benchmarks and examples.

    harness/      launcher of ranks, marks, kills at every step, small disks
    zoo/          small models: a registry of families for transformers, Megatron and vLLM
    hybrid_engine/end_to_end      both engines in one job; hybrid_engine/tools/verify/matrix.py: every layout and family
    gpu/          checks of the code for GPUs (make gpu-check); most of them also run on the CPU
    faults/       real jobs, broken on purpose (make test-faults)
    megatron_lm/  Megatron-LM's own unit tests, with and without our hooks

Marks:

    ranks     starts processes that form a group. Set by the fixtures `ranks` and `engines`; a test that starts
              programs (torchrun, `run_ranks`) must carry it, or fails
    engines   builds Megatron or vLLM on ranks. Set by the fixture `engines`; a rank that does so without it fails
    slow      takes more than a few seconds
    faults    deselected unless `-m faults` is given
    gpu       needs a CUDA device, or as many devices as its argument

`make test-fast` is `-m "not ranks and not slow"`, for use after every change. `make test` runs all
but `faults`.

A test on ranks consists of a function that runs on every rank and returns observations, and tests
of these:

    @dataclass(frozen=True)
    class Observed:
        total: int

    def add_up() -> Observed:                                 # on every rank: its own imports, its own process group
        dist.init_process_group("gloo")
        ...
        return Observed(total)

    @pytest.fixture(scope="module")                           # one launch for all tests of the module
    def observations(ranks: Ranks) -> list[Observed]:
        return ranks.launch(add_up, 2)                        # by rank; add_up is a function of this module

    def test_the_total_is_the_same_on_all_ranks(observations: list[Observed]) -> None:
        assert [observed.total for observed in observations] == [3, 3]

A test has one reason to fail. Tests share launches (module scope, `launch_in_turn`), because
starting ranks takes longer than most tests; a failed call fails only its own tests.

`make test` runs two files at a time, so a test inspects only its own processes, ports and names.
"""
