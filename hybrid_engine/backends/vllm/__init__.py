"""vLLM as the inference side; the only package that imports vLLM, and only when an engine is built.

engine_settings.py  InferenceSettings, Sampling, Completion, LoraSettings: plain data
engine.py           InferenceEngine: vLLM colocated with training
arguments.py        settings -> vLLM's arguments, looked at by vLLM before anything is built
requests.py         requests to vLLM; none outlives the call that made it
native_load.py      what vLLM itself would load, to compare with
lora/               adapters from memory, and those that arrive with a switch
weights/            VllmAdaptor: vLLM's parameters as `InferenceWeights`
process/            environment, shared memory, groups and random state in somebody else's process
"""

from hybrid_engine.backends.vllm.engine import InferenceEngine
from hybrid_engine.backends.vllm.engine_settings import Completion, InferenceSettings, LoraSettings, Sampling
from hybrid_engine.backends.vllm.version import TESTED_VERSION, require_vllm
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor

__all__ = [
    "TESTED_VERSION",
    "Completion",
    "InferenceEngine",
    "InferenceSettings",
    "LoraSettings",
    "Sampling",
    "VllmAdaptor",
    "require_vllm",
]
