"""Megatron-LM's own unit tests on CPU, with our patches: that the hooks change none of their outcomes.

    test_unit_tests.py                starts pytest on several ranks in a checkout of Megatron-LM, compares outcomes
      └── plugin/megatron_lm_on_cpu.py    what those ranks load: our patches, and CUDA's spelling in the tests

Needs a checkout of Megatron-LM core_v0.16.1, named by MEGATRON_LM_PATH.
"""
