"""The switch between training and inference on one set of devices.

    sharding_manager.py   ShardingManager: the order of a switch, the way back after a failure; `rollout_context` and
                          the like, for HybridEngine and ActorHybridWorker
      states.py             the states, what each needs on the device, their contexts, and users' hooks
      report.py             ReshardReport, and the tally that it is made from; device memory against the memory plan
    prefetch.py           training state that comes back before the switch, while the last sequences are drawn
    rendezvous.py         set-up: layouts are exchanged, the plan is made, transports are connected
    weight_container.py   the inference weights: empty -> filled bucket by bucket -> released
    incremental.py        what the inference side still has from earlier switches
    release_fence.py      releases training memory as soon as all ranks of the host have read it
    verifier.py           `generate_config.verify`: vLLM's weights against training's, while they are filled; refuses
                          values that a cast on the way would make infinite
    computation.py        `generate_config.check_compute`: vLLM's log-probabilities against the trainer's

Set-up, once, on every rank:

    1  gather_side          training layouts of all ranks                             (by assembly.py, or in 2)
    2  rendezvous.connect      the other layouts and handles; plan; groups; transports; container
    3  start: InferenceWeights.release, Offloader.onload                                 state TRAIN

A switch to INFER, each step a phase that all ranks leave together; on the device afterwards:

    0  Computation.ask_trainer the trainer's log-probabilities of a few tokens, in the first switch
    1  offload                 gradients and optimizer state                             parameters
    2  prepare, check          pending gathers finish; NaN, overflow refused              parameters
    3  WeightContainer.begin   on all ranks, before any of them fills
       WeightContainer.fill    for each bucket:
         allocate                                                                        + one bucket of inference
         TransportSet.run        read, transfer, write; the next bucket's messages go
         Verification.filled     digests of both sides, where switches are verified
         ReleaseFence.sent       all of the host have read the bucket before             - that bucket of parameters
         commit                  the engine's post-load processing
       finish_fill, trim       staging memory is freed                                   inference weights
       Verification.conclude   digests travel and are compared
    4  offload                 the rest of the parameters                                inference weights
    5  wake_kv_cache, reset_caches
       Computation.compare     vLLM's log-probabilities of the same tokens, where 0 was

With prefetch: auto, optimizer state is copied beside 1 to 3 and leaves in 4, or before 3 where its memory is needed.

and back: WeightContainer.release, Offloader.onload. On failure: abandon and drain in step 3, then `restore`.

To change: what is on the device in a state, states.py; a phase of a switch, or how a fence waits, sharding_manager.py
(its group, made in rendezvous.py, has the job's timeout, which a longer wait needs changed too); the text of the
report's line, report.py.
"""
