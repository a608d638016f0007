"""Megatron's parameters in 8 bits, made up as Transformer Engine's, sent to vLLM as they are or dequantised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid_engine
from hybrid_engine import Sampling
from hybrid_engine.errors import ConfigError, HybridEngineError
from hybrid_engine.ranks.job import join_process_group
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.launch import Call, Outcomes, Ranks
from tests.hybrid_engine.backends.vllm.support import same_bits
from tests.hybrid_engine.end_to_end.test_quantised_rollouts import compare_with_published, note_report
from tests.zoo import block_formats, workers
from tests.zoo.families import served_config, write_config

KEPT = "model.layers.1.self_attn.o_proj"
"""A module that vLLM leaves unquantised."""
SIZES = {
    **{"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    **{"intermediate_size": 512, "vocab_size": 128, "torch_dtype": "bfloat16", "num_hidden_layers": 3},
}
EXPERT_SIZES = {
    **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
    **{"num_hidden_layers": 2, "moe_intermediate_size": 128, "num_experts": 4, "vocab_size": 130},
}
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
ENGINE = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16, "verify": "full", "check_compute": "off"}
PROMPTS = torch.arange(2, 18).reshape(2, 8)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Case:
    """Class of the parameters, method and TP of vLLM, TP and kind of optimizer of training."""

    kind: str
    method: str = ""
    tp_size: int = 2
    train_tp_size: int = 2
    distributed: bool = True


@dataclass
class Switched:
    """Results of one rank.

    Attributes:
        different: vLLM's parameters that differ bitwise from its own load of the expected tensors.
        dtypes: dtype of each parameter of vLLM.
        unverified: for each switch, tensors of vLLM that `verify: full` did not compare.
        nbytes: bytes of all ranks in each switch.
        scratch: bytes of scratch memory, by name of the buffer.
        transposes: number of transposes or copies for the backward pass, after each step and each switch.
        kept: whether those that are left after a switch are bitwise as before.
        saved: tensors of a saved checkpoint that differ from dequantised weights.
        loaded: largest relative change of a weight by loading this checkpoint, which quantises it again.
        losses: of the steps.
    """

    different: list[str] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    unverified: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    scratch: dict[str, int] = field(default_factory=dict)
    transposes: list[int] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    loaded: float = 0.0
    losses: list[float] = field(default_factory=list)


@contextlib.contextmanager
def built(path: Path, case: Case, **sizes: int) -> Iterator[tuple[Any, Any]]:
    """Build a Qwen3 whose linear layers from the second on have parameters of a made-up class."""
    hybrid_engine.prepare()
    join_process_group(120)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    from tests.zoo import made_up_fp8

    values = {**SIZES, **sizes}
    if dist.get_rank() == 0:
        write_config(path, served_config("qwen3", **values))
    dist.barrier()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=case.train_tp_size)
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        ffn_hidden_size=values["intermediate_size"],
        num_attention_heads=values["num_attention_heads"],
        num_query_groups=values["num_key_value_heads"],
        kv_channels=values["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        tensor_model_parallel_size=case.train_tp_size,
        hidden_dropout=0,
        attention_dropout=0,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    model: Any = GPTModel(config, spec, vocab_size=128, max_sequence_length=64, position_embedding_type="rope")
    model = Float16Module(config, model)
    with made_up_fp8.in_megatron():
        made_up_fp8.quantise_linear_layers(model, getattr(made_up_fp8, case.kind), first_layer=1)
        # Megatron's own checks of these settings ask for Transformer Engine.
        config.fp8, config.fp8_param, config.fp8_recipe = "e4m3", True, "blockwise"
        shared = {"reuse_grad_buf_for_mxfp8_param_ag": case.kind == "MXFP8Tensor" and case.distributed}
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=case.distributed, fp8_param_gather=True, **shared
        )
        model = DistributedDataParallel(config, ddp_config, model)
        optimizer_config = OptimizerConfig(
            lr=1e-2, bf16=True, use_distributed_optimizer=case.distributed, fp8_recipe="blockwise", **shared
        )
        optimizer = get_megatron_optimizer(optimizer_config, [model])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        yield model, optimizer
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def step(model: Any, optimizer: Any, seed: int) -> float:
    """Train one step by Megatron's schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 128, (2, 13), generator=generator)

    def forward_step(_iterator: Any, model: Any) -> Any:
        mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
        losses = model(rows[:, :-1], torch.arange(12)[None], mask, labels=rows[:, 1:])
        return losses, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

    model.zero_grad_buffer()
    optimizer.zero_grad()
    sizes = {"seq_length": 12, "micro_batch_size": 2, "num_microbatches": 1, "forward_only": False}
    (report,) = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter([None]), model=model, **sizes
    )
    optimizer.step()
    return float(report["loss"])


