"""What a `HybridEngine` around a transformers model is made of: a job, the model sharded, and vLLM beside it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybrid_engine.assembly import EngineParts, inference_settings, put_beside
from hybrid_engine.config import FsdpConfig, GenerateConfig, HybridConfig, load_config
from hybrid_engine.config.fsdp_rules import generate_values, read_train_config
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.files.hub import Snapshot
from hybrid_engine.models import table_for
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_defaults import torch_defaults

if TYPE_CHECKING:
    from hybrid_engine.backends.fsdp import ShardedModel


@torch_defaults()  # what is made here is trained and filled in other modes of torch
def build_parts(
    model: torch.nn.Module,
    owner: ExitStack,
    *,
    rollout_config: Mapping[str, Any] | None = None,
    train_config: Mapping[str, Any] | None = None,
    enable_reshard: bool = True,
    compress_reshard: bool = False,
    compression_dtype: torch.dtype | str = torch.bfloat16,
) -> EngineParts[ShardedModel]:
    """Shard the model, unless it is, and build vLLM for it. Collective.

    `owner` ends what is made here; the other arguments are `HybridEngine`'s. Raises, on all ranks: ConfigError,
    UnknownModelError, ModelError, each with everything that is wrong.
    """
    from hybrid_engine.backends.fsdp import ShardedModel
    from hybrid_engine.backends.fsdp.sharding import is_sharded, mesh_of, shard_model
    from hybrid_engine.backends.vllm import check_before_building

    if not enable_reshard:
        remedy = "Leave it out: vLLM's weights come by resharding alone"
        raise ConfigError([Violation("enable_reshard", "False", remedy)])
    values = generate_values(rollout_config or {})
    if compress_reshard:
        values |= {"compress_reshard": True, "compression_dtype": str(compression_dtype).removeprefix("torch.")}
    job = owner.enter_context(closing(Job.join(values.get("timeout_seconds", GenerateConfig().timeout_seconds))))
    with job.agreement.building():
        with job.agreement.phase("checking the configuration"):
            fsdp = read_train_config(train_config or {}, job.world_size)
            config, tokenizer_dir = _checked_config(model, fsdp, values, job, owner)
            table = table_for(config.hf_config())
            check_before_building(inference_settings(config, job.world_size), job)
        with job.agreement.phase("sharding the model", SHORT_PATIENCE):
            if train_config is not None or not is_sharded(model):
                shard_model(model, fsdp, mesh_of(fsdp, job.device, job.world_size))
            train = ShardedModel(model, table, job.rank, lora_delivery=config.generate_config.lora_delivery)
            owner.callback(train.close)  # once all of it is back on the device
        lora = train.weights.lora
        return put_beside(train, config, table, job, owner, lora=lora, tokenizer_dir=tokenizer_dir)


def _checked_config(
    model: torch.nn.Module, fsdp: FsdpConfig, values: dict[str, Any], job: Job, owner: ExitStack
) -> tuple[HybridConfig, str | None]:
    """The configuration for this model, and its tokenizer's directory. Raises before the model is changed."""
    from hybrid_engine.backends.fsdp.adaptor import read_model_weights
    from hybrid_engine.backends.fsdp.model_checks import require_drivable, weights_dtype
    from hybrid_engine.backends.fsdp.wrapped_names import wrapped_names
    from hybrid_engine.backends.fsdp.written_config import require_configured

    require_drivable(model, job.world_size)
    tensors = model.state_dict(keep_vars=True)
    names = wrapped_names(model, tensors)
    tokenizer_dir = _tokenizer_directory(names.model, values.pop("model", None))
    directory = _model_directory(names.model, owner)
    wire_dtype = values.get("compression_dtype", "bfloat16") if values.get("compress_reshard") else None
    dtype = weights_dtype({own: tensors[own] for own in names.weights.values()}, wire_dtype)
    actor = {"params_dtype": dtype, "seq_length": 1, "fsdp": fsdp}
    settings = {"model": str(directory), "actor_config": actor, "generate_config": values}
    config = load_config(settings, job.world_size, own_loop=True, own_weights=True)  # the loop is the caller's
    read_model_weights(model, tensors, table_for(config.hf_config()), config.generate_config.lora_delivery)
    require_configured(names.model)
    return config, tokenizer_dir


def _model_directory(model: Any, owner: ExitStack) -> Path:
    """A directory with the config and the generation config of a transformers model, for vLLM; `owner` removes it.

    No file is read: what the model was told when it was loaded, and since, is in the object alone.
    """
    from hybrid_engine.backends.fsdp.written_config import config_of

    made = Path(owner.enter_context(tempfile.TemporaryDirectory(prefix="hybrid-engine-")))
    config_of(model).save_pretrained(made)
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.to_json_file(made / "generation_config.json")  # save_pretrained refuses what vLLM does not read
    return made


def _tokenizer_directory(model: Any, given: str | None) -> str | None:
    """Directory that is given, else where a transformers model was loaded from, on disk or in the Hub's cache.

    Raises ConfigError for a directory that is given and not there.
    """
    if given is not None and not os.path.isdir(given):
        problem = f"{given} is not a directory"
        raise ConfigError([Violation("rollout_config.model", problem, "Name that of the tokenizer, or leave it out")])
    name = given or model.config.name_or_path
    if name and os.path.isdir(name):
        return str(name)
    # the commit that transformers has loaded; None: the main branch
    snapshot = Snapshot.in_cache(name, getattr(model.config, "_commit_hash", None))
    return None if snapshot is None else str(snapshot.directory)
