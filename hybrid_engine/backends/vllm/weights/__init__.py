"""vLLM's parameters as `InferenceWeights`: where they lie, and how new values get there.

    adaptor.py          VllmAdaptor: in a switch, group by group, allocates, commits, releases
    groups.py           which modules are committed together, and the state of each such group
    weight_memory.py    where memory comes from, and vLLM's sleep mode
    loader.py           the load format through which vLLM hands over its model when it is built
    tracing.py          run the model's loader once on meta tensors, record every copy; the storages it writes
    traced_model.py     TracedModel: what is known before vLLM processes the weights; trace + storages -> Layout
    postload.py         which modules vLLM processes after loading, how to do so again, and all that modules hold
    derivation.py       a snapshot before the processing; what it derived from weights, derived again
    processed_model.py  ProcessedModel: what the processing made of the model; how a group is committed and dropped
    forward_state.py    what layers made of weights in a forward: forgotten before others come
    processing_barrier.py  ranks whose processing has collectives wait for each other before each run of it

No kernel or method of vLLM's is known by its name: what it does to weights is seen once they are loaded, and it is
done again, or refused, by what was seen. Nothing is moved while tracing: a plan can be made before there are weights.
"""
