"""Training from a configuration: the loop's side of `ActorHybridWorker`. The switch does without it.

    worker.py       `ActorHybridWorker`: a trainer that is built here, and vLLM beside it
    ports.py        what the worker and companions ask of whoever trains for them
    batches/        batches of sequences: masks, packing, checks, what losses get and return
    companions/     models beside the actor: the reference, the critic
    megatron/       Megatron's model, optimizer, steps and checkpoints, from one configuration
    fsdp/           the same on a transformers model that FSDP2 shards

    trained_model.py          what both have: optimizer, learning rate, shares of a batch
    learning_rate.py          set by hand, or by a schedule
    checkpoint_directory.py   checkpoints of both trainers: saves, a pointer to the latest, checksums
    checkpoint_metadata.py    torch's records of what a checkpoint has, proven to be whole

Whoever has a loop of their own needs none of this: `HybridEngine(model=...)`, `attach` and `--enable-resharding` work
where this folder is absent (tests/hybrid_engine/test_model_engine.py runs them so).
"""
