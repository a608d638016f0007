"""Tests of megatron_patches; `gpt` builds the small model that other tests reuse."""
