"""Megatron-LM's own unit tests on CPU, with our patches: that the hooks change none of their outcomes.

    unit_tests.run()          starts pytest on several ranks in a checkout of Megatron-LM, brings back outcomes
      └── plugin/megatron_lm_on_cpu.py    what those ranks load: our patches, and CUDA's spelling in the tests
    python -m tests.megatron_lm           the figures
    test_unit_tests.py                    the same, as a test

Needs a checkout of Megatron-LM core_v0.16.1, named by MEGATRON_LM_PATH.
"""
