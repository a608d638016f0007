"""PEFT's LoRA on a sharded model, delivered apart and merged, with real PEFT and vLLM; two ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import HybridEngine, Sampling
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.native_load import native_parameters
from hybrid_engine.errors import ReshardError
from tests.harness.launch import Outcomes, Ranks
from tests.harness.torch_modes import other_torch_modes
from tests.hybrid_engine.backends.fsdp.test_switches import same_bits
from tests.zoo import sharded_models
from tests.zoo.families import served_config, write_config
from tests.zoo.tiny_models import label_log_probs, token_batch

GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = torch.arange(2, 18).reshape(2, 8)
NUM_STEPS = 2

# Ranks, alphas and scaling of each kind: by default, by pattern, rank-stabilised.
APART = {
    **{"r": 6, "lora_alpha": 12, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    **{"rank_pattern": {"down_proj": 5}, "alpha_pattern": {"layers.1.self_attn.v_proj": 7}},
}
MERGED = {"r": 3, "lora_alpha": 5, "target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head", "norm"]}


@dataclass
class Adapted:
    """What one rank saw.

    Attributes:
        different: vLLM's parameters that differ from its own load of the checkpoint, by how much.
        loras: the adapter's matrices in vLLM that differ in a bit from its own load of PEFT's checkpoint.
        num_loras: how many were compared.
        gap: greatest difference of a log-probability from what transformers computes with the adapter.
        far: the same from transformers without the adapter.
        chosen: share of greedy tokens that are transformers' likeliest.
        refusals: codes of errors of a switch after adapters were disabled.
        trained: names of parameters that differ in a bit from those of the same steps without an engine.
        surplus: bytes received beyond the least.
        origins: how many of the model's tensors each canonical one is made of.
        read, skipped: bytes of each switch, of what this rank's vLLM holds.
        committed: vLLM's parameters, as they were last filled.
    """

    different: dict[str, float] = field(default_factory=dict)
    loras: list[str] = field(default_factory=list)
    num_loras: int = 0
    gap: float = 0.0
    far: float = 0.0
    chosen: float = 0.0
    refusals: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    surplus: int = 0
    origins: dict[str, int] = field(default_factory=dict)
    read: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    committed: dict[str, torch.Tensor] = field(default_factory=dict)


def peft_model(path: Path, settings: dict[str, Any]) -> Any:
    """LoRA with random A and B on the model of a config.json, fp32; the same on every rank."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(sharded_models.from_config(path), LoraConfig(**settings))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return model


