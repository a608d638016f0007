"""Adapters and frozen weights in Megatron on real ranks; the matrix switches with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybrid_engine.assembly import megatron_lora
from hybrid_engine.backends.huggingface import load_hf_checkpoint, save_hf_checkpoint
from hybrid_engine.errors import WeightError
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.launch import on_engines
from tests.harness.torch_modes import other_torch_modes
from tests.harness.values import Values
from tests.zoo.megatron_models import (
    EP2,
    PP2,
    SP2,
    TP2,
    loaded,
    negative_log_likelihood,
    reference_of,
    running,
    whole_weights,
)
from tests.zoo.tiny_models import Zoo, token_batch

peft = pytest.importorskip("peft", reason="pip install peft")

BATCH = token_batch(0, 4, 12)
LORA: Values = {"lora": {"rank": 4, "alpha": 8.0}, "optimizer": {"lr": 1e-2}}
LAYOUTS: dict[str, Values] = {
    "dp2": {},
    "tp2": TP2,
    "tp2 sequence parallel": SP2,
    "tp2 replicated": {**TP2, "use_distributed_optimizer": False},
    "pp2": PP2,
}
# megatron-core's own experts train with tensor parallelism only if the sequence is split.
EXPERT_LAYOUTS: dict[str, Values] = {
    "dp2": {},
    "ep2": EP2,
    "tp2 etp2": SP2,
    "tp2 ep2 etp1": {**SP2, **EP2, "expert_tensor_parallel_size": 1},
    "tp2 etp2 replicated": {**SP2, "use_distributed_optimizer": False},
}


def parameters_of(run: Any) -> TensorDict:
    return dict(run.engine.model.weights.model.named_parameters())


def copies_of(tensors: TensorDict) -> TensorDict:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def changed_in(run: Any, before: TensorDict) -> set[str]:
    return {
        name
        for name, parameter in parameters_of(run).items()
        if not torch.equal(before[name], parameter)
    }


@on_engines(2)
@pytest.mark.parametrize(("family", "layouts"), [("qwen3", LAYOUTS), ("qwen3_moe", EXPERT_LAYOUTS)])
def test_adapters_train_and_are_merged(
    zoo: Zoo, tmp_path: Path, family: str, layouts: dict[str, Values]
) -> None:
    """Every layout trains the same, and PEFT loads what it has written."""
    expected: dict[str, list[float]] = {}
    for layout in layouts.values():
        with loaded(zoo.path(family), **LORA, **layout) as run:
            _start_alike(run)
            before = copies_of(parameters_of(run))
            steps = [run.engine.train_step(BATCH, negative_log_likelihood) for _ in range(3)]
            with other_torch_modes():  # merging must not depend on the caller's modes
                run.engine.model.weights.prepare()
            adapters = {name for name in before if ".adapter." in name}
            assert changed_in(run, before) == adapters != set()
            if family == "qwen3":
                _check_written(run, zoo.path(family), tmp_path)
            _check_merged(run)
            _check_that_a_nan_is_found(run)
        losses = [step["loss"] for step in steps]
        norms = [step["grad_norm"] for step in steps]
        assert losses[0] > losses[-1]
        expected = expected or {"losses": losses, "norms": norms}
        assert losses == pytest.approx(expected["losses"], abs=1e-5), layout
        assert norms == pytest.approx(expected["norms"], rel=1e-4), layout


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


def _check_written(run: Any, path: Path, out: Path) -> None:
    """Check that PEFT's model computes as Megatron's, with its very matrices."""
    weights = run.engine.model.weights.separate
    lora = megatron_lora(run.config, run.table)
    save_hf_checkpoint(out, weights, run.table, Job.join(60), path, lora=lora)
    saved = load_file(out / "adapter_model.safetensors")
    trained = {name: part for name, part in whole_weights(weights).items() if ".lora_" in name}
    torch.testing.assert_close(saved, trained, atol=0, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits = peft.PeftModel.from_pretrained(base, out)(BATCH["tokens"]).logits
    expected = run.engine.logits(BATCH["tokens"])[..., : logits.shape[-1]]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def _check_merged(run: Any) -> None:
    """Check that without adapters the merged weights give the adapted logits."""
    weights = run.engine.model.weights
    adapted = run.engine.logits(BATCH["tokens"])
    sums = dict(weights.shown_weights())
    with torch.no_grad():
        for name, parameter in parameters_of(run).items():
            if name.endswith(".adapter.linear_out.weight"):
                parameter.zero_()
        for name, weight in weights.model.named_weights():
            weight.copy_(sums[name])
    torch.testing.assert_close(run.engine.logits(BATCH["tokens"]), adapted, atol=1e-4, rtol=0)


def _check_that_a_nan_is_found(run: Any) -> None:
    """Check a matrix that is not sent by itself."""
    parameters = parameters_of(run)
    poisoned = next(name for name in parameters if name.endswith(".adapter.linear_in.weight"))
    parameters[poisoned].data[0, 0] = torch.nan
    with pytest.raises(WeightError, match=re.escape(poisoned)):
        run.engine.model.weights.check_values()


@on_engines(2)
@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3", {}), ("qwen3_moe", EXPERT_LAYOUTS["ep2"])]
)
def test_checkpoints_and_references_hold_merged_weights(
    zoo: Zoo, tmp_path: Path, family: str, layout: Values
) -> None:
    from hybrid_engine.trainer.megatron.train_engine import copy_weights

    path = zoo.path(family)
    tokens = BATCH["tokens"]
    with running(path, **LORA, **layout) as run:
        weights = run.engine.model.weights
        job = Job.join(60)
        for _ in range(3):
            run.engine.train_step(BATCH, negative_log_likelihood)
        trained = run.engine.logits(tokens)
        assert trained.max() - trained.min() > 1e-5
        reference = reference_of(run, path)
        copy_weights(run.engine.model, reference.model)
        merged = reference.logits(tokens)
        torch.testing.assert_close(merged, trained, atol=1e-5, rtol=0)
        save_hf_checkpoint(tmp_path, weights.merged, run.table, job, path)
        load_hf_checkpoint(tmp_path, weights.base, run.table, job)
        run.engine.model.reload_main_params()
        torch.testing.assert_close(run.engine.logits(tokens), trained, atol=1e-5, rtol=0)
        run.engine.train_step(BATCH, negative_log_likelihood)
        assert (run.engine.logits(tokens) - trained).abs().max() > 1e-5
        # The reference holds the weights merged before the last step.
        assert torch.equal(merged, reference.logits(tokens))


@on_engines(2)
def test_frozen_parameters_stay(zoo: Zoo) -> None:
    with running(zoo.path("qwen3"), frozen_parameters=["embedding.*", "decoder.layers.1.*"]) as run:
        before = copies_of(parameters_of(run))
        frozen = {name for name in before if name.startswith(("embedding.", "decoder.layers.1."))}
        assert {
            name for name, parameter in parameters_of(run).items() if not parameter.requires_grad
        } == frozen
        run.engine.train_step(BATCH, negative_log_likelihood)
        assert changed_in(run, before) == before.keys() - frozen != set()
