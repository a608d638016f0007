"""Training with FSDP2: a transformers model that `torch.distributed.fsdp.fully_shard` has sharded.

    sharded_tensors.py   applies `fully_shard`; what of each parameter this rank holds, and the flat buffer it lies in
    names.py             a tensor's name in the state dict, by transformers, and in a checkpoint, whatever PEFT,
                         torch.compile and checkpointing put around modules; the same from a config.json, for plans;
                         which LoRA a model has, and the methods of PEFT that are refused
    attention.py         settings that an implementation of attention leaves out
    model_checks.py      all else that makes a model impossible to read or drive, and a config that is not the model's
    live_attention.py    windows, scales and rotary frequencies of each layer, as transformers' forward pass has them
    adaptor.py           records of this rank (port `TrainingWeights`), with LoRA added or beside the weights
    sharded_model.py     `ShardedModel`: the model as the switch sees it, and what can be offloaded (port `Trainer`)
    internals.py         names of torch and transformers that are not documented

Nothing of Megatron is imported. The model stays the user's: its forward, its optimizer and its loop.
"""

from hybrid_engine.backends.fsdp.sharded_model import ShardedModel

__all__ = ["ShardedModel"]