def run(directory: str, settings: dict[str, Any], rollout: dict[str, Any]) -> Adapted:
    """Train, switch and compare, `NUM_STEPS` times."""
    path = Path(directory)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        write_config(path, served_config("llama", torch_dtype="float32"))
    dist.barrier()
    model = peft_model(path, settings)
    rollout_config = {"model": directory, "max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16, **rollout}
    with other_torch_modes():
        engine = HybridEngine(model=model, rollout_config=rollout_config, train_config={"fsdp_config": {}})
    found = Adapted(origins={name: len(each) for name, each in engine.train.weights.origins().items()})
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for step in range(NUM_STEPS):
        with engine.train_context():
            _train(model, optimizer, step)
            whole = _whole_copy(path, settings, model)
        _compare(engine, whole, path, rollout.get("lora_delivery") == "adapter", found)
    with model.disable_adapter():
        try:
            engine.train.weights.prepare()
        except ReshardError as error:
            found.refusals.append(error.code)
    engine.shutdown()
    alone = sharded_models.shard(peft_model(path, settings))
    other = torch.optim.AdamW([each for each in alone.parameters() if each.requires_grad], lr=1e-2)
    for step in range(NUM_STEPS):
        _train(alone, other, step)
    both = zip(model.named_parameters(), alone.parameters(), strict=True)
    found.trained = [name for (name, one), two in both if not same_bits(local_of(one), local_of(two))]
    return found


def _train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    batch = token_batch(100 * step + dist.get_rank(), num_sequences=2, length=16)
    tokens, labels = batch["tokens"] % 130, batch["labels"] % 130
    optimizer.zero_grad()
    (-label_log_probs(model(input_ids=tokens).logits, labels).mean()).backward()
    optimizer.step()


def _whole_copy(path: Path, settings: dict[str, Any], model: Any) -> Any:
    """The same model on this rank alone."""
    whole = peft_model(path, settings)
    whole.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
    return whole


def _compare(engine: Any, whole: Any, path: Path, apart: bool, found: Adapted) -> None:
    seen = found.committed

    def keep(name: str, tensor: torch.Tensor) -> None:
        seen[name] = tensor.detach().clone()

    with engine.inference.adaptor.observed(keep):
        with other_torch_modes(), engine.rollout_context():
            pass
        _of_answers(engine, whole, found)
        if apart:
            _of_loras(engine, whole, path / "peft", found)
        base = whole.unload() if apart else whole.merge_and_unload()
        if dist.get_rank() == 0:
            base.save_pretrained(path)
        dist.barrier()
        native = native_parameters(engine.inference, str(path))
    for name in seen | native:
        if not same_bits(seen.get(name), native.get(name)):
            found.different[name] = float((seen[name] - native[name]).abs().max())
    report = engine.sharding.last_report
    found.surplus += report.bytes_received - report.bytes_least
    found.read.append(report.bytes_own + report.bytes_received)
    found.skipped.append(report.bytes_skipped)


def _of_answers(engine: Any, whole: Any, found: Adapted) -> None:
    """Log-probabilities and greedy tokens, against transformers."""
    with other_torch_modes():
        sequences = engine.generate(PROMPTS, GREEDY)
        scored = engine.inference.prompt_logprobs(sequences.tolist(), lora=engine.adapter)
    with torch.no_grad():
        logits = whole(input_ids=sequences).logits[:, :-1].log_softmax(-1)
        with whole.disable_adapter():
            plain = whole(input_ids=sequences).logits[:, :-1].log_softmax(-1)
    for row, (of_row, with_lora, without) in enumerate(zip(scored, logits, plain, strict=True)):
        drawn = sequences[row, 1:, None]
        found.gap = max(found.gap, float((of_row - with_lora.gather(-1, drawn)[:, 0]).abs().max()))
        found.far = max(found.far, float((of_row - without.gather(-1, drawn)[:, 0]).abs().max()))
    found.chosen = float((logits[:, -4:].argmax(-1) == sequences[:, -4:]).float().mean())


def _of_loras(engine: Any, whole: Any, path: Path, found: Adapted) -> None:
    """What vLLM was given, against what its own loader reads."""
    if dist.get_rank() == 0:
        whole.save_pretrained(path)
    dist.barrier()
    loras = engine.inference.loras
    manager = internals.model_runner_of(engine.inference.llm).lora_manager
    ours = loras._load(loras.request(engine.adapter))
    native = type(manager)._load_adapter(manager, internals.LORA_REQUEST.load()("native", 99, str(path)))
    assert ours.loras.keys() == native.loras.keys()
    for name, one in ours.loras.items():
        other = native.loras[name].optimize()
        one = one.optimize()
        found.num_loras += 1
        if not (same_bits(one.lora_a, other.lora_a) and same_bits(one.lora_b, other.lora_b)):
            found.loras.append(name)


pytest.importorskip("peft", reason="pip install peft")


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By rank, what each delivery brought back."""
    directory = tmp_path_factory.mktemp("peft")
    apart = {"tp_size": 2, "lora_delivery": "adapter", "incremental": "auto"}
    calls = {
        "apart": (run, (str(directory / "apart"), APART, apart)),
        "merged": (run, (str(directory / "merged"), MERGED, {"incremental": "auto"})),
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
        assert found.refusals == ["adapters-changed"]


@pytest.mark.parametrize("delivery", ["apart", "merged"])
def test_adapters_train_as_without_switches(outcomes: Outcomes, delivery: str) -> None:
    assert [found.trained for found in outcomes[delivery]] == [[], []]
