"""Rollouts in 8 and 4 bits: quantised in training, sent, and compared with vLLM's load of a
published checkpoint.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import HybridEngine, Sampling
from hybrid_engine.backends.vllm.native_load import native_parameters
from hybrid_engine.errors import ConfigError, HybridEngineError
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import has_violation, refused
from tests.harness.launch import of_all_ranks, on_engines
from tests.harness.torch_modes import other_torch_modes
from tests.harness.values import Values
from tests.hybrid_engine.backends.vllm.support import same_bits
from tests.zoo import block_formats, sharded_models, workers
from tests.zoo.families import read_config, served_config, write_config
from tests.zoo.tiny_models import label_log_probs, read_canonical, token_batch

# Over two ranks FSDP2 cuts the 384 rows of gate and up inside of a block, and those of others
# between blocks.
SIZES = {
    **{"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"head_dim": 64, "torch_dtype": "bfloat16"},
}
KEPT = "model.layers.1.self_attn.o_proj"
"""A module that config.json excludes."""
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]

PROMPTS = torch.arange(2, 18).reshape(2, 8)
GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)


ENGINE = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16, "verify": "full"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _write_config(path: Path, intermediate_size: int, has_experts: bool) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        variant, key = (
            ("qwen3_moe", "moe_intermediate_size")
            if has_experts
            else ("qwen3", "intermediate_size")
        )
        write_config(path, served_config(variant, **SIZES, **{key: intermediate_size}))
    dist.barrier()


def _train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    batch = token_batch(100 * step + dist.get_rank(), num_sequences=2, length=16)
    optimizer.zero_grad()
    logits = model(input_ids=batch["tokens"] % 130).logits
    (-label_log_probs(logits, batch["labels"] % 130).mean()).backward()
    optimizer.step()


def switch(engine: Any) -> TensorDict:
    """Switch to vLLM, which verifies every tensor, and back; return vLLM's parameters."""
    parameters = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        parameters[name] = tensor.detach().clone()

    with engine.inference.adaptor.observed(keep), engine.rollout_context():
        pass
    assert engine.sharding.last_report.tensors_verified == len(
        engine.inference.adaptor.layout().tensors
    )
    return parameters


def moved_nbytes(engine: Any) -> int:
    """Return the bytes of the last switch on all ranks."""
    report = engine.sharding.last_report
    return sum(of_all_ranks(report.bytes_own + report.bytes_received))


def check_published(
    engine: Any, published: Path, tensors: TensorDict, parameters: TensorDict
) -> None:
    """Compare vLLM's parameters bitwise with its own load of a checkpoint of these tensors, which
    is written.
    """
    if dist.get_rank() == 0:
        write_config(published, engine.config.hf_config())
        block_formats.write_checkpoint(published, tensors)
    dist.barrier()
    native = native_parameters(engine.inference, str(published))
    assert parameters.keys() <= native.keys()
    assert [
        name for name, tensor in parameters.items() if not same_bits(tensor, native[name])
    ] == []


def check_rollout(
    engine: Any,
    path: Path,
    method: str,
    weights: TensorDict,
    parameters: TensorDict,
    *unquantised: str,
) -> float:
    """Compare vLLM's parameters with its own load, its log-probabilities with transformers, and a
    saved checkpoint.

    Return the largest difference of a log-probability from transformers with the weights of
    training.
    """
    dtype = DTYPES[method]
    assert f"quantised weights in {dtype}" in engine.train.weights.scratch
    described = engine.config.hf_config().get("quantization_config", {})
    kept = described.get("ignore", described.get("modules_to_not_convert", ()))
    names = [
        name
        for name in weights
        if name.endswith("_proj.weight") and name.removesuffix(".weight") not in kept
    ]
    tensors = block_formats.quantised_checkpoint(method, weights, names)
    for name in weights.keys() - set(names):
        tensors[name] = weights[name].bfloat16()
    published = path / "published"
    check_published(engine, published, tensors, parameters)
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in parameters.items()}
    of_experts = {dtypes[name] for name in dtypes if ".experts." in name and "scale" not in name}
    assert of_experts <= {dtype}
    projections = [
        name for name in dtypes if name.endswith(("_proj.weight", "_proj.weight_packed"))
    ]
    assert len(projections) == (4 if of_experts else 8)
    assert [name for name in projections if dtypes[name] != dtype] == [*unquantised]
    assert dtypes["lm_head.weight"] == dtypes["model.norm.weight"] == "bfloat16"
    sequences = engine.generate(PROMPTS.tolist(), GREEDY)
    rows = [
        [*prompt, *of_prompt[0].token_ids]
        for prompt, of_prompt in zip(PROMPTS.tolist(), sequences, strict=True)
    ]
    scored = torch.stack(engine.inference.prompt_logprobs(rows))
    near = block_formats.dequantised_checkpoint(method, tensors)
    # Activations in bfloat16 change routers' choices.
    assert _gap(published, near, rows, scored) < (0.1 if of_experts else 0.05)
    with engine.train_context():
        engine.save_hf_checkpoint(str(path / "saved"))
    if dist.get_rank() == 0:
        saved = read_canonical(path / "saved")
        assert saved.keys() == weights.keys()
        assert [
            name
            for name in saved
            if not torch.equal(saved[name], weights[name].to(saved[name].dtype))
        ] == []
    dist.barrier()
    return _gap(published, weights, rows, scored)


