"""Training steps and checkpoints of a transformers model that FSDP2 shards, from a configuration.

train_engine.py            `FsdpTrainEngine`: steps and log-probabilities
training_state.py          what a checkpoint has of the trainer
actor.py                   builds the parts of `ActorHybridWorker`'s trainer, its model layer by
                           layer
"""
