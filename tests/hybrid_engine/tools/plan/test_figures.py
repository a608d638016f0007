"""Figures of a plan that something else computes as well, each with the test that compares both."""

from __future__ import annotations

import pytest

from tests.harness.launch import REPO_ROOT

# figure | counted by | and by | file and test
FIGURES = """
sizes of a model | models/derived.py | written tables | models/test_derived.py::test_a_derived_table_equals_the_written_table_in_every_size
Megatron's layout | layouts/training.py | live models | layouts/test_training.py::test_every_rank_matches_the_live_model
vLLM's layout | layouts/inference.py | loaded models | backends/vllm/test_layouts.py::test_weights_are_traced_as_computed_and_filled_like_a_native_load
vLLM's stages | stage_bounds | vLLM | layouts/test_inference.py::test_stages_match_vllm
vLLM's blocks of experts | expert_bounds | vLLM | layouts/test_inference.py::test_blocks_of_experts_match_vllm
padded vocabulary | InferenceParallelism | vLLM | layouts/test_inference.py::test_the_padded_vocabulary_matches_vllm
caches, longest sequence | layouts/kv_cache.py, longest_of | vLLM's layers | tools/plan/test_kv_cache.py::test_plans_count_the_caches_of_vllm
blocks of a sequence | sequence_nbytes | vLLM | tools/plan/test_kv_cache.py::test_a_sequence_takes_the_blocks_that_vllm_requires
bytes of a switch | summarize | plans of ranks | planning/test_one_planner.py::test_the_summary_matches_plans_of_any_records
bytes, state with FSDP2 | plan_job | live switches | backends/fsdp/test_switches.py::test_switches
largest bucket | largest_bucket | plans, memory_plan | tools/plan/test_cluster_plan.py::test_the_peak_counts_the_planners_buckets
phases with Megatron | memory_plan | live models | trainer/reference_and_critic/test_value_model.py::test_a_critic_and_a_reference_share_devices_with_the_actor
entropy of a chunk | activation_nbytes | live tensors | tools/plan/test_activations.py::test_the_entropy_keeps_the_planned_bytes_of_a_logit
activations | activation_nbytes | a paper | tools/plan/test_activations.py::test_activations_match_the_papers_layer
"""  # noqa: E501


@pytest.mark.parametrize("row", FIGURES.strip().splitlines(), ids=lambda row: row.partition(" |")[0])
def test_a_test_compares_both_figures(row: str) -> None:
    file, _, name = row.rpartition(" | ")[2].partition("::")
    assert f"\ndef {name}(" in (REPO_ROOT / "tests/hybrid_engine" / file).read_text()
