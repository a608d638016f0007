"""vLLM's parameters as `InferenceWeights`: where they lie, and how new values get there.

    loader.py         the load format through which vLLM hands over its model when it is built
    traced_model.py   what is found out about it: TracedModel then, ProcessedModel once vLLM has processed it
      tracing.py        run the model's loader once on meta tensors, record every copy
      storages.py       the storages behind the parameters, in loader layout
      traced_layout.py  trace + storages -> Layout
      groups.py         which modules are committed together
      quantization.py   layers that vLLM quantises while loading
      loaded_state.py   what its modules held then, to compare with
      marks.py          values by which one sees whether weights were changed
    looking.py        what vLLM made of it: what is live, what was derived, what cannot be renewed
      held.py           all that a module computes with, wherever it keeps it
      derivation.py     what was derived from the weights of a group, and how it is derived again
    adaptor.py        VllmAdaptor: in a switch, group by group, allocates, commits, releases
      group_states.py   released, filling, committed, void: one state a group, one table
      weight_memory.py  where memory comes from: host pages, vLLM's sleep mode
      sleeping_segments.py  weights that sleep on, in sleep mode, until they are asked for
  collective_processing.py  ranks whose processing has collectives agree before each run of it
  commit.py         how one group is committed, and dropped
  proof.py          where a switch is verified: whether vLLM computes with what was committed
    postload.py       what of vLLM processes weights after loading, and how to run it again

No kernel or method of vLLM's is known by its name: what it does to weights is seen once they are loaded, and it is
done again, or refused, by what was seen.

Nothing is moved while tracing, so a plan can be made before there are weights.
"""
