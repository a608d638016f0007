"""Stand-ins with which Megatron trains without CUDA.

`apply` imports them if its default groups include "cpu".

core.py         group "cpu": megatron-core on CPU tensors and gloo
training.py     group "cpu_training": megatron.training and its scripts, in addition
rl.py           group "cpu_rl": megatron.rl, in addition to both
cuda_names.py   the `torch` that megatron's modules use, and collectives that gloo lacks
"""
