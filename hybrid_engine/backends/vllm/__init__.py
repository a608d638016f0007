"""vLLM as the inference side; the only package that imports vLLM, and only when an engine is built.

    engine_settings.py  InferenceSettings, Sampling, Completion: plain data
    engine.py           InferenceEngine: vLLM in the training processes
    arguments.py        settings -> vLLM's arguments, and every check before anything is built
    config_reads.py     values that replace config.json's; keys that vLLM alone reads
    positions.py        layout of each inference position, traced before an engine exists
    isolation.py        vLLM's environment, groups and registries, kept apart from the caller's
    process_state.py    random numbers and torch's settings, kept apart from the caller's
    prompts.py          prompts -> token ids, completions in the prompts' form; the tokenizer
    images.py           prompts with images, for vLLM and for the trainer
    tool_calls.py       calls of tools in answers, by vLLM's parsers
    completing.py       calls for completions over any engine: checks, seeds, shares of the ranks
    requests.py         requests and completions in vLLM's terms; no request outlives its call
    lora.py             LoRA from memory, and LoRA that arrives with a switch
    live_layers.py      windows, scales and rotations of vLLM's layers, and experts that its routers
                        select
    native_load.py      weights that vLLM itself loads from a checkpoint, for comparison
    stock.py            vLLM without this backend's load format, observed for `certify`
    internals.py        every private name of vLLM and torch that is used here, with the reason
    private_names.py    Internal and Replacement, the records in internals.py
    version.py          tested versions of vLLM, and the check of the installed one
    cpu/                parts for vLLM on a CPU: its worker, shared memory, memory of weights
    server/             parts of a vLLM server whose weights come from trainers
    weights/            VllmAdaptor: vLLM's parameters as `InferenceWeights`

Sequence of calls, and the memory that each adds (+) to or removes (-) from this rank:

    InferenceEngine(...)
      1  isolation.py, arguments.py: the world, the environment,
         vLLM's own checks of the settings
      2  isolation.py around vllm.LLM(...): groups in rank order     process groups
      3  vLLM calls weights/loader.py with the new model;
         weights/traced_model.py traces it                           + weights (zero)
      4  vLLM processes the zeros, and makes its caches              + packed copies, KV cache
      5  VllmAdaptor(processed model, memory)                        nothing
    switch (switch/weight_container.py), after `release`             KV cache (CPU)
      6  adaptor.allocate, transports write, adaptor.commit,
         group by group                                              + weights, one group twice
      7  adaptor.finish_fill                                         - staging memory
      8  engine.wake_kv_cache (GPU), engine.reset_caches             + KV cache (GPU)
    generate
      9  prompts.py, completing.py and requests.py before
         and after it, process_state.py around it
    release (switch/sharding_manager.py)
      10 adaptor.release                                             - weights, - KV cache (GPU)

`shutdown` ends vLLM and its groups; another engine may be built in the same process.
"""

from hybrid_engine.backends.vllm.arguments import check_before_building
from hybrid_engine.backends.vllm.engine import InferenceEngine
from hybrid_engine.backends.vllm.engine_settings import Completion, InferenceSettings, Sampling
from hybrid_engine.backends.vllm.positions import (
    Position,
    layout_of_position,
    planned_position,
    quantised_at_position,
)
from hybrid_engine.backends.vllm.version import TESTED_VERSION, require_vllm
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.models.lora_tensors import LoraSettings

__all__ = [
    "TESTED_VERSION",
    "Completion",
    "InferenceEngine",
    "InferenceSettings",
    "LoraSettings",
    "Position",
    "Sampling",
    "VllmAdaptor",
    "check_before_building",
    "layout_of_position",
    "planned_position",
    "quantised_at_position",
    "require_vllm",
]
