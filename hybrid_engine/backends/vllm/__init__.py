"""vLLM as the inference side; the only package that imports vLLM, and only when an engine is built.

settings.py   InferenceSettings, Sampling, Completion: plain data
engine.py     InferenceEngine: vLLM colocated with training
adaptor.py    VllmAdaptor: vLLM's parameters as `InferenceWeights`
  tracing.py    run the model's loader once on meta tensors, record every copy
  inventory.py  the storages behind the parameters
  records.py    trace + storages -> Layout
  postload.py   what vLLM does to weights after loading
  heap.py       freed memory goes back to the operating system
loader.py     the load format through which vLLM hands over its model
guest.py      environment, shared memory, groups and errors of a guest in somebody else's process
random_state.py  the sampler's own random state
worker.py     vLLM's worker as a guest; names.py is what it shares with the engine
"""

from hybrid_engine.backends.vllm.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.engine import InferenceEngine
from hybrid_engine.backends.vllm.settings import Completion, InferenceSettings, Sampling
from hybrid_engine.backends.vllm.version import TESTED_VERSION, require_vllm

__all__ = [
    "TESTED_VERSION",
    "Completion",
    "InferenceEngine",
    "InferenceSettings",
    "Sampling",
    "VllmAdaptor",
    "require_vllm",
]