def switch(directory: str, case: Case) -> Switched:
    """Train, switch and compare twice."""
    path = Path(directory)
    method = case.method
    results = Switched()
    with block_formats.kernels_in_torch(), built(path, case) as (model, optimizer):
        engine = attached(path, case, model, optimizer)
        for number in range(2):
            with engine.train_context():
                results.losses.append(step(model, optimizer, number))
                tensors = canonical(model, method)
                weights = {name: tensor for name, (tensor, _) in canonical(model, "").items()}
                engine.save_hf_checkpoint(str(path / "saved"))
            saved = {key: value for file in (path / "saved").glob("*.safetensors") for key, value in read(file)}
            results.saved += [name for name in weights if not same_bits(saved[name], weights[name])]
            results.transposes.append(len(transposes(model)))
            kept = [copy.clone() for copy in transposes(model)]
            _switch(engine, path, method, tensors, results)
            with engine.train_context():
                results.kept.append(all(map(torch.equal, kept, transposes(model))))
        with engine.train_context():
            step(model, optimizer, 2)
            before = canonical(model, "")
            engine.save_hf_checkpoint(str(path / "saved"))
            step(model, optimizer, 3)
            engine.load_hf_checkpoint(str(path / "saved"))
            for name, (tensor, _) in canonical(model, "").items():
                expected = before[name][0].float()
                change = (tensor.float() - expected).abs().max() / expected.abs().max()
                results.loaded = max(results.loaded, float(change))
        engine.shutdown()
    return results


def switch_experts(directory: str) -> Switched:
    """Do the same with a model that is built here, with experts, over two expert parallel ranks."""
    from hybrid_engine.trainer.megatron import build
    from tests.zoo import made_up_fp8

    path = Path(directory)
    build_chunks = build._build_chunks

    def build_quantised(*args: Any) -> list[torch.nn.Module]:
        chunks = build_chunks(*args)
        for chunk in chunks:
            made_up_fp8.quantise_linear_layers(chunk, made_up_fp8.Float8BlockwiseQTensor, first_layer=1)
        return chunks

    results = Switched()
    with (
        block_formats.kernels_in_torch(),
        block_formats.experts_in_torch(),
        made_up_fp8.in_megatron(),
        mock.patch.object(build, "_build_chunks", build_quantised),
    ):
        actor = {"params_dtype": "bfloat16", "expert_model_parallel_size": 2}
        worker = workers.build_worker(path, actor, {"verify": "full", "check_compute": "off", "quantization": "fp8"})
        for number in range(2):
            with worker.train_context():
                worker.update(workers.batch(seed=number), workers.cross_entropy)
                tensors = canonical(worker.train.chunks[0], "fp8")
            _switch(worker, path, "fp8", tensors, results)
        worker.shutdown()
    return results


def attached(path: Path, case: Case, model: Any, optimizer: Any) -> Any:
    if case.method and dist.get_rank() == 0:
        block_formats.publish(path, block_formats.published(case.method, ["lm_head", KEPT]))
    dist.barrier()
    generate = {"infer_tensor_parallel_size": case.tp_size, **ENGINE}
    return hybrid_engine.attach(model, optimizer, {"model": str(path), "generate_config": generate})


def transposes(model: Any) -> list[torch.Tensor]:
    """Return the elements for the backward pass that parameters have."""
    copies = [
        getattr(parameter, parameter.copies_name, None)
        for parameter in model.parameters()
        if hasattr(parameter, "copies_name")
    ]
    return [copy for copy in copies if copy is not None]


