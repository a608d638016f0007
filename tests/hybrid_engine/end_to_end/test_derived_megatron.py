"""Megatron models without a name table, attached: their layouts follow from names, and are verified
by computing.

    torchrun ... -m tests.hybrid_engine.end_to_end.test_derived_megatron     # WITH_TORCHVISION
    torchrun ... -m tests.hybrid_engine.end_to_end.test_derived_megatron FILE NUMBER ...

The second compares some of `MODELS` as `verify` does, and writes the verdicts to FILE.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

import hybrid_engine
from hybrid_engine.backends.huggingface.saving import save_hf_checkpoint
from hybrid_engine.backends.megatron.live_model import live_model
from hybrid_engine.compute_check.probes import following_log_probs
from hybrid_engine.config import load_config
from hybrid_engine.errors import ComputationError, ConfigError
from hybrid_engine.models.families import read_model
from hybrid_engine.planning.plan import ReshardPlan
from hybrid_engine.ranks.job import Job, join_process_group
from hybrid_engine.tools.launching import run_ranks
from hybrid_engine.tools.plan.cluster_plan import plan_job
from hybrid_engine.tools.verify.comparison import (
    NUM_SWITCHES,
    Comparison,
    Verdict,
    join,
    tokens_and_labels,
)
from hybrid_engine.tools.verify.reference import Reference
from hybrid_engine.trainer.megatron.specs import LatentAttention, LatentDotProductAttention
from tests.harness.errors import violated
from tests.harness.launch import of_all_ranks, on_engines
from tests.harness.values import Values
from tests.hybrid_engine.end_to_end.own_layers import (
    let_vllm_route_by_sigmoids,
    one_block_per_layer,
    with_gated_delta_nets,
    with_norms_over_heads,
)
from tests.hybrid_engine.models.small_configs import small_config
from tests.hybrid_engine.planning.cases import bytes_read
from tests.zoo.families import write_config
from tests.zoo.vision_models import required_environment

PROMPTS = [[3, 5, 7, 9], [11, 13]]
NUM_TOKENS = 6
GENERATE = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16, "verify": "full"}
ROUTED = {
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 96,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
}
BY_SIGMOIDS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
}
SHARED = {"moe_shared_expert_intermediate_size": 96}
EXPERTS = {**ROUTED, **BY_SIGMOIDS, **SHARED, "moe_layer_freq": [0, 1, 1, 1]}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 64,
    "rope_type": "rope",
    "qk_layernorm": True,
}
MINISTRAL_YARN = {
    "yarn_rotary_scaling_factor": 16.0,
    "yarn_original_max_position_embeddings": 16384,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 1.0,
    "yarn_correction_range_round_to_int": True,
}
DELTA_NETS = {
    "layernorm_zero_centered_gamma": True,
    "attention_output_gate": True,
    "qk_layernorm": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # Without the kernels of flash-linear-attention.
    "deterministic_mode": True,
}
SHARED_GATE = {**ROUTED, **SHARED, "moe_shared_expert_gate": True}
TIED = {"share_embeddings_and_output_weights": True}
TENSOR_AND_EXPERT = {
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}


@dataclass(frozen=True)
class Model:
    """A Megatron model of a user's own.

    Attributes:
        architecture: of `small_configs`.
        layers: settings of TransformerConfig beside the usual ones.
        outside: settings of GPTModel.
        parallel: parallel sizes of Megatron.
        infer: parallel sizes of vLLM.
        spec: returns the layers, given the config; None: megatron-core's layers.
        kind: class of the model.
        dtype: of the weights, on both sides.
    """

    architecture: str
    layers: Values = field(default_factory=dict)
    outside: Values = field(default_factory=dict)
    parallel: dict[str, int] = field(default_factory=lambda: {"tensor_model_parallel_size": 2})
    infer: dict[str, int] = field(default_factory=lambda: {"infer_tensor_parallel_size": 2})
    spec: Callable[[TransformerConfig], TransformerBlockSubmodules | ModuleSpec] | None = None
    kind: type[GPTModel | MambaModel] = GPTModel
    dtype: torch.dtype = torch.float32


GLM = Model(
    "Glm4MoeForCausalLM",
    layers={**EXPERTS, "add_qkv_bias": True, "qk_layernorm": True, "layernorm_epsilon": 1e-5},
    outside={"rotary_percent": 0.5},
    parallel={"expert_model_parallel_size": 2},
)
QWEN3_NEXT = Model(
    "Qwen3NextForCausalLM",
    layers={**DELTA_NETS, **SHARED_GATE},
    outside={"rotary_percent": 0.25},
    parallel=TENSOR_AND_EXPERT,
    spec=with_gated_delta_nets,
    dtype=torch.bfloat16,
)
MODELS = [
    Model("MistralForCausalLM"),
    Model("MistralForCausalLM", parallel={"pipeline_model_parallel_size": 2}, infer={}),
    Model("Phi3ForCausalLM", layers={"layernorm_epsilon": 1e-5}),
    Model("SeedOssForCausalLM", layers={"add_qkv_bias": True}),
    Model(
        "Ministral3ForCausalLM",
        layers={"layernorm_epsilon": 1e-5, **MINISTRAL_YARN},
        outside={"position_embedding_type": "yarn", "rotary_base": 1_000_000},
    ),
    Model("GraniteForCausalLM", layers={"softmax_scale": 1.0}),
    Model(
        "SmolLM3ForCausalLM", layers={"no_rope_freq": 4}, outside={"rotary_base": 2_000_000, **TIED}
    ),
    GLM,
    Model(
        "Glm4MoeLiteForCausalLM",
        layers={
            **EXPERTS,
            **LATENT,
            "layernorm_epsilon": 1e-5,
            "moe_router_topk_scaling_factor": 1.8,
        },
        parallel={"expert_model_parallel_size": 2},
    ),
    Model(
        "GptOssForCausalLM",
        layers={
            **ROUTED,
            "moe_ffn_hidden_size": 128,
            "add_bias_linear": True,
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
            "bias_activation_fusion": False,
            "softmax_type": "learnable",
            "window_size": (15, 0),
            "window_attn_skip_freq": 2,
            "layernorm_epsilon": 1e-5,
            "yarn_rotary_scaling_factor": 4.0,
            "yarn_original_max_position_embeddings": 128,
            "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0,
            "yarn_mscale": None,
            "yarn_mscale_all_dim": None,
            "yarn_correction_range_round_to_int": False,
        },
        outside={"position_embedding_type": "yarn"},
        parallel={"expert_model_parallel_size": 2},
    ),
    QWEN3_NEXT,
    Model(
        "MiniMaxM2ForCausalLM",
        layers={**ROUTED, **BY_SIGMOIDS, "qk_layernorm": True},
        outside={"rotary_base": 5_000_000, "rotary_percent": 0.5},
        parallel=TENSOR_AND_EXPERT,
        spec=with_norms_over_heads,
    ),
    Model(
        "NemotronHForCausalLM",
        layers={
            "layernorm_epsilon": 1e-5,
            "gated_linear_unit": False,
            "activation_func": squared_relu,
            "bias_activation_fusion": False,
            "is_hybrid_model": True,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "mamba_state_dim": 32,
            "mamba_num_groups": 2,
            "use_mamba_mem_eff_path": False,
        },
        outside={"position_embedding_type": "none", "hybrid_override_pattern": "M-*-"},
        spec=one_block_per_layer,
        kind=MambaModel,
    ),
]
MODELS.append(replace(MODELS[-1], parallel={"pipeline_model_parallel_size": 2}, infer={}))

WITH_TORCHVISION = [
    replace(
        QWEN3_NEXT,
        architecture="Qwen3_5ForCausalLM",
        layers=DELTA_NETS,
        parallel=MODELS[0].parallel,
    ),
    replace(QWEN3_NEXT, architecture="Qwen3_5MoeForCausalLM"),
]
"""Models of text for which vLLM imports torchvision (see `tests/vision_path`)."""


@on_engines(2)
def test_vllm_computes_what_transformers_does_with_megatrons_weights() -> None:
    """And a job is planned without engines as live engines plan it."""
    plans = planned()  # before this process is a rank of a job
    assert check_switches() == [by_rank[int(os.environ["RANK"])] for by_rank in plans]


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_models_for_which_vllm_imports_torchvision() -> None:
    ended = run_ranks(["-m", __name__], 2, 500, environment=required_environment())
    assert ended.status == 0, ended.output


def check_switches(models: Sequence[Model] = MODELS) -> list[Values]:
    """Compare what each model's engine generates with transformers and equal weights; return the
    live plans.
    """
    join_process_group(120)
    hybrid_engine.prepare()
    let_vllm_route_by_sigmoids()
    return [_check_switch(model) for model in models]


def planned() -> list[list[Values]]:
    """Return, for each model, the plans of all ranks of a job that does not run."""
    plans = []
    for model in MODELS:
        with tempfile.TemporaryDirectory() as directory:
            write_config(Path(directory), small_config(model.architecture))
            actor = {**model.parallel, "seq_length": 32, "micro_batch_size": 1}
            actor["params_dtype"] = str(model.dtype).removeprefix("torch.")
            values = {
                "model": directory,
                "actor_config": actor,
                "generate_config": {**GENERATE, **model.infer},
            }
            config = load_config(values, 2, weights_only=True, own_weights=True, own_loop=True)
            job = plan_job(config, 2)
            plans.append([_facts(job.plan_of(rank), rank) for rank in range(2)])
    return plans


@on_engines(2)
def test_megatron_computes_what_transformers_does_in_float32() -> None:
    """Compare log-probabilities of models for which vLLM has no float32.

    transformers reads the weights that Megatron saved.
    """
    job = Job.join(120)
    hybrid_engine.prepare()
    for model in (*MODELS, *WITH_TORCHVISION):
        if model.dtype != torch.float32:
            assert _gap_in_float32(replace(model, dtype=torch.float32), job) < 1e-3, (
                model.architecture
            )


def _gap_in_float32(model: Model, job: Job) -> float:
    """Return the largest difference of a log-probability in nats."""
    with _live(model) as (chunk, optimizer, directory):
        table, _ = read_model(directory)
        live = live_model([chunk], optimizer, table)
        tokens = torch.randint(3, 500, (2, 80), generator=torch.Generator().manual_seed(0))
        answer = live.probe(tokens)
        place = [str(directory)]
        torch.distributed.broadcast_object_list(place)
        save_hf_checkpoint(f"{place[0]}/saved", live.weights.merged, table, job, directory)
        twin = _reader(f"{place[0]}/saved", model.architecture)
        expected = (
            twin(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        )
        torch.distributed.barrier()
        live.close()
    return float((answer.log_probs - expected).abs().max())


def _facts(plan: ReshardPlan, rank: int) -> Values:
    """Return the bytes that a rank receives, and its pieces with their sender and receiver."""
    count = bytes_read(plan).get(rank)
    pieces = Counter(
        (transfer.tensor, transfer.src_rank, transfer.dst_rank, transfer.numel)
        for transfer in plan.transfers()
    )
    return {
        "bytes": 0 if count is None else count.host + count.network,
        "pieces": sorted(pieces.items()),
    }


@on_engines(2)
def test_other_computations_and_sizes_are_refused() -> None:
    """Attach models that compute or are otherwise than their names suggest."""
    join_process_group(120)
    hybrid_engine.prepare()
    whole_heads = Model(GLM.architecture, GLM.layers, {"rotary_percent": 1.0}, GLM.parallel)
    with (
        _attached(whole_heads) as engine,
        _refusal("rotary frequencies is 16 for the trainer and 8 for vLLM"),
    ):
        engine.rollout_context().__enter__()
    # No module shows how many experts a token has.
    one_expert = Model(
        GLM.architecture, {**GLM.layers, "moe_router_topk": 1}, GLM.outside, GLM.parallel
    )
    with (
        _attached(one_expert) as engine,
        _refusal("vLLM does not compute what the trainer computes"),
    ):
        engine.rollout_context().__enter__()
    # vLLM's own log-probabilities are not compared.
    uncompared = {"kv_cache_dtype": "fp8"}
    of_transformers = "transformers does not compute what the trainer computes"
    with _attached(one_expert, vllm=uncompared) as engine, _refusal(of_transformers):
        engine.rollout_context().__enter__()
    with _attached(GLM, vllm=uncompared) as engine, engine.rollout_context():
        assert "compute" in engine.sharding.last_report.seconds_by_phase
    fewer = Model("MistralForCausalLM", layers={"num_query_groups": 4})
    computes_otherwise = ("TransformerConfig.num_query_groups", "computes-otherwise")
    with violated(ConfigError, computes_otherwise), _attached(fewer):
        pass
    needs_check = ("generate_config.check_compute", "needs-check")
    with violated(ConfigError, needs_check), _attached(MODELS[0], check_compute="off"):
        pass


def _refusal(text: str) -> AbstractContextManager[object]:
    return pytest.raises(ComputationError, match=text)


def _check_switch(model: Model) -> Values:
    with _attached(model) as engine:
        with engine.rollout_context():
            sampling = hybrid_engine.Sampling(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=True)
            completions = [first for first, *_ in engine.generate(PROMPTS, sampling)]
        report = engine.sharding.last_report
        assert report.bytes_received == report.bytes_least, model.architecture
        assert report.tensors_verified == len(engine.table.shapes) > 0, model.architecture
        tokens = {token for completion in completions for token in completion.token_ids}
        assert len(tokens) > 2, "too uniform to compare"
        plan = _facts(engine.sharding.plan, torch.distributed.get_rank())
        assert plan["pieces"]
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory) / "saved"
            shared = [str(place)]
            torch.distributed.broadcast_object_list(shared)
            with engine.train_context():
                engine.save_hf_checkpoint(shared[0])
                _check_read(engine, shared[0])
            differences, gains = _differences(shared[0], model.architecture, completions)
            torch.distributed.barrier()
    if model.dtype == torch.float32:
        assert max(differences.max(), gains.max()) < 1e-3, model.architecture
    else:
        # A token may have other experts.
        assert differences.mean() < 0.2, model.architecture
    return plan


def _check_read(engine: Any, directory: str) -> None:
    """Check that all weights come back from the files. Collective."""
    tensors = [
        flat for flat in engine.sharding.training.buffers().values() if flat.is_floating_point()
    ]
    before = [flat.clone() for flat in tensors]
    for flat in tensors:
        flat.zero_()
    engine.load_hf_checkpoint(directory)
    assert all(map(torch.equal, tensors, before))


def _differences(
    directory: str, architecture: str, completions: list[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by how much vLLM's log-probabilities differ from transformers in float32, in nats.

    The second is by how much another token is more likely.
    """
    model = _reader(directory, architecture)
    differences, gains = [], []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens = torch.tensor([[*prompt, *completion.token_ids]])
        log_probs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        drawn = log_probs.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        differences.append((drawn - torch.tensor(completion.logprobs)).abs())
        gains.append(log_probs.amax(-1) - drawn)
    return torch.cat(differences), torch.cat(gains)


