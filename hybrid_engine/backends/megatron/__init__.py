"""The training side on Megatron. Only modules of this folder import megatron.

    build    build.py             model, DDP and optimizer from one configuration (`Actor`)
             parallel_groups.py   Megatron's process groups and generators
             megatron_config.py   Megatron's configuration objects from ours
             fusions.py           Megatron's fused kernels, where they exist
             specs.py             which modules the layers consist of
             hybrid_layers.py     a HybridModel of the same modules
             model_variants.py    what some architectures compute and megatron-core has no setting for
             routing.py           DeepSeek's ranking of groups of experts
             lora_layers.py       LoRA on parallel linear layers, and its sum with the weights
             elastic_weights.py   weights outside of DDP's buffers in memory that peers can map
    layout   model_tensors.py     global names of this rank's tensors, and the flat buffers they lie in
             adaptor.py           `MegatronAdaptor`: where every canonical tensor is (port `TrainingWeights`)
    offload  training_state.py    what is on the device, and what can leave it
    train    live_model.py        `LiveModel`: a model as the switch sees it (port `Trainer`), whoever trains it
             live_settings.py     what a model that somebody else has built says of itself, and whether it can be driven
             forward_probe.py     what any such model computes of a few tokens, to be compared with vLLM
             pipeline_engine.py   steps and readings through Megatron's pipeline schedules, whatever the output is
             model_inputs.py      masks, positions and packed sequences, as Megatron's models take them
             output_hooks.py      what is read off the output layer's logits
             train_engine.py      `TrainEngine`: log-probabilities of a language model
             value_engine.py      `ValueEngine`: one number for each token; value_head.py is its output layer
    resume   rank_checkpoint.py   save and load in the same layout; rank_files.py, checkpoint_checks.py
    worker   actor.py             all of this for `ActorHybridWorker`, from one configuration (port `ActorTrainer`)
    all      internals.py         every private name of megatron-core that is used here, with its reason

    1  build     the worker: `actor.build_actor`; or a user or a script brings a model, and `live_model` moves its loose
                 weights and makes a `LiveModel`
    2  layout    ShardingManager, once: `weights.layout()`, which is planned against the inference side
    3  offload   Offloader, at every switch: `offload_items()`; memory stays at its addresses
    4  switch    ShardingManager: `weights.prepare()` finishes gathers and adds LoRA; buffers are read
    5  return    everything is back at its address; a step raises `version`, and with it the next switch moves weights
    6  resume    the worker, in train state: save_checkpoint, load_checkpoint
    7  end       the worker: end_training, destroy_parallel_state, in the order that `build_actor` has noted

A second trainer is a sibling folder with its own `Trainer`; nothing outside of this folder and `megatron_script` knows
Megatron's names.
"""
