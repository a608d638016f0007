"""What is refused of a live model and its values, what is pending on them, and private names that are used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model
from packaging.version import Version

from hybrid_engine.backends.megatron.forward_probe import hide_padding
from hybrid_engine.backends.megatron.internals import PRIVATE_NAMES
from hybrid_engine.backends.megatron.live_model import LiveModel
from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError, ParameterMismatchError, WeightError
from hybrid_engine.models import table_for
from hybrid_engine.ranks.torch_internals import PrivateName
from megatron_patches.patch import CORE_VERSIONS
from tests.harness.core_versions import INSTALLED
from tests.harness.errors import has_violations
from tests.harness.launch import Outcomes, Ranks
from tests.harness.private_names import exists
from tests.zoo.families import read_config, served_config
from tests.zoo.megatron_models import DENSE_FLOAT32, parallel_state_of, running
from tests.zoo.tiny_models import save_model


def test_every_setting_that_does_not_go_with_a_switch_is_named_at_once() -> None:
    chunk = torch.nn.Module()
    chunk.config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4)
    chunk.config.fp8_param = True
    chunk.ddp_config = DistributedDataParallelConfig(use_megatron_fsdp=True)
    expected = has_violations(
        ("TransformerConfig.fp8_param", "refused-megatron-setting"),
        ("DistributedDataParallelConfig.use_megatron_fsdp", "refused-megatron-setting"),
    )
    with pytest.raises(ConfigError, check=expected):
        LiveModel([chunk], None, table_for(served_config("llama")))


TP2 = {"tensor_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}

MLP_WEIGHTS = [f"decoder.layers.{layer}.mlp.linear_fc{half}.weight" for layer in range(2) for half in (1, 2)]
OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "wider": ({"intermediate_size": 48}, MLP_WEIGHTS),
    "narrower": ({"intermediate_size": 32}, MLP_WEIGHTS),
    "fewer layers": ({"num_hidden_layers": 1, "layer_types": None}, ["model.layers.1.input_layernorm.weight"]),
    "no norms": ({"architectures": ["LlamaForCausalLM"]}, ["decoder.layers.0.self_attention.q_layernorm.weight"]),
    "more heads": ({"num_attention_heads": 8}, ["linear_qkv.weight", "linear_proj.weight"]),
    "vocabulary": ({"vocab_size": 1000}, ["embedding.word_embeddings.weight"]),
    "hidden": ({"hidden_size": 48}, ["decoder.final_layernorm.weight"]),
}
"""What the table's model has in place of Megatron's, and what is named."""


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    path = save_model(tmp_path_factory.mktemp("model"), "qwen3")
    calls = {"gathers": follow_gathers, "values": refuse_values, "models": refuse_other_models}
    return engines.launch_in_turn(2, {name: (function, (path,)) for name, function in calls.items()})


@dataclass(frozen=True)
class Gathers:
    """Buffers by name, as optimizer steps with overlapping gathers leave them.

    Attributes:
        stale, ready: before and after `prepare`, by step.
        again: after another `prepare`, for which nothing is pending.
    """

    stale: list[dict[str, torch.Tensor]]
    ready: list[dict[str, torch.Tensor]]
    again: dict[str, torch.Tensor]


def follow_gathers(path: Path) -> Gathers:
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **OVERLAP})) as run:
        batch = {"tokens": torch.arange(12).reshape(1, 12) + 12 * run.engine.dp_rank}
        batch["labels"] = batch["tokens"] + 1
        run.engine.set_learning_rate(1e-2)

        def buffers() -> dict[str, torch.Tensor]:
            return {name: flat.clone() for name, flat in run.engine.weights.buffers().items()}

        stale, ready = [], []
        for _ in range(2):
            run.engine.train_step(batch, lambda _batch, log_probs: (-log_probs.mean(), {}))
            stale.append(buffers())
            run.engine.weights.prepare()
            ready.append(buffers())
        run.engine.weights.prepare()
        return Gathers(stale, ready, buffers())


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in left if not torch.equal(left[name], right[name])]


def test_prepare_finishes_pending_gathers(outcomes: Outcomes) -> None:
    """Without it a data parallel replica still holds the other rank's old weights; once more it changes nothing."""
    first, second = outcomes["gathers"]
    for step in range(2):
        assert differing(first.stale[step], second.stale[step]), "they agree before prepare: this test shows nothing"
        assert differing(first.stale[step], first.ready[step])
        assert differing(second.stale[step], second.ready[step])
        assert differing(first.ready[step], second.ready[step]) == []
    for found in outcomes["gathers"]:
        assert differing(found.again, found.ready[-1]) == []


def refuse_values(path: Path) -> str:
    """The message about NaN and infinite weights; large ones are none."""
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **TP2})) as run:
        weights = run.engine.weights
        weights.check_values()
        named = dict(weights.model.named_parameters())
        large = named["decoder.layers.0.self_attention.linear_qkv.weight"]
        kept = large.detach().clone()
        with torch.no_grad():
            large.fill_(1e38)
            weights.check_values()  # their sum is infinite, they are not
            large.copy_(kept)
            named["decoder.layers.1.self_attention.linear_qkv.weight"][3, :2] = float("nan")
            named["decoder.layers.1.self_attention.linear_qkv.weight"][4, 0] = float("-inf")
            named["decoder.final_layernorm.weight"][0] = float("inf")
        with pytest.raises(WeightError) as caught:
            weights.check_values()
        return str(caught.value)


