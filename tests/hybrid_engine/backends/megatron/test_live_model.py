"""Live Megatron models: refused settings and values, pending gathers, private names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model
from packaging.version import Version

from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
from hybrid_engine.backends.megatron.forward_probe import hide_padding
from hybrid_engine.backends.megatron.internals import PRIVATE_NAMES
from hybrid_engine.backends.megatron.live_model import LiveModel
from hybrid_engine.backends.megatron.model_tensors import ModelTensors
from hybrid_engine.errors import ConfigError, ParameterMismatchError, ReshardError, WeightError
from hybrid_engine.models import table_for
from hybrid_engine.ranks.torch_internals import PrivateName, TensorDict
from tests.harness.core_versions import INSTALLED
from tests.harness.errors import has_violations, refused
from tests.harness.launch import of_all_ranks, on_engines
from tests.harness.private_names import exists
from tests.zoo.families import read_config, served_config
from tests.zoo.megatron_models import OVERLAP, TP2, actor_config, loaded, parallel_state_of, running
from tests.zoo.tiny_models import Zoo, build_hf_model, label_log_probs, token_batch


def test_all_settings_that_prevent_a_switch_are_reported_at_once() -> None:
    chunk = torch.nn.Module()
    chunk.config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4)
    chunk.config.fp4_param = True
    chunk.ddp_config = DistributedDataParallelConfig(use_megatron_fsdp=True)
    expected = has_violations(
        ("TransformerConfig.fp4_param", "refused-megatron-setting"),
        ("DistributedDataParallelConfig.use_megatron_fsdp", "refused-megatron-setting"),
    )
    with pytest.raises(ConfigError, check=expected):
        LiveModel([chunk], None, table_for(served_config("llama")))


def test_layers_keep_the_numbers_of_the_checkpoint(job: None, zoo: Zoo) -> None:
    """Layers that do nothing are not counted, and those that predict more tokens come last."""
    path = zoo.path("deepseek_v3", mtp_layers=2)
    batch = token_batch(0, num_sequences=2, length=12)
    with loaded(path, noop_layers=(1,)) as run:
        log_probs = run.engine.log_probs(batch)
        names = {name for name, _ in run.engine.model.weights.model.named_parameters()}
    expected = label_log_probs(
        build_hf_model("deepseek_v3")(batch["tokens"]).logits, batch["labels"]
    )
    torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=0)
    assert {name.split(".")[2] for name in names if name.startswith("mtp.")} == {"3", "4"}


def test_padding_and_adapters_are_zero_after_loading(job: None, zoo: Zoo) -> None:
    with running(zoo.path("qwen3"), lora={"rank": 4}) as run:
        weights = run.engine.model.weights
        for flat in weights.base.buffers().values():
            flat.fill_(7)
        weights.base.finish_loading()
        for name, parameter in weights.model.named_parameters():
            is_padded = name.startswith(("embedding.", "output_layer."))
            expected = [0, 7] if is_padded else [0] if name.endswith("linear_out.weight") else [7]
            assert parameter.unique().tolist() == expected, name
        run.actor.chunks[0].to(torch.float64)
        with refused(ReshardError, "parameters-moved"):
            weights.prepare()


def test_factors_of_norms_are_exact_in_both_directions(job: None, zoo: Zoo) -> None:
    """A norm around 1 in a model whose norms Megatron stores minus 1; here Gemma's, as if its
    checkpoint had it.
    """
    with loaded(zoo.path("gemma2")) as run:
        rules = [
            replace(rule, around_one="decoder.final_layernorm.weight" in rule.names)
            for rule in run.table.rules
        ]
        model = ModelTensors(run.actor.chunks, replace(run.table, rules=rules))
        weights = MegatronAdaptor(model)
        weights.prepare()
        ((weight, factor),) = model.norm_factors.tensors.items()
        assert torch.equal(factor, weight + 1)
        factor.fill_(1.25)
        weights.finish_loading()
        assert weight.unique().tolist() == [0.25]


MLP_WEIGHTS = [
    f"decoder.layers.{layer}.mlp.linear_fc{half}.weight" for layer in range(2) for half in (1, 2)
]
# Change of config.json that the Megatron model lacks -> parameters the error must name.
MISMATCHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "wider": ({"intermediate_size": 48}, MLP_WEIGHTS),
    "fewer layers": (
        {"num_hidden_layers": 1, "layer_types": None},
        ["model.layers.1.input_layernorm.weight"],
    ),
    "no norms": (
        {"architectures": ["LlamaForCausalLM"]},
        ["decoder.layers.0.self_attention.q_layernorm.weight"],
    ),
    "more heads": ({"num_attention_heads": 8}, ["linear_qkv.weight", "linear_proj.weight"]),
    "vocabulary": ({"vocab_size": 1000}, ["embedding.word_embeddings.weight"]),
}


def differing_names(left: TensorDict, right: TensorDict) -> list[str]:
    return [name for name in left if not torch.equal(left[name], right[name])]


@on_engines(2)
def test_prepare_finishes_pending_gathers(zoo: Zoo) -> None:
    with running(zoo.path("qwen3"), **OVERLAP) as run:
        weights = run.engine.model.weights
        batch = {"tokens": torch.arange(12).reshape(1, 12) + 12 * run.engine.data_parallel.rank}
        batch["labels"] = batch["tokens"] + 1
        run.engine.optimizer.set_learning_rate(1e-2)

        def buffers() -> TensorDict:
            return {name: flat.clone() for name, flat in weights.buffers().items()}

        for _ in range(2):
            run.engine.train_step(batch, lambda _batch, log_probs: (-log_probs.mean(), {}))
            stale = buffers()
            weights.prepare()
            ready = buffers()
            # Before prepare, each data parallel replica holds old weights of the other rank's part.
            assert differing_names(*of_all_ranks(stale)), "replicas agree before prepare"
            assert differing_names(stale, ready)
            assert differing_names(*of_all_ranks(ready)) == []
        weights.prepare()
        assert differing_names(buffers(), ready) == []


@on_engines(2)
def test_non_finite_values_are_reported_with_rank_and_count(zoo: Zoo) -> None:
    with running(zoo.path("qwen3"), **TP2) as run:
        weights = run.engine.model.weights
        weights.check_values()
        named = dict(weights.model.named_parameters())
        large = named["decoder.layers.0.self_attention.linear_qkv.weight"]
        kept = large.detach().clone()
        with torch.no_grad():
            large.fill_(1e38)
            weights.check_values()  # the values are finite, their sum overflows
            large.copy_(kept)
            named["decoder.layers.1.self_attention.linear_qkv.weight"][3, :2] = float("nan")
            named["decoder.layers.1.self_attention.linear_qkv.weight"][4, 0] = float("-inf")
            named["decoder.final_layernorm.weight"][0] = float("inf")
        with pytest.raises(WeightError) as caught:
            weights.check_values()
    for text in (
        "(2)",
        f"decoder.layers.1.self_attention.linear_qkv.weight on rank {dist.get_rank()}",
        "model.layers.1.self_attn.k_proj.weight",
        "2 NaN, 1 Inf of 768 elements",
        "model.norm.weight): 1 Inf of ",
    ):
        assert text in str(caught.value)


@on_engines(2)
def test_every_parameter_of_another_model_is_named(zoo: Zoo) -> None:
    config = actor_config(**TP2)
    with parallel_state_of(config):
        from hybrid_engine.trainer.megatron.build import build_model

        hf_config = read_config(zoo.path("qwen3"))
        chunks, _ = build_model(config, table_for(hf_config), hf_config, dist.get_world_size())

        def check(change: dict[str, Any], parameters: list[str]) -> None:
            with pytest.raises(ParameterMismatchError) as caught:
                MegatronAdaptor(ModelTensors(chunks, table_for({**hf_config, **change}))).layout()
            assert [
                parameter for parameter in parameters if parameter not in str(caught.value)
            ] == []

        for change, parameters in MISMATCHES.values():
            check(change, parameters)
        attention = unwrap_model(chunks[0]).decoder.layers[0].self_attention
        attention.linear_proj = AdaptedByOthers(attention.linear_proj)
        layer = "decoder.layers.0.self_attention.linear_proj"
        check({}, [f"{layer}.{name}: " for name in ("to_wrap.weight", "adapter.linear_in.weight")])


class AdaptedByOthers(torch.nn.Module):
    """A layer with the parameter names of Megatron-Bridge's LoRA, which are also ours."""

    def __init__(self, to_wrap: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        self.adapter = torch.nn.ModuleDict({"linear_in": torch.nn.Linear(2, 2, bias=False)})


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=lambda private: private.target)
def test_private_names_exist_in_the_installed_megatron(private: PrivateName) -> None:
    # Older supported versions work without the name.
    is_expected = not private.since or Version(private.since) <= INSTALLED
    assert exists(private) == is_expected, private.reason


