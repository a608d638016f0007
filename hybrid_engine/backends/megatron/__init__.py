"""Training side on Megatron: a live model, built and trained by any code.

    config   megatron_config.py   Megatron's configuration objects, and the fused kernels in use
    weights  lora_layers.py       LoRA on parallel linear layers
             adapted_weights.py   adapters on the weights, ours or Megatron-Bridge's, and their sums
             quantised_parameters.py   parameters that Transformer Engine keeps in 8 bits
    layout   model_tensors.py     global names of this rank's tensors, and their flat buffers
             adaptor.py           `MegatronAdaptor`: location of every canonical tensor
                                  (port `TrainingWeights`)
    switch   live_model.py        `LiveModel`: the model as the switch uses it (port `Trainer`), its
                                  state that can leave the device, and its description
             live_attention.py    windows, scales and rotations of each layer
             forward_probe.py     forward pass over a few tokens, to compare the model with vLLM
    rollouts rl_interface.py      vLLM servers in place of the inference engine of Megatron-LM's RL
    shared   internals.py         private names of megatron-core that are used here, with reasons

    1  build     trainer/megatron, a user or a script builds a model; `live_model` moves its weights
                 outside DDP's buffers and returns a `LiveModel`
    2  layout    ShardingManager, once: `weights.layout()`, planned against the inference side
    3  offload   Offloader, at every switch: `offload_items()`; memory keeps its addresses
    4  switch    ShardingManager: `weights.prepare()` finishes gathers and adds LoRA; buffers are
                 read
    5  return    all state is back at its address

A second trainer would be a sibling folder with its own `Trainer`. Only this folder,
trainer/megatron, trainer/learning_rate.py and `megatron_script` use Megatron's names.
"""
