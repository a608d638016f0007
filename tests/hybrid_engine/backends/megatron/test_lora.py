"""Adapters and frozen weights in Megatron on real ranks; the matrix switches with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError, WeightError
from tests.harness.launch import Outcomes, Ranks
from tests.harness.torch_modes import other_torch_modes
from tests.harness.values import Values
from tests.zoo.megatron_models import DENSE_FLOAT32, load_canonical, negative_log_likelihood, reference_of, running
from tests.zoo.tiny_models import save_model, token_batch

LORA = {"lora": {"rank": 4, "alpha": 8.0}, "optimizer": {"lr": 1e-2}}
TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, Values] = {
    "dp2": {},
    "tp2": TP2,
    "tp2 sequence parallel": {**TP2, "sequence_parallel": True},
    "tp2 replicated": {**TP2, "use_distributed_optimizer": False},
    "pp2": {"pipeline_model_parallel_size": 2},
}
# megatron-core's own experts train with tensor parallelism only if the sequence is split.
SPLIT = {**TP2, "sequence_parallel": True}
EXPERT_LAYOUTS: dict[str, Values] = {
    "dp2": {},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2 etp2": SPLIT,
    "tp2 ep2 etp1": {**SPLIT, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "tp2 etp2 replicated": {**SPLIT, "use_distributed_optimizer": False},
}


def train_adapters(path: Path, layouts: dict[str, Values]) -> Values:
    """Train three steps in every layout; see `_train` for the results."""
    results = {}
    for name, layout in layouts.items():
        with running(path, ActorConfig(**{**DENSE_FLOAT32, **LORA, **layout})) as run:
            load_canonical(run, path)
            _start_alike(run)
            results[name] = _train(run)
    return results


def _start_alike(run: Any) -> None:
    """Set the same matrices A in every layout; random ones depend on the layout."""
    from megatron.core import parallel_state

    for name, parameter in run.engine.model.weights.model.named_lora():
        module, _, matrix = name.partition(".adapter.")
        if matrix != "linear_in.weight":
            continue
        group = parallel_state.get_tensor_model_parallel_group()
        if ".experts." in name:
            group = parallel_state.get_expert_tensor_parallel_group()
        num_parts = group.size() if module.endswith(("linear_proj", "linear_fc2")) else 1
        rows, columns = parameter.shape
        generator = torch.Generator().manual_seed(sum(name.encode()))
        whole = 0.3 * torch.randn(rows, columns * num_parts, generator=generator)
        parameter.data.copy_(whole.chunk(num_parts, 1)[group.rank() % num_parts])
    run.engine.model.reload_main_params()


def _train(run: Any) -> Values:
    """Return losses, changed parameters, and the error of the merged model."""
    weights = run.engine.model.weights
    before = {name: parameter.detach().clone() for name, parameter in weights.model.named_parameters()}
    batch = token_batch(0, 4, 12)
    steps = [run.engine.train_step(batch, negative_log_likelihood) for _ in range(3)]
    with other_torch_modes():  # merging must not depend on the caller's modes
        weights.prepare()
    changed = {
        name
        for name, parameter in weights.model.named_parameters()
        if not torch.equal(before[name], parameter.detach())
    }
    tokens = batch["tokens"]
    adapted = run.engine.logits(tokens)
    sums = dict(weights.shown_weights())
    with torch.no_grad():
        for name, parameter in weights.model.named_parameters():
            if name.endswith(".adapter.linear_out.weight"):
                # Without adapters, the merged weights must give the adapted logits.
                parameter.zero_()
        for name, weight in weights.model.named_weights():
            weight.copy_(sums[name])
    from_merged = float((run.engine.logits(tokens) - adapted).abs().max())
    poisoned = next(name for name in before if name.endswith(".adapter.linear_in.weight"))
    # In a matrix that is not sent by itself.
    dict(weights.model.named_parameters())[poisoned].data[0, 0] = torch.nan
    with pytest.raises(WeightError) as caught:
        weights.check_values()
    return {
        "nan": poisoned in str(caught.value),
        "losses": [step["loss"] for step in steps],
        "norms": [step["grad_norm"] for step in steps],
        "changed": changed,
        "adapters": {name for name in before if ".adapter." in name},
        "frozen": {name: name not in changed for name in before},
        "from merged": from_merged,
    }


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Results of the calls, by rank."""
    directory = tmp_path_factory.mktemp("adapters")
    path = save_model(directory / "model", "qwen3")
    experts = save_model(directory / "experts", "qwen3_moe")
    calls = {
        "trained": (train_adapters, (path, LAYOUTS)),
        "experts": (train_adapters, (experts, EXPERT_LAYOUTS)),
        "read": (save_and_load, (path, directory / "out", {})),
        "experts read": (save_and_load, (experts, directory / "out of experts", EXPERT_LAYOUTS["ep2"])),
        "frozen": (freeze_and_fail, (path,)),
    }
    return engines.launch_in_turn(2, calls)


