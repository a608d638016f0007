"""Steps and scores of the FSDP2 trainer, compared with transformers on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.errors import LossError, StateError
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches import chunked_scores
from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine
from hybrid_engine.trainer.learning_rate import MAX_SKIPPED
from tests.harness.errors import refused
from tests.harness.launch import Ranks, of_all_ranks, on_ranks
from tests.harness.values import Values
from tests.hybrid_engine.backends.fsdp.actors import (
    TIED_WITH_ODD_ROWS,
    actor,
    batch,
    cross_entropy,
    state_of,
    train,
    weights_of,
)
from tests.zoo import padded_batches
from tests.zoo.families import FAMILIES
from tests.zoo.shares import share_of, spoiled
from tests.zoo.tiny_models import Zoo, adamw, label_log_probs

# family -> changes. qwen2: tied, odd rows; mixtral: experts packed by transformers;
# gpt2: dropout and learned positions
MODELS: dict[str, Values] = {"qwen2": TIED_WITH_ODD_ROWS, "mixtral": {}, "gpt2": {}}
PADDED = ("qwen2", "gpt2", "gemma3", "mixtral", "deepseek_v3")
CHUNK_NBYTES = 1500  # of logits: a few tokens


def whole_log_probs(engine: FsdpTrainEngine, whole_batch: Batch) -> torch.Tensor:
    return engine.data_parallel.gather(engine.log_probs(share_of(engine, whole_batch)))


def skip(engine: FsdpTrainEngine) -> None:
    """Check that non-finite gradients change nothing, and end training after some steps."""
    before = state_of(engine)
    skipped = []
    with refused(LossError, "every-step-skipped"):
        while True:
            skipped.append(
                engine.train_step(share_of(engine, batch(5)), spoiled(cross_entropy))["skipped"]
            )
    assert skipped == [1.0] * (MAX_SKIPPED - 1)
    assert state_of(engine) == before


def unsharded_model(path: Path, initial: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(path), dtype=torch.float32
    ).eval()
    model.load_state_dict(initial)
    return model


def log_probs(model: torch.nn.Module, whole_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return label_log_probs(
        model(whole_batch["tokens"], use_cache=False).logits.float(), whole_batch["labels"]
    )


@on_ranks(2)
@pytest.mark.parametrize("family", MODELS)
def test_steps_equal_the_unsharded_model(zoo: Zoo, family: str) -> None:
    """Losses, norms before clipping and weights after three steps on 2 ranks x 2 micro batches,
    with skipped ones.
    """
    path = zoo.path(family, **MODELS[family])
    with actor(path) as parts, attributes_set([chunked_scores], MAX_LOGIT_NBYTES=CHUNK_NBYTES):
        engine = parts.engine
        initial = weights_of(engine)
        check_random_weights(initial)
        model = unsharded_model(path, initial)

        def check_scores(atol: float) -> torch.Tensor:
            scores = whole_log_probs(engine, batch(9))
            torch.testing.assert_close(
                scores, log_probs(model, batch(9)).detach(), atol=atol, rtol=0
            )
            return scores

        check_scores(2e-5)
        optimizer = adamw(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(3):
            if step == 1:
                skip(engine)
            report = train(engine, step)
            optimizer.zero_grad()
            loss = -log_probs(model, batch(step)).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            assert of_all_ranks(report) == [report] * 2
            assert report["loss"] == pytest.approx(loss.item(), abs=1e-4)
            assert report["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
            assert report["skipped"] == 0
        rescored = check_scores(1e-2)
        reference = parts.frozen_copy()
        assert torch.equal(whole_log_probs(reference, batch(9)), rescored)
        with refused(StateError, "no-optimizer"):
            train(reference, 0)
        assert engine.logits(batch(9)["tokens"]).shape == (8, 12, 130)


def check_random_weights(initial: TensorDict) -> None:
    """Check that norms are ones, and matrices normal with the configured deviation, on all ranks
    alike.
    """
    matrices = [tensor for name, tensor in initial.items() if tensor.dim() > 1]
    assert all(0.5 * 0.02 < tensor.std() < 1.5 * 0.02 for tensor in matrices)
    norms = [
        tensor for name, tensor in initial.items() if "norm" in name and name.endswith("weight")
    ]
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in norms)
    for weights in of_all_ranks(initial):
        assert all(torch.equal(tensor, weights[name]) for name, tensor in initial.items())


@on_ranks(2)
def test_ranks_report_the_same_names_or_none(zoo: Zoo) -> None:
    """A loss with another name on each rank is refused, and no weight changes."""
    with actor(zoo.path("qwen2")) as parts:
        engine = parts.engine
        report = engine.train_step(
            share_of(engine, batch(3)), lambda _b, values: (-values.mean(), {})
        )
        assert report.keys() == {"skipped", "learning_rate", "grad_norm"}
        before = whole_log_probs(engine, batch(9))
        name = f"of rank {engine.data_parallel.rank}"
        with refused(LossError, "other-names-reported", name):
            engine.train_step(
                share_of(engine, batch(4)),
                lambda _batch, values: {"loss": -values.mean(), name: 1.0},
            )
        assert torch.equal(whole_log_probs(engine, batch(9)), before)


def initial_weights(path: Path) -> TensorDict:
    with actor(path) as parts:
        engine = parts.engine
        return weights_of(engine)


def test_random_weights_do_not_depend_on_the_number_of_ranks(ranks: Ranks, zoo: Zoo) -> None:
    path = zoo.path("qwen2", **TIED_WITH_ODD_ROWS)
    (weights,) = ranks.launch(initial_weights, 1, path)
    first, _ = ranks.launch(initial_weights, 2, path)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in first.items())


@on_ranks(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_built(zoo: Zoo, family: str) -> None:
    """Built layer by layer, but equal to a model built by transformers: buffers, ties, logits, also
    in chunks.
    """
    path = zoo.path(family)
    with actor(path) as parts, torch.no_grad():
        engine = parts.engine
        model = unsharded_model(path, weights_of(engine))
        tokens = batch(0)["tokens"]
        torch.testing.assert_close(engine.logits(tokens), model(tokens).logits, atol=1e-5, rtol=0)
        sizes = []
        head = engine.model.model.get_output_embeddings()
        head.register_forward_hook(lambda _module, _inputs, logits: sizes.append(logits.nbytes))
        for one in (
            engine.model.model,
            model,
        ):  # what a user's hook and replacement do is done once
            one.base_model.register_forward_hook(doubled)
            own = one.get_output_embeddings()
            own.forward = lambda hidden, plain=own.forward: plain(hidden) * 0.5
        with attributes_set([chunked_scores], MAX_LOGIT_NBYTES=CHUNK_NBYTES):
            in_chunks = engine.log_probs(batch(0))
        torch.testing.assert_close(in_chunks, log_probs(model, batch(0)), atol=1e-5, rtol=0)
        assert max(sizes) <= CHUNK_NBYTES
        attention = engine.model.model.config._attn_implementation
        assert attention == ("eager" if family == "gemma2" else "sdpa")  # sdpa ignores soft caps


@on_ranks(1)
@pytest.mark.parametrize("family", PADDED)
def test_padding_and_packing_do_not_change_values_of_tokens(zoo: Zoo, family: str) -> None:
    """Neither log-probabilities nor gradients of a token change."""
    path = zoo.path(family)
    with actor(path, seq_length=padded_batches.WIDTH) as parts:
        engine = parts.engine
        model = unsharded_model(path, weights_of(engine))
        reads = padded_batches.read_all(engine)
        padded_batches.assert_is_that_of_logits(reads["right"], model)
        padded_batches.assert_all_ways_agree(reads, atol=1e-5)


def doubled(_module: torch.nn.Module, _inputs: object, output: Any) -> None:
    output["last_hidden_state"] = output.last_hidden_state * 2


@pytest.mark.parametrize(
    ("micro_batch_size", "attention", "supports_packing"),
    [
        (1, "flash_attention_2", True),
        (2, "sdpa", True),
        (2, None, True),
        (2, "flash_attention_2", False),
    ],
)
def test_flash_attention_supports_packing_in_single_rows_only(
    micro_batch_size: int, attention: str | None, supports_packing: bool
) -> None:
    """A model passed by the caller may use any attention implementation."""
    engine = FsdpTrainEngine.__new__(FsdpTrainEngine)
    engine._micro_batch_size = micro_batch_size
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention))
    engine.model = SimpleNamespace(model=module)  # type: ignore[assignment]
    assert (engine._no_packing == "") == supports_packing
