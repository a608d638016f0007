"""Estimates of a plan, compared with figures computed by hand and with a paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hybrid_engine.config import ActorConfig, FsdpConfig, GenerateConfig
from hybrid_engine.config.job_rules import megatron_training
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.kv_cache import layer_caches, sequence_nbytes
from hybrid_engine.layouts.memory import GIB
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism, named
from hybrid_engine.layouts.sharded import PackedModel
from hybrid_engine.models import table_for
from hybrid_engine.tools.plan.activations import (
    ENTROPY_NBYTES,
    Step,
    activation_nbytes,
    gathered_nbytes,
    vllm_step_nbytes,
)
from hybrid_engine.trainer.batches.token_outputs import Outputs, token_outputs
from tests.harness.values import Values
from tests.hybrid_engine.layouts.cases import DENSE
from tests.zoo.published_configs import DEEPSEEK_V3, LLAMA_3_70B

# Elements of one rank, T = 1,024 tokens of a micro batch, 16,384 of a step of vLLM (H100), 256
# sequences with logits.  Llama-3 70B, TP 8, 64 ranks, so DP 8. A layer: q and o 8,192 x 8,192 each,
# k and v 1,024 x 8,192 each, 150,994,944; MLP 3 x 28,672 x 8,192 = 704,643,072; their eighth
# 106,954,752, and two norms 16,384: 106,971,136. 80 of them 8,557,690,880. Embedding and head:
# 128,256 rows padded to 129,024 (of 1,024), 2 x 129,024 x 8,192 / 8 = 264,241,152. Last norm 8,192.
# In all 8,821,940,224, each 2 bytes + 4 of gradient + 12 / 8 of optimizer: 7.5. Activations of a
# token and layer, with sequence parallelism: 4 x 8,192 / 8 = 4,096; q and output 2 x 8,192 and k, v
# 2 x 1,024, an eighth: 2,304; MLP 3 x 28,672 / 8 = 10,752; in all 17,152. 80 layers, 2 bytes:
# 2,744,320 a token; logits 129,024 / 8 x (2 + 4 + 16 for the entropy) = 354,816. vLLM, TP 4:
# (150,994,944 + 704,643,072) / 4 + 16,384 = 213,925,888, 80 of them; ends 2 x 128,256 x 8,192 / 4 =
# 525,336,576; norm: 17,639,415,808. A token: key and value, 2 of 8 heads, 128, 80 layers, 2 bytes =
# 81,920. A step: 2 bytes x 16,384 x (3 x 8,192 + 3 x 28,672 / 4) = 1,509,949,440, and 256 x 128,256
# logits of
# 2 + 8 bytes.
# DeepSeek-V3, TP 8, PP
# 16 (4 x 15, 1), EP 32, ETP 1, 512 ranks, so DP 4, one replica of an expert. A layer: q down 1,536
# x 7,168 and kv down 576 x 7,168, whole, 15,138,816, with norms 2,048; q up 24,576 x 1,536 / 8 =
# 4,718,592; kv up 32,768 x 512 / 8 = 2,097,152; o 7,168 x 16,384 / 8 = 14,680,064; two norms
# 14,336: 36,651,008. Router 256 x 7,168 and its bias 256: 1,835,264. Shared expert 3 x 2,048 x
# 7,168 / 8 = 5,505,024. 4 layers 175,965,184. Experts: 8 of 44,040,192, 4 layers 1,409,286,144. 6
# bytes each, and 12 x (175,965,184 / 4 + 1,409,286,144). Activations of the second stage, 15 micro
# batches x 4 layers: 4 x 7,168 / 8 = 3,584; compressed 2 x (1,536 + 576) = 4,224; q, k 2 x 24,576
# and output 16,384, an eighth: 8,192; kv up 4,096; one copy for experts, 7,168 + 3 x 2,048 =
# 13,312; shared 768; in all 34,176. 60 x 34,176 = 2,050,560. The first has 16 x (3 x 27,008 +
# 34,176) = 1,843,200. vLLM, TP 8, EP 32: 36,651,008 + 1,835,264 + the shared expert whole
# 44,040,192 + 8 experts 352,321,536 = 434,848,000, 58 of them; 3 dense ones of 36,651,008 + 3 x
# 18,432 x 7,168 / 8 = 86,196,224; ends 2 x 129,280 x 7,168 / 8 = 231,669,760; norm 7,168:
# 25,711,449,600. A token: 576 x 61 x 2 = 70,272, on every rank. A step: 8 x (7,168 + 3 x 2,048) =
# 106,496 of experts, and 3 x 7,168; 256 x 129,280 logits.
TERMS = {
    "llama-3 70b": (
        LLAMA_3_70B,
        TrainParallelism(64, tensor=8),
        InferenceParallelism(64, tensor=4),
        8_821_940_224 * 15 // 2,
        1024 * (2_744_320 + 354_816),
        2 * 17_639_415_808,
        81_920,
        1_509_949_440 + 256 * 128_256 * 10,
    ),
    "deepseek-v3": (
        DEEPSEEK_V3,
        TrainParallelism(
            512, 8, 16, num_layers_in_last_pipeline_stage=1, expert=32, expert_tensor=1
        ),
        InferenceParallelism(512, tensor=8, expert=32),
        6 * 1_585_251_328 + 12 * (43_991_296 + 1_409_286_144),
        1024 * 2 * 2_050_560,
        2 * 25_711_449_600,
        70_272,
        2 * 16_384 * (21_504 + 106_496) + 256 * 129_280 * 10,
    ),
}


@pytest.mark.parametrize("name", TERMS)
def test_terms_match_the_figures_computed_by_hand(name: str) -> None:
    model, train, infer, training, activations, weights, token_bytes, step = TERMS[name]
    table = table_for(model)
    actor = ActorConfig(sequence_parallel=True, **named(train, "key"))
    _, state = megatron_training(actor, table, train.world_size)
    assert state.total.max() == training
    assert activation_nbytes(table, Step.of(actor, train)).max() == activations
    assert 2 * inference_side(table, infer).num_elements.max() == weights
    assert max(sequence_nbytes(stage, 1) for stage in layer_caches(table, infer, 2)) == token_bytes
    assert vllm_step_nbytes(table, infer, GenerateConfig(), 2, 79.1 * GIB) == step


def test_activations_match_the_papers_layer() -> None:
    """Paper: sbh (34 + ...) bytes with dropout masks, so 32 h without them.

    TP 2 does not cut norms and inputs: 8 h + 24 h / 2.
    """
    gpt = {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 1024,
        "n_head": 16,
        "n_layer": 1,
        "n_positions": 1024,
    }
    table = table_for({**gpt, "vocab_size": 1024})
    logits = 1024 * 1024 * 22

    def layer_nbytes(tensor: int, **actor: Any) -> int:
        step = Step.of(ActorConfig(**actor), TrainParallelism(2, tensor=tensor))
        return int(activation_nbytes(table, step)[0]) - logits // tensor

    assert layer_nbytes(1) == 1024 * 1024 * 32
    assert layer_nbytes(2) == 1024 * 1024 * (8 + 24 // 2)
    assert layer_nbytes(2, sequence_parallel=True) == 1024 * 1024 * 16
    assert layer_nbytes(1, micro_batch_size=3) == 3 * 1024 * 1024 * 32 + 2 * logits


def test_the_entropy_keeps_the_planned_bytes_of_a_logit() -> None:
    """Its backward pass adds a gradient in float32, and every score has one."""
    logits = torch.randn(64, 5000, dtype=torch.bfloat16, requires_grad=True)
    kept = {}
    with saved_tensors_hooks(
        lambda tensor: kept.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor
    ):
        token_outputs(logits, Outputs(entropy=True))
    nbytes = sum(tensor.nbytes for tensor in kept.values())
    assert nbytes / logits.numel() == pytest.approx(ENTROPY_NBYTES - 4, rel=1e-3)


def full(method: str, num_layers: int) -> Values:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": num_layers,
    }


def selective(*modules: str) -> Values:
    return {"recompute_granularity": "selective", "recompute_modules": modules or None}


@pytest.mark.parametrize(
    ("num_layers", "keys", "expected"),
    [
        (24, {}, 2 * 12 * 20),
        (24, selective("mlp"), 2 * 12 * 8 + 12),
        (24, selective("layernorm", "mlp"), 2 * 12 * 6 + 14),
        (
            12,
            full("uniform", 2),
            2 * 6 // 2 + 2 * 20,
        ),  # the input of every group of two layers, and one full group
        (4, full("block", 1), 2 * (1 + 20) + 20),
        (4, full("block", 2), 2 * 2 + 20),
        (
            24,
            {"virtual_pipeline_model_parallel_size": 2},
            (2 + 2 + 1) * 6 * 20,
        ),  # chunks of 6 layers
    ],
)
def test_recomputation_and_stages_in_flight(num_layers: int, keys: Values, expected: int) -> None:
    """PP 2: the first stage keeps two micro batches.

    With h = q = kv = 8 and f = 32, a token and layer takes 20 h: norms and inputs 4 h; q, k, v and
    output 4 h; MLP 12 h.
    """
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 32,
    }
    table = table_for({**DENSE, **sizes, "num_hidden_layers": num_layers})
    actor = ActorConfig(pipeline_model_parallel_size=2, seq_length=10, **keys)
    assert activation_nbytes(table, Step.of(actor, actor.sizes(2)))[0] == 8 * 10 * 2 * expected


def test_fsdp_gathers_a_layer_and_the_root() -> None:
    """Root of 10 and 30 elements, layers of 100 and 120.

    In float32: 4 (40 + 240) + 4 (40 + 120) + 4 x 120.
    """
    shapes = {
        "embed": (10,),
        "layers.0.q": (100,),
        "layers.1.q": (70,),
        "layers.1.k": (50,),
        "head": (30,),
        "bias": (9,),
    }
    model = PackedModel({}, shapes, whole={"bias"})

    def gathered(**fsdp: Any) -> int:
        return gathered_nbytes(model, ActorConfig(fsdp=FsdpConfig(**fsdp), params_dtype="float32"))

    assert gathered() == 4 * 280 + 4 * 160 + 480
    assert gathered(mixed_precision="amp") == 2 * 280 + 2 * 160 + 480, "reduced in float32"
    assert gathered(sharding_strategy="SHARD_GRAD_OP") == 4 * 260 + 4 * 160 + 480, "all layers stay"
