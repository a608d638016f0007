"""Names that the engine and vLLM's worker share; here, for the worker imports vLLM and the engine does not."""

ENGINE_TOKEN = "HYBRID_ENGINE_VLLM_TOKEN"
"""Environment variable with a name that all ranks of one engine share and no other engine on the host has."""
