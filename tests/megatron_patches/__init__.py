"""Tests of megatron_patches. `gpt` builds a small model, also for other tests."""