@torch.no_grad()
def _reader(directory: str, architecture: str) -> Any:
    """Return transformers' model of a checkpoint, in float32."""
    import transformers

    return getattr(transformers, architecture).from_pretrained(directory, dtype=torch.float32)


@contextmanager
def _attached(model: Model, **generate: Any) -> Iterator[Any]:
    with _live(model) as (chunk, optimizer, directory):
        values = {
            "model": str(directory),
            "generate_config": {**GENERATE, **model.infer, **generate},
        }
        engine = hybrid_engine.attach(chunk, optimizer, values)
        try:
            yield engine
        finally:
            engine.shutdown()


@contextmanager
def _live(model: Model) -> Iterator[tuple[Any, Any, Path]]:
    """Yield Megatron's model, its optimizer, and a directory with config.json."""
    parallel_state.initialize_model_parallel(**model.parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    hf_config = small_config(model.architecture)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_config(directory, hf_config)
        try:
            yield *_built(model, hf_config), directory
        finally:
            parallel_state.destroy_model_parallel()


def _built(model: Model, hf_config: Values) -> tuple[Any, Any]:
    sizes = {
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hf_config["hidden_size"],
        "ffn_hidden_size": hf_config["intermediate_size"],
        "num_attention_heads": hf_config["num_attention_heads"],
        "num_query_groups": hf_config["num_key_value_heads"],
        "kv_channels": hf_config["head_dim"],
    }
    usual = {
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "use_cpu_initialization": True,
        "pipeline_dtype": model.dtype,
        "params_dtype": model.dtype,
        "bf16": model.dtype == torch.bfloat16,
        # Larger values than usual, so that the tokens differ.
        "init_method_std": 0.2,
    }
    layers = {**sizes, **usual, **model.parallel, **model.layers}
    # GPTModel reads these from attributes that its config has no fields for.
    yarn = {name: layers.pop(name) for name in list(layers) if name.startswith("yarn_")}
    config_class = MLATransformerConfig if "multi_latent_attention" in layers else TransformerConfig
    config = config_class(**layers)
    for name, value in yarn.items():
        setattr(config, name, value)
    if model.spec is not None:
        spec = model.spec(config)
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
    if config.multi_latent_attention:
        for layer in spec.layer_specs:
            # megatron-core's own attention takes no values of another size than keys.
            layer.submodules.self_attention.module = LatentAttention
            layer.submodules.self_attention.submodules.core_attention = LatentDotProductAttention
    chunk = model.kind(
        config,
        spec,
        vocab_size=hf_config["vocab_size"],
        max_sequence_length=hf_config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **{
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": False,
            **model.outside,
        },
    )
    _randomise(chunk)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    in_precision = Float16Module(config, chunk) if config.bf16 else chunk
    wrapped = DistributedDataParallel(config, ddp_config, in_precision)
    settings = OptimizerConfig(
        lr=1e-3, use_distributed_optimizer=True, bf16=config.bf16, params_dtype=model.dtype
    )
    return wrapped, get_megatron_optimizer(settings, [wrapped])


def _randomise(chunk: torch.nn.Module) -> None:
    """Change what Megatron initialises alike: norms, biases, and all that each rank draws from the
    same seed.

    Ranks that hold one tensor get equal values, and ranks of different experts or heads other ones.
    """
    for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
        if not name.endswith(("bias", "norm.weight", "conv1d.weight", "conv1d_weight")):
            continue
        seed = zlib.crc32(name.encode()) + torch.distributed.get_rank() * (
            ".local_experts." in name
        )
        if getattr(tensor, "tensor_model_parallel", False):
            seed += parallel_state.get_tensor_model_parallel_rank()
        noise = torch.empty(tensor.shape).normal_(
            std=0.2, generator=torch.Generator().manual_seed(seed)
        )
        # In steps that bfloat16 has beside 1, so that a weight in place of 1 + weight keeps its
        # bits in a file.
        tensor.data += noise.mul(128).round().div(128).to(tensor.dtype)


def compared(model: Model) -> Verdict:
    """Return the verdict over all ranks on switches of random weights, which are not trained."""
    with (
        Reference() as reference,
        tempfile.TemporaryDirectory() as directory,
        _attached(model) as engine,
    ):
        shared = [directory]
        torch.distributed.broadcast_object_list(shared)
        verdict = Verdict(model.architecture, remarks=["the user's loop trains"])
        Comparison(engine, reference, Path(shared[0]), verdict).run()
        tokens = tokens_and_labels(99, engine.table.dims.vocab_size)["tokens"]
        log_probs = reference.log_probs(Path(shared[0], f"version{NUM_SWITCHES - 1}"), tokens)
        with engine.train_context():
            trained = engine.train.probe(tokens).log_probs
        expected = following_log_probs(log_probs, tokens, engine.table.dims.vocab_size)
        verdict.training = float((trained - expected).abs().max())
        return join(of_all_ranks(verdict))


def main(path: str = "", *numbers: str) -> None:
    if not path:
        check_switches(WITH_TORCHVISION)
        return
    join_process_group(120)
    hybrid_engine.prepare()
    verdicts = [asdict(compared(MODELS[int(number)])) for number in numbers]
    if torch.distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(verdicts))


if __name__ == "__main__":
    main(*sys.argv[1:])
