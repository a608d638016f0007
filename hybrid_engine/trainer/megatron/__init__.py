"""Megatron's model, optimizer, training steps and checkpoints, from a configuration.

build    build.py             process groups, model, DDP and optimizer (`Actor`)
         specs.py             modules of which the layers consist
         hybrid_layers.py     the same modules as layers of a HybridModel
         model_variants.py    features of some architectures that megatron-core lacks; value head
train    pipeline.py          training and evaluation through Megatron's pipeline schedules
         model_inputs.py      arguments of the forward pass
         router_inputs.py     experts of a batch for routers, and masks of padding
         train_engine.py      `TrainEngine` for language models and value models
resume   training_state.py    what a checkpoint has of the trainer
worker   actor.py             builds the parts of `ActorHybridWorker`'s trainer, and of the critic
"""
