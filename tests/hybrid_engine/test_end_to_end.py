"""Both real engines on 2 and 4 ranks: what reaches vLLM, what the models compute, what training keeps."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.worker import share_of
from tests.hybrid_engine import jobs
from tests.hybrid_engine.tiny_models import running
from tests.hybrid_engine.vllm_support import differences, native_parameters, write_checkpoint
from tests.launch import launch

TP2 = {"tensor_model_parallel_size": 2}
TP2PP2 = {**TP2, "pipeline_model_parallel_size": 2}

# float32 logits of about 1 in size: different kernels and orders of summation
LOGITS_ATOL = 5e-5


def switch_and_compare(model: Path, actor: dict[str, Any], generate: dict[str, Any]) -> dict[str, Any]:
    """Three updates with a switch after each; what differed where."""
    worker = jobs.build_worker(model, actor, generate)
    result: dict[str, Any] = {"different": [], "bytes": [], "logits": []}
    tokens = jobs.batch(seed=99)["tokens"]
    for version in range(3):
        with worker.train_context():
            worker.update(jobs.batch(seed=version), jobs.cross_entropy)
            weights = jobs.canonical_weights(worker)
            megatron = worker.train.logits(tokens)[..., : worker.table.dims.vocab_size]
        seen: dict[str, torch.Tensor] = {}
        worker.inference.adaptor.observer = lambda name, tensor, seen=seen: seen.update({name: tensor.clone()})
        with worker.rollout_context():
            vllm = worker.inference.prompt_distributions(tokens.tolist())
        config = worker.config.hf_config()
        checkpoint = write_checkpoint(model.parent / f"checkpoint{version}", config, weights)
        result["different"] += differences(seen, native_parameters(worker.inference, checkpoint))
        result["num_parameters"] = len(seen)
        result["digest"] = _digest(weights.values())
        result["bytes"].append(jobs.global_nbytes(worker))
        result["logits"].append(_largest_differences(checkpoint, tokens, megatron, vllm))
    worker.shutdown()
    return result


def _largest_differences(
    checkpoint: str, tokens: torch.Tensor, megatron: torch.Tensor, vllm: list[torch.Tensor]
) -> dict[str, float]:
    """Largest absolute difference of log-probabilities from transformers' own, over all positions and tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        expected = model(tokens).logits.log_softmax(-1)
    ours = megatron.log_softmax(-1)
    served = torch.stack(vllm)
    return {
        "spread": float(expected.max() - expected.min()),
        "megatron": float((ours - expected).abs().max()),
        "vllm": float((served - expected[:, :-1]).abs().max()),
    }


def _digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_ranks", "actor", "infer_tp", "moves"),
    [
        pytest.param("qwen3", 2, TP2, 1, True, id="qwen3-tp2-to-dp2"),
        pytest.param("qwen2", 4, TP2PP2, 2, True, id="qwen2-tied-tp2pp2-to-tp2dp2"),
        pytest.param("llama", 2, {}, 2, False, id="llama-dp2-to-tp2"),
    ],
)
def test_switches(
    tmp_path: Path, family: str, num_ranks: int, actor: dict[str, Any], infer_tp: int, moves: bool
) -> None:
    """(a) bitwise what vLLM loads itself, (b) one set of logits in three engines, (c) the fewest bytes."""
    model = jobs.write_model(tmp_path / "model", family)
    generate = {"infer_tensor_parallel_size": infer_tp}
    results = launch(switch_and_compare, num_ranks, model, actor, generate, timeout=400)
    assert [result["different"] for result in results] == [[]] * num_ranks
    assert all(result["num_parameters"] > 20 for result in results)
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        for nbytes in result["bytes"]:
            assert nbytes["received"] == nbytes["least"]
            assert (nbytes["received"] > 0) == moves
        for difference in result["logits"]:
            assert difference["spread"] > 1
            assert difference["megatron"] < LOGITS_ATOL
            assert difference["vllm"] < LOGITS_ATOL


def train_with_switches(model: Path, actor: dict[str, Any]) -> dict[str, Any]:
    """Five updates, with a switch and an offload of everything after each; the training state then."""
    worker = jobs.build_worker(model, actor)
    losses, offloaded = [], set()
    for version in range(5):
        with worker.train_context():
            losses.append(worker.update(jobs.batch(seed=version), jobs.cross_entropy)["loss"])
            training_nbytes = sum(item.tensor.nbytes for item in worker.train.offload_items())
        with worker.rollout_context():
            worker.inference.generate([[1, 2, 3]], jobs.GREEDY)
            offloaded.add(worker.sharding.last_report.bytes_offloaded / training_nbytes)
        with worker.forward_context():
            worker.compute_log_probs(jobs.batch(seed=version))
    with worker.train_context():
        state = _training_state(worker.train)
    worker.shutdown()
    return {"losses": losses, "state": state, "version": worker.train.version, "offloaded": offloaded}


