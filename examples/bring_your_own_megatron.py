"""A plain megatron-core job. The lines marked (*) add vLLM; docs/trainers.md explains them.

hybrid-engine run --nproc-per-node 2 -m examples.bring_your_own_megatron
"""

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import hybrid_engine

CONFIG = {
    "model": "examples/gpt_rl/model",
    "generate_config": {"max_model_len": 16, "max_num_seqs": 8},
}
LENGTH = 12
PROMPTS = [[0, 1, 2], [5, 6, 7]]
HAS_GPU = torch.cuda.is_available()


def build_my_model() -> tuple[Any, Any]:
    """Build a Qwen3 with TP=2 in DDP, and its optimizer, without the hybrid engine."""
    torch.distributed.init_process_group("nccl" if HAS_GPU else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    sizes = {
        "num_layers": 4,
        "hidden_size": 128,
        "ffn_hidden_size": 384,
        "num_attention_heads": 4,
        "kv_channels": 32,
    }
    qwen3 = {
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
    }
    mlp = {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
    }
    training = {"tensor_model_parallel_size": 2, "hidden_dropout": 0, "attention_dropout": 0}
    config = TransformerConfig(
        **sizes, **qwen3, **mlp, **training, use_cpu_initialization=not HAS_GPU
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    # the model has 14 tokens; Megatron pads the vocabulary
    model = GPTModel(
        config, spec, vocab_size=16, max_sequence_length=64, position_embedding_type="rope"
    )
    model = model.cuda() if HAS_GPU else model
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp_config, model)
    optimizer_config = OptimizerConfig(lr=3e-3, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(optimizer_config, [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def forward_step(iterator: Any, model: Any) -> Any:
    """Return the loss of counting modulo 12."""
    rows = next(iterator).to("cuda" if HAS_GPU else "cpu")
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=rows.device).triu(1)
    positions = torch.arange(LENGTH, device=rows.device)[None]
    losses = model(rows[:, :-1], positions, mask, labels=rows[:, 1:])
    return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def train(model: Any, optimizer: Any, num_steps: int) -> float:
    """Train by Megatron's schedule; return the last loss."""
    step = get_forward_backward_func()
    sizes = {
        "seq_length": LENGTH,
        "micro_batch_size": 8,
        "num_microbatches": 1,
        "forward_only": False,
    }
    for number in range(num_steps):
        rows = (torch.arange(8)[:, None] + torch.arange(LENGTH + 1) + number) % 12
        model.zero_grad_buffer()
        optimizer.zero_grad()
        (report,) = step(
            forward_step_func=forward_step, data_iterator=iter([rows]), model=model, **sizes
        )
        optimizer.step()
    return float(report["loss"])


def main(num_rounds: int = 3, num_steps: int = 20) -> None:
    hybrid_engine.prepare()  # (*) before the model is built
    model, optimizer = build_my_model()
    engine = hybrid_engine.attach(model, optimizer, CONFIG)  # (*) CONFIG may be a YAML file
    for _ in range(num_rounds):
        with engine.train_context():  # (*) vLLM's weights off the device; training state back
            loss = train(model, optimizer, num_steps)
        with engine.rollout_context():  # (*) weights to vLLM; training state off the device
            groups = engine.generate(PROMPTS, hybrid_engine.Sampling(temperature=0.0, max_tokens=6))
        if engine.job.rank == 0:
            answers = [list(completions[0].token_ids) for completions in groups]
            print(f"loss {loss:.3f}: after {PROMPTS} comes {answers}", flush=True)
    engine.shutdown()  # (*) model and optimizer stay on the device
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
