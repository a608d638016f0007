"""vLLM for a Megatron model that exists already: of the user's loop, or of a Megatron-LM script.

    prepare()            attachment.py     before DDP is built: patches, elastic memory of buffers
    attach(model, ...)                     every check, then vLLM and the plan -> HybridEngine
                         config_check.py   Megatron's model compared with the Hugging Face config

`megatron_script` uses both for Megatron-LM's own scripts. backends/megatron/live_model.py reads
Megatron's objects.
"""

from hybrid_engine.attaching.attachment import attach, prepare

__all__ = ["attach", "prepare"]