def refuse(directory: str) -> list[str]:
    """Return codes and texts of errors."""
    refusals = []
    cases = {
        "of two ranks": (Case("Float8BlockwiseQTensor", "fp8"), {"head_dim": 64}),
        "several": (Case("Float8BlockwiseQTensor", "fp8", train_tp_size=1), {"head_dim": 64}),
        "of one parameter": (Case("Float8BlockwiseQTensor", "fp8", tp_size=1), {"intermediate_size": 640}),
        "other": (Case("MXFP8Tensor", "fp8"), {}),
        "unusable": (Case("Float8BlockwiseQTensor", "fp8"), {}),
    }
    for name, (case, sizes) in cases.items():
        path = Path(directory, name)
        with (
            block_formats.kernels_in_torch(),
            built(path, case, **sizes) as (model, optimizer),
            contextlib.ExitStack() as owner,
            pytest.raises(HybridEngineError) as caught,
        ):
            engine = attached(path, case, model, optimizer)
            owner.callback(engine.shutdown)
            weights = dict(model.named_parameters())
            weights["module.module.decoder.layers.1.mlp.linear_fc1.weight"]._rowwise_data[3, 5] = 0xFF
            with engine.rollout_context():
                pass
        error = caught.value
        codes = [violation.code for violation in error.findings] if isinstance(error, ConfigError) else []
        refusals.append(f"{codes} {error}")
    return refusals


def read(file: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return [*load_file(file).items()]


def canonical(model: Any, method: str) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the whole elements of each weight on every rank, and the scale of each of them; no engine is asked.

    Without a method, and of weights that vLLM leaves unquantised, returns dequantised weights, and no scales.
    """
    from megatron.core.utils import unwrap_model

    from tests.zoo.made_up_fp8 import QuantizedTensor

    whole: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    for name, parameter in unwrap_model(model).named_parameters():
        stored = parameter.detach()
        for kept in (False, True):
            parts = [stored.dequantize() if isinstance(stored, QuantizedTensor) else stored, None]
            if isinstance(stored, QuantizedTensor) and method and not kept:
                parts = [stored.elements().view(torch.uint8), stored.scales().contiguous()]
            gathered = [None if part is None else _gathered(part) for part in parts]
            for key, (tensor, of_scales) in _split(name, *gathered).items():
                if kept == key.startswith(KEPT):
                    whole[key] = (tensor, of_scales)
    dist.all_gather_object(of_ranks, whole)  # experts of other ranks
    return {
        key: (tensor.view(torch.float8_e4m3fn) if tensor.dtype is torch.uint8 else tensor, of_scales)
        for of_rank in of_ranks
        for key, (tensor, of_scales) in of_rank.items()
    }


def _gathered(part: torch.Tensor) -> list[torch.Tensor]:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def _split(
    name: str, tensors: list[torch.Tensor], scales: list[torch.Tensor] | None
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the tensors of a checkpoint in a parameter, given its parts on both ranks."""
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }
    _, _, of_layer = name.partition("decoder.layers.")
    number, _, inner = of_layer.partition(".")
    prefix = f"model.layers.{number}."
    if inner.startswith("mlp.experts."):
        *_, expert, layer, _ = inner.split(".")
        prefix += f"mlp.experts.{2 * dist.get_rank() + int(expert)}."
        inner = f"mlp.{layer}.weight"
    pieces: dict[str, list[Any]] = {}
    for parts in (tensors, scales):
        for key, tensor in _pieces(inner or name, parts).items():
            target = names.get(key, key)
            if ".experts." in prefix:
                target = target.removeprefix("mlp.")
            pieces.setdefault(prefix + target if of_layer else target, []).append(tensor)
    return {key: (values[0], values[1] if scales is not None else None) for key, values in pieces.items()}