def train_without(model: Path, actor: dict[str, Any]) -> dict[str, Any]:
    """The same five updates by Megatron alone."""
    config = jobs.configuration(model, actor)
    with running(model, config.actor_config) as run:
        losses = [
            run.engine.train_step(share_of(run.engine, jobs.batch(seed=version)), jobs.cross_entropy)["loss"]
            for version in range(5)
        ]
        return {"losses": losses, "state": _training_state(run.engine), "version": run.engine.version}


def _training_state(engine: Any) -> dict[str, str]:
    """Digest of every parameter buffer, main parameter and moment; an overlapped gather that is still owed is made."""
    engine.weights.prepare()
    return {item.owner: _digest([item.tensor]) for item in engine.offload_items() if item.action == "copy"}


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize(
    "actor",
    [
        pytest.param({**TP2, "params_dtype": "bfloat16"}, id="bf16-distributed"),
        pytest.param({"params_dtype": "bfloat16", "use_distributed_optimizer": False}, id="bf16-replicated"),
        pytest.param({"overlap_grad_reduce": True, "overlap_param_gather": True}, id="fp32-overlap"),
    ],
)
def test_training_is_bitwise_the_same_with_switches(tmp_path: Path, actor: dict[str, Any]) -> None:
    model = jobs.write_model(tmp_path / "model", "qwen3")
    without = launch(train_without, 2, model, actor, timeout=300)
    switched = launch(train_with_switches, 2, model, actor, timeout=300)
    for plain, other in zip(without, switched, strict=True):
        assert other["losses"] == plain["losses"]
        assert other["state"] == plain["state"]
        assert len(plain["state"]) > 1
        assert other["version"] == plain["version"] == 5
        assert other["offloaded"] == {1.0}
    assert len({str(result["losses"]) for result in switched}) == 1


def fail_and_go_on(model: Path) -> dict[str, Any]:
    """A NaN on one rank, a lost buffer during the transfer on one rank, calls in the wrong state; then all is well."""
    from hybrid_engine.errors import HybridEngineError, StateError

    worker = jobs.build_worker(model, TP2)
    outcome: dict[str, Any] = {}
    with pytest.raises(StateError) as wrong_state:
        worker.generate_sequences([[1, 2]], jobs.GREEDY)
    outcome["wrong_state"] = str(wrong_state.value)
    with worker.train_context():
        worker.update(jobs.batch(seed=0), jobs.cross_entropy)
        parameter = dict(worker.train.weights.named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"]
        good = parameter.data[3, 5].clone()
        if worker.rank == 1:
            parameter.data[3, 5] = torch.nan
    with pytest.raises(HybridEngineError) as nan, worker.rollout_context():
        raise AssertionError("entered the rollout with a NaN weight")
    outcome["nan"] = (type(nan.value).__name__, str(nan.value))
    outcome["state_after_nan"] = worker.sharding.state.value
    parameter.data[3, 5] = good

    run, broken = worker.sharding.container._router.run, worker.rank == 0
    if broken:
        worker.sharding.container._router.run = _raise_disk_on_fire
    with pytest.raises(HybridEngineError) as transfer, worker.rollout_context():
        raise AssertionError("entered the rollout after a failed transfer")
    outcome["transfer"] = (type(transfer.value).__name__, str(transfer.value))
    worker.sharding.container._router.run = run

    home, parameter.data = parameter.data, parameter.data.clone()
    with pytest.raises(HybridEngineError) as moved, worker.rollout_context():
        raise AssertionError("entered the rollout with a parameter that lies elsewhere")
    outcome["moved"] = str(moved.value)
    parameter.data = home

    with worker.train_context():
        worker.update(jobs.batch(seed=1), jobs.cross_entropy)
    with worker.rollout_context():
        outcome["completions"] = len(worker.generate_sequences([[1, 2], [3]], jobs.GREEDY))
    worker.shutdown()
    outcome["group_ended"] = not dist.is_initialized()
    return outcome


def _raise_disk_on_fire(*_: Any) -> None:
    raise OSError("disk on fire")


@pytest.mark.engines
@pytest.mark.slow
def test_failures_reach_every_rank_and_lose_nothing(tmp_path: Path) -> None:
    model = jobs.write_model(tmp_path / "model", "qwen3")
    results = launch(fail_and_go_on, 2, model, timeout=300)
    assert results[1]["nan"][0] == "WeightError"
    assert results[0]["nan"][0] == "RemoteError"
    for result in results:
        assert "state train" in result["wrong_state"]
        assert "decoder.layers.1.mlp.linear_fc2.weight on rank 1" in result["nan"][1]
        assert "model.layers.1.mlp.down_proj.weight" in result["nan"][1]
        assert result["state_after_nan"] == "train"
        assert "decoder.layers.1.mlp.linear_fc2.weight" in result["moved"]
        assert "disk on fire" in result["transfer"][1]
        assert result["completions"] == 2
        assert result["group_ended"]
