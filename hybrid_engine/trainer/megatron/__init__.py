"""Megatron's model, optimizer and steps from one configuration.

build    build.py             model, DDP and optimizer (`Actor`)
         parallel_groups.py   Megatron's process groups and generators
         specs.py             which modules the layers consist of
         hybrid_layers.py     a HybridModel of the same modules
         model_variants.py    what some architectures compute and megatron-core has no setting for
         routing.py           DeepSeek's ranking of groups of experts
train    pipeline_engine.py   steps and readings through Megatron's pipeline schedules, whatever the output is
         model_inputs.py      masks, positions and packed sequences, as Megatron's models take them
         output_hooks.py      what is read off the output layer's logits
         train_engine.py      `TrainEngine`: log-probabilities of a language model
         value_engine.py      `ValueEngine`: one number for each token; value_head.py is its output layer
resume   rank_checkpoint.py   save and load in the same layout; rank_files.py, checkpoint_checks.py
worker   actor.py             all of this for `ActorHybridWorker` (port `ActorTrainer`)
"""
