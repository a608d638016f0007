"""Models that Megatron here does not compute are refused in words; those that only hold weights are built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from packaging.version import Version

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError
from hybrid_engine.models import table_for
from tests.harness.core_versions import INSTALLED
from tests.harness.launch import Outcomes, Ranks
from tests.zoo.families import read_config
from tests.zoo.megatron_models import DENSE_FLOAT32, parallel_state_of
from tests.zoo.tiny_models import read_canonical, save_model

TP2 = {"tensor_model_parallel_size": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts without sequence parallel": ({**TP2, "sequence_parallel": False}, "sequence_parallel"),
    "context": ({"context_parallel_size": 2}, "context_parallel_size: 2"),
    "positions": ({"noop_layers": (1, 1)}, "noop_layers: [1, 1] names a position twice"),
}
"""actor_config of a model with experts on two ranks, and what is said of it."""
if Version("0.19.0") > INSTALLED:
    CUT_OTHERWISE = {**TP2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
    REFUSED["experts cut otherwise"] = CUT_OTHERWISE, "expert_tensor_parallel_size: 1 with TP 2"


@dataclass(frozen=True)
class Refusal:
    """What is said, and the number of elements of the model that only holds weights; None where there is none."""

    text: str
    num_elements: int | None


def refuse(path: Path, actor: dict[str, Any], holds_weights: bool) -> Refusal:
    from hybrid_engine.trainer.megatron.build import build_model

    config, model = ActorConfig(**{**DENSE_FLOAT32, **actor}), read_config(path)
    with parallel_state_of(config):
        with pytest.raises(ConfigError) as caught:
            build_model(config, table_for(model), model, dist.get_world_size())
        if not holds_weights:
            return Refusal(str(caught.value), None)
        chunks, _ = build_model(config, table_for(model), model, dist.get_world_size(), weights_only=True)
        return Refusal(str(caught.value), sum(parameter.numel() for parameter in chunks[0].parameters()))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "deepseek_v2")


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, path: Path) -> Outcomes:
    calls = {name: (refuse, (path, actor, name != "positions")) for name, (actor, _) in REFUSED.items()}
    return engines.launch_in_turn(2, calls)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused(outcomes: Outcomes, name: str) -> None:
    assert all(REFUSED[name][1] in refusal.text for refusal in outcomes[name])


@pytest.mark.parametrize(
    ("name", "least", "most"), [("experts without sequence parallel", 0.4, 1.0), ("context", 0.99, 1.02)]
)
def test_weights_are_held_all_the_same(outcomes: Outcomes, path: Path, name: str, least: float, most: float) -> None:
    """Half of what tensor parallel ranks cut; all of it on context parallel ones."""
    whole = sum(tensor.numel() for tensor in read_canonical(path).values())
    for refusal in outcomes[name]:
        assert least * whole < refusal.num_elements < most * whole
