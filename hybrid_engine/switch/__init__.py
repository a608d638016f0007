"""The switch between training and inference on one set of devices.

    sharding_manager.py   ShardingManager: order of a switch, recovery from failures
      states.py             states, the training state that each needs, contexts and user hooks
      report.py             ReshardReport, and the tally from which it is built
    setup.py              set-up: layouts are exchanged, the plan is made, transports are connected
    weight_container.py   inference weights: empty -> filled bucket by bucket -> released
    incremental.py        buckets that need not be sent, because the inference side still holds them
    release_fence.py      release of training memory as soon as all ranks of the host have read it
    replicas.py           small weights that several ranks train, compared between these ranks
    verifier.py           `generate_config.verify`: vLLM's weights compared with training's during
                          the fill; check of values that a cast would make infinite

Set-up, once, on every rank:

    1  gather_side             training layouts of all ranks (by assembly.py, or in 2)
    2  setup.connect           the other layouts and handles; plan; groups; transports; container
    3  start                   InferenceWeights.release, Offloader.onload; state TRAIN

A switch to INFER. Every step is a phase that all ranks leave together. Right: what is on the device
afterwards.

    0  LogprobCheck.must_repeat: whether the model's structure changed on any rank
       LogprobCheck.probe_trainer: the trainer's log-probabilities of a few tokens, if due
    1  offload                 gradients and optimizer state                   parameters
    2  prepare, check          pending gathers finish; NaN, overflow refused   parameters
       Replicas                small weights are equal on all ranks that train them
    3  WeightContainer.begin   on all ranks, before any of them fills
       WeightContainer.fill    for each bucket:
         allocate                memory of inference                           + the bucket
         TransportSet.run        read, transfer, write; the next
                                 bucket's messages start
         Verification.filled     digests of both sides, with `verify`
         ReleaseFence.sent       all ranks of the host have read the           - the previous bucket
                                 previous bucket                                 of parameters
         commit                  the engine's post-load processing
       finish_fill, trim       staging memory is freed                         inference weights
       Verification.conclude   digests travel and are compared
    4  offload                 the rest of the parameters                      inference weights
    5  wake_kv_cache, reset_caches
       LogprobCheck.compare    vLLM's log-probabilities of the same tokens, after 0

Once both sides share memory (memory/pool.py), no weight gets memory of parameters: there is no
fence, and in 1 and 4 what the KV cache needs last is only copied, behind generation. It leaves
before a request gets this memory; until then the way back leaves it where it is.

The switch back: WeightContainer.release, Offloader.onload. It ends before the copies of optimizer
state do, and the trainer's guard waits for them before the first step.

On failure: abandon and drain in step 3, then `restore`.

To change what is on the device in a state, edit states.py; for a phase of a switch, or how a fence
waits, sharding_manager.py (the fences' group, created in setup.py, has the job's timeout: a longer
wait needs a longer timeout there too); for the text of the report, report.py.
"""