def _gap(path: Path, weights: TensorDict, rows: list[list[int]], scored: torch.Tensor) -> float:
    """Return the largest difference of vLLM's log-probabilities from those of transformers with
    these weights.
    """
    from transformers import AutoModelForCausalLM

    config = {**read_config(path), "quantization_config": None}
    directory = write_config(path / f"of rank {dist.get_rank()}", config)
    block_formats.write_checkpoint(
        directory, {name: tensor.float() for name, tensor in weights.items()}
    )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.tensor(rows)
    with torch.no_grad():
        log_probs = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return float((log_probs.gather(-1, tokens[:, 1:, None])[..., 0] - scored).abs().max())


FSDP2: dict[str, tuple[str, int, int, bool]] = {
    "fsdp2, fp8": ("fp8", 1, 384, False),
    "fsdp2, fp8, vLLM's TP 2": ("fp8", 2, 512, False),
    "fsdp2, fp8 with scales in powers of two": ("ue8m0", 1, 384, False),
    "fsdp2, mxfp8, vLLM's TP 2": ("mxfp8", 2, 384, False),
    "fsdp2, mxfp4": ("mxfp4", 1, 384, False),
    "fsdp2, nvfp4, vLLM's TP 2": ("nvfp4", 2, 384, False),
    "fsdp2, ModelOpt's nvfp4, vLLM's TP 2": ("modelopt", 2, 384, False),
    "experts, fp8": ("fp8", 1, 128, True),
    "experts, mxfp8": ("mxfp8", 1, 128, True),
    "experts, mxfp4": ("mxfp4", 1, 128, True),
    "experts, nvfp4, vLLM's TP 2": ("nvfp4", 2, 128, True),
    "experts, ModelOpt's nvfp4, vLLM's TP 2": ("modelopt", 2, 128, True),
}
TP2 = {"params_dtype": "bfloat16", "tensor_model_parallel_size": 2}
MEGATRON: dict[str, tuple[str, Values]] = {
    "megatron, fp8": ("fp8", TP2),
    "megatron with LoRA, fp8": ("fp8", {**TP2, "lora": {"rank": 4, "alpha": 8.0}}),
    "megatron, nvfp4": ("nvfp4", TP2),
    "megatron with LoRA, mxfp8": ("mxfp8", {**TP2, "lora": {"rank": 4, "alpha": 8.0}}),
}
DTYPES = {
    "ue8m0": "float8_e4m3fn",
    "fp8": "float8_e4m3fn",
    "mxfp8": "float8_e4m3fn",
    "mxfp4": "uint8",
    "nvfp4": "uint8",
    "modelopt": "uint8",
}
BYTES = {
    "fp8": (0.5, 0.6),
    "ue8m0": (0.5, 0.6),
    "mxfp8": (0.5, 0.6),
    "mxfp4": (0.3, 0.4),
    "nvfp4": (0.3, 0.4),
}
BYTES["modelopt"] = BYTES["nvfp4"]
"""Bounds of a switch's bytes, as a share of unquantised ones. Embedding, head and a projection stay
as they are.
"""
GAPS = {"fp8": 0.08, "ue8m0": 0.08, "mxfp8": 0.08, "mxfp4": 0.3, "nvfp4": 0.2, "modelopt": 0.2}
"""Least difference of log-probabilities from those of the weights of training."""


