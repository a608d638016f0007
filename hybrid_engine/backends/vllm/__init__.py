"""vLLM as the inference side; the only package that imports vLLM, and only when an engine is built.

    engine_settings.py  InferenceSettings (`generate_config` and what the job adds), Sampling, Completion: plain data
    engine.py           InferenceEngine: vLLM in the processes that train
    arguments.py        settings -> vLLM's arguments, checked by vLLM before anything is built
    feasibility.py      what would keep an engine from generating at all
    requests.py         requests to vLLM; none outlives the call that made it
    probing.py          what vLLM computes of a few tokens, to be compared with the trainer
    caches.py           the memory of its caches, zeroed in every switch
    native_load.py      what vLLM itself loads from a checkpoint, for comparison
    fresh_engine.py     what a vLLM of its own answers, for comparison
    internals.py        every private name of vLLM and torch that is used or replaced here, with the reason
    version.py          which vLLM was tested
    acceptance.py       whether the installed one is accepted, and has every name of internals.py
    generation/         prompts in any form, sampling, ranks that share the work
    process/            isolation from training in one process: environment, groups, random state
    cpu/                what only vLLM on a CPU needs: its worker, shared memory, memory of weights
    weights/            VllmAdaptor: vLLM's parameters as `InferenceWeights`
    lora/               LoRA from memory, and LoRA that arrives with a switch

What happens, and what is in this rank's memory after it:

    InferenceEngine(...)
      1  process/isolation.py, arguments.py: the world, the environment, vLLM's own checks of the settings
      2  process/group_placement.py around vllm.LLM(...): groups in the order of ranks      process groups
      3  vLLM calls weights/loader.py with the fresh model; weights/traced_model.py traces   + weights (zero)
      4  vLLM processes the zeros, and makes its caches                                      + packed copies, KV cache
      5  VllmAdaptor(processed model, memory)                                                nothing
    switch (switch/weight_container.py), after `release`                                     KV cache (CPU)
      6  adaptor.allocate, transports write, adaptor.commit, group by group                  + weights, one group twice
      7  adaptor.finish_fill                                                                 - staging memory
      8  engine.wake_kv_cache (GPU), engine.reset_caches                                     + KV cache (GPU)
    generate
      9  generation/ before and after it, requests.py, process/random_state.py around it
    release (switch/sharding_manager.py)
      10 adaptor.release                                                                     - weights, - KV cache (GPU)

`shutdown` ends vLLM and its groups; another engine may be built in the same process.
"""

from hybrid_engine.backends.vllm.acceptance import require_vllm
from hybrid_engine.backends.vllm.arguments import check_before_building
from hybrid_engine.backends.vllm.engine import InferenceEngine
from hybrid_engine.backends.vllm.engine_settings import Completion, InferenceSettings, Sampling
from hybrid_engine.backends.vllm.version import TESTED_VERSION
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
    "require_vllm",
]
