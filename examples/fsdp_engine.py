"""A transformers model that FSDP2 trains and vLLM samples from, in the same processes.

    hybrid-engine run --nproc-per-node 2 examples/fsdp_engine.py MODEL

MODEL is a directory or a name on the Hub; the default is a small random Qwen2. Even tokens reward.
"""

import logging
import sys

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from hybrid_engine import HybridEngine, ReshardReport, Sampling

logging.basicConfig(level=logging.INFO)  # [Reshard] lines: seconds, bytes
logging.getLogger("vllm").setLevel(logging.WARNING)

torch.manual_seed(0)
if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
else:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = Qwen2Config(**sizes, **heads, vocab_size=512, bos_token_id=0, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config)

engine = HybridEngine(
    model=model,
    rollout_config={"tp_size": 2, "max_model_len": 64},
    train_config={"fsdp_config": {"mixed_precision": "amp", "sharding_strategy": "FULL_SHARD"}},
    compress_reshard=True,
    compression_dtype=torch.bfloat16,
)
rank = engine.job.rank
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


@engine.on_reshard_end
def log_bytes(report: ReshardReport) -> None:
    figures = f"{report.bytes_received} bytes in {report.seconds:.2f} s"
    print(f"rank {rank}: {report.direction}, {figures}")


prompts = torch.randint(2, 500, (8, 8), generator=torch.Generator().manual_seed(1))
for step in range(5):
    with engine.rollout_context():
        sampling = Sampling(n=8, max_tokens=24, ignore_eos=True, seed=step)
        sequences = engine.generate(prompts, sampling)  # [64, 32]
    responses = sequences[:, prompts.shape[1] :]
    rewards = (responses % 2 == 0).float().mean(1)
    with engine.train_context():
        logits = model(sequences).logits[:, prompts.shape[1] - 1 : -1].float()
        log_probs = logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]
        loss = -((rewards - rewards.mean())[:, None] * log_probs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: step {step}, reward {rewards.mean():.3f}, loss {loss.item():.4f}")
engine.shutdown()
