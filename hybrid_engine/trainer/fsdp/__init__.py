"""Training steps and checkpoints of a transformers model that FSDP2 shards, from a configuration.

train_engine.py            `FsdpTrainEngine`: steps and log-probabilities
distributed_checkpoint.py  checkpoints for any number of ranks, by torch.distributed.checkpoint
actor.py                   builds the parts of `ActorHybridWorker`'s trainer, its model layer by
                           layer
"""
