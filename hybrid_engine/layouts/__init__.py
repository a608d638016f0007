"""Layouts of all ranks, computed from a name table and parallel sizes, without engine or weights.

    TrainParallelism, ModelTable      --training_side-->    SideLayout (Megatron's)
    InferenceParallelism, ModelTable  --inference_side-->   SideLayout (vLLM's)

A `SideLayout` has the boxes and ranks of each tensor as numbers; `layout_of(rank)` returns the
explicit records of a rank.

    parallelism.py  parallel sizes of both sides with all their names; place of each rank
    size_rules.py   constraints on the sizes for a model
    stages.py       layers of each pipeline stage and virtual chunk, of HybridModel as well
    parameters.py   every parameter of a name table
    training.py     Megatron's side
    sharded.py      FSDP2's side, and a rank's part of a tensor packed in a sharded parameter
    inference.py    vLLM's side
    kv_cache.py     bytes that vLLM's layers cache of a sequence
    memory.py       bytes on device and host: peaks of a switch, phases of a job with all its models

The configuration's rules (config/) and `plan` (tools/plan/) use these layouts. Tests compare them
with the layouts of the live engines' adaptors, which jobs use, also for their order of ranks
(assembly.py).

Where to change what: a parallel size in parallelism.py, its key in config/keys.py, and its rule in
size_rules.py; vLLM's cut of a parameter in inference.py.
"""
