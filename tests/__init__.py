"""Tests. Their folders mirror hybrid_engine, megatron_patches, benchmarks and examples.

    harness/      what tests run on: ranks, marks, kills at every step, small disks
    zoo/          the small models: a registry of families, as transformers, Megatron and vLLM hold them
    hybrid_engine/end_to_end      both engines in one job; hybrid_engine/tools/verify/matrix.py: every layout and family
    gpu/          checks of what was written for GPUs (make gpu-check), as far as possible on the CPU too
    faults/       real jobs that are broken on purpose (make test-faults)
    megatron_lm/  Megatron-LM's own unit tests, with our hooks and without

Marks:

    ranks     starts processes that form a group. Given by the fixtures `ranks` and `engines`; a test that starts
              programs (torchrun, `run_ranks`) is marked by hand, and fails if it is not
    engines   builds Megatron or vLLM on them. Given by the fixture `engines`; a rank that does so without it fails
    slow      takes more than a few seconds
    faults    left out unless asked for by `-m faults`
    gpu       needs a CUDA device, or as many as its argument says

`make test-fast` is `-m "not ranks and not slow"`: after every change. `make test` is all but `faults`.

A test on ranks is a function that runs there and returns what it saw, and tests of that:

    @dataclass(frozen=True)
    class Seen:
        total: int

    def add_up() -> Seen:                                     # on every rank: its own imports, its own process group
        dist.init_process_group("gloo")
        ...
        return Seen(total)

    @pytest.fixture(scope="module")                           # one launch for all tests of the module
    def seen(ranks: Ranks) -> list[Seen]:
        return ranks.launch(add_up, 2)                        # by rank; add_up is of this module

    def test_the_total_is_the_same_everywhere(seen: list[Seen]) -> None:
        assert [found.total for found in seen] == [3, 3]

One test has one reason to fail. Launches are shared (module scope, `launch_in_turn`), since starting ranks costs more
than what is asked of them; a call that fails is the failure of its own tests only.

`make test` runs two files at a time, so a test looks at its own processes, ports and names, not at the machine's.
"""
