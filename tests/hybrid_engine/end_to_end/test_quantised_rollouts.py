"""Rollouts in 8 and 4 bits: quantised in training, sent, and compared with vLLM's load of a published checkpoint."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
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
from tests.harness.launch import Call, Outcomes, Ranks
from tests.harness.torch_modes import other_torch_modes
from tests.hybrid_engine.backends.vllm.support import same_bits
from tests.zoo import block_formats, sharded_models, workers
from tests.zoo.families import served_config, write_config
from tests.zoo.tiny_models import label_log_probs, token_batch

# Over two ranks FSDP2 cuts the 384 rows of gate and up inside of a block, and those of others between blocks.
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


@dataclass
class Rollouts:
    """Results of one rank.

    Attributes:
        different: vLLM's parameters that differ bitwise from its own load of a published checkpoint.
        dtypes: dtype of each parameter of vLLM.
        nbytes: bytes of all ranks in a switch, quantised and unquantised.
        unverified: for each switch, tensors of vLLM that `verify: full` did not compare.
        gap: largest difference of a log-probability from transformers with dequantised weights.
        plain_gap: largest difference from transformers with the weights of training.
        saved: tensors of a saved checkpoint that differ from the weights of training.
        scratch: names of buffers that are dropped without a copy.
        skipped: bytes that a switch without an update in between did not send.
    """

    different: list[str] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)
    unverified: list[int] = field(default_factory=list)
    gap: float = 0.0
    plain_gap: float = 0.0
    saved: list[str] = field(default_factory=list)
    scratch: list[str] = field(default_factory=list)
    skipped: int = 0


def train_with_fsdp2(directory: str, method: str, tp_size: int, intermediate_size: int, experts: bool) -> Rollouts:
    """Train, switch and compare twice; then switch without quantisation."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    path = _write_config(directory, intermediate_size, experts)
    results = Rollouts()
    of_experts = block_formats.experts_in_torch() if experts else contextlib.nullcontext()
    with block_formats.kernels_in_torch(), of_experts:
        for quantization in (None, "none"):
            model: Any = sharded_models.from_config(path)
            # Checkpoints in nvfp4 have scales of activations, which a trainer lacks.
            scheme = "NVFP4" if method == "nvfp4" else ""
            # ModelOpt's exclusions are parts of names, and `mlp.gate` is one of `mlp.gate_up_proj`.
            excluded = ["lm_head", KEPT, *(ROUTERS if experts else ())]
            model.config.quantization_config = block_formats.published(method, excluded, scheme)
            settings = {"tp_size": tp_size, "quantization": quantization, "incremental": "auto", **ENGINE}
            engine = HybridEngine(
                model=model,
                rollout_config={"model": str(path), **settings},
                train_config={"fsdp_config": {}},
                compress_reshard=True,
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(2):
                with engine.train_context():
                    _train(model, optimizer, step)
                    if experts:
                        # The model has the experts of a layer in one tensor.
                        engine.save_hf_checkpoint(path / "weights")
                        weights = _read(path / "weights")
                    else:
                        # Of the state dict, because a checkpoint is what is compared with them.
                        weights = {name: tensor.full_tensor().detach() for name, tensor in model.state_dict().items()}
                _switch(engine, path, weights, method if quantization is None else "", results)
            with engine.rollout_context():
                results.skipped = max(results.skipped, engine.sharding.last_report.bytes_skipped)
            engine.shutdown()
    return results


def train_with_megatron(directory: str, method: str, actor: dict[str, Any]) -> Rollouts:
    """Do the same with Megatron's weights in bfloat16, cut in the middle of blocks by TP."""
    results = Rollouts()
    with block_formats.kernels_in_torch():
        for quantization in (method, None):
            worker = workers.build_worker(Path(directory), actor, {"quantization": quantization, "verify": "full"})
            for step in range(2):
                with worker.train_context():
                    worker.update(workers.batch(seed=step), workers.cross_entropy)
                    worker.save_hf_checkpoint(f"{directory}/weights")
                weights = _read(Path(directory, "weights"))
                _switch(worker, Path(directory), weights, quantization or "", results)
            worker.shutdown()
    return results


def refuse(directory: str) -> list[str]:
    """Return codes and texts of errors for a device without kernels, and for parts that vLLM cannot cut."""
    refusals = []
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    path = _write_config(directory, 384, experts=False)
    if dist.get_rank() == 0:
        block_formats.publish(path, block_formats.PUBLISHED_FP8)
    dist.barrier()
    without_amx = mock.patch("torch.cpu._is_amx_tile_supported", return_value=False)
    for kernel, sizes in ((without_amx, {}), (block_formats.kernels_in_torch(), {"tp_size": 2})):
        model = sharded_models.from_config(path)
        with kernel, pytest.raises(HybridEngineError) as caught:
            HybridEngine(
                model=model,
                rollout_config={"model": str(path), **ENGINE, **sizes},
                train_config={"fsdp_config": {}},
                compress_reshard=True,
            )
        error = caught.value
        codes = [violation.code for violation in error.findings] if isinstance(error, ConfigError) else [error.code]
        refusals.append(f"{codes} {error}")
    return refusals


def _write_config(directory: str, intermediate_size: int, experts: bool) -> Path:
    path = Path(directory)
    if dist.get_rank() == 0:
        variant, key = ("qwen3_moe", "moe_intermediate_size") if experts else ("qwen3", "intermediate_size")
        write_config(path, served_config(variant, **SIZES, **{key: intermediate_size}))
    dist.barrier()
    return path


def _train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    batch = token_batch(100 * step + dist.get_rank(), num_sequences=2, length=16)
    optimizer.zero_grad()
    logits = model(input_ids=batch["tokens"] % 130).logits
    (-label_log_probs(logits, batch["labels"] % 130).mean()).backward()
    optimizer.step()


def _switch(engine: Any, path: Path, weights: TensorDict, method: str, results: Rollouts) -> None:
    parameters: TensorDict = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        parameters[name] = tensor.detach().clone()

    with engine.inference.adaptor.observed(keep), other_torch_modes(), engine.rollout_context():
        pass
    note_report(engine, results)
    if method:
        results.scratch = sorted(engine.train.weights.scratch)
        _compare(engine, path, method, weights, parameters, results)


def note_report(engine: Any, results: Any) -> None:
    """Note the tensors of the last switch that were not verified, and its bytes on all ranks."""
    report = engine.sharding.last_report
    results.unverified.append(len(engine.inference.adaptor.layout().tensors) - report.tensors_verified)
    total = torch.tensor([report.bytes_own + report.bytes_received])
    dist.all_reduce(total)
    results.nbytes.append(int(total))


def compare_with_published(
    engine: Any, published: Path, tensors: TensorDict, parameters: TensorDict, results: Any
) -> None:
    """Write a checkpoint with these tensors; compare vLLM's parameters with its own load of it."""
    if dist.get_rank() == 0:
        write_config(published, engine.config.hf_config())
        block_formats.write_checkpoint(published, tensors)
    dist.barrier()
    native = native_parameters(engine.inference, str(published))
    assert parameters.keys() <= native.keys()
    results.different += [name for name, tensor in parameters.items() if not same_bits(tensor, native[name])]
    results.dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in parameters.items()}


