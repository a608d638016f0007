"""Changes of live models: which the fingerprint reports as moved tensors, as another function, or
not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune

from hybrid_engine.backends.fsdp.sharded_tensors import ShardedTensors, reshard
from hybrid_engine.backends.training_side import WholeTensors, guard_model
from hybrid_engine.compute_check.fingerprint import Fingerprint
from hybrid_engine.errors import ReshardError
from hybrid_engine.models import table_for
from tests.harness.errors import refused
from tests.zoo.families import read_config, tiny_config, write_config
from tests.zoo.megatron_models import actor_config, parallel_state_of
from tests.zoo.sharded_models import from_config, shard

pytestmark = pytest.mark.slow  # imports the training engines

TRANSFORMERS = {
    "layers": "model.layers",
    "attention": "model.layers.1.self_attn",
    "square": "model.layers.1.self_attn.o_proj",
    "first": "model.layers.0.mlp.gate_proj",
    "second": "model.layers.0.mlp.up_proj",
    "mlp": "model.layers.0.mlp",
    "norm": "model.layers.0.input_layernorm",
    "rotary": "model.rotary_emb",
    "embedding": "model.embed_tokens",
    "head": "lm_head",
    "router": "model.layers.1.mlp.gate",
    "epsilon": "variance_epsilon",
    "activation": "act_fn",
    "scale": "scaling",
    "top_k": "top_k",
}
MEGATRON = {
    "layers": "decoder.layers",
    "attention": "decoder.layers.1.self_attention.core_attention",
    "square": "decoder.layers.1.self_attention.linear_proj",
    "first": "decoder.layers.0.self_attention.q_layernorm",
    "second": "decoder.layers.0.self_attention.k_layernorm",
    "mlp": "decoder.layers.0.mlp",
    "norm": "decoder.layers.0.input_layernorm",
    "rotary": "rotary_pos_emb",
    "embedding": "embedding.word_embeddings",
    "head": "output_layer",
    "router": "decoder.layers.1.mlp.router",
    "epsilon": "eps",
    "activation": "activation_func",
    "scale": "softmax_scale",
    "top_k": "topk",
}
HIDDEN = {"hidden_size": 32}  # the attention's output projection is square


@dataclass(frozen=True)
class Live:
    """A model with the fingerprint that its trainer makes; `names` are its modules and attributes
    by role.
    """

    model: Any
    fingerprint: Fingerprint
    names: dict[str, str]

    def __getattr__(self, role: str) -> Any:
        return self.model.get_submodule(self.names[role])

    def set(self, owner: str, role: str, change: Callable[[Any], Any]) -> None:
        module = getattr(self, owner)
        name = self.names[role]
        setattr(module, name, change(getattr(module, name)))

    def exchange(self, first: str, second: str) -> None:
        modules = {
            self.names[first]: getattr(self, second),
            self.names[second]: getattr(self, first),
        }
        for name, module in modules.items():
            parent, _, key = name.rpartition(".")
            setattr(self.model.get_submodule(parent), key, module)


def reverse_layers(live: Live) -> None:
    layer = live.layers[0]
    live.layers[0] = live.layers[1]
    live.layers[1] = layer


def set_forward(owner: str) -> Callable[[Live], None]:
    def change(live: Live) -> None:
        module = getattr(live, owner)
        plain = module.forward
        module.forward = lambda *args, **kwargs: plain(*args, **kwargs)

    return change


def in_place(live: Live) -> None:
    with torch.no_grad():
        for parameter in live.model.parameters():
            parameter.add_(0.5)
        for name, buffer in live.model.named_buffers():
            if "correction_bias" in name:
                buffer.add_(1.0)


def train(live: Live) -> None:
    live.model.train()
    if live.names is TRANSFORMERS:
        tokens = torch.arange(8).reshape(2, 4)
        live.model(tokens, labels=tokens).loss.backward()
        torch.optim.AdamW(live.model.parameters()).step()
    live.model.eval()
    live.model.zero_grad()


def replace_data(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Live], None]:
    def replace(live: Live) -> None:
        live.square.weight.data = change(live.square.weight.data)

    return replace


def add_bias(live: Live) -> None:
    live.norm.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))


def rename(live: Live) -> None:
    live.norm.register_parameter("gain", live.norm.weight)
    del live.norm.weight


class Half(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


MOVED = "moved"
FUNCTION = "function"
SAME = "same"
WHOLE = ("llama", "deepseek_v3", "megatron", "megatron experts")
DENSE = ("llama", "sharded")
ROUTED = ("deepseek_v3", "sharded experts", "megatron experts")
EVERY = (*WHOLE, "sharded", "sharded experts")
IN_TRANSFORMERS = ("llama", "deepseek_v3", "sharded", "sharded experts")
OF_MLP = ("llama", "sharded", "deepseek_v3", "sharded experts")
SQUARE = ("llama", "megatron", "megatron experts")

CHANGES: dict[str, tuple[Callable[[Live], object], str, tuple[str, ...]]] = {
    # the layout no longer describes the model
    "pruned": (lambda live: prune.l1_unstructured(live.norm, "weight", 0.5), MOVED, WHOLE),
    "parametrized": (
        lambda live: parametrize.register_parametrization(live.norm, "weight", Half()),
        MOVED,
        WHOLE,
    ),
    "spectral norm": (lambda live: torch.nn.utils.spectral_norm(live.square), MOVED, SQUARE),
    "parametrized by spectral norm": (
        lambda live: parametrizations.spectral_norm(live.square),
        MOVED,
        SQUARE,
    ),
    "transposed": (replace_data(torch.t), MOVED, SQUARE),
    "cloned": (replace_data(torch.clone), MOVED, WHOLE),
    "in another dtype": (replace_data(torch.Tensor.double), MOVED, WHOLE),
    "layers exchanged": (
        reverse_layers,
        MOVED,
        ("llama", "sharded", "megatron", "megatron experts"),
    ),
    "projections exchanged": (lambda live: live.exchange("first", "second"), MOVED, EVERY),
    "head tied": (lambda live: setattr(live.head, "weight", live.embedding.weight), MOVED, EVERY),
    "parameter replaced": (
        lambda live: setattr(
            live.norm, "weight", torch.nn.Parameter(live.norm.weight.detach().clone())
        ),
        MOVED,
        WHOLE,
    ),
    "parameter added": (add_bias, MOVED, EVERY),
    "parameter renamed": (rename, MOVED, EVERY),
    "buffer replaced": (
        lambda live: setattr(live.router, "e_score_correction_bias", torch.ones(8)),
        MOVED,
        ("deepseek_v3", "sharded experts"),
    ),
    "layer removed": (lambda live: live.layers.pop(1), MOVED, EVERY),
    # the function
    "inv_freq halved": (lambda live: live.rotary.inv_freq.mul_(0.5), FUNCTION, EVERY),
    "inv_freq replaced": (
        lambda live: live.rotary.__setattr__("inv_freq", live.rotary.inv_freq * 2),
        FUNCTION,
        EVERY,
    ),
    "epsilon": (
        lambda live: live.set("norm", "epsilon", lambda value: 10 * value),
        FUNCTION,
        EVERY,
    ),
    "activation replaced": (
        lambda live: live.set("mlp", "activation", lambda _: torch.nn.functional.relu),
        FUNCTION,
        ("megatron",),
    ),
    "activation module replaced": (
        lambda live: live.set("mlp", "activation", lambda _: torch.nn.ReLU()),
        FUNCTION,
        OF_MLP,
    ),
    "scale": (
        lambda live: live.set("attention", "scale", lambda value: 2 * value),
        FUNCTION,
        EVERY,
    ),
    "scale as a tensor": (
        lambda live: live.set("attention", "scale", torch.tensor),
        FUNCTION,
        EVERY,
    ),
    "forward hook": (lambda live: live.mlp.register_forward_hook(lambda *_: None), FUNCTION, EVERY),
    "forward pre-hook": (
        lambda live: live.mlp.register_forward_pre_hook(lambda *_: None),
        FUNCTION,
        EVERY,
    ),
    "forward hook of the model": (
        lambda live: live.model.register_forward_hook(lambda *_: None),
        FUNCTION,
        EVERY,
    ),
    "forward patched": (set_forward("norm"), FUNCTION, EVERY),
    "class replaced": (
        lambda live: setattr(live.norm, "__class__", type("Other", (type(live.norm),), {})),
        FUNCTION,
        WHOLE,
    ),
    "config": (lambda live: setattr(live.model.config, "new_setting", 3.0), FUNCTION, EVERY),
    "attention by": (
        lambda live: live.model.set_attn_implementation("sdpa"),
        FUNCTION,
        IN_TRANSFORMERS,
    ),
    "router's top_k": (
        lambda live: live.set("router", "top_k", lambda value: value - 1),
        FUNCTION,
        ROUTED,
    ),
    "router's factor": (
        lambda live: setattr(live.router, "routed_scaling_factor", 0.5),
        FUNCTION,
        ("deepseek_v3", "sharded experts"),
    ),
    "module inserted": (
        lambda live: live.mlp.add_module("gain", torch.nn.Identity()),
        FUNCTION,
        EVERY,
    ),
    # weights, and what does not change log-probabilities
    "in place": (in_place, SAME, EVERY),
    "trained": (train, SAME, EVERY),
    "frozen": (lambda live: live.model.requires_grad_(False), SAME, EVERY),
    "checkpointing": (
        lambda live: live.model.gradient_checkpointing_enable(),
        SAME,
        IN_TRANSFORMERS,
    ),
    "input gradients": (
        lambda live: live.model.enable_input_require_grads(),
        SAME,
        IN_TRANSFORMERS,
    ),
    "compiled": (lambda live: live.model.compile(backend="eager"), SAME, EVERY),
    "moved to its own device": (lambda live: live.model.to("cpu"), SAME, EVERY),
    "dropout": (
        lambda live: setattr(live.attention, "attention_dropout", 0.5),
        SAME,
        IN_TRANSFORMERS,
    ),
    "guarded": (lambda live: [*guard_model(live.model, print)], SAME, EVERY),
    "callbacks": (
        lambda live: setattr(live.model.config, "no_sync_func", print),
        SAME,
        ("megatron",),
    ),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("configs")

    def path(family: str) -> Path:
        if not (directory / family).exists():
            write_config(directory / family, tiny_config(family, **HIDDEN))
        return directory / family

    return path


def megatron(path: Path) -> Live:
    """Build the chunk of one rank, with the fingerprint of an adaptor."""
    from hybrid_engine.backends.megatron.model_tensors import ModelTensors
    from hybrid_engine.trainer.megatron.build import build_model

    config = actor_config()
    table = table_for(read_config(path))
    chunks, _ = build_model(config, table, read_config(path), 1, weights_only=True)
    return Live(chunks[0], ModelTensors(chunks, table).fingerprint, MEGATRON)


def transformers(path: Path, is_sharded: bool) -> Live:
    model = from_config(path)
    if is_sharded:
        return Live(shard(model), ShardedTensors(model).fingerprint, TRANSFORMERS)
    return Live(model, ShardedTensors(model, is_whole=True).fingerprint, TRANSFORMERS)


@pytest.fixture
def live(kind: str, paths: Callable[[str], Path], job: None) -> Iterator[Live]:
    if kind.startswith("megatron"):
        with parallel_state_of(actor_config()):
            yield megatron(paths("qwen3" if kind == "megatron" else "qwen3_moe"))
    else:
        family = "deepseek_v3" if kind in ("deepseek_v3", "sharded experts") else "llama"
        yield transformers(paths(family), kind.startswith("sharded"))


CASES = [(name, kind) for name, (_, _, kinds) in CHANGES.items() for kind in kinds]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_changes_are_told_apart(live: Live, name: str, kind: str) -> None:
    change, expected, _ = CHANGES[name]
    assert (live.fingerprint.moved(), live.fingerprint.differences()) == ([], [])
    change(live)
    reshard(live.model)
    moved = live.fingerprint.moved()
    differences = live.fingerprint.differences()
    kind_of_change = MOVED if moved else FUNCTION if differences else SAME
    assert kind_of_change == expected, (moved, differences)
    if expected == MOVED:
        with refused(ReshardError, "parameters-moved", moved[0]):
            live.fingerprint.require_placed()
    live.fingerprint.renew()
    assert live.fingerprint.differences() == []
    assert live.fingerprint.moved() == moved  # still not where the layout has them


@pytest.mark.parametrize("kind", ["llama"])
def test_variables_of_a_closure_are_not_seen(live: Live, kind: str) -> None:
    """`check_compute: always` compares what they compute."""
    factor = 1.0
    live.mlp.register_forward_hook(lambda _module, _inputs, output: output * factor)
    live.fingerprint.renew()
    factor = 2.0
    assert live.fingerprint.differences() == []


def test_whole_tensors_compare_the_structure_of_given_models(job: None) -> None:
    """Without models only moved data is noticed."""
    for models, expected in ((1, ["0.new"]), (0, [])):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        weights = WholeTensors(model.state_dict(keep_vars=True), 0, [model] * models)
        weights.prepare()
        model[0].register_parameter("new", torch.nn.Parameter(torch.zeros(1)))
        assert weights.fingerprint.moved() == expected
        weights = WholeTensors(copy.deepcopy(model).state_dict(keep_vars=True), 0)
        weights.tensors["0.weight"].data = torch.zeros(2, 2)
        assert weights.fingerprint.moved() == ["0.weight"]
