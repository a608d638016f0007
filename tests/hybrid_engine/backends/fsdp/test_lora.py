"""PEFT's LoRA on a sharded model, delivered separately or merged, with real PEFT and vLLM."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from hybrid_engine import HybridEngine, Sampling
from hybrid_engine.backends.fsdp import ShardedModel
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.backends.huggingface import save_hf_checkpoint
from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.native_load import native_parameters
from hybrid_engine.errors import ReshardError
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import has_code
from tests.harness.launch import Call, Outcomes, Ranks
from tests.harness.torch_modes import other_torch_modes
from tests.harness.values import Values
from tests.hybrid_engine.backends.fsdp.test_switches import same_bits
from tests.hybrid_engine.models.small_configs import small_config
from tests.zoo import sharded_models
from tests.zoo.families import read_config, served_config, write_config
from tests.zoo.megatron_models import whole_weights
from tests.zoo.tiny_models import label_log_probs, read_canonical, token_batch

GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = torch.arange(2, 18).reshape(2, 8)
NUM_STEPS = 2

# Ranks, alphas and scaling of every kind: by default, by pattern, rank-stabilised.
SEPARATE = {
    **{"r": 6, "lora_alpha": 12, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    **{"rank_pattern": {"down_proj": 5}, "alpha_pattern": {"layers.1.self_attn.v_proj": 7}},
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Nested wrappers adapt the parameters of all experts; the router is not a linear layer either.
OF_EXPERTS = {
    **{"r": 3, "lora_alpha": 5, "target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"]},
    **{"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"layers.1.mlp.experts.gate_up_proj": 7}},
}
TP2 = {"tp_size": 2}
WITH_EXPERTS = {
    "qwen3_moe": (served_config("qwen3_moe"), TP2),
    "mixtral": (served_config("mixtral"), {}),
    # Experts that are stored transposed, with biases.
    "gpt-oss": ({**small_config("GptOssForCausalLM"), "vocab_size": 130}, TP2),
}
ALONG = (("qwen3_moe", 1), ("qwen3_moe", 2), ("gpt-oss", 1), ("gpt-oss", 2))
# vLLM's parameters of them.
ADAPTED_WITH_EXPERTS = ("w13_weight", "w2_weight", "gate.weight", "router.weight", "qkv_proj.weight")
MERGED = {"r": 3, "lora_alpha": 5, "target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head", "norm"]}


@dataclass
class Adapted:
    """Results of one rank.

    Attributes:
        different: vLLM's parameters that differ from its own load, with the largest difference.
        loras: matrices of the adapter that differ bitwise from vLLM's load of PEFT's checkpoint.
        num_loras: number of modules compared for `loras`.
        gap: largest difference of a log-probability from transformers with the adapter.
        base_gap: largest difference from transformers without the adapter.
        chosen: share of greedy tokens that are the likeliest in transformers.
        refusals: error codes of a switch with disabled adapters.
        trained: parameters that differ bitwise from the same training without an engine.
        surplus: bytes received beyond the least.
        origins: number of model tensors that each canonical tensor is made of.
        read, skipped: bytes of each switch, for the weights of this rank's vLLM.
        committed: vLLM's parameters after the last switch.
    """

    different: dict[str, float] = field(default_factory=dict)
    loras: list[str] = field(default_factory=list)
    num_loras: int = 0
    gap: float = 0.0
    base_gap: float = 0.0
    chosen: float = 0.0
    refusals: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    surplus: int = 0
    origins: dict[str, int] = field(default_factory=dict)
    read: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    committed: TensorDict = field(default_factory=dict)


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


def run(directory: str, config: Values, settings: Values, rollout: Values) -> Adapted:
    """Train, switch and compare `NUM_STEPS` times."""
    path = Path(directory)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        write_config(path, {**config, "torch_dtype": "float32"})
    dist.barrier()
    model = peft_model(path, settings)
    rollout_config = {"model": directory, "max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16, **rollout}
    with other_torch_modes():
        engine = HybridEngine(model=model, rollout_config=rollout_config, train_config={"fsdp_config": {}})
    results = Adapted(origins={name: len(origins) for name, origins in engine.train.weights.origins().items()})
    optimizer = _optimizer_of(model)
    for step in range(NUM_STEPS):
        with engine.train_context():
            _train(model, optimizer, step)
            whole = _whole_copy(path, settings, model)
        _compare(engine, whole, path, rollout.get("lora_delivery") == "adapter", results)
    with model.disable_adapter():
        try:
            engine.train.weights.prepare()
        except ReshardError as error:
            results.refusals.append(error.code)
    engine.shutdown()
    alone = sharded_models.shard(peft_model(path, settings))
    other = _optimizer_of(alone)
    for step in range(NUM_STEPS):
        _train(alone, other, step)
    for (name, parameter), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        if not same_bits(local_of(parameter), local_of(expected)):
            results.trained.append(name)
    return results


def _optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([tensor for tensor in model.parameters() if tensor.requires_grad], lr=1e-2)


def _train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    batch = token_batch(100 * step + dist.get_rank(), num_sequences=2, length=16)
    tokens = batch["tokens"] % 130
    labels = batch["labels"] % 130
    optimizer.zero_grad()
    (-label_log_probs(model(input_ids=tokens).logits, labels).mean()).backward()
    optimizer.step()


def _whole_copy(path: Path, settings: Values, model: Any) -> Any:
    """Return the unsharded model on this rank."""
    whole = peft_model(path, settings)
    whole.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
    return whole


def _compare(engine: Any, whole: Any, path: Path, is_separate: bool, results: Adapted) -> None:
    parameters = results.committed

    def keep(name: str, tensor: torch.Tensor) -> None:
        parameters[name] = tensor.detach().clone()

    with engine.inference.adaptor.observed(keep):
        with other_torch_modes(), engine.rollout_context():
            pass
        _compare_answers(engine, whole, results)
        if is_separate:
            _compare_loras(engine, whole, path / "peft", results)
        # vLLM's own load reads either the base weights or the merged ones.
        base = whole.unload() if is_separate else whole.merge_and_unload()
        if dist.get_rank() == 0:
            base.save_pretrained(path)
        dist.barrier()
        native = native_parameters(engine.inference, str(path))
    for name in parameters | native:
        if not same_bits(parameters.get(name), native.get(name)):
            results.different[name] = float((parameters[name] - native[name]).abs().max())
    report = engine.sharding.last_report
    results.surplus += report.bytes_received - report.bytes_least
    results.read.append(report.bytes_own + report.bytes_received)
    results.skipped.append(report.bytes_skipped)


def _compare_answers(engine: Any, whole: Any, results: Adapted) -> None:
    """Compare log-probabilities and greedy tokens with transformers."""
    with other_torch_modes():
        sequences = engine.generate(PROMPTS, GREEDY)
        scored = engine.inference.prompt_logprobs(sequences.tolist(), lora=engine.adapter)
    with torch.no_grad():
        logits = whole(input_ids=sequences).logits[:, :-1].log_softmax(-1)
        with whole.disable_adapter():
            plain = whole(input_ids=sequences).logits[:, :-1].log_softmax(-1)
    for row, (log_probs, with_lora, without_lora) in enumerate(zip(scored, logits, plain, strict=True)):
        drawn = sequences[row, 1:, None]
        gap = (log_probs - with_lora.gather(-1, drawn)[:, 0]).abs().max()
        base_gap = (log_probs - without_lora.gather(-1, drawn)[:, 0]).abs().max()
        results.gap = max(results.gap, float(gap))
        results.base_gap = max(results.base_gap, float(base_gap))
    results.chosen = float((logits[:, -4:].argmax(-1) == sequences[:, -4:]).float().mean())


def _compare_loras(engine: Any, whole: Any, path: Path, results: Adapted) -> None:
    """Compare the adapter delivered to vLLM with vLLM's own load."""
    if dist.get_rank() == 0:
        whole.save_pretrained(path)
    dist.barrier()
    loras = engine.inference.loras
    manager = internals.model_runner_of(engine.inference.llm).lora_manager
    delivered = loras._load(loras.request(engine.adapter))
    native = type(manager)._load_adapter(manager, internals.LORA_REQUEST.load()("native", 99, str(path)))
    assert delivered.loras.keys() == native.loras.keys()
    for name, lora in delivered.loras.items():
        other = native.loras[name].optimize()
        lora = lora.optimize()
        results.num_loras += 1
        if not (same_bits(lora.lora_a, other.lora_a) and same_bits(lora.lora_b, other.lora_b)):
            results.loras.append(name)