def _compare(
    engine: Any,
    path: Path,
    method: str,
    weights: TensorDict,
    parameters: TensorDict,
    results: Rollouts,
) -> None:
    """Compare vLLM's parameters with its own load, and its log-probabilities with transformers."""
    described = engine.config.hf_config().get("quantization_config", {})
    kept = described.get("ignore", described.get("modules_to_not_convert", ()))
    names = [name for name in weights if name.endswith("_proj.weight") and name.removesuffix(".weight") not in kept]
    tensors = block_formats.quantised_checkpoint(method, weights, names)
    for name in weights.keys() - set(names):
        tensors[name] = weights[name].bfloat16()
    published = path / "published"
    compare_with_published(engine, published, tensors, parameters, results)
    sequences = engine.generate(PROMPTS.tolist(), GREEDY)
    rows = [[*prompt, *of_prompt[0].token_ids] for prompt, of_prompt in zip(PROMPTS.tolist(), sequences, strict=True)]
    scored = torch.stack(engine.inference.prompt_logprobs(rows))
    near = block_formats.dequantised_checkpoint(method, tensors)
    results.gap = max(results.gap, _gap(published, near, rows, scored))
    results.plain_gap = max(results.plain_gap, _gap(published, weights, rows, scored))
    with engine.train_context():
        engine.save_hf_checkpoint(str(path / "saved"))
    if dist.get_rank() == 0:
        saved = _read(path / "saved")
        results.saved += sorted(saved.keys() ^ weights.keys())
        results.saved += [name for name in saved if not torch.equal(saved[name], weights[name].to(saved[name].dtype))]
    dist.barrier()


