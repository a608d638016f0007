"""Megatron's parameters in 8 bits, made up as Transformer Engine's, sent to vLLM as they are or
dequantised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid_engine
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.ranks.job import join_process_group
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import violations_of
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.hybrid_engine.backends.vllm.support import same_bits
from tests.hybrid_engine.end_to_end.test_quantised_rollouts import (
    GREEDY,
    PROMPTS,
    check_published,
    moved_nbytes,
    switch,
)
from tests.zoo import block_formats, workers
from tests.zoo.families import served_config, write_config
from tests.zoo.tiny_models import read_canonical

KEPT = "model.layers.1.self_attn.o_proj"
"""A module that vLLM leaves unquantised."""
SIZES = {
    **{"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    **{
        "intermediate_size": 512,
        "vocab_size": 128,
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 3,
    },
}
EXPERT_SIZES = {
    **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
    **{"num_hidden_layers": 2, "moe_intermediate_size": 128, "num_experts": 4, "vocab_size": 130},
}
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
ENGINE = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "kv_cache_mb": 16,
    "verify": "full",
    "check_compute": "off",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Case:
    """Class of the parameters, method and TP of vLLM, TP and kind of optimizer of training."""

    kind: str
    method: str = ""
    tp_size: int = 2
    train_tp_size: int = 2
    distributed: bool = True


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
    model = GPTModel(
        config, spec, vocab_size=128, max_sequence_length=64, position_embedding_type="rope"
    )
    model = Float16Module(config, model)
    with made_up_fp8.in_megatron():
        made_up_fp8.quantise_linear_layers(model, getattr(made_up_fp8, case.kind), first_layer=1)
        # Megatron's own checks of these settings ask for Transformer Engine.
        config.fp8, config.fp8_param, config.fp8_recipe = "e4m3", True, "blockwise"
        shared = {
            "reuse_grad_buf_for_mxfp8_param_ag": case.kind == "MXFP8Tensor" and case.distributed
        }
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=case.distributed, fp8_param_gather=True, **shared
        )
        model = DistributedDataParallel(config, ddp_config, model)
        optimizer_config = OptimizerConfig(
            lr=1e-2,
            bf16=True,
            use_distributed_optimizer=case.distributed,
            fp8_recipe="blockwise",
            **shared,
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
        return losses, lambda losses: (
            losses.float().mean(),
            {"loss": losses.detach().float().mean()},
        )

    model.zero_grad_buffer()
    optimizer.zero_grad()
    sizes = {"seq_length": 12, "micro_batch_size": 2, "num_microbatches": 1, "forward_only": False}
    (report,) = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter([None]), model=model, **sizes
    )
    optimizer.step()
    return float(report["loss"])


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


def canonical(model: Any, method: str) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the whole elements of each weight on every rank, and the scale of each of them; no
    engine is asked.

    Without a method, and of weights that vLLM leaves unquantised, returns dequantised weights, and
    no scales.
    """
    from megatron.core.utils import unwrap_model

    from tests.zoo.made_up_fp8 import QuantizedTensor

    whole = {}
    of_ranks = [None] * dist.get_world_size()
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
        key: (
            tensor.view(torch.float8_e4m3fn) if tensor.dtype is torch.uint8 else tensor,
            of_scales,
        )
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
    pieces = {}
    for parts in (tensors, scales):
        for key, tensor in _pieces(inner or name, parts).items():
            target = names.get(key, key)
            if ".experts." in prefix:
                target = target.removeprefix("mlp.")
            pieces.setdefault(prefix + target if of_layer else target, []).append(tensor)
    return {
        key: (values[0], values[1] if scales is not None else None)
        for key, values in pieces.items()
    }


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
    return {
        key: torch.cat(of_ranks)
        for key, of_ranks in zip(keys, zip(*split, strict=True), strict=True)
    }


def scratch_of(engine: Any) -> dict[str, int]:
    """Return the bytes of scratch memory, by name of the buffer."""
    weights = engine.train.weights
    return {name: weights.allocated()[name].nbytes for name in weights.scratch}


