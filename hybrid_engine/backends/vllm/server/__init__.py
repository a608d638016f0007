"""In the processes of a vLLM server: what `vllm.general_plugins` loads.

    vllm serve MODEL --load-format hybrid_engine --weight-transfer-config '{"backend": "hybrid_engine"}'

    plugin.py        called in each of its processes: registers the two names, closes the gate
    capture.py       load format, in workers: traces the model and reads no file
    receiver.py      weight transfer engine, in workers: vLLM's calls to a `serving.WeightReceiver`
    gate.py          in the engine core: no token is drawn while a worker's weights are not whole
    ownership.py     in the engine core: a request of one job is not answered with another's weights
    probing.py       in the engine core: what a paused server computes, for the trainers to compare
    queues.py        in all of them: nothing of vLLM's queues stays in /dev/shm when they are killed
    routes.py        in the API server: routes for whoever has the token, and what an answer says of its weights

And on the trainers' side:

    inference.py     completions over HTTP, in place of an `InferenceEngine`
    async_server.py  an `AsyncLLM` of the publisher's own process
"""
