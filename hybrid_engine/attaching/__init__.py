"""vLLM beside a Megatron model that is there already: one of the user's own loop, or a script's.

    prepare()             preparing.py       before DDP is built: patches, and elastic memory for its buffers
    attach(model, …)      attachment.py      every check, then vLLM and the plan -> HybridEngine
                            live_config.py     the configuration, with the training side as the live model has it
                            matching.py        does the Hugging Face config describe Megatron's model?
                            engine_beside.py   the two engines put together

`megatron_script` uses the last two for Megatron-LM's own scripts. What is read off Megatron's objects is read in
backends/megatron/live_settings.py.
"""

from hybrid_engine.attaching.attachment import attach
from hybrid_engine.attaching.preparing import prepare

__all__ = ["attach", "prepare"]