def _pieces(name: str, parts: list[torch.Tensor] | None) -> TensorDict:
    if parts is None:
        return {}
    if name == "self_attention.linear_qkv.weight":
        # Two groups, each with two heads of queries, one of keys, and one of values.
        groups = [group for part in parts for group in part.chunk(2 // len(parts))]
        split = [group.split([256, 128, 128]) for group in groups]
        keys = (f"self_attn.{letter}_proj.weight" for letter in "qkv")
    elif name == "mlp.linear_fc1.weight":
        split = [part.chunk(2) for part in parts]
        keys = (f"mlp.{half}_proj.weight" for half in ("gate", "up"))
    elif name in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
        return {name: torch.cat(parts, 1)}
    elif parts[0].dim() == 1:
        return {name: parts[0]}
    else:
        return {name: torch.cat(parts)[:130]}
    return {key: torch.cat(of_ranks) for key, of_ranks in zip(keys, zip(*split, strict=True), strict=True)}


def _switch(engine: Any, path: Path, method: str, tensors: dict[str, Any], results: Switched) -> None:
    parameters: TensorDict = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        parameters[name] = tensor.detach().clone()

    with engine.inference.adaptor.observed(keep), engine.rollout_context():
        engine.generate(PROMPTS.tolist(), Sampling(temperature=0.0, max_tokens=2, ignore_eos=True))
    results.transposes.append(len(transposes(engine.train.chunks[0])))
    note_report(engine, results)
    weights = engine.train.weights
    results.scratch = {name: weights.allocated()[name].nbytes for name in weights.scratch}
    compare_with_published(engine, path / "published", checkpoint(tensors, method), parameters, results)


def checkpoint(tensors: dict[str, Any], method: str) -> TensorDict:
    """Return a published checkpoint: scales of blocks from those of elements, and the first layer quantised here."""
    stored = {}
    for name, (tensor, scales) in tensors.items():
        module = name.removesuffix("weight")
        if scales is not None:
            rows, columns = (128, 128) if method == "fp8" else (1, 32)
            of_blocks = scales[::rows, ::columns]
            spread = of_blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            assert torch.equal(spread, scales), name
            stored[name] = tensor
            if method == "fp8":
                stored[f"{module}weight_scale_inv"] = of_blocks
            else:
                stored[f"{module}weight_scale"] = (of_blocks.log2() + 127).to(torch.uint8)
        elif method and name.endswith("_proj.weight") and not name.startswith(KEPT):
            stored |= {module + end: value for end, value in block_formats.quantised(method, tensor).items()}
        else:
            stored[name] = tensor
    return stored


CASES = {
    "blocks to fp8": Case("Float8BlockwiseQTensor", "fp8"),
    "blocks to fp8, vLLM's TP 1": Case("Float8BlockwiseQTensor", "fp8", tp_size=1),
    "blocks to fp8, data parallel": Case("Float8BlockwiseQTensor", "fp8", train_tp_size=1),
    "blocks to bf16": Case("Float8BlockwiseQTensor"),
    "per tensor to fp8": Case("Float8Tensor", "fp8"),
    "per tensor to bf16": Case("Float8Tensor", tp_size=1),
    "mxfp8 to mxfp8": Case("MXFP8Tensor", "mxfp8", tp_size=1),
    "mxfp8 to mxfp8, data parallel": Case("MXFP8Tensor", "mxfp8", train_tp_size=1),
    "mxfp8 to bf16, plain optimizer": Case("MXFP8Tensor", distributed=False),
}


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    directory = tmp_path_factory.mktemp("fp8")
    calls: dict[str, Call] = {}
    for name, case in CASES.items():
        calls[name] = (switch, (str(directory / str(len(calls))), case))
    served = workers.write_model(directory / "experts", "qwen3_moe", **EXPERT_SIZES)
    block_formats.publish(served, block_formats.published("fp8", ["lm_head", KEPT, *ROUTERS]))
    calls["experts"] = (switch_experts, (str(directory / "experts"),))
    calls["refused"] = (refuse, (str(directory / "refused"),))
    return engines.launch_in_turn(2, calls, timeout=900)


@pytest.mark.parametrize("name", CASES)
def test_vllm_holds_the_elements_and_scales_of_training(outcomes: Outcomes, name: str) -> None:
    for switched in outcomes[name]:
        assert switched.different == []
        assert switched.unverified == [0, 0]
        quantised = {key for key, dtype in switched.dtypes.items() if dtype == "float8_e4m3fn"}
        assert len(quantised) == (11 if CASES[name].method else 0)
        assert f"{KEPT}.weight" not in quantised


def test_experts_are_sent_as_they_are(outcomes: Outcomes) -> None:
    for switched in outcomes["experts"]:
        assert switched.different == []
        assert switched.unverified == [0, 0]
        quantised = {key for key, dtype in switched.dtypes.items() if dtype == "float8_e4m3fn"}
        # q, k and v of two layers, one projection, and two weights of the experts of a layer.
        assert len(quantised) == 3 + 4
        of_first_layer = 256 * (2 * 512 + 2 * 256) + 2 * 3 * 256 * 128
        assert switched.scratch["quantised weights in float8_e4m3fn"] == of_first_layer
        assert switched.scratch["dequantised weights in bfloat16"] == 2 * 512 * 256


@pytest.mark.parametrize("name", CASES)
def test_no_second_copy_of_the_weights_is_made(outcomes: Outcomes, name: str) -> None:
    linear = 256 * (2 * 512 + 2 * 256) + 3 * 256 * 512  # elements of a layer
    num_parts = CASES[name].train_tp_size
    for switched in outcomes[name]:
        dequantised = switched.scratch.get("dequantised weights in bfloat16", 0)
        if not CASES[name].method:
            assert dequantised == 2 * linear * 2 // num_parts
            continue
        # The module that vLLM leaves unquantised.
        assert dequantised == 512 * 256 * 2 // num_parts
        # The first layer, which training has in bfloat16.
        assert switched.scratch["quantised weights in float8_e4m3fn"] == linear // num_parts
        scales = switched.scratch.keys() - {
            "dequantised weights in bfloat16",
            "quantised weights in float8_e4m3fn",
        }
        assert sum(switched.scratch[name] for name in scales) < 3 * linear // num_parts // 31


@pytest.mark.parametrize("name", CASES)
def test_transposes_leave_the_device_and_come_back(outcomes: Outcomes, name: str) -> None:
    for switched in outcomes[name]:
        if CASES[name].kind == "MXFP8Tensor":
            assert switched.transposes == [8, 8, 8, 8]
        else:
            assert switched.transposes == [8, 0, 8, 0]
        assert switched.kept == [True, True]


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_are_saved_and_loaded_dequantised(outcomes: Outcomes, name: str) -> None:
    for switched in outcomes[name]:
        assert switched.saved == []
        # Values that are dequantised are quantised to themselves.
        assert switched.loaded == 0
        first, second = switched.losses
        assert first != second


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.method])
def test_half_of_the_bytes_are_sent(outcomes: Outcomes, name: str) -> None:
    assert len({tuple(switched.nbytes) for switched in outcomes[name]}) == 1
    (nbytes, again), *_ = (switched.nbytes for switched in outcomes[name])
    assert nbytes == again
    plain = outcomes["blocks to bf16"][0].nbytes[0]
    replicas = 1 if CASES[name].tp_size == 2 else 2
    # Embedding, head, norms and a projection have 16 bits.
    assert 0.5 < nbytes / replicas / plain < 0.6


def test_what_cannot_be_sent_is_refused_by_name(outcomes: Outcomes) -> None:
    for refusals in outcomes["refused"]:
        *several, other, unusable = refusals
        *of_heads, of_columns = several
        assert all(text.startswith("['blocks-with-several-scales']") for text in several)
        for text in of_heads:
            assert "4 weights that it keeps in 8 bits, first model.layers.1.self_attn.k_proj.weight" in text
        # 320 rows of gate and up, and columns of down, on each rank.
        assert "6 weights that it keeps in 8 bits, first model.layers.1.mlp.gate_proj.weight" in of_columns
        assert other.startswith("['other-fp8-parameters']")
        assert "fp8, but training has a MXFP8Tensor: 7 parameters" in other
        assert "decoder.layers.1.mlp.linear_fc1.weight" in unusable
        assert "1 NaN" in unusable