def _read(path: Path) -> TensorDict:
    from safetensors.torch import load_file

    tensors = {}
    for file in path.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def _gap(path: Path, weights: TensorDict, rows: list[list[int]], scored: torch.Tensor) -> float:
    """Return the largest difference of vLLM's log-probabilities from those of transformers with these weights."""
    from transformers import AutoModelForCausalLM

    config = {**json.loads((path / "config.json").read_text()), "quantization_config": None}
    directory = write_config(path / f"of rank {dist.get_rank()}", config)
    block_formats.write_checkpoint(directory, {name: tensor.float() for name, tensor in weights.items()})
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
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
}
EXPERTS: dict[str, tuple[str, int, int, bool]] = {
    "experts, fp8": ("fp8", 1, 128, True),
    "experts, mxfp8": ("mxfp8", 1, 128, True),
    "experts, mxfp4": ("mxfp4", 1, 128, True),
    "experts, nvfp4, vLLM's TP 2": ("nvfp4", 2, 128, True),
    "experts, ModelOpt's nvfp4, vLLM's TP 2": ("modelopt", 2, 128, True),
}
TP2 = {"params_dtype": "bfloat16", "tensor_model_parallel_size": 2}
MEGATRON: dict[str, tuple[str, dict[str, Any]]] = {
    "megatron, fp8": ("fp8", TP2),
    "megatron with LoRA, fp8": ("fp8", {**TP2, "lora": {"rank": 4, "alpha": 8.0}}),
    "megatron, nvfp4": ("nvfp4", TP2),
    "megatron with LoRA, mxfp8": ("mxfp8", {**TP2, "lora": {"rank": 4, "alpha": 8.0}}),
}
TRAINED = {name: method for name, (method, *_) in (*FSDP2.items(), *EXPERTS.items(), *MEGATRON.items())}
DTYPES = {
    "ue8m0": "float8_e4m3fn",
    "fp8": "float8_e4m3fn",
    "mxfp8": "float8_e4m3fn",
    "mxfp4": "uint8",
    "nvfp4": "uint8",
    "modelopt": "uint8",
}
BYTES = {"fp8": (0.5, 0.6), "ue8m0": (0.5, 0.6), "mxfp8": (0.5, 0.6), "mxfp4": (0.3, 0.4), "nvfp4": (0.3, 0.4)}
BYTES["modelopt"] = BYTES["nvfp4"]
"""Bounds of a switch's bytes, as a share of unquantised ones. Embedding, head and a projection stay as they are."""
GAPS = {"fp8": 0.08, "ue8m0": 0.08, "mxfp8": 0.08, "mxfp4": 0.3, "nvfp4": 0.2, "modelopt": 0.2}
"""Least difference of log-probabilities from those of the weights of training."""


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    directory = tmp_path_factory.mktemp("quantised")
    calls: dict[str, Call] = {}
    for name, sizes in (*FSDP2.items(), *EXPERTS.items()):
        calls[name] = (train_with_fsdp2, (str(directory / str(len(calls))), *sizes))
    served = workers.write_model(directory / "megatron", "qwen3", **SIZES, intermediate_size=384, num_hidden_layers=2)
    for name, (method, actor) in MEGATRON.items():
        calls[name] = (train_with_megatron, (str(served), method, actor))
    calls["refused"] = (refuse, (str(directory / "refused"),))
    return engines.launch_in_turn(2, calls, timeout=900)


@pytest.mark.parametrize("name", TRAINED)
def test_vllm_holds_what_it_loads_from_a_published_checkpoint(outcomes: Outcomes, name: str) -> None:
    for rollouts in outcomes[name]:
        assert rollouts.different == []
        ends = ("_proj.weight", "_proj.weight_packed")
        weights = {key: dtype for key, dtype in rollouts.dtypes.items() if key.endswith(ends)}
        kept = {key for key, dtype in weights.items() if dtype != DTYPES[TRAINED[name]]}
        assert kept == (set() if name.startswith("megatron") else {f"{KEPT}.weight"})
        assert len(weights) == (4 if name in EXPERTS else 8)
        of_experts = {key: dtype for key, dtype in rollouts.dtypes.items() if ".experts." in key and "scale" not in key}
        assert set(of_experts.values()) == ({DTYPES[TRAINED[name]]} if name in EXPERTS else set())
        assert rollouts.dtypes["lm_head.weight"] == rollouts.dtypes["model.norm.weight"] == "bfloat16"


@pytest.mark.parametrize("name", TRAINED)
def test_fewer_bytes_are_sent(outcomes: Outcomes, name: str) -> None:
    least, most = BYTES[TRAINED[name]]
    for rollouts in outcomes[name]:
        quantised, _, plain, _ = rollouts.nbytes
        assert least < quantised / plain < most


@pytest.mark.parametrize("name", TRAINED)
def test_every_tensor_is_verified(outcomes: Outcomes, name: str) -> None:
    for rollouts in outcomes[name]:
        assert rollouts.unverified == [0, 0, 0, 0]


@pytest.mark.parametrize("name", TRAINED)
def test_log_probs_are_those_of_dequantised_weights(outcomes: Outcomes, name: str) -> None:
    for rollouts in outcomes[name]:
        # Activations in bfloat16 change routers' choices.
        assert rollouts.gap < (0.1 if name in EXPERTS else 0.05)
        # Megatron's initial weights are so small that bfloat16 hides the difference.
        assert rollouts.plain_gap > GAPS[TRAINED[name]] or name.startswith("megatron")


@pytest.mark.parametrize("name", TRAINED)
def test_checkpoints_hold_the_weights_of_training(outcomes: Outcomes, name: str) -> None:
    for rollouts in outcomes[name]:
        assert rollouts.saved == []
        assert f"quantised weights in {DTYPES[TRAINED[name]]}" in rollouts.scratch


def test_unchanged_quantised_weights_are_not_sent_again(outcomes: Outcomes) -> None:
    for name in FSDP2:
        assert all(rollouts.skipped > 1e5 for rollouts in outcomes[name])


def test_devices_without_kernels_and_cuts_of_vllm_are_refused(outcomes: Outcomes) -> None:
    for without_kernel, cut in outcomes["refused"]:
        assert without_kernel.startswith("['no-kernel']")
        assert "AMX" in without_kernel
        assert "Set it to none" in without_kernel
        assert cut.startswith("['not-constructible']")
        assert "192 is not divisible" in cut
        assert "quantization to none" in cut
