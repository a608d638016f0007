"""Steps and checkpoints of a transformers model that FSDP2 shards, from one configuration.

build.py                   a sharded model from a config.json, layer by layer
train_engine.py            `FsdpTrainEngine`: steps and log-probabilities
param_schedule.py          learning rate and weight decay by update
distributed_checkpoint.py  save and load on any number of ranks, through torch.distributed.checkpoint
actor.py                   all of this for `ActorHybridWorker` (port `ActorTrainer`)
"""
