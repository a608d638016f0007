"""`--enable-resharding` of Megatron-LM's own scripts: vLLM beside a model that Megatron builds, loads and trains.

    megatron_patches.script calls
      make_engine(script)    ->   script_engine.py     ScriptEngine: the order of events; samples and timings
      engine.attach, switch         script_settings.py   Megatron's arguments + YAML -> HybridConfig, all checked
    with --perform-rl-step      rl_engine.py         RolloutEngine: Megatron's RL loop says when to switch
                                  rl_settings.py       what of that loop is refused

The engines are put together as by `hybrid_engine.attach`, in attaching/, which also compares Megatron's model with the
Hugging Face config; they are switched by switch/, as everywhere. Registered as an entry point of the
group "megatron_patches.engines".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid_engine.megatron_script.script_engine import ScriptEngine
    from megatron_patches.engines import MegatronScript


def make_engine(script: MegatronScript) -> ScriptEngine:
    """Return the engine for this script. Raises ScriptError with every violation, before anything is built."""
    from hybrid_engine.megatron_script.rl_engine import RolloutEngine
    from hybrid_engine.megatron_script.script_engine import ScriptEngine
    from megatron_patches.engines import performs_rl

    return RolloutEngine(script) if performs_rl(script.args) else ScriptEngine(script)
