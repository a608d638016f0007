"""vLLM's parameters as `InferenceWeights`: where they are in memory and how new values get there.

    adaptor.py          VllmAdaptor: allocates, commits and releases group by group during a switch
    groups.py           the modules that are committed together, and the state of each such group
    weight_memory.py    where memory comes from, and vLLM's sleep mode
    cache_blocks.py     blocks of the KV cache: their addresses, and those that requests get last
    loader.py           the load format through which vLLM hands over its model at construction
    tracing.py          runs the model's loader once on meta tensors and records every copy
    traced_model.py     TracedModel: the model before vLLM processes its weights; trace -> Layout
    postload.py         the modules that vLLM processes after loading, how to repeat the processing,
                        and everything that modules hold
    derivation.py       a snapshot before the processing; re-derives the tensors vLLM derived
    processed_model.py  ProcessedModel: the result of the processing; commits and drops a group
    drafter.py          a drafter of speculative decoding, filled with the main model
    forward_state.py    tensors that layers cache in a forward, reset before new weights arrive
    processing_barrier.py  synchronises ranks before each run of a collective processing

No kernel or method of vLLM is known by its name. The effect of the processing is observed once
after loading; it is then repeated, or refused, according to that observation. Tracing moves no
data, so a plan can be made before there are weights.
"""
