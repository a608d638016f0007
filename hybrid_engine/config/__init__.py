"""Configuration: the keys, and the rules that they, the model and the number of ranks must satisfy.

    keys.py             `actor_config`, `generate_config` and their sections, as pydantic models; optimizer_keys.py
    values.py           types of their values
    rules.py            what a rule is and what it looks at
    training_rules.py   rules of `actor_config` and the model: of any trainer, and of Megatron
    override_rules.py   rules of `actor_config.overrides`, by the classes of the installed megatron-core
    fsdp_rules.py       rules where FSDP2 trains; the two dictionaries of an engine around a transformers model
    inference_rules.py  rules of `generate_config`, and of vLLM's arguments in it
    critic_rules.py     the critic's layout, and rules of `critic_config`
    memory_rules.py     the memory plan of a configuration, and whether it keeps within `device_budget_gib`
    loading.py          all rules; load_config: YAML or a mapping -> HybridConfig, or every violation at once
    proposals.py        what is said of unknown keys and wrong values; other frameworks' names for ours

To change: a key: keys.py, then `make docs`. A parallel size is a key too, but begins in layouts/parallelism.py, which
has its other names, and its rule is in layouts/size_rules.py. Any other rule: one of the files of rules. Each rule
has a case that breaks it in tests/hybrid_engine/config/test_constraints.py.
"""

from hybrid_engine.config.keys import (
    ActorConfig,
    CriticConfig,
    FsdpConfig,
    GenerateConfig,
    HybridConfig,
    LoraConfig,
    OverridesConfig,
)
from hybrid_engine.config.loading import find_violations, load_config
from hybrid_engine.config.optimizer_keys import OptimizerConfig, ScheduleConfig
from hybrid_engine.config.values import FromProgram

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
