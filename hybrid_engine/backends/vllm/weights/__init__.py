"""vLLM's parameters as `InferenceWeights`: where they lie, and how new values get there.

    loader.py         the load format through which vLLM hands over its model when it is built
    traced_model.py   what is found out about it then: TracedModel, and ProcessedModel once vLLM has processed it
      tracing.py        run the model's loader once on meta tensors, record every copy
      storages.py       the storages behind the parameters, in loader layout
      traced_layout.py  trace + storages -> Layout
      groups.py         which modules are committed together
      quantization.py   layers that vLLM quantises while loading
    adaptor.py        VllmAdaptor: in a switch, group by group, allocates, commits, releases
      group_states.py   released, filling, committed, void: one state a group, one table
      weight_memory.py  where memory comes from: host pages, vLLM's sleep mode
      sleeping_segments.py  weights that sleep on, in sleep mode, until they are asked for
  commit.py         how one group is committed, and dropped
  proof.py          where a switch is verified: whether vLLM computes with what was committed
    postload.py       what vLLM does to weights after loading (repacks them, or not), and how to do it again

For a vLLM method that repacks weights after loading, name its class in a tuple of backends/vllm/internals.py and say
in postload.py what it does and how it is done again; a model that needs one without an entry is refused.

Nothing is moved while tracing, so a plan can be made before there are weights.
"""
