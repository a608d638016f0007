"""Random configurations and model configs are refused with ConfigError or planned, in a short time.

    HYPOTHESIS_PROFILE=thorough pytest -s tests/hybrid_engine/config/test_fuzz.py   # tries more

Valid configurations are changed at a few places: keys are removed or exchanged, values get another
type, are far too large or nested.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from hybrid_engine.config import ActorConfig, GenerateConfig, HybridConfig, load_config
from hybrid_engine.config.loading import generate_values
from hybrid_engine.errors import ConfigError
from hybrid_engine.models.families import TABLES, read_model
from hybrid_engine.tools.plan.cluster_plan import Cluster, plan_job
from hybrid_engine.tools.verify.small_models import Divisors, prepare_model
from tests.zoo.families import FAMILIES, SERVED_VARIANTS, served_config, tiny_config

MOST_SECONDS = 1.0  # of a core, for a refusal or the plan of a tiny job
LONGEST_LINE = 4000  # characters of a refusal

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        [
            10**6,
            2**31,
            2**63,
            2**80,
            -(2**80),
            1.5,
            4.0,
            -1.0,
            1e308,
            5e-324,
            float("inf"),
            float("nan"),
        ]
    ),
    st.sampled_from(
        ["", "4", "x" * 1000, "silu", "yarn", "llama3", "auto", "sliding_attention", "\ud800", "\0"]
    ),
    st.sampled_from(["1e-6", "０_2", "Et*999999999|L", "(t|)*99999L", "*", "float32", "bfloat16"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)
ROPE = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
        | VALUES,
        "type": st.sampled_from(["linear", "yarn"]) | VALUES,
        **dict.fromkeys(
            ("factor", "low_freq_factor", "high_freq_factor"),
            st.sampled_from([1.0, 4, 8.0]) | VALUES,
        ),
        "original_max_position_embeddings": st.just(16) | VALUES,
        "rope_theta": st.just(1e4) | VALUES,
        **dict.fromkeys(
            ("mscale", "mscale_all_dim", "full_attention", "sliding_attention"), VALUES
        ),
    },
)
KINDS = st.lists(st.sampled_from(["full_attention", "sliding_attention"]) | VALUES, max_size=5)
TRAIN_SIZES = st.sampled_from(
    [{}, *({f"{size}_model_parallel_size": 2} for size in ("tensor", "pipeline", "expert"))]
)
INFER_SIZES = st.sampled_from(
    [{}, *({f"infer_{size}_parallel_size": 2} for size in ("tensor", "pipeline", "expert"))]
)
WORLD_SIZES = st.just(2) | st.integers(-1, 8) | st.integers() | st.booleans()
Sizes = dict[str, int]


def _keys_of(config: dict[str, Any]) -> list[str]:
    """Return the keys in a config and the keys that its class or table reads."""
    return sorted({*config, *TABLES[config["architectures"][0]].config_class.keys})


@st.composite
def model_configs(draw: st.DrawFn) -> Any:
    """Contents of a config.json, changed at up to three places."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    is_served = family in SERVED_VARIANTS and draw(st.booleans())
    config = served_config(family) if is_served else tiny_config(family)
    keys = st.sampled_from(_keys_of(config))
    for change in draw(
        st.lists(st.sampled_from(["drop", "set", "exchange", "rope", "kinds", "whole"]), max_size=3)
    ):
        match change:
            case "drop":
                config.pop(draw(keys), None)
            case "set":
                config[draw(keys)] = draw(VALUES)
            case "exchange":
                first = draw(keys)
                second = draw(keys)
                config[first], config[second] = config.get(second), config.get(first)
            case "rope":
                config[draw(st.sampled_from(["rope_scaling", "rope_parameters"]))] = draw(ROPE)
            case "kinds":
                config["layer_types"] = draw(KINDS)
            case "whole" if draw(st.integers(0, 20)) == 0:
                return draw(VALUES)
    return config


