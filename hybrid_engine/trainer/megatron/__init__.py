"""Megatron's model, optimizer and steps from one configuration.

build    build.py             process groups, model, DDP and optimizer (`Actor`)
         specs.py             which modules the layers consist of
         hybrid_layers.py     a HybridModel of the same modules
         model_variants.py    what some architectures compute and megatron-core has no setting for; a value head
train    pipeline_engine.py   steps and readings through Megatron's pipeline schedules, whatever the output is
         train_engine.py      `TrainEngine`: log-probabilities of a language model; `ValueEngine`: a number a token
resume   rank_checkpoint.py   save and load in the same layout
worker   actor.py             all of this for `ActorHybridWorker` (port `ActorTrainer`)
"""