def test_bad_values_are_named_with_their_rank_and_number(outcomes: Outcomes) -> None:
    for rank, message in enumerate(outcomes["values"]):
        assert "(2)" in message
        assert f"decoder.layers.1.self_attention.linear_qkv.weight on rank {rank}" in message
        assert "model.layers.1.self_attn.k_proj.weight" in message
        assert "2 NaN, 1 Inf of 768 elements" in message
        assert "model.norm.weight): 1 Inf of " in message


def refuse_other_models(path: Path) -> dict[str, str]:
    """The messages about tables that are not of Megatron's model."""
    config, messages = ActorConfig(**{**DENSE_FLOAT32, **TP2}), {}
    with parallel_state_of(config):
        from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
        from hybrid_engine.backends.megatron.model_tensors import ModelTensors
        from hybrid_engine.trainer.megatron.build import build_model

        hf_config = read_config(path)
        chunks, _ = build_model(config, table_for(hf_config), hf_config, dist.get_world_size())
        for name, (change, _) in OTHERS.items():
            with pytest.raises(ParameterMismatchError) as caught:
                MegatronAdaptor(ModelTensors(chunks, table_for({**hf_config, **change}))).layout()
            messages[name] = str(caught.value)
        attention = unwrap_model(chunks[0]).decoder.layers[0].self_attention
        attention.linear_proj = AdaptedByOthers(attention.linear_proj)
        with pytest.raises(ParameterMismatchError) as caught:
            MegatronAdaptor(ModelTensors(chunks, table_for(hf_config))).layout()
        messages["adapted by others"] = str(caught.value)
    return messages


class AdaptedByOthers(torch.nn.Module):
    """A layer with Megatron-Bridge's LoRA, as far as names go, which are those of ours."""

    def __init__(self, to_wrap: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, torch.nn.ModuleDict({"linear_in": torch.nn.Linear(2, 2, bias=False)})


def test_an_adapter_that_nobody_would_add_is_refused(outcomes: Outcomes) -> None:
    layer = "decoder.layers.0.self_attention.linear_proj"
    for messages in outcomes["models"]:
        for name in ("to_wrap.weight", "adapter.linear_in.weight"):
            assert f"{layer}.{name}: " in messages["adapted by others"]


@pytest.mark.parametrize("name", OTHERS)
def test_every_parameter_that_does_not_fit_is_named(outcomes: Outcomes, name: str) -> None:
    for messages in outcomes["models"]:
        assert [named for named in OTHERS[name][1] if named not in messages[name]] == []


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda private: private.target)
def test_the_installed_megatron_has_the_name(private: PrivateName) -> None:
    """An older one that is supported does without it."""
    is_there = not private.since or Version(private.since) <= INSTALLED
    assert exists(private) == is_there, private.reason


def test_names_came_with_a_supported_version() -> None:
    """Otherwise nothing would show that the backend works without them."""
    oldest, newest = Version(CORE_VERSIONS[0]), Version(CORE_VERSIONS[-1])
    assert all(oldest < Version(private.since) <= newest for private in PRIVATE_NAMES if private.since)


class _Output(torch.nn.Module):
    """An output layer of two ranks' four rows each, of which this is the second's, or all of them, as autograd gets
    them from one that gathers."""

    output_size_per_partition = 4

    def __init__(self, gather_output: bool = False) -> None:
        super().__init__()
        self.gather_output = gather_output

    def forward(self, hidden: torch.Tensor, runtime_gather_output: bool = False) -> tuple[torch.Tensor, None]:
        is_gathered = runtime_gather_output or self.gather_output
        return _Gathered.apply(hidden) if is_gathered else hidden[..., 4:] * 1, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.mark.parametrize("always", [False, True], ids=["asked for", "parallel_output=False"])
def test_tokens_that_pad_the_vocabulary_have_no_probability(monkeypatch: pytest.MonkeyPatch, always: bool) -> None:
    """Nor a gradient; and what was gathered is not written to, which autograd would refuse."""
    monkeypatch.setattr("megatron.core.parallel_state.get_tensor_model_parallel_rank", lambda: 1)
    model = torch.nn.Module()
    model.post_process, model.output_layer = True, _Output(always)
    hide_padding([model], vocab_size=6)
    hidden = torch.zeros(2, 8, requires_grad=True)
    if not always:
        split, _ = model.output_layer(hidden)
        assert split.tolist() == [[0.0, 0.0, -torch.inf, -torch.inf]] * 2
    gathered, _ = model.output_layer(hidden, **({} if always else {"runtime_gather_output": True}))
    assert gathered.shape == (2, 6)
    gathered.logsumexp(-1).sum().backward()
    torch.testing.assert_close(hidden.grad, torch.tensor([[1 / 6] * 6 + [0.0] * 2] * 2))