def sections(model: type[Any]) -> st.SearchStrategy[Any]:
    """Values for a section of the configuration: known keys and others."""
    keys = st.sampled_from(sorted(model.model_fields)) | st.text(max_size=8)
    return st.dictionaries(keys, VALUES, max_size=3) | VALUES


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Contents of a configuration without `model`."""
    keys = {"actor_config": sections(ActorConfig), "generate_config": sections(GenerateConfig)}
    others = dict.fromkeys(sorted(HybridConfig.model_fields.keys() - {*keys, "model"}), VALUES)
    return (
        draw(st.fixed_dictionaries({}, optional={**keys, **others})) if draw(st.booleans()) else {}
    )


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    slow: list[str] = field(default_factory=list)

    def count(self, name: str, begun: float, example: object) -> None:
        seconds = time.process_time() - begun
        self.counts[name] += 1
        self.slowest = max(self.slowest, seconds)
        if seconds > MOST_SECONDS:
            self.slow.append(f"{name}: {seconds:.1f} s for {example!r:.2000}")


def check(
    directory: Path,
    config: Any,
    values: dict[str, Any],
    ranks: int,
    train: Sizes,
    infer: Sizes,
    tally: Tally,
) -> None:
    """Run `load_config`, `plan`, `verify` and `HybridEngine`'s parsing; other errors propagate."""
    (directory / "config.json").write_text(json.dumps(config))  # may be invalid on purpose
    steps = {
        "load_config": lambda: load_config(
            {"model": str(directory), "random_weights": True, **values}, ranks
        ),
        "plan": lambda: _plan(directory, train, infer),
        "verify": lambda: _reduce(directory),
        "rollout_config": lambda: generate_values(values.get("generate_config", {})),
    }
    for name, step in steps.items():
        begun = time.process_time()
        try:
            step()
        except ConfigError as error:
            if not all(
                finding.key and finding.problem and finding.remedy for finding in error.findings
            ):
                raise AssertionError("a finding lacks a part") from error
            str(error).encode()  # raises if it cannot be printed
            if max(map(len, str(error).splitlines())) >= LONGEST_LINE:
                raise AssertionError("a line of the refusal is too long") from error
            tally.count(f"{name}: refused", begun, config)
        else:
            tally.count(f"{name}: accepted", begun, config)


def _plan(directory: Path, train: Sizes, infer: Sizes) -> None:
    values = {"model": str(directory), "actor_config": train, "generate_config": infer}
    plan_job(load_config(values, 2, weights_only=True, own_weights=True), 2, Cluster()).plan_of(0)


def _reduce(directory: Path) -> None:
    """Check that a valid model stays valid when it is reduced."""
    read_model(directory, "--model")
    try:
        prepare_model(directory, directory / "small", 2, Divisors((1, 2), (1, 2), (1, 2)))
    except ConfigError as error:
        raise AssertionError("the small model is refused") from error


def run(examples: int) -> Tally:
    """Try `examples` random configurations."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "small").mkdir()

        # Every run is independent.
        @hypothesis.settings(
            max_examples=examples, deadline=None, database=None, phases=[hypothesis.Phase.generate]
        )
        @hypothesis.given(model_configs(), configurations(), WORLD_SIZES, TRAIN_SIZES, INFER_SIZES)
        def try_one(
            config: Any, values: dict[str, Any], ranks: int, train: Sizes, infer: Sizes
        ) -> None:
            check(Path(directory), config, values, ranks, train, infer, tally)

        try_one()
    return tally


@pytest.mark.timeout(300)
def test_random_configurations_are_refused_or_planned_in_a_short_time() -> None:
    tally = run(hypothesis.settings.default.max_examples)
    print(f"slowest: {tally.slowest:.2f} s", *sorted(tally.counts.items()), sep="\n")
    assert tally.slow == []
    assert all(
        tally.counts[f"{name}: {end}"]
        for name in ("plan", "verify")
        for end in ("accepted", "refused")
    )