@pytest.mark.parametrize("model", ["trained", "experts"])
def test_adapters_train_and_are_merged(outcomes: Outcomes, model: str) -> None:
    results = outcomes[model]
    expected = results[0]["dp2"]  # every layout trains the same
    for result in results:
        for name, outcome in result.items():
            assert outcome["losses"][0] > outcome["losses"][-1]
            assert outcome["losses"] == pytest.approx(expected["losses"], abs=1e-5), name
            assert outcome["norms"] == pytest.approx(expected["norms"], rel=1e-4), name
            assert outcome["adapters"], name
            assert outcome["changed"] == outcome["adapters"], name
            assert outcome["from merged"] < 1e-4, name
            assert outcome["nan"], name


def save_and_load(path: Path, out: Path, layout: Values) -> Values:
    """Train, save a Hugging Face checkpoint, load it; return logit differences."""
    from hybrid_engine.backends.huggingface import load_hf_checkpoint, save_hf_checkpoint
    from hybrid_engine.ranks.job import Job
    from hybrid_engine.trainer.megatron.train_engine import copy_weights

    with running(path, ActorConfig(**{**DENSE_FLOAT32, **LORA, **layout})) as run:
        weights = run.engine.model.weights
        job = Job.join(60)
        batch = token_batch(0, 4, 12)
        for _ in range(3):
            run.engine.train_step(batch, negative_log_likelihood)
        trained = run.engine.logits(batch["tokens"])
        reference = reference_of(run, path)
        copy_weights(run.engine.model, reference.model)
        frozen = reference.logits(batch["tokens"])
        save_hf_checkpoint(out, weights.merged, run.table, job, path)
        load_hf_checkpoint(out, weights.base, run.table, job)
        run.engine.model.reload_main_params()
        read = run.engine.logits(batch["tokens"])
        run.engine.train_step(batch, negative_log_likelihood)
        moved = run.engine.logits(batch["tokens"])
        # The reference holds the weights merged before the last step.
        stays = torch.equal(frozen, reference.logits(batch["tokens"]))
    return {
        "difference": float((read - trained).abs().max()),
        "of reference": float((frozen - trained).abs().max()),
        "moved": float((moved - trained).abs().max()),
        "reference stays": stays,
        "spread": float(trained.max() - trained.min()),
    }


@pytest.mark.parametrize("model", ["read", "experts read"])
def test_checkpoints_and_references_hold_merged_weights(outcomes: Outcomes, model: str) -> None:
    for result in outcomes[model]:
        assert result["difference"] < 1e-5 < result["spread"]
        assert result["of reference"] < 1e-5 < result["moved"]
        assert result["reference stays"]


def freeze_and_fail(path: Path) -> tuple[Mapping[str, bool], list[str]]:
    """Return whether each parameter is frozen, and the errors for names that match nothing."""
    frozen = {"frozen_parameters": ["embedding.*", "decoder.layers.1.*"], "optimizer": {"lr": 1e-2}}
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **frozen})) as run:
        kept = {
            name: not parameter.requires_grad for name, parameter in run.engine.model.weights.model.named_parameters()
        }
        before = {
            name: parameter.detach().clone() for name, parameter in run.engine.model.weights.model.named_parameters()
        }
        run.engine.train_step(token_batch(0, 4, 12), negative_log_likelihood)
        for name, parameter in run.engine.model.weights.model.named_parameters():
            assert torch.equal(before[name], parameter.detach()) == kept[name], name
    messages = []
    for wrong in ({"frozen_parameters": ["decoder.layer.*"]}, {"lora": {"target_modules": ["input_layernorm"]}}):
        with pytest.raises(ConfigError) as caught, running(path, ActorConfig(**{**DENSE_FLOAT32, **wrong})):
            pass
        messages.append(str(caught.value))
    return kept, messages


def test_frozen_parameters_stay_and_unknown_names_are_refused(outcomes: Outcomes) -> None:
    for kept, messages in outcomes["frozen"]:
        assert {name for name, is_kept in kept.items() if is_kept} == {
            name for name in kept if name.startswith(("embedding.", "decoder.layers.1."))
        }
        assert not all(kept.values())
        assert "no parameter matches decoder.layer.*" in messages[0]
        assert "input_layernorm" in messages[1]
        assert "target_modules" in messages[1]