class _Output(torch.nn.Module):
    """Output layer of the second of two ranks; `hidden` holds the logits of both, four each."""

    output_size_per_partition = 4

    def __init__(self, gather_output: bool = False) -> None:
        super().__init__()
        self.gather_output = gather_output

    def forward(
        self, hidden: torch.Tensor, runtime_gather_output: bool = False
    ) -> tuple[torch.Tensor, None]:
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
def test_padding_tokens_have_no_probability(monkeypatch: pytest.MonkeyPatch, always: bool) -> None:
    # Holds rows 4 to 7.
    monkeypatch.setattr("megatron.core.parallel_state.get_tensor_model_parallel_rank", lambda: 1)
    model = torch.nn.Module()
    model.post_process = True
    model.output_layer = _Output(always)
    hide_padding([model], vocab_size=6)
    hidden = torch.zeros(2, 8, requires_grad=True)
    if not always:
        split, _ = model.output_layer(hidden)
        assert split.tolist() == [[0.0, 0.0, -torch.inf, -torch.inf]] * 2
    gathered, _ = model.output_layer(hidden, **({} if always else {"runtime_gather_output": True}))
    assert gathered.shape == (2, 6)
    # Autograd would refuse an in-place write to the gathered logits.
    gathered.logsumexp(-1).sum().backward()
    torch.testing.assert_close(hidden.grad, torch.tensor([[1 / 6] * 6 + [0.0] * 2] * 2))
