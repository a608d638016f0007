"""The parts of a vLLM server whose weights come from trainers; `vllm_plugin.py` loads them.

    vllm serve MODEL --load-format hybrid_engine --weight-transfer-config '{"backend":
    "hybrid_engine"}'

    capture.py       load format, in workers: traces the model and reads no file
    receiver.py      weight transfer engine, in workers: vLLM's calls -> a `serving.WeightReceiver`
    gate.py          in the engine core: no token is drawn while a worker's weights are incomplete,
                     and no request for a job is answered with another's
    probing.py       in the engine core: log-probabilities of a paused server, for its trainers
    replaced_methods.py
                     in all processes: unlinks vLLM's queues, so that none outlives a kill; in
                     workers of vLLM 0.24, which call their transfer engine otherwise
    routes.py        in the API server: guards routes by a token, labels answers with weights

On the trainers' side:

    inference.py     completions over HTTP, instead of an `InferenceEngine`
    async_server.py  an `AsyncLLM` in the publisher's own process
"""
