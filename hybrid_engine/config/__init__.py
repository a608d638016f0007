"""Configuration: the keys, and the rules that keys, model and number of ranks must satisfy.

    keys.py             `actor_config`, `generate_config` and their sections, as pydantic models;
                        types of values
    rules.py            what a rule is, and the contexts that rules read
    training_rules.py   rules of `actor_config` and the model: for any trainer, Megatron and FSDP2
    override_rules.py   rules of `actor_config.overrides`
    inference_rules.py  rules of `generate_config`, and of vLLM's arguments in it
    job_rules.py        rules of all models together: the critic, and the budget `device_budget_gib`
    loading.py          load_config: YAML or a mapping -> HybridConfig, or every violation at once,
                        with proposals for unknown keys

To add or change a key, edit keys.py and run `make docs`. A parallel size is also a key, but its
definition starts in layouts/parallelism.py, which has its other names, and its rule is in
layouts/size_rules.py. Other rules belong in one of the files of rules. Each rule has a case
that breaks it in tests/hybrid_engine/config/test_constraints.py.
"""

from hybrid_engine.config.keys import (
    ActorConfig,
    CriticConfig,
    FromProgram,
    FsdpConfig,
    GenerateConfig,
    HybridConfig,
    LoraConfig,
    OptimizerConfig,
    OverridesConfig,
    ScheduleConfig,
)
from hybrid_engine.config.loading import find_violations, load_config

__all__ = [
    "ActorConfig",
    "CriticConfig",
    "FromProgram",
    "FsdpConfig",
    "GenerateConfig",
    "HybridConfig",
    "LoraConfig",
    "OptimizerConfig",
    "OverridesConfig",
    "ScheduleConfig",
    "find_violations",
    "load_config",
]
