"""Steps and checkpoints of a transformers model that FSDP2 shards, from one configuration.

train_engine.py            `FsdpTrainEngine`: steps and log-probabilities
distributed_checkpoint.py  save and load on any number of ranks, through torch.distributed.checkpoint
actor.py                   a sharded model built layer by layer, for `ActorHybridWorker` (port `ActorTrainer`)
"""
