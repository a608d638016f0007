"""Stand-ins with which Megatron trains without CUDA. `apply` imports them where its default groups have "cpu".

core.py         group "cpu": megatron-core on CPU tensors and gloo
training.py     group "cpu_training": megatron.training and its scripts, on top
rl.py           group "cpu_rl": megatron.rl, on top of both
cuda_names.py   the `torch` that megatron's modules see, and the few collectives that gloo lacks
"""
