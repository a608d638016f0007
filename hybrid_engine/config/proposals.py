"""What is said of unknown keys and wrong values, and what is proposed instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pydantic

from hybrid_engine.config.values import Section
from hybrid_engine.errors import Violation, clipped, nearest, shortened

Path = tuple[str, ...]

ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    # verl
    "actor": ("actor_config",),
    "actor_rollout_ref": ("actor_config", "generate_config"),
    "critic": ("critic_config",),
    "rollout": ("generate_config",),
    "expert_model_parallel_size": ("infer_expert_parallel_size",),
    "grad_offload": ("offload_train_grad",),
    "lr_warmup_steps_ratio": ("lr_warmup_fraction",),
    "micro_batch_size_per_gpu": ("micro_batch_size",),
    "optim": ("optimizer",),
    "optimizer_offload": ("offload_train_optimizer",),
    "param_offload": ("offload_train_param",),
    "pipeline_model_parallel_size": ("infer_pipeline_parallel_size",),
    "ppo_micro_batch_size_per_gpu": ("micro_batch_size",),
    "tensor_model_parallel_size": ("infer_tensor_parallel_size",),
    "total_training_steps": ("lr_decay_steps",),
    "warmup_style": ("lr_decay_style",),
    # TRL, PEFT and transformers
    "adam_epsilon": ("adam_eps",),
    "betas": ("adam_beta1", "adam_beta2"),
    "bf16": ("params_dtype",),
    "dtype": ("params_dtype",),
    "gradient_checkpointing": ("recompute_granularity", "activation_checkpointing"),
    "grad_clip": ("clip_grad",),
    "learning_rate": ("lr",),
    "lora_alpha": ("alpha",),
    "lora_r": ("rank",),
    "lr_scheduler_type": ("lr_decay_style",),
    "max_grad_norm": ("clip_grad",),
    "max_seq_length": ("seq_length", "max_model_len"),
    "model_name_or_path": ("model",),
    "peft_config": ("lora",),
    "per_device_train_batch_size": ("micro_batch_size",),
    "r": ("rank",),
    "torch_dtype": ("params_dtype",),
    "warmup_ratio": ("lr_warmup_fraction",),
    # short forms
    "dp": ("infer_data_parallel_size",),
    "ep": ("expert_model_parallel_size", "infer_expert_parallel_size"),
    "offload": ("offload_train_param", "offload_train_grad", "offload_train_optimizer"),
    "pp": ("pipeline_model_parallel_size", "infer_pipeline_parallel_size"),
    "tp": ("tensor_model_parallel_size", "infer_tensor_parallel_size"),
}
"""Names that other frameworks have for a key, or for a like key of another section -> keys of ours."""

_DATA_PARALLEL = "Leave it out: it is the number of ranks over TP x PP x CP"
_SAMPLED = "Pass Sampling({0}=...) to generate_sequences: each call says how it samples"
_ACCUMULATED = "Leave it out: an update accumulates the rows of a rank / micro_batch_size micro batches"
NO_KEYS = {
    ("actor_config", "dp"): _DATA_PARALLEL,
    ("actor_config", "data_parallel_size"): _DATA_PARALLEL,
    ("actor_config", "gradient_accumulation_steps"): _ACCUMULATED,
    **{
        ("generate_config", name): _SAMPLED.format(ours)
        for name, ours in {
            **{name: name for name in ("n", "temperature", "top_p", "top_k", "max_tokens", "min_p", "stop")},
            "max_new_tokens": "max_tokens",
        }.items()
    },
}
"""(section, name) that users try, though it is not a key -> what to do."""

_BESIDE = "critic_config"
"""A section that most jobs lack, with keys of the same names as the actor's."""


def proposal(place: Path, section: type[Section], root: type[Section], prefix: str = "") -> str:
    """What to do about the unknown key at `place`, whose last part is its name.

    First the same name in another section, or another framework's name for a key; then a near spelling; else the keys
    of the section. Of several places the ones that share most sections with `place`.

    Args:
        place: parts of the key below `root`.
        section: that it was found in.
        root: where other keys are looked up.
        prefix: of keys below `root`, in messages.
    """
    if place in NO_KEYS:
        return NO_KEYS[place]
    here, name = place[:-1], clipped(place[-1])
    paths = [path for path in paths_of(root) if path[0] != _BESIDE or here[:1] == (_BESIDE,)]
    spelling = nearest(name, section.model_fields) or nearest(name, {path[-1] for path in paths})

    def distance(path: Path) -> tuple[int, bool]:
        return -sum(path[:depth] == here[:depth] for depth in range(1, len(here) + 1)), path[-1] != name

    for verb, conjunction, names in (
        ("Use", " and ", {name, *ELSEWHERE.get(name, ())}),
        ("Did you mean", " or ", {spelling}),
    ):
        found = sorted((path for path in paths if path[-1] in names), key=distance)
        best = [path for path in found if distance(path) == distance(found[0])]
        if 0 < len(best) <= 3:  # more are a list to search
            *others, last = [_shown(path, here, prefix) for path in best]
            return f"{verb} {conjunction.join(filter(None, (', '.join(others), last)))}"
    return f"Known keys: {', '.join(section.model_fields)}"


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a key's type is, also where it may be left out; None for other types."""
    options = (annotation, *get_args(annotation))
    return next((one for one in options if isinstance(one, type) and issubclass(one, Section)), None)


def paths_of(section: type[Section], above: Path = ()) -> Iterator[Path]:
    """Every key of a section and of those in it."""
    for name, field in section.model_fields.items():
        yield (*above, name)
        if (inner := section_in(field.annotation)) is not None:
            yield from paths_of(inner, (*above, name))


def _shown(path: Path, here: Path, prefix: str) -> str:
    if path[:-1] == here:
        return path[-1]
    return prefix + ".".join(path) + (" at the top level" if len(path) == 1 else "")


def violations_of(error: pydantic.ValidationError, root: type[Section], prefix: str = "") -> list[Violation]:
    """What pydantic found in values of `root`; keys begin with `prefix`."""
    return [_violation_of(item, root, prefix) for item in error.errors(include_url=False, include_context=False)]


def _violation_of(item: Mapping[str, Any], root: type[Section], prefix: str) -> Violation:
    key = clipped((prefix + ".".join(str(part) for part in item["loc"])).rstrip(".") or "configuration")
    if item["type"] not in ("extra_forbidden", "missing"):
        message = item["msg"].removeprefix("Value error, ")
        return Violation(key, f"{message}, found {shortened(item.get('input'))}", "Correct the value")
    place = tuple(str(part) for part in item["loc"])
    section = root
    for part in place[:-1]:
        section = section_in(section.model_fields[part].annotation) or section
    if item["type"] == "missing":
        what = " ".join((section.model_fields[place[-1]].description or "").split()).split(". ")[0]
        return Violation(key, "is missing", f"Add it: {what[:1].lower()}{what[1:]}")
    return Violation(key, "unknown key", proposal(place, section, root, prefix))
