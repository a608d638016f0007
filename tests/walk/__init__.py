"""A random walk over users' actions on an engine, checked by an oracle that gathers the weights
itself.

walk.py           the walk: contexts, writes, refused calls, permitted outcomes, findings
oracle.py         expected weights: bitwise copies of the trainer's own tensors
fsdp2.py          a transformers model sharded by FSDP2, and every way to write it
megatron.py       a Megatron model with DDP and the distributed optimizer, and every way to write it
inference.py      a plain inference side in memory, for switches of milliseconds; or vLLM
interruptions.py  exceptions at any call of a switch, as a signal handler raises them
runs.py           walks on ranks; WALK_SEED repeats the one that `make test-faults` has named
"""
