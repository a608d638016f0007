"""PEFT's LoRA on a sharded model, delivered separately or merged, with real PEFT and vLLM."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from hybrid_engine import HybridEngine, ReshardReport, Sampling
from hybrid_engine.backends.fsdp import ShardedModel
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.backends.huggingface import load_hf_checkpoint, save_hf_checkpoint
from hybrid_engine.backends.vllm.native_load import native_parameters
from hybrid_engine.errors import ReshardError
from hybrid_engine.models import table_for
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import refused
from tests.harness.launch import on_engines
from tests.harness.torch_modes import other_torch_modes
from tests.harness.values import Values
from tests.hybrid_engine.backends.fsdp.test_switches import train
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import job
from tests.hybrid_engine.backends.vllm.support import same_bits
from tests.hybrid_engine.models.small_configs import small_config
from tests.zoo import sharded_models
from tests.zoo.families import served_config
from tests.zoo.tiny_models import read_canonical

GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = torch.arange(2, 18).reshape(2, 8)
NUM_STEPS = 2

# Ranks, alphas and scaling of every kind: by default, by pattern, rank-stabilised.
SEPARATE = {
    **{
        "r": 6,
        "lora_alpha": 12,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    },
    **{"rank_pattern": {"down_proj": 5}, "alpha_pattern": {"layers.1.self_attn.v_proj": 7}},
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Nested wrappers adapt the parameters of all experts; the router is not a linear layer either.
OF_EXPERTS = {
    **{
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "embed_tokens"],
        "target_parameters": [*EXPERTS, "mlp.gate.weight"],
    },
    **{
        "rank_pattern": {"experts.down_proj": 2},
        "alpha_pattern": {"layers.1.mlp.experts.gate_up_proj": 7},
    },
}
TP2 = {"tp_size": 2}
WITH_EXPERTS = {
    "qwen3_moe": served_config("qwen3_moe"),
    "mixtral": served_config("mixtral"),
    # Experts that are stored transposed, with biases.
    "gpt-oss": {**small_config("GptOssForCausalLM"), "vocab_size": 130},
}
ALONG = (("qwen3_moe", 1), ("qwen3_moe", 2), ("gpt-oss", 1), ("gpt-oss", 2))
# vLLM's parameters of them.
ADAPTED_WITH_EXPERTS = (
    "embed_tokens.weight",
    "w13_weight",
    "w2_weight",
    "gate.weight",
    "router.weight",
    "qkv_proj.weight",
)
MERGED = {
    "r": 3,
    "lora_alpha": 5,
    "target_modules": ["embed_tokens", "o_proj"],
    "modules_to_save": ["lm_head", "norm"],
}


@dataclass(frozen=True)
class Delivery:
    """A model with adapters, and how vLLM gets them.

    Attributes:
        config: config.json of the model.
        settings: of PEFT.
        rollout: rollout_config.
        adapted: ends of the names of vLLM's parameters that adapters are merged into.
        skipped: least share of a switch that the next one skips.
    """

    config: Values
    settings: Values
    rollout: Values
    adapted: tuple[str, ...] = ()
    skipped: float = 0.0


DELIVERIES = {
    "separate": Delivery(
        served_config("llama"), SEPARATE, {**TP2, "lora_delivery": "adapter"}, skipped=0.5
    ),
    "merged": Delivery(
        served_config("llama"), MERGED, {}, ("embed_tokens.weight", "o_proj.weight"), 0.1
    ),
    "qwen3_moe": Delivery(WITH_EXPERTS["qwen3_moe"], OF_EXPERTS, TP2, ADAPTED_WITH_EXPERTS),
    "mixtral": Delivery(WITH_EXPERTS["mixtral"], OF_EXPERTS, {}, ADAPTED_WITH_EXPERTS),
    "gpt-oss": Delivery(WITH_EXPERTS["gpt-oss"], OF_EXPERTS, TP2, ADAPTED_WITH_EXPERTS),
}

pytest.importorskip("peft", reason="pip install peft")


def peft_model(path: Path, settings: Values) -> Any:
    """Return an fp32 model with random A and B, the same on every rank."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(sharded_models.from_config(path), LoraConfig(**settings))
    torch.manual_seed(5)  # PEFT's B is zero, so adapters would have no effect
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return model


@on_engines(2)
@pytest.mark.parametrize("name", DELIVERIES)
def test_vllm_has_the_adapted_model_and_training_does_not_change(tmp_path: Path, name: str) -> None:
    delivery = DELIVERIES[name]
    job()
    support.write_config(tmp_path, {**delivery.config, "torch_dtype": "float32"})
    model = peft_model(tmp_path, delivery.settings)
    rollout = {
        "model": str(tmp_path),
        "max_model_len": 64,
        "max_num_seqs": 8,
        "kv_cache_mb": 16,
        "incremental": "auto",
    }
    with other_torch_modes():
        engine = HybridEngine(
            model=model,
            rollout_config={**rollout, **delivery.rollout},
            train_config={"fsdp_config": {}},
        )
    optimizer = _optimizer_of(model)
    parameters: TensorDict = {}
    reports = []
    for step in range(NUM_STEPS):
        with engine.train_context():
            train(model, optimizer, step, dist.get_rank())
            whole = _whole_copy(tmp_path, delivery.settings, model)
        reports.append(_compare(engine, whole, tmp_path, delivery, parameters))
    # The base is sent once, and weights that originate from A and B in every switch.
    first, second = reports
    read = first.bytes_own + first.bytes_received
    assert first.bytes_skipped == 0
    assert delivery.skipped * read < second.bytes_skipped < read
    assert second.bytes_skipped + second.bytes_own + second.bytes_received == read
    with model.disable_adapter(), refused(ReshardError, "adapters-changed"):
        engine.train.weights.prepare()
    engine.shutdown()
    alone = sharded_models.shard(peft_model(tmp_path, delivery.settings))
    other = _optimizer_of(alone)
    for step in range(NUM_STEPS):
        train(alone, other, step, dist.get_rank())
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert same_bits(local_of(parameter), local_of(expected))


