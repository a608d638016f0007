"""Megatron models without a name table, attached to vLLM on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_engine.tools.launching import run_ranks
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.zoo.vision_models import vision_environment


def attach_and_switch() -> list[Values]:
    from tests.hybrid_engine.end_to_end.derived_megatron import switched

    return switched()


def plan_the_same() -> list[list[Values]]:
    from tests.hybrid_engine.end_to_end.derived_megatron import planned

    return planned()


def compute_in_float32() -> dict[str, float]:
    from tests.hybrid_engine.end_to_end.derived_megatron import computed

    return computed()


def attach_what_does_not_fit() -> Values:
    from tests.hybrid_engine.end_to_end.derived_megatron import refused

    return refused()


@pytest.fixture(scope="module")
def switches(engines: Ranks) -> list[list[Values]]:
    return engines.launch(attach_and_switch, 2)


def test_a_job_is_planned_as_live_engines_do(switches: list[list[Values]], engines: Ranks) -> None:
    (plans,) = engines.launch(plan_the_same, 1)
    for rank, results in enumerate(switches):
        for result, plan in zip(results, plans, strict=True):
            assert result["plan"] == plan[rank], result["model"]
            assert result["plan"]["pieces"]


def test_vllm_computes_what_transformers_does_with_megatrons_weights(switches: list[list[Values]]) -> None:
    for results in switches:
        check_switches(results)


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_models_for_which_vllm_imports_torchvision(tmp_path: Path) -> None:
    environment = vision_environment()
    if environment is None:
        pytest.skip("`make env` installs the torchvision of requirements-cpu-vision.txt, and it is not here")
    arguments = ["-m", "tests.hybrid_engine.end_to_end.derived_megatron", str(tmp_path)]
    ended = run_ranks(arguments, 2, 500, environment=environment)
    assert ended.status == 0, ended.output
    for rank in range(2):
        check_switches(json.loads((tmp_path / f"rank{rank}.json").read_text()))


def check_switches(results: list[Values]) -> None:
    for result in results:
        if result["dtype"] == "torch.float32":
            assert max(result["differences"].values()) < 1e-3, result
        else:
            # A token may have other experts.
            assert result["differences"]["mean"] < 0.2, result
        received, least = result["bytes"]
        assert received == least, result
        verified, num_tensors = result["verified"]
        assert verified == num_tensors > 0, result
        assert result["is read again"], result
        assert len({*result["tokens"][0], *result["tokens"][1]}) > 2, "too uniform to compare"


def test_megatron_computes_what_transformers_does_in_float32(engines: Ranks) -> None:
    for differences in engines.launch(compute_in_float32, 2):
        assert max(differences.values()) < 1e-3, differences


def test_other_computations_and_sizes_are_refused(engines: Ranks) -> None:
    for results in engines.launch(attach_what_does_not_fit, 2):
        assert "rotary frequencies is 16 for the trainer and 8 for vLLM" in results["other rotation"]
        assert "vLLM does not compute what the trainer computes" in results["other experts"]
        assert "transformers does not compute what the trainer computes" in results["uncomparable"]
        assert "compute" in results["comparable"]
        assert results["other sizes"] == [("TransformerConfig.num_query_groups", "computes-otherwise")]
        assert results["unchecked"] == [("generate_config.check_compute", "needs-check")]
