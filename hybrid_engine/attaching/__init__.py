"""vLLM beside a Megatron model that is there already: one of the user's own loop, or a script's.

    prepare()             attachment.py      before DDP is built: patches, and elastic memory for its buffers
    attach(model, …)                         every check, then vLLM and the plan -> HybridEngine
                          matching.py        does the Hugging Face config describe Megatron's model?

`megatron_script` uses both for Megatron-LM's own scripts. What is read off Megatron's objects is read in
backends/megatron/live_model.py.
"""

from hybrid_engine.attaching.attachment import attach, prepare

__all__ = ["attach", "prepare"]
