"""`--enable-resharding` of Megatron-LM's own scripts: vLLM beside a model that Megatron builds, loads and trains.

    megatron_patches.script calls          engine.py         ScriptEngine, the order of events
      make_engine(script)      ------->    settings.py       Megatron's arguments + YAML -> HybridConfig, all checked
                                           matching.py       is the Hugging Face config that of Megatron's model?
      engine.attach, switch    ------->    assembly.py, hybrid_engine.py (as everywhere)
                                           checked_weights.py   --resharding-verify
                                           journal.py        samples, timings, Megatron's timers and writers

Registered as an entry point of the group "megatron_patches.engines".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid_engine.megatron_script.script_engine import ScriptEngine
    from megatron_patches.engines import MegatronScript


def make_engine(script: MegatronScript) -> ScriptEngine:
    """The engine for this script. Raises ConfigError with everything that is wrong, before anything is built."""
    from hybrid_engine.megatron_script.script_engine import ScriptEngine

    return ScriptEngine(script)
