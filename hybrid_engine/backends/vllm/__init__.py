"""vLLM as the inference side; the only package that imports vLLM, and only when an engine is built.

settings.py   InferenceSettings, Sampling, Completion, AdapterConfig: plain data
engine.py     InferenceEngine: vLLM colocated with training
  arguments.py  settings -> vLLM's arguments, looked at by vLLM before anything is built
  requests.py   requests to vLLM; none outlives the call that made it
  adapters.py   LoRA adapters from memory
  inbox.py      adapters that arrive with a switch
  random_state.py  the sampler's own random state
adaptor.py    VllmAdaptor: vLLM's parameters as `InferenceWeights`
  tracing.py    run the model's loader once on meta tensors, record every copy
  inventory.py  the storages behind the parameters
  records.py    trace + storages -> Layout
  postload.py   what vLLM does to weights after loading
  quantization.py  weights that vLLM quantises after loading
  heap.py       freed memory goes back to the operating system, and comes in large pages
native.py     what vLLM itself would load, to compare with
loader.py     the load format through which vLLM hands over its model
guest.py      environment, shared memory, groups and errors of a guest in somebody else's process
placement.py  which place in vLLM's groups each rank takes
worker.py     vLLM's worker as a guest; names.py is what it shares with the engine
"""

from hybrid_engine.backends.vllm.engine import InferenceEngine
from hybrid_engine.backends.vllm.engine_settings import AdapterConfig, Completion, InferenceSettings, Sampling
from hybrid_engine.backends.vllm.version import TESTED_VERSION, require_vllm
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor

__all__ = [
    "TESTED_VERSION",
    "AdapterConfig",
    "Completion",
    "InferenceEngine",
    "InferenceSettings",
    "Sampling",
    "VllmAdaptor",
    "require_vllm",
]
