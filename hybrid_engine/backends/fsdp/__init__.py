"""Training with FSDP2: a transformers model sharded by `torch.distributed.fsdp.fully_shard`.

    sharded_tensors.py   applies `fully_shard`; locates this rank's part of each parameter in the
                         flat buffer that stores it
    names.py             maps names of the state dict to names of transformers and of a checkpoint,
                         through the wrappers of PEFT, torch.compile and checkpointing; does the
                         same from a config.json, for plans; finds LoRA, refuses other PEFT methods
    attention.py         windows, scales and rotations of each layer, and keys of the config that
                         are read, from a recorded forward pass; settings that an implementation of
                         attention ignores
    model_checks.py      refuses models that cannot be read or driven, or that do not match their
                         config
    adaptor.py           records of this rank (port `TrainingWeights`), with LoRA merged into the
                         weights or delivered separately
    sharded_model.py     `ShardedModel`: the model as the switch sees it, and the state that can be
                         offloaded (port `Trainer`)
    reference.py         transformers' class with the weights of another trainer, for comparison
    internals.py         undocumented names of torch and transformers

Nothing of Megatron is imported. The user keeps the model, its forward pass, its optimizer and the
training loop.
"""

from hybrid_engine.backends.fsdp.sharded_model import ShardedModel

__all__ = ["ShardedModel"]
