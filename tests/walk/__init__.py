"""A random walk over what users do with an engine, against an oracle that gathers the weights by itself.

walk.py                the walk: contexts, writes, calls that must be refused, how each call may end, what it finds
oracle.py              what the weights are: the trainer's own tensors, kept bit by bit
fsdp2.py               a transformers model sharded by FSDP2, and every way to write it
megatron.py            a Megatron model with DDP and the distributed optimizer, and every way to write it
inference.py           a plain inference side in memory, so that a switch takes milliseconds; or vLLM
interruptions.py       exceptions at any call of a switch, as a signal handler raises them
interrupted_saves.py   Ctrl-C at random moments of a script that saves checkpoints
runs.py                walks on ranks; `python -m tests.walk.runs --help`
"""
