"""Log-probabilities of both engines for a model whose routers are close to ties, with and without router replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import Completion, Sampling
from hybrid_engine.rl import GrpoConfig, train
from hybrid_engine.trainer.batches import build_batch, pack_rows
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [list(range(2 + 3 * number, 14 + 3 * number)) for number in range(8)]
SAMPLING = Sampling(n=1, max_tokens=16, ignore_eos=True)
NOISE = 1e-7
"""Relative difference of weights in a router: that of rounding in float32."""

# name -> (actor_config, generate_config)
CASES: dict[str, tuple[Values, Values]] = {
    "ep2 -> tp2": ({"expert_model_parallel_size": 2}, {"infer_tensor_parallel_size": 2}),
    "pp2 vpp2 -> dp2": (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {},
    ),
}


def tie_experts(worker: Any) -> None:
    """Make four scores of a router differ by rounding only, of which two are selected, and experts by everything."""
    with torch.no_grad():
        for chunk in worker.train.chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("router.weight"):
                    parameter.mul_(20)
                    for number in range(1, 4):
                        parameter[number::4] = parameter[::4] * (1 + number * NOISE)
                elif ".experts." in name:
                    parameter.mul_(10)
    worker.train.optimizer.reload_model_params()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workers.write_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_experts=8)


@on_engines({2: CASES}, timeout=600)
def test_both_engines_agree_with_replay_and_differ_without(model: Path, case: str) -> None:
    """Also in rows of several sequences, and in a step; with the experts of the token before they differ."""
    actor, generate = CASES[case]
    # The comparison of the first switch replays nothing, so it would refuse this model.
    settings = {"seq_length": 2 * workers.SEQ_LENGTH, **actor}
    worker = workers.build_worker(model, settings, {"router_replay": True, "check_compute": "off", **generate})
    with worker.train_context():
        tie_experts(worker)
    with worker.rollout_context():
        groups = worker.generate(PROMPTS, SAMPLING)
    completions = [completion for group in groups for completion in group]
    batch = build_batch(PROMPTS, completions, workers.SEQ_LENGTH)
    sampled = torch.zeros_like(batch["mask"])
    sampled[batch["mask"] > 0] = torch.tensor([value for each in completions for value in each.logprobs])
    lengths = torch.tensor([len(each.prompt_token_ids) + len(each.token_ids) - 1 for each in completions])
    batch["attention_mask"] = (torch.arange(workers.SEQ_LENGTH) < lengths[:, None]).long()
    own = {name: tensor for name, tensor in batch.items() if name != "routed_experts"}
    shifted = {**batch, "routed_experts": batch["routed_experts"].roll(1, dims=1)}
    packed = pack_rows(batch, 2 * workers.SEQ_LENGTH, multiple_of=4)

    def gap(log_probs: torch.Tensor) -> float:
        return float((log_probs - sampled)[batch["mask"] > 0].abs().max())

    def loss(micro_batch: Any, log_probs: torch.Tensor) -> Any:
        largest = ((log_probs.detach() - micro_batch["sampled"]) * micro_batch["mask"]).abs().max()
        return -(log_probs * micro_batch["weights"]).sum(1).mean(), {"gap": largest}

    with worker.train_context():
        assert gap(worker.compute_log_probs(batch)) < 1e-4
        assert gap(packed.restore(worker.compute_log_probs(packed.batch))) < 1e-4
        assert gap(worker.compute_log_probs(own)) > 1e-2
        assert gap(worker.compute_log_probs(shifted)) > 1e-2
        assert worker.update({**batch, "sampled": sampled}, loss)["gap"] < 1e-4
    worker.shutdown()


@on_engines(2, timeout=600)
def test_a_loop_replays_where_it_is_configured(model: Path) -> None:
    """A step of `train` with KL and packed rows."""
    differences = {}
    for replays in (False, True):
        generate = {"router_replay": replays, "check_compute": "off"}
        with workers.build_worker(model, {"micro_batch_size": 1}, generate) as worker:
            with worker.train_context():
                tie_experts(worker)
            config = GrpoConfig(
                **{"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 4, "max_tokens": 8, "learning_rate": 1e-3},
                **{"kl_coefficient": 0.01, "pack": True, "stop_token_ids": tuple(range(8))},
            )
            (row,) = train(worker, PROMPTS[:2], reward, config)
            differences[replays] = row["logprob_diff"]
    assert differences[True] < 1e-4
    assert differences[False] > 1e-2


def reward(_prompt: Any, completion: Completion) -> float:
    return sum(token % 2 for token in completion.token_ids) / 8
