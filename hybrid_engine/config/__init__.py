"""Configuration: the keys, the sizes that follow from them, and the rules that they must satisfy.

keys.py         `actor_config`, `generate_config` and their sections, as pydantic models
constraints.py  the rules between keys, model and number of ranks
loading.py      load_config: YAML or a mapping -> HybridConfig, or every violation at once
"""

from hybrid_engine.config.keys import ActorConfig, GenerateConfig, HybridConfig, LoraConfig, OptimizerConfig
from hybrid_engine.config.loading import find_violations, load_config

__all__ = [
    "ActorConfig",
    "GenerateConfig",
    "HybridConfig",
    "LoraConfig",
    "OptimizerConfig",
    "find_violations",
    "load_config",
]
