"""Parallel sizes under all their names, and that a new one is a field and its key."""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from hybrid_engine.config import ActorConfig, GenerateConfig
from hybrid_engine.config.values import Count, Positions, Section, StageLayout
from hybrid_engine.layouts.parallelism import (
    InferenceParallelism,
    Parallelism,
    TrainParallelism,
    named,
    sizes_of,
)
from hybrid_engine.layouts.size_rules import INFER_RULES, TRAIN_RULES, violations
from hybrid_engine.megatron_script.script_settings import actor_values
from hybrid_engine.models import table_for
from tests.hybrid_engine.layouts.cases import DENSE

REPO_ROOT = Path(__file__).resolve().parents[3]
SIDES = [TrainParallelism, InferenceParallelism]


@pytest.mark.parametrize("side", SIDES)
def test_every_size_has_names_of_its_own(side: type[Parallelism]) -> None:
    sizes = sizes_of(side)
    assert len({size.key for size in sizes}) == len(sizes)


KEY_TYPES: dict[type, Any] = {int: Count, bool: bool, str: StageLayout, tuple: Positions}


@pytest.mark.parametrize(("side", "section"), [(TrainParallelism, ActorConfig), (InferenceParallelism, GenerateConfig)])
def test_every_size_is_a_key_with_its_type_its_default_and_a_meaning(
    side: type[Parallelism], section: type[Section]
) -> None:
    hints = get_type_hints(section, include_extras=True)
    for size in sizes_of(side):
        key, expected = section.model_fields[size.key], KEY_TYPES[size.type]
        assert hints[size.key] == (expected | None if size.default is None else expected), size.key
        assert key.default == size.default, size.key
        assert (key.description or "").endswith("."), size.key


def test_rules_are_about_sizes_that_exist() -> None:
    assert {rule.size for rule in TRAIN_RULES} <= {size.name for size in sizes_of(TrainParallelism)}
    assert {rule.size for rule in INFER_RULES} <= {size.name for size in sizes_of(InferenceParallelism)}


def test_the_configuration_and_the_sizes_are_each_others_values() -> None:
    train = TrainParallelism(16, 2, 4, 2, num_layers_in_first_pipeline_stage=3, noop_layers=(1, 5), expert_tensor=1)
    assert ActorConfig(**named(train, "key")).sizes(16) == train
    infer = InferenceParallelism(16, tensor=2, expert=4, rank_order=tuple(range(15, -1, -1)))
    assert GenerateConfig(**named(infer, "key")).sizes(16, infer.rank_order) == infer


def test_megatrons_own_names() -> None:
    sizes = TrainParallelism(8, tensor=2, pipeline=4, context=2, num_layers_in_first_pipeline_stage=3)
    assert named(sizes, "script")["decoder_first_pipeline_num_layers"] == 3
    assert named(sizes, "model")["num_layers_in_first_pipeline_stage"] == 3
    assert named(sizes, "groups")["context_parallel_size"] == 2
    assert "context_parallel_size" not in named(sizes, "model")
    args = Namespace(**named(sizes, "script"), num_experts=4, params_dtype="torch.bfloat16")
    assert ActorConfig(**actor_values(args)).sizes(8) == sizes


@pytest.mark.parametrize("side", SIDES)
def test_counts_below_one_are_all_named(side: type[Parallelism]) -> None:
    counts = [size.name for size in sizes_of(side) if size.type is int]
    found = violations(side(0, **dict.fromkeys(counts, 0)), table_for(DENSE))
    assert [violation.key for violation in found] == ["world_size", *counts]


ADDED = {
    "layouts/parallelism.py": {
        "    cuts_whole_projections: bool = False\n": (
            '    spread: Annotated[int, _megatron("spread_model_parallel_size", groups=True)] = 1\n'
        ),
        "    rank_order: tuple[int, ...] | None = None\n": (
            '    swarm: Annotated[int | None, Size("infer_swarm_size", vllm="swarm_parallel_size")] = None\n'
        ),
    },
    "config/keys.py": {
        '    """Ranks that split each expert; default: tensor_model_parallel_size."""\n': (
            '    spread_model_parallel_size: Count = 1\n    """A size that nobody knew."""\n'
        ),
        '    """vLLM\'s pipeline parallel size."""\n': (
            '    infer_swarm_size: Count | None = None\n    """Another size that nobody knew."""\n'
        ),
    },
}
"""File of the copied package -> after which line, what is added."""

FIND_IT = """
import runpy, sys
from argparse import Namespace

import pydantic

from hybrid_engine.backends.vllm.arguments import named
from hybrid_engine.config import ActorConfig, GenerateConfig
from hybrid_engine.config.rules import JobContext, size_constraints
from hybrid_engine.errors import Violation
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.size_rules import SizeRule
from hybrid_engine.megatron_script.script_settings import actor_values

train, infer = TrainParallelism(8, tensor=2, spread=3), InferenceParallelism(8, tensor=2, swarm=5)

actor, generate = ActorConfig(**named(train, "key")), GenerateConfig(**named(infer, "key"))
assert (actor.spread_model_parallel_size, generate.infer_swarm_size) == (3, 5)
assert (actor.sizes(8), generate.sizes(8)) == (train, infer)
assert GenerateConfig(infer_swarm_size=None) == GenerateConfig()
try:
    ActorConfig(spread_model_parallel_size=0)
except pydantic.ValidationError as error:
    assert error.errors()[0]["loc"] == ("spread_model_parallel_size",)
else:
    raise AssertionError("a size of 0 was taken")

rule = SizeRule("spread", "SPREAD is odd.", lambda sizes, table: iter([Violation("spread", f"{sizes.spread}", "")]))
(constraint,) = size_constraints("actor_config", TrainParallelism, [rule], lambda context: context.train_sizes)
(found,) = constraint.find(JobContext(actor, None, 8, generate))
assert constraint.key == found.key == "actor_config.spread_model_parallel_size" and found.problem == "3"

args = Namespace(spread_model_parallel_size=3, num_experts=None, params_dtype="torch.bfloat16")
assert actor_values(args)["spread_model_parallel_size"] == 3
for names in ("groups", "model"):  # what backends/megatron gives to Megatron
    assert named(train, names)["spread_model_parallel_size"] == 3
assert named(infer, "vllm")["swarm_parallel_size"] == 5

page = runpy.run_path(sys.argv[1])["page"]()
assert "| `spread_model_parallel_size` | `1` | A size that nobody knew. |" in page
assert "| `infer_swarm_size` | `null` | Another size that nobody knew. |" in page
"""


def test_a_new_size_is_one_field_and_its_key(tmp_path: Path) -> None:
    """A copy of the package with a made-up size on each side, and nothing else changed, knows it everywhere."""
    shutil.copytree(REPO_ROOT / "hybrid_engine", tmp_path / "hybrid_engine", ignore=shutil.ignore_patterns("*.pyc"))
    (tmp_path / "megatron_patches").symlink_to(REPO_ROOT / "megatron_patches")
    for name, additions in ADDED.items():
        text = (tmp_path / "hybrid_engine" / name).read_text()
        for line, added in additions.items():
            assert text.count(line) == 1
            text = text.replace(line, line + added)
        (tmp_path / "hybrid_engine" / name).write_text(text)
    script = [sys.executable, "-c", FIND_IT, str(REPO_ROOT / "docs" / "make_configuration.py")]
    result = subprocess.run(
        script, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