def sharded_along(directory: str, family: str, dim: int) -> dict[str, float]:
    """Map tensors of a saved checkpoint that are not PEFT's merged ones to the largest difference.

    `dim`: the parts of a parameter of experts are along it.
    """
    path = Path(directory)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    config = {**WITH_EXPERTS[family][0], "torch_dtype": "float32"}
    if dist.get_rank() == 0:
        write_config(path, config)
    dist.barrier()
    job = Job.join(60)
    table = table_for(config)
    whole = peft_model(path, OF_EXPERTS)
    model = sharded_models.shard(
        peft_model(path, OF_EXPERTS), shard_placement_fn=lambda tensor: Shard(dim if tensor.dim() == 3 else 0)
    )
    with closing(ShardedModel(model, table, job.rank)) as sharded:
        save_hf_checkpoint(path / "saved", sharded.weights, table, job, path)
    saved = read_canonical(path / "saved")
    base = whole.merge_and_unload()
    if job.rank == 0:
        base.save_pretrained(path)
    dist.barrier()
    merged = read_canonical(path)
    assert saved.keys() == merged.keys()
    return {
        name: float((values - merged[name]).abs().max())
        for name, values in saved.items()
        if not same_bits(values, merged[name])
    }


pytest.importorskip("peft", reason="pip install peft")


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Results of both deliveries, by rank."""
    directory = tmp_path_factory.mktemp("peft")
    rollout = {"tp_size": 2, "lora_delivery": "adapter", "incremental": "auto"}
    calls: dict[str, Call] = {
        "separate": (run, (str(directory / "separate"), served_config("llama"), SEPARATE, rollout)),
        "merged": (run, (str(directory / "merged"), served_config("llama"), MERGED, {"incremental": "auto"})),
        **{
            family: (run, (str(directory / family), config, OF_EXPERTS, {"incremental": "auto", **rollout}))
            for family, (config, rollout) in WITH_EXPERTS.items()
        },
    }
    for family, dim in ALONG:
        calls[f"{family} along {dim}"] = (sharded_along, (str(directory / f"{family} {dim}"), family, dim))
    return engines.launch_in_turn(2, calls)


def test_vllm_base_and_adapter_equal_its_own_load(outcomes: Outcomes) -> None:
    for adapted in outcomes["separate"]:
        assert adapted.different == {}  # the base is not merged
        assert adapted.loras == []
        assert adapted.num_loras == NUM_STEPS * 2 * 3  # layers and modules


def test_one_rank_merges_as_peft_and_refuses_other_adapters(job: None, tmp_path: Path) -> None:
    path = write_config(tmp_path, served_config("llama", torch_dtype="float32"))
    model: Any = sharded_models.shard(peft_model(path, MERGED))
    with closing(ShardedModel(model, table_for(read_config(path)), 0)) as sharded:
        sharded.weights.prepare()
        expected = peft_model(path, MERGED).merge_and_unload().state_dict()
        torch.testing.assert_close(whole_weights(sharded.weights), expected)
        with model.disable_adapter(), pytest.raises(ReshardError, check=has_code("adapters-changed")):
            sharded.weights.prepare()


def test_vllm_weights_equal_those_merged_by_peft(outcomes: Outcomes) -> None:
    for adapted in outcomes["merged"]:
        # Each rank multiplies its own rows only, so the last bits of a product may differ.
        assert max(adapted.different.values(), default=0.0) < 1e-6
        assert all(name.endswith(("embed_tokens.weight", "o_proj.weight")) for name in adapted.different)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_adapters_on_experts_are_merged_as_by_peft(outcomes: Outcomes, family: str) -> None:
    for adapted in outcomes[family]:
        assert max(adapted.different.values(), default=0.0) < 1e-6
        assert all(name.endswith(ADAPTED_WITH_EXPERTS) for name in adapted.different), adapted.different


@pytest.mark.parametrize(("family", "dim"), ALONG)
def test_experts_may_be_sharded_along_any_dim(outcomes: Outcomes, family: str, dim: int) -> None:
    for different in outcomes[f"{family} along {dim}"]:
        assert max(different.values(), default=0.0) < 1e-6


def test_merged_weights_originate_from_the_weight_and_its_adapter(outcomes: Outcomes) -> None:
    for adapted in outcomes["merged"]:
        summed = {name for name, count in adapted.origins.items() if count == 3}
        assert summed == {name for name in adapted.origins if name.endswith(("embed_tokens.weight", "o_proj.weight"))}
    assert all(set(adapted.origins.values()) == {1} for adapted in outcomes["separate"])


def test_the_base_is_sent_once_and_adapted_weights_in_every_switch(outcomes: Outcomes) -> None:
    for delivery, share in (("separate", 0.5), ("merged", 0.1)):
        for adapted in outcomes[delivery]:
            assert adapted.skipped[0] == 0
            assert adapted.skipped[1] + adapted.read[1] == adapted.read[0]
            assert adapted.skipped[1] > share * adapted.read[0]
            assert adapted.read[1] > 0


@pytest.mark.parametrize("delivery", ["separate", "merged", *WITH_EXPERTS])
def test_completions_equal_those_of_the_adapted_model(outcomes: Outcomes, delivery: str) -> None:
    for adapted in outcomes[delivery]:
        assert adapted.gap < 1e-4 < 0.1 < adapted.base_gap  # the adapter matters
        assert adapted.chosen == 1.0
        assert adapted.surplus == 0


def test_a_switch_refuses_adapters_that_changed(outcomes: Outcomes) -> None:
    for adapted in [*outcomes["separate"], *outcomes["merged"]]:
        assert adapted.refusals == ["adapters-changed"]


@pytest.mark.parametrize("delivery", ["separate", "merged", *WITH_EXPERTS])
def test_switches_do_not_change_the_training_of_adapters(outcomes: Outcomes, delivery: str) -> None:
    assert [adapted.trained for adapted in outcomes[delivery]] == [[], []]
