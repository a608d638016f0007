"""Training with FSDP2: a transformers model that `torch.distributed.fsdp.fully_shard` has sharded.

    sharding.py          applies `fully_shard` as a configuration says
    canonical_names.py   where each tensor of a checkpoint lies in the model's parameters: transformers' own conversion
    wrapped_names.py     transformers' names below what PEFT, torch.compile and checkpointing put around modules
    lora_views.py        what a switch gets of weights with LoRA: sums, or the adapter beside them
    model_checks.py      what makes a model impossible to read or to drive, all of it at once
    written_config.py    the config of a model that is there, which must say what the model computes
    unbuilt_model.py     the same from a config.json alone, for plans
    sharded_tensors.py   what of each parameter this rank holds, and the flat buffer it lies in
    adaptor.py           the two together: records of this rank (port `TrainingWeights`)
    training_state.py    gradients, optimizer state, and what else refers to memory
    sharded_model.py     `ShardedModel`: the model as the switch sees it (port `Trainer`)
    internals.py         names of torch and transformers that are not documented

Nothing of Megatron is imported. The model stays the user's: its forward, its optimizer and its loop.
"""

from hybrid_engine.backends.fsdp.sharded_model import ShardedModel

__all__ = ["ShardedModel"]
