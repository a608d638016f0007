"""vLLM's parameters as `InferenceWeights`: where they lie, and how new values get there.

    tracing.py        run the model's loader once on meta tensors, record every copy
    storages.py       the storages behind the parameters, in loader layout
    traced_layout.py  trace + storages -> Layout
    groups.py         which modules are committed together
    quantization.py   layers that vLLM quantises after loading
    postload.py       what vLLM does to weights after loading, and how to do it again
    traced_model.py   all of the above for one model: TracedModel, and ProcessedModel once vLLM has processed it
    loader.py         the load format through which vLLM hands over its model
    group_states.py   released, filling, committed, void: one state a group, one table
    weight_memory.py  where memory comes from: host pages, vLLM's sleep mode
    commit.py         how one group is committed; another way to commit is another class here
    adaptor.py        VllmAdaptor, which puts these together

At start-up vLLM calls loader.py, which calls `trace_model` before and `TracedModel.processed` after the post-load
processing; `InferenceEngine` then builds the adaptor. In a switch the adaptor checks the state in group_states.py,
takes memory from weight_memory.py, and commits with commit.py. Nothing is moved while tracing, so a plan can be made
before there are weights.
"""
