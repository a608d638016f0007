"""The same sequences padded on the right, padded on the left, and packed, and a trainer's results
for each.

The temperatures of the sequences differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches.arrangement import positions_in
from hybrid_engine.trainer.batches.token_outputs import Outputs
from tests.zoo.shares import share_of

LENGTHS = (11, 5, 4, 12, 7, 8, 3, 13)
"""Computed tokens of each sequence; pairs fill rows of 16, except the third with 15."""
TEMPERATURES = torch.tensor([0.7, 1.0, 1.3, 0.6, 1.7, 0.7, 0.8, 1.1])
WIDTH = 24
TOP_K = 3
OUTPUTS = Outputs(entropy=True, top_k=TOP_K)
VOCAB_SIZE = 130
Batch = TensorDict


def batches() -> dict[str, Batch]:
    """Return the batches by arrangement of the sequences. Each has other padding tokens."""
    generator = torch.Generator().manual_seed(5)
    sequences = [
        torch.randint(0, VOCAB_SIZE, (length + 1,), generator=generator) for length in LENGTHS
    ]
    right, left, packed = _rows(8, WIDTH, 0), _rows(8, WIDTH, 9), _rows(4, 16, 7)
    for number, (sequence, length) in enumerate(zip(sequences, LENGTHS, strict=True)):
        _put(right, number, 0, sequence)
        right["temperature"][number] = left["temperature"][number] = TEMPERATURES[number]
        _put(
            left, number, WIDTH - length - (number % 2), sequence
        )  # Odd rows have padding on both sides.
        start = 0 if number % 2 == 0 else LENGTHS[number - 1]
        _put(packed, number // 2, start, sequence, number % 2 + 1)
        packed["temperature"][number // 2, start : start + length] = TEMPERATURES[number]
    ids = packed.pop("attention_mask")
    by_row = {name: tensor for name, tensor in right.items() if name != "attention_mask"}
    return {
        "no mask": {**by_row, "temperature": TEMPERATURES},
        "right": right,
        "left": left,
        "packed": {**packed, "sequence_ids": ids},
        "packed by position": {**packed, "position_ids": positions_in(ids)},
    }


def _rows(num_rows: int, width: int, padding: int) -> Batch:
    names = ("tokens", "labels", "attention_mask")
    rows = {name: torch.full((num_rows, width), padding * (name != names[2])) for name in names}
    return {
        **rows,
        "weights": torch.zeros(num_rows, width),
        "temperature": torch.ones(num_rows, width),
    }


def _put(rows: Batch, row: int, start: int, sequence: torch.Tensor, number: int = 1) -> None:
    columns = slice(start, start + len(sequence) - 1)
    rows["tokens"][row, columns], rows["labels"][row, columns] = sequence[:-1], sequence[1:]
    rows["attention_mask"][row, columns] = number
    # The sum of weighted values is then the mean over the tokens of the batch.
    rows["weights"][row, columns] = len(rows["tokens"]) / sum(LENGTHS)


def by_sequence(values: torch.Tensor, way: str) -> torch.Tensor:
    """Return the values of all tokens, sequence by sequence, from `values` [B, S, ...]."""
    return values[batches()[way]["weights"] > 0]


def loss(micro_batch: Mapping[str, torch.Tensor], log_probs: torch.Tensor) -> TensorDict:
    """Return a loss over all tokens with an entropy bonus; "ratio gap" is max |ratio - 1|."""
    weights = micro_batch["weights"]
    ratio = (log_probs - micro_batch["old_log_probs"]).exp()
    policy = -(log_probs * weights).sum(1).mean()
    entropy = (micro_batch["entropy"] * weights).sum(1).mean()
    ratio_gap = ((ratio - 1).abs() * (weights > 0)).max()
    return {
        "loss": policy - 0.5 * entropy,
        "policy": policy,
        "entropy": entropy,
        "ratio gap": ratio_gap,
    }


@dataclass(frozen=True)
class Read:
    """Results of a trainer for one arrangement.

    Attributes:
        scores: scores [tokens, ...] by name.
        report: report of a training step without effect.
        padding: whether a score of padding is not 0.
    """

    scores: TensorDict
    report: dict[str, float]
    padding: bool


def read_all(engine: Any) -> dict[str, Read]:
    """Return the results by arrangement; set the learning rate to 0 to keep the weights."""
    engine.optimizer.set_learning_rate(0.0)
    results = {}
    for way, batch in batches().items():
        share = share_of(engine, batch)
        scores = {
            name: engine.data_parallel.gather(value)
            for name, value in engine.scores(share, OUTPUTS).items()
        }
        old_log_probs = engine.log_probs(share)
        log_probs = engine.data_parallel.gather(old_log_probs)
        assert torch.equal(log_probs, scores["log_probs"]), (
            "further outputs change log-probabilities"
        )
        report = engine.train_step(
            {**share, "old_log_probs": old_log_probs.to(share["tokens"].device)}, loss, OUTPUTS
        )
        is_padding = batch["weights"] == 0
        padding = any(bool(value[is_padding].any()) for value in scores.values())
        results[way] = Read(
            {name: by_sequence(value, way) for name, value in scores.items()}, report, padding
        )
    return results


def assert_all_ways_agree(results: Mapping[str, Read], atol: float) -> None:
    """Check that results of left and right padding are bitwise equal, and all others equal up to
    rounding.

    Rounding differs because the loss sums other rows.
    """
    right = results["right"]
    assert [read.report["ratio gap"] for read in results.values()] == [0.0] * len(results), (
        "log-probabilities differ before a step"
    )
    for name, values in right.scores.items():
        assert torch.equal(values, results["left"].scores[name]), name
    for way in ("no mask", "left", "packed", "packed by position"):
        for name in ("log_probs", "entropy", "top_log_probs"):
            torch.testing.assert_close(
                results[way].scores[name], right.scores[name], atol=atol, rtol=0
            )
        for name, value in right.report.items():
            assert abs(results[way].report[name] - value) < max(1e-4 * abs(value), atol), (
                way,
                name,
            )
    assert [way for way, read in results.items() if read.padding] == [
        "no mask",
        "packed by position",
    ]


def assert_is_that_of_logits(result: Read, model: torch.nn.Module) -> None:
    """Compare log-probabilities, entropy, top tokens and gradient with a transformers model."""
    model.zero_grad()
    batch = batches()["no mask"]
    log_probs, entropies, tops = [], [], []
    for row, length in enumerate(LENGTHS):
        logits = model(batch["tokens"][row : row + 1, :length], use_cache=False).logits[0].double()
        whole = (logits / TEMPERATURES[row]).log_softmax(-1)
        log_probs.append(whole.gather(-1, batch["labels"][row, :length, None])[:, 0])
        entropies.append(-(whole.exp() * whole).sum(-1))
        tops.append(whole.topk(TOP_K, dim=-1).values)
    for name, parts in (("log_probs", log_probs), ("entropy", entropies), ("top_log_probs", tops)):
        torch.testing.assert_close(
            result.scores[name].double(), torch.cat(parts).detach(), atol=2e-5, rtol=0
        )
    (-torch.cat(log_probs).mean() - 0.5 * torch.cat(entropies).mean()).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    assert abs(result.report["grad_norm"] - norm) < 1e-3 * norm