def _optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [tensor for tensor in model.parameters() if tensor.requires_grad], lr=1e-2
    )


def _whole_copy(path: Path, settings: Values, model: Any) -> Any:
    """Return the unsharded model on this rank."""
    whole = peft_model(path, settings)
    whole.load_state_dict(
        {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    )
    return whole


def _compare(
    engine: Any,
    whole: Any,
    path: Path,
    delivery: Delivery,
    parameters: TensorDict,
) -> ReshardReport:
    """Switch; compare vLLM's weights with its own load, and its answers with transformers.

    Args:
        parameters: vLLM's after the last switch, to be updated.
    """

    def keep(name: str, tensor: torch.Tensor) -> None:
        parameters[name] = tensor.detach().clone()

    with engine.inference.adaptor.observed(keep):
        with other_torch_modes(), engine.rollout_context():
            pass
        _compare_answers(engine, whole)
        is_separate = not delivery.adapted
        # vLLM's own load reads either the base weights or the merged ones.
        base = whole.unload() if is_separate else whole.merge_and_unload()
        if dist.get_rank() == 0:
            base.save_pretrained(path)
        dist.barrier()
        native = native_parameters(engine.inference, str(path))
    assert parameters.keys() == native.keys()
    for name, values in parameters.items():
        if name.endswith(delivery.adapted):
            # Each rank multiplies its own rows only, so the last bits of a product may differ.
            torch.testing.assert_close(values, native[name], atol=1e-6, rtol=0)
        else:
            assert same_bits(values, native[name]), name
    report: ReshardReport = engine.sharding.last_report
    assert report.bytes_received == report.bytes_least
    return report


def _compare_answers(engine: Any, whole: Any) -> None:
    with other_torch_modes():
        sequences = engine.generate(PROMPTS, GREEDY)
        scored = torch.stack(
            engine.inference.prompt_logprobs(sequences.tolist(), lora=engine.adapter)
        )
    with torch.no_grad():
        logits = whole(input_ids=sequences).logits[:, :-1].log_softmax(-1)
        with whole.disable_adapter():
            plain = whole(input_ids=sequences).logits[:, :-1].log_softmax(-1)
    drawn = sequences[:, 1:, None]
    torch.testing.assert_close(scored, logits.gather(-1, drawn)[..., 0], atol=1e-4, rtol=0)
    assert (scored - plain.gather(-1, drawn)[..., 0]).abs().max() > 0.1  # the adapter matters
    assert torch.equal(logits[:, -4:].argmax(-1), sequences[:, -4:])


@on_engines(2)
@pytest.mark.parametrize(("family", "dim"), ALONG)
def test_experts_may_be_sharded_along_any_dim(tmp_path: Path, family: str, dim: int) -> None:
    """The parts of a parameter of experts are along `dim`."""
    config = {**WITH_EXPERTS[family], "torch_dtype": "float32"}
    job()
    support.write_config(tmp_path, config)
    table = table_for(config)
    whole = peft_model(tmp_path, OF_EXPERTS)
    model = sharded_models.shard(
        peft_model(tmp_path, OF_EXPERTS),
        shard_placement_fn=lambda tensor: Shard(dim if tensor.dim() == 3 else 0),
    )
    with closing(ShardedModel(model, table, job().rank)) as sharded:
        save_hf_checkpoint(tmp_path / "saved", sharded.weights, table, job(), tmp_path)
        # Loaded weights have the adapters added, so new ones add nothing.
        load_hf_checkpoint(tmp_path / "saved", sharded.weights.base, table, job())
        sharded.weights.prepare()
        save_hf_checkpoint(tmp_path / "again", sharded.weights, table, job(), tmp_path)
    for name, value in model.state_dict().items():
        if "lora_" in name:
            is_zero = "lora_B" in name or "lora_embedding_A" in name
            assert bool(value.full_tensor().any()) != is_zero, name
    saved = read_canonical(tmp_path / "saved")
    base = whole.merge_and_unload()
    if job().rank == 0:
        base.save_pretrained(tmp_path)
    dist.barrier()
    torch.testing.assert_close(saved, read_canonical(tmp_path), atol=1e-6, rtol=0)
    torch.testing.assert_close(saved, read_canonical(tmp_path / "again"), atol=0, rtol=0)
