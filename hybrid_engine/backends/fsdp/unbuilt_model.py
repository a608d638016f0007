"""What transformers would build from a config.json, without the memory of it: for plans of models of any size."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_engine.backends.fsdp.canonical_names import packed_model
from hybrid_engine.errors import ConfigError, ParameterMismatchError, Violation, clipped
from hybrid_engine.layouts.sharded import PackedModel
from hybrid_engine.models.table import ModelTable


def packed_model_of(directory: Path, table: ModelTable, key: str = "model") -> PackedModel:
    """Where the tensors of a checkpoint lie in the model of a config.json.

    Raises ConfigError under `key` for a config that transformers builds no model from, or another one than the table's.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return packed_model(model, model.state_dict(keep_vars=True), table)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        problem = f"transformers builds no model from its config.json: {type(error).__name__}: {error}"
        remedy = "Check it by AutoModelForCausalLM.from_config, or plan for Megatron"
    except ParameterMismatchError as error:
        problem, remedy = f"transformers builds another model from it: {error}", "Check its config.json"
    raise ConfigError([Violation(key, clipped(problem, 1000), remedy)])
