"""The training side on Megatron: a live model, whoever built it and whoever trains it.

    config   megatron_config.py   Megatron's configuration objects from ours, with fused kernels where they exist
    weights  lora_layers.py       LoRA on parallel linear layers, and its sum with the weights
    layout   model_tensors.py     global names of this rank's tensors, and the flat buffers they lie in, or are moved to
             adaptor.py           `MegatronAdaptor`: where every canonical tensor is (port `TrainingWeights`)
    switch   live_model.py        `LiveModel`: a model as the switch sees it (port `Trainer`), what of it can leave the
                                  device, and what it says of itself
             live_attention.py    windows, scales and rotary frequencies of each layer
             forward_probe.py     what any such model computes of a few tokens, to be compared with vLLM
    rollouts rl_interface.py      in Megatron-LM's own RL loop, vLLM servers in the place of its inference engine
    all      internals.py         every private name of megatron-core that is used here, with its reason

    1  build     trainer/megatron, a user or a script brings a model; `live_model` moves its loose weights and makes a
                 `LiveModel`
    2  layout    ShardingManager, once: `weights.layout()`, which is planned against the inference side
    3  offload   Offloader, at every switch: `offload_items()`; memory stays at its addresses
    4  switch    ShardingManager: `weights.prepare()` finishes gathers and adds LoRA; buffers are read
    5  return    everything is back at its address

A second trainer is a sibling folder with its own `Trainer`; nothing outside of this folder, trainer/megatron and
`megatron_script` knows Megatron's names.
"""