def num_in_8_bits(parameters: TensorDict) -> int:
    assert parameters[f"{KEPT}.weight"].dtype is torch.bfloat16
    return sum(tensor.dtype is torch.float8_e4m3fn for tensor in parameters.values())


def checkpoint(tensors: Values, method: str) -> TensorDict:
    """Return a published checkpoint: scales of blocks from those of elements, and the first layer
    quantised here.
    """
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
            stored |= {
                module + end: value
                for end, value in block_formats.quantised(method, tensor).items()
            }
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


LINEAR = 256 * (2 * 512 + 2 * 256) + 3 * 256 * 512
"""Elements of a layer's linear weights."""
QUANTISED = "quantised weights in float8_e4m3fn"
DEQUANTISED = "dequantised weights in bfloat16"


@on_engines({2: CASES}, timeout=900)
def test_vllm_holds_the_elements_and_scales_of_training(tmp_path: Path, case: str) -> None:
    """Train, switch and compare twice; then load a saved checkpoint."""
    settings = CASES[case]
    method = settings.method
    losses = []
    with block_formats.kernels_in_torch(), built(tmp_path, settings) as (model, optimizer):
        engine = attached(tmp_path, settings, model, optimizer)
        for number in range(2):
            with engine.train_context():
                losses.append(step(model, optimizer, number))
                tensors = canonical(model, method)
                weights = {name: tensor for name, (tensor, _) in canonical(model, "").items()}
                engine.save_hf_checkpoint(str(tmp_path / "saved"))
                saved = read_canonical(tmp_path / "saved")
            assert [name for name in weights if not same_bits(saved[name], weights[name])] == []
            kept = [copy.clone() for copy in transposes(model)]
            assert len(kept) == 8
            parameters = switch(engine)
            engine.generate(PROMPTS.tolist(), GREEDY)
            # Those of blocks and of tensors leave the device, and come back.
            assert len(transposes(model)) == (8 if settings.kind == "MXFP8Tensor" else 0)
            check_bytes(engine, settings, weights)
            check_published(engine, tmp_path / "published", checkpoint(tensors, method), parameters)
            assert num_in_8_bits(parameters) == (11 if method else 0)
            with engine.train_context():
                assert all(map(torch.equal, kept, transposes(model)))
        assert losses[0] != losses[1]
        with engine.train_context():
            step(model, optimizer, 2)
            before = canonical(model, "")
            engine.save_hf_checkpoint(str(tmp_path / "saved"))
            step(model, optimizer, 3)
            engine.load_hf_checkpoint(str(tmp_path / "saved"))
            # Values that are dequantised are quantised to themselves.
            after = canonical(model, "")
        assert [
            name for name, (tensor, _) in after.items() if not torch.equal(tensor, before[name][0])
        ] == []
        engine.shutdown()


def check_bytes(engine: Any, case: Case, weights: TensorDict) -> None:
    """Check that half of the bytes are sent, and that no second copy of the weights is made."""
    replicas = 1 if case.tp_size == 2 else 2
    # Both ranks have vectors whole.
    plain = 2 * sum(
        tensor.numel() * (2 if tensor.dim() == 1 else replicas) for tensor in weights.values()
    )
    nbytes = moved_nbytes(engine)
    scratch = scratch_of(engine)
    num_parts = case.train_tp_size
    dequantised = scratch.pop(DEQUANTISED, 0)
    if not case.method:
        assert nbytes == plain
        assert dequantised == 2 * LINEAR * 2 // num_parts
        return
    # Embedding, head, norms and a projection have 16 bits.
    assert 0.5 < nbytes / plain < 0.6
    # The module that vLLM leaves unquantised.
    assert dequantised == 512 * 256 * 2 // num_parts
    # The first layer, which training has in bfloat16.
    assert scratch.pop(QUANTISED) == LINEAR // num_parts
    assert sum(scratch.values()) < 3 * LINEAR // num_parts // 31, "scales"


