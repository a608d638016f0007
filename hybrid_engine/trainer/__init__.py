"""Training from a configuration, for `ActorHybridWorker`. The switch does not depend on it.

    worker.py                `ActorHybridWorker`: builds a trainer, and vLLM on the same devices
    batches/                 batches of sequences: masks, packing, checks, losses
    reference_and_critic/    models that share the actor's devices
    megatron/                Megatron's model, optimizer, steps and checkpoints
    fsdp/                    the same for a transformers model that FSDP2 shards

    data_parallel.py         the ranks that share a batch
    learning_rate.py         set by the user, or by a schedule
    training_checkpoint.py   checkpoints of both trainers, for any layout
    canonical_state.py       boxes of canonical tensors in weights and optimizer state
    checkpoint_directory.py  saves in a directory, a pointer to the latest, checksums

Data flow of `worker.update(batch, loss_function)`:

    batch -> batches.batch_checks.agreed_share -> this rank's share
          -> TrainEngine.train_step -> batches.arrangement.micro_batches -> rows -> model
          -> log-probabilities -> loss_function -> optimizer step, scalars to report

A program with its own training loop needs none of this: `HybridEngine(model=...)`, `attach` and
`--enable-resharding` work if this folder is absent (tests/hybrid_engine/test_model_engine.py runs
them without it).
"""
