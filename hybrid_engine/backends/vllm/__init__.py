"""vLLM as the inference side; the only package that imports vLLM, and only when an engine is built.

    engine_settings.py  InferenceSettings (`generate_config` and what the job adds), Sampling, Completion: plain data
    engine.py           InferenceEngine: vLLM in the processes that train
    arguments.py        settings -> vLLM's arguments, and every check of them before anything is built
    config_reads.py     values that vLLM takes in place of config.json's; keys that it reads and the trainer does not
    positions.py        what each inference position holds, traced before there is an engine
    isolation.py        vLLM's environment, process groups and registries, kept apart from the caller's
    process_state.py    random numbers and torch's settings, kept apart from the caller's
    prompts.py          prompts in any form -> token ids, and completions in the form of their prompts; the tokenizer
    requests.py         sampling and requests in vLLM's terms, answers in ours; none outlives the call that made it
    replica_exchange.py which replica completes which prompts
    lora.py             LoRA from memory, and LoRA that arrives with a switch
    live_attention.py   windows, scales and rotary frequencies of vLLM's layers
    native_load.py      what vLLM itself loads from a checkpoint, for comparison
    stock.py            vLLM without this backend's load format, reloaded by its own calls and looked at, for `certify`
    internals.py        every private name of vLLM and torch that is used or replaced here, with the reason
    version.py          which vLLM was tested, and whether the installed one is accepted
    cpu/                what only vLLM on a CPU needs: its worker, shared memory, memory of weights
    weights/            VllmAdaptor: vLLM's parameters as `InferenceWeights`

What happens, and what is in this rank's memory after it:

    InferenceEngine(...)
      1  isolation.py, arguments.py: the world, the environment, vLLM's own checks of the settings
      2  isolation.py around vllm.LLM(...): groups in the order of ranks      process groups
      3  vLLM calls weights/loader.py with the fresh model; weights/traced_model.py traces   + weights (zero)
      4  vLLM processes the zeros, and makes its caches                                      + packed copies, KV cache
      5  VllmAdaptor(processed model, memory)                                                nothing
    switch (switch/weight_container.py), after `release`                                     KV cache (CPU)
      6  adaptor.allocate, transports write, adaptor.commit, group by group                  + weights, one group twice
      7  adaptor.finish_fill                                                                 - staging memory
      8  engine.wake_kv_cache (GPU), engine.reset_caches                                     + KV cache (GPU)
    generate
      9  prompts.py, replica_exchange.py and requests.py before and after it, process_state.py around it
    release (switch/sharding_manager.py)
      10 adaptor.release                                                                     - weights, - KV cache (GPU)

`shutdown` ends vLLM and its groups; another engine may be built in the same process.
"""

from hybrid_engine.backends.vllm.arguments import check_before_building
from hybrid_engine.backends.vllm.engine import InferenceEngine
from hybrid_engine.backends.vllm.engine_settings import Completion, InferenceSettings, Sampling
from hybrid_engine.backends.vllm.positions import layout_of_position
from hybrid_engine.backends.vllm.version import TESTED_VERSION, require_vllm
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.models.lora_tensors import LoraSettings

__all__ = [
    "TESTED_VERSION",
    "Completion",
    "InferenceEngine",
    "InferenceSettings",
    "LoraSettings",
    "Sampling",
    "VllmAdaptor",
    "check_before_building",
    "layout_of_position",
    "require_vllm",
]
