"""Megatron-LM's own unit tests on CPU: our hooks must not change their outcomes.

    test_unit_tests.py                starts pytest on ranks in a checkout of Megatron-LM; compares
      └── plugin/megatron_lm_on_cpu.py    their pytest plugin: our patches, and CPU devices for CUDA

Requires a checkout of Megatron-LM core_v0.16.1 in MEGATRON_LM_PATH.
"""
