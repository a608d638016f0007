"""Megatron models without a name table, attached to vLLM on two ranks.

Its imports of Megatron are those of the ranks.
"""

from __future__ import annotations

import os

import pytest

from hybrid_engine.tools.launching import run_ranks
from tests.harness.launch import on_engines
from tests.zoo.vision_models import required_environment


@on_engines(2)
def test_vllm_computes_what_transformers_does_with_megatrons_weights() -> None:
    """And a job is planned without engines as live engines plan it."""
    from tests.hybrid_engine.end_to_end import derived_megatron

    planned = derived_megatron.planned()  # before this process is a rank of a job
    assert derived_megatron.check_switches() == [plans[int(os.environ["RANK"])] for plans in planned]


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_models_for_which_vllm_imports_torchvision() -> None:
    arguments = ["-m", "tests.hybrid_engine.end_to_end.derived_megatron"]
    ended = run_ranks(arguments, 2, 500, environment=required_environment())
    assert ended.status == 0, ended.output


@on_engines(2)
def test_megatron_computes_what_transformers_does_in_float32() -> None:
    from tests.hybrid_engine.end_to_end import derived_megatron

    derived_megatron.check_in_float32()


@on_engines(2)
def test_other_computations_and_sizes_are_refused() -> None:
    from tests.hybrid_engine.end_to_end import derived_megatron

    derived_megatron.check_refusals()
