"""The contents of every rank, computed from a name table and parallel sizes alone: no device, no weights, no engine.

    TrainParallelism, ModelTable      --training_side-->    SideLayout (Megatron's)
    InferenceParallelism, ModelTable  --inference_side-->   SideLayout (vLLM's)

`SideLayout.holdings` has (region, ranks) of each tensor as numbers; `layout_of(rank)` gives a rank's explicit records.

    parallelism.py  parallel sizes of both sides, with all their names; which rank is at which place
    size_rules.py   what the sizes must satisfy for a model
    stages.py       which layers megatron-core builds on which pipeline stage and virtual chunk, of a HybridModel too
    parameters.py   every parameter that a name table speaks of
    training.py     Megatron's side
    sharded.py      FSDP2's side, and what a rank holds of a tensor that is packed in a sharded parameter
    inference.py    vLLM's side, and whether two layouts hold the same
    memory.py       bytes on device and host: peaks of a switch, phases of a job with all its models

Used for the rules of the configuration (config/) and by `plan` (advisor/). Tests compare these layouts with what the
live engines' adaptors say. A job goes by the latter: its order of ranks too (assembly.py).

To change: a parallel size: parallelism.py, its key in config/keys.py, and its rule in size_rules.py. How vLLM cuts a
parameter: inference.py.
"""
