"""Sums of weights and adapters, and refused adapters, on layers of Megatron-Bridge's class names.

The layers are made up: they have the attributes that Megatron-Bridge's have, and compute nothing.
Its real ones are in tests/hybrid_engine/models/test_bridge_lora.py, where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.megatron.adapted_weights import Adapters, Factors, unsupported_adapters
from hybrid_engine.ranks.job import join_process_group
from tests.harness.launch import on_engines

ALPHA, DIM = 10, 4
SCALE = ALPHA / DIM
Module = torch.nn.Module


def made_up(kind: str, **attributes: Any) -> Module:
    """Return a module whose class has a name of Megatron-Bridge."""
    module = type(kind, (Module,), {"__module__": "megatron.bridge.peft.made_up"})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def holder(*shape: int) -> Module:
    """Return a module with a random weight."""
    module = Module()
    module.weight = torch.nn.Parameter(torch.randn(shape))
    return module


def adapter(num_rows: int, num_columns: int, *experts: int, **attributes: Any) -> Module:
    kind = "GroupedExpertLinearAdapter" if experts else "ParallelLinearAdapter"
    layers = {
        "linear_in": holder(*experts, DIM, num_columns),
        "linear_out": holder(*experts, num_rows, DIM),
    }
    defaults = {
        "activation": torch.nn.Identity(),
        "input_is_parallel": False,
        "base_linear_is_parallel": True,
    }
    groups = {"tp_group": None, "expert_tp_group": None}
    return made_up(kind, alpha=ALPHA, dim=DIM, **{**defaults, **groups, **layers, **attributes})


def layer(*weights: torch.Tensor, **config: Any) -> Module:
    module = Module()
    for number, weight in enumerate(weights):
        module.register_parameter(
            f"weight{number if len(weights) > 1 else ''}", torch.nn.Parameter(weight)
        )
    module.config = SimpleNamespace(sequence_parallel=False, **config)  # type: ignore[assignment]
    return module


def wrapped(kind: str, base: Module, **adapters: Module) -> Module:
    only = adapters.pop("adapter", None)
    return made_up(kind, to_wrap=base, adapter=only or torch.nn.ModuleDict(adapters))


def product(part: Module, expert: int | None = None) -> torch.Tensor:
    a, b = part.linear_in.weight, part.linear_out.weight
    return SCALE * (b @ a if expert is None else b[expert] @ a[expert])


def sums_of(model: Module) -> list[torch.Tensor]:
    sums = Adapters([model]).sums()
    with torch.no_grad():
        sums.fill()
    return list(sums.tensors.values())


def test_a_weight_has_the_product_of_its_adapter() -> None:
    base, part = layer(torch.randn(6, 5)), adapter(6, 5)
    (total,) = sums_of(wrapped("LoRALinear", base, adapter=part))
    torch.testing.assert_close(total, base.weight + product(part))
    disabled = wrapped("LoRALinear", base, adapter=part)
    disabled._adapter_enabled = False  # type: ignore[assignment]
    assert Adapters([disabled]).weights == {}


def test_adapters_of_q_k_and_v_have_the_rows_of_their_query_groups() -> None:
    base = layer(torch.randn(16, 5), kv_channels=2)  # two groups of two queries, a key and a value
    q, k, v = adapter(8, 5), adapter(4, 5), adapter(4, 5)
    (total,) = sums_of(wrapped("LoRALinearSplitQKV", base, adapter_q=q, adapter_k=k, adapter_v=v))
    rows = [
        product(q)[:4],
        product(k)[:2],
        product(v)[:2],
        product(q)[4:],
        product(k)[2:],
        product(v)[2:],
    ]
    torch.testing.assert_close(total, base.weight + torch.cat(rows))


def test_experts_have_one_adapter_together_or_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    num_products = []
    multiply = Factors.product

    def counted(self: Factors, *args: Any) -> torch.Tensor:
        num_products.append(1)
        return multiply(self, *args)

    monkeypatch.setattr(Factors, "product", counted)
    together, each = adapter(6, 5), adapter(6, 5, 3)
    bases = [layer(*torch.randn(3, 6, 5)), layer(*torch.randn(3, 6, 5))]
    model = torch.nn.ModuleList(
        [
            wrapped("LoRALinear", base, adapter=part)
            for base, part in ((bases[0], together), (bases[1], each), (bases[0], together))
        ]
    )
    totals = sums_of(model[:2])
    for expert in range(3):
        torch.testing.assert_close(
            totals[expert], getattr(bases[0], f"weight{expert}") + product(together)
        )
        torch.testing.assert_close(
            totals[3 + expert], getattr(bases[1], f"weight{expert}") + product(each, expert)
        )
    assert len(num_products) == 1 + 3  # the adapter of all experts is multiplied once


@on_engines(2)
def test_split_matrices_are_gathered() -> None:
    """A and B are split over two ranks."""
    join_process_group(120)
    torch.manual_seed(0)
    weight, a, b = torch.randn(6, 5), torch.randn(DIM, 5), torch.randn(6, DIM)
    rank = dist.get_rank()
    whole = weight + SCALE * (b @ a)
    for rows_of_b, rows in (
        (b, slice(None)),
        (b.chunk(2)[rank], slice(None)),
        (b.chunk(2)[rank], None),
    ):
        # Of a column-parallel layer a rank has rows of W and B; A is split by its rows in all.
        own = slice(3 * rank, 3 * rank + 3) if rows is None else rows
        part = adapter(6, 5, tp_group=dist.group.WORLD)
        part.linear_in.weight = torch.nn.Parameter(a.chunk(2)[rank])
        part.linear_out.weight = torch.nn.Parameter(rows_of_b)
        (total,) = sums_of(wrapped("LoRALinear", layer(weight[own]), adapter=part))
        torch.testing.assert_close(total, whole[own], atol=1e-6, rtol=0)


class Group:
    """A group of two ranks, which is not communicated over."""

    @staticmethod
    def size() -> int:
        return 2


def _mixed() -> Module:
    base = layer(torch.randn(6, 5))
    base.config.sequence_parallel = True
    part = adapter(6, 5, tp_group=Group(), base_linear_is_parallel=False)
    return torch.nn.ModuleDict({"router": wrapped("LoRATopKRouter", base, adapter=part)})


def _partial() -> Module:
    base = layer(torch.randn(6, 5))
    base.explicit_expert_comm = True  # type: ignore[assignment]
    return torch.nn.ModuleDict(
        {
            "linear_fc2": wrapped(
                "LoRALinear", base, adapter=adapter(6, 5, tp_group=Group(), input_is_parallel=True)
            )
        }
    )


def _tied() -> Module:
    model = torch.nn.ModuleDict(
        {"output_layer": wrapped("LoRALinear", layer(torch.randn(6, 5)), adapter=adapter(6, 5))}
    )
    model.share_embeddings_and_output_weights = True  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("build", "problem", "remedy"),
    [
        (
            _mixed,
            "its adapter mixes tokens",
            "Leave out layers that tensor parallelism does not split",
        ),
        (
            _partial,
            "its adapter applies B to a part of A x",
            "Set expert_tensor_parallel_size to 1",
        ),
        (_tied, "its weight is tied to the embedding", "Leave output_layer out"),
    ],
)
def test_adapters_that_compute_more_than_a_sum_are_refused(
    build: Callable[[], Module], problem: str, remedy: str
) -> None:
    (violation,) = unsupported_adapters([build()])
    assert violation.code == "unsupported-adapters"
    assert problem in violation.problem
    assert remedy in violation.remedy
