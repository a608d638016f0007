"""PEFT's LoRA on a sharded model, delivered apart and merged, with real PEFT and vLLM; two ranks."""

from __future__ import annotations

import pytest

from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.backends.fsdp import peft_models
from tests.hybrid_engine.backends.fsdp.peft_models import APART, MERGED, NUM_STEPS

pytest.importorskip("peft", reason="pip install peft")


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By rank, what each delivery brought back."""
    directory = tmp_path_factory.mktemp("peft")
    apart = {"tp_size": 2, "lora_delivery": "adapter", "incremental": "auto"}
    calls = {
        "apart": (peft_models.run, (str(directory / "apart"), APART, apart)),
        "merged": (peft_models.run, (str(directory / "merged"), MERGED, {"incremental": "auto"})),
    }
    return engines.launch_in_turn(2, calls)


def test_vllm_has_base_and_adapter_as_it_loads_them_itself(outcomes: Outcomes) -> None:
    for found in outcomes["apart"]:
        assert found.different == {}
        assert found.loras == []
        assert found.num_loras == NUM_STEPS * 2 * 3  # layers and modules


def test_vllm_has_the_weights_that_peft_merges(outcomes: Outcomes) -> None:
    """Products are of a rank's rows alone, so their last bits may differ; what has no adapter is the same."""
    for found in outcomes["merged"]:
        assert max(found.different.values(), default=0.0) < 1e-6
        assert all(name.endswith(("embed_tokens.weight", "o_proj.weight")) for name in found.different)


def test_a_sum_is_made_of_its_weight_and_its_adapter(outcomes: Outcomes) -> None:
    for found in outcomes["merged"]:
        summed = {name for name, count in found.origins.items() if count == 3}
        assert summed == {name for name in found.origins if name.endswith(("embed_tokens.weight", "o_proj.weight"))}
    assert all(set(found.origins.values()) == {1} for found in outcomes["apart"])


def test_the_base_goes_once_and_what_has_an_adapter_in_every_switch(outcomes: Outcomes) -> None:
    """Merged, sums go anew; that they were right each time is above."""
    for delivery, share in (("apart", 0.5), ("merged", 0.1)):
        for found in outcomes[delivery]:
            assert found.skipped[0] == 0
            assert found.skipped[1] + found.read[1] == found.read[0]
            assert found.skipped[1] > share * found.read[0]
            assert found.read[1] > 0


@pytest.mark.parametrize("delivery", ["apart", "merged"])
def test_completions_are_those_of_the_adapted_model(outcomes: Outcomes, delivery: str) -> None:
    for found in outcomes[delivery]:
        assert found.gap < 1e-4 < 0.1 < found.far
        assert found.chosen == 1.0
        assert found.surplus == 0


def test_a_switch_refuses_other_adapters_than_it_was_built_for(outcomes: Outcomes) -> None:
    for found in [*outcomes["apart"], *outcomes["merged"]]:
        (refusal,) = found.refusals
        assert "PEFT's active adapters or their scaling changed" in refusal


@pytest.mark.parametrize("delivery", ["apart", "merged"])
def test_adapters_train_as_without_switches(outcomes: Outcomes, delivery: str) -> None:
    assert [found.trained for found in outcomes[delivery]] == [[], []]