@on_engines(2, timeout=900)
def test_experts_are_sent_as_they_are(experts: Path) -> None:
    """The same with a model that is built by us, with experts, over two expert parallel ranks."""
    from hybrid_engine.trainer.megatron import build
    from tests.zoo import made_up_fp8

    build_chunks = build._build_chunks

    def build_quantised(*args: Any) -> list[torch.nn.Module]:
        chunks = build_chunks(*args)
        for chunk in chunks:
            made_up_fp8.quantise_linear_layers(
                chunk, made_up_fp8.Float8BlockwiseQTensor, first_layer=1
            )
        return chunks

    with (
        block_formats.kernels_in_torch(),
        block_formats.experts_in_torch(),
        made_up_fp8.in_megatron(),
        mock.patch.object(build, "_build_chunks", build_quantised),
    ):
        actor = {"params_dtype": "bfloat16", "expert_model_parallel_size": 2}
        generate = {"verify": "full", "check_compute": "off", "quantization": "fp8"}
        worker = workers.build_worker(experts, actor, generate)
        for number in range(2):
            with worker.train_context():
                worker.update(workers.batch(seed=number), workers.cross_entropy)
                tensors = canonical(worker.train.chunks[0], "fp8")
            parameters = switch(worker)
            worker.generate(PROMPTS.tolist(), GREEDY)
            check_published(worker, experts / "published", checkpoint(tensors, "fp8"), parameters)
            # q, k and v of two layers, one projection, and two weights of the experts of a layer.
            assert num_in_8_bits(parameters) == 3 + 4
            of_first_layer = 256 * (2 * 512 + 2 * 256) + 2 * 3 * 256 * 128
            assert scratch_of(worker)[QUANTISED] == of_first_layer
            assert scratch_of(worker)[DEQUANTISED] == 2 * 512 * 256
        worker.shutdown()


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    served = workers.write_model(tmp_path_factory.mktemp("experts"), "qwen3_moe", **EXPERT_SIZES)
    block_formats.publish(served, block_formats.published("fp8", ["lm_head", KEPT, *ROUTERS]))
    return served


BLOCKS = "Float8BlockwiseQTensor"
SEVERAL_SCALES = ["blocks-with-several-scales"]
OF_HEADS = "4 weights that it keeps in 8 bits, first model.layers.1.self_attn.k_proj.weight"
REFUSED: dict[str, tuple[Case, dict[str, int], list[str], list[str]]] = {
    "blocks of two ranks": (Case(BLOCKS, "fp8"), {"head_dim": 64}, SEVERAL_SCALES, [OF_HEADS]),
    "blocks of two parameters": (
        Case(BLOCKS, "fp8", train_tp_size=1),
        {"head_dim": 64},
        SEVERAL_SCALES,
        [OF_HEADS],
    ),
    # 320 rows of gate and up, and columns of down, on each rank.
    "blocks of one parameter": (
        *(Case(BLOCKS, "fp8", tp_size=1), {"intermediate_size": 640}, SEVERAL_SCALES),
        ["6 weights that it keeps in 8 bits, first model.layers.1.mlp.gate_proj.weight"],
    ),
    "another class": (
        *(Case("MXFP8Tensor", "fp8"), {}, ["other-fp8-parameters"]),
        ["fp8, but training has a MXFP8Tensor: 7 parameters"],
    ),
    "a value": (Case(BLOCKS, "fp8"), {}, [], ["decoder.layers.1.mlp.linear_fc1.weight", "1 NaN"]),
}


@on_engines({2: REFUSED}, timeout=900)
def test_what_cannot_be_sent_is_refused_by_name(tmp_path: Path, case: str) -> None:
    settings, sizes, codes, texts = REFUSED[case]
    with (
        block_formats.kernels_in_torch(),
        built(tmp_path, settings, **sizes) as (model, optimizer),
        contextlib.ExitStack() as owner,
        pytest.raises(HybridEngineError) as caught,
    ):
        engine = attached(tmp_path, settings, model, optimizer)
        owner.callback(engine.shutdown)
        weights = dict(model.named_parameters())
        weights["module.module.decoder.layers.1.mlp.linear_fc1.weight"]._rowwise_data[3, 5] = 0xFF
        with engine.rollout_context():
            pass
    assert [code for _, code in violations_of(caught.value)] == codes
    assert [text for text in texts if text not in str(caught.value)] == []
