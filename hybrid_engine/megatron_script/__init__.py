"""`--enable-resharding` of Megatron-LM's own scripts: vLLM beside a model that Megatron trains.

    megatron_patches.script calls
      make_engine(script)    ->   script_engine.py     ScriptEngine: events, samples, timings
      engine.attach, switch         script_settings.py   Megatron's arguments + YAML -> HybridConfig
    with --perform-rl-step      rl_engine.py         RolloutEngine: Megatron's RL loop switches

The engines are assembled as by `hybrid_engine.attach`, in attaching/, which also compares
Megatron's model with the Hugging Face config. switch/ switches them, as everywhere. The factory is
registered as an entry point of the group "megatron_patches.engines".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid_engine.megatron_script.script_engine import ScriptEngine
    from megatron_patches.engines import MegatronScript


def make_engine(script: MegatronScript) -> ScriptEngine:
    """Return the engine for this script, before anything is built.

    Raises ScriptError with every violation.
    """
    from hybrid_engine.megatron_script.rl_engine import RolloutEngine
    from hybrid_engine.megatron_script.script_engine import ScriptEngine
    from megatron_patches.engines import performs_rl

    return RolloutEngine(script) if performs_rl(script.args) else ScriptEngine(script)