@on_engines({2: FSDP2}, timeout=900)
def test_rollouts_of_fsdp2_are_those_of_a_published_checkpoint(tmp_path: Path, case: str) -> None:
    """Train, switch and compare twice."""
    method, tp_size, intermediate_size, has_experts = FSDP2[case]
    _write_config(tmp_path, intermediate_size, has_experts)
    of_experts = block_formats.experts_in_torch() if has_experts else contextlib.nullcontext()
    with block_formats.kernels_in_torch(), of_experts:
        model = published_model(tmp_path, method, *(ROUTERS if has_experts else ()))
        engine = engine_of(model, tmp_path, {"tp_size": tp_size, "incremental": "auto", **ENGINE})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        gaps = []
        for step in range(2):
            with engine.train_context():
                _train(model, optimizer, step)
                if has_experts:
                    # The model has the experts of a layer in one tensor.
                    engine.save_hf_checkpoint(tmp_path / "weights")
                    weights = read_canonical(tmp_path / "weights")
                else:
                    # Of the state dict, because a checkpoint is what is compared with them.
                    weights = {
                        name: tensor.full_tensor().detach()
                        for name, tensor in model.state_dict().items()
                    }
            with other_torch_modes():
                parameters = switch(engine)
            if not step:
                check_share(method, engine, weights, 2 // tp_size)
            kept = f"{KEPT}.weight"
            gaps.append(check_rollout(engine, tmp_path, method, weights, parameters, kept))
        with engine.rollout_context():
            skipped = engine.sharding.last_report.bytes_skipped
        engine.shutdown()
    assert max(gaps) > GAPS[method]
    assert skipped > 1e5 or has_experts, "unchanged weights are sent again"


def published_model(path: Path, method: str, *excluded: str) -> Any:
    """Return a model whose config is that of a checkpoint in a format."""
    model = sharded_models.from_config(path)
    # Checkpoints in nvfp4 have scales of activations, which a trainer lacks.
    scheme = "NVFP4" if method == "nvfp4" else ""
    # ModelOpt's exclusions are parts of names, and `mlp.gate` is one of `mlp.gate_up_proj`.
    model.config.quantization_config = block_formats.published(
        method, ["lm_head", KEPT, *excluded], scheme
    )
    return model


@on_engines(2, timeout=900)
def test_rollouts_are_unquantised_on_request(tmp_path: Path) -> None:
    _write_config(tmp_path, 384, has_experts=False)
    model = published_model(tmp_path, "fp8")
    engine = engine_of(model, tmp_path, {"quantization": "none", **ENGINE})
    nbytes = unquantised_nbytes(model.state_dict(), 2)
    parameters = switch(engine)
    assert {tensor.dtype for tensor in parameters.values()} == {torch.bfloat16}
    assert moved_nbytes(engine) == nbytes
    engine.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return workers.write_model(
        directory, "qwen3", **SIZES, intermediate_size=384, num_hidden_layers=2
    )


@on_engines({2: MEGATRON}, timeout=900)
def test_rollouts_of_megatron_are_those_of_a_published_checkpoint(model: Path, case: str) -> None:
    """The same with Megatron's weights in bfloat16, cut in the middle of blocks by TP.

    Its initial weights are so small that bfloat16 hides the difference from unquantised ones.
    """
    method, actor = MEGATRON[case]
    with block_formats.kernels_in_torch():
        worker = workers.build_worker(model, actor, {"quantization": method, "verify": "full"})
        for step in range(2):
            with worker.train_context():
                worker.update(workers.batch(seed=step), workers.cross_entropy)
                worker.save_hf_checkpoint(str(model / "weights"))
            weights = read_canonical(model / "weights")
            with other_torch_modes():
                parameters = switch(worker)
            if not step:
                check_share(method, worker, weights, 2)
            check_rollout(worker, model, method, weights, parameters)
        worker.shutdown()


def check_share(method: str, engine: Any, weights: TensorDict, num_replicas: int) -> None:
    """Compare the bytes of the last switch with those of bfloat16."""
    least, most = BYTES[method]
    assert least < moved_nbytes(engine) / unquantised_nbytes(weights, num_replicas) < most


def unquantised_nbytes(weights: TensorDict, num_replicas: int) -> int:
    return 2 * num_replicas * sum(tensor.numel() for tensor in weights.values())


def engine_of(model: Any, path: Path, settings: Values) -> HybridEngine:
    return HybridEngine(
        model=model,
        rollout_config={"model": str(path), **settings},
        train_config={"fsdp_config": {}},
        compress_reshard=True,
    )


@on_engines(2, timeout=900)
def test_devices_without_kernels_and_cuts_of_vllm_are_refused(tmp_path: Path) -> None:
    _write_config(tmp_path, 384, has_experts=False)
    if dist.get_rank() == 0:
        block_formats.publish(tmp_path, block_formats.PUBLISHED_FP8)
    dist.barrier()
    model = sharded_models.from_config(tmp_path)
    without_amx = mock.patch("torch.cpu._is_amx_tile_supported", return_value=False)
    no_kernel = has_violation("generate_config.quantization", "no-kernel", "AMX", "Set it to none")
    with without_amx, pytest.raises(ConfigError, check=no_kernel):
        engine_of(model, tmp_path, ENGINE)
    cut = ("192 is not divisible", "quantization to none")
    with block_formats.kernels_in_torch(), refused(HybridEngineError, "not-constructible", *cut):
        engine_of(sharded_models.from_config(tmp_path), tmp_path, {**ENGINE, "tp_size": 2})
