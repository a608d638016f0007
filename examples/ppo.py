"""PPO with a critic and a reference, in the root of a checkout; stopped, it resumes bit by bit.

    hybrid-engine run --nproc-per-node 2 examples/ppo.py

The same command resumes the run. The model is a small random GPT; the reward is the share of even
tokens. On one CPU machine the first rewards are 0.5332, 0.6836 and 0.9297.
"""

import json
from pathlib import Path

import torch

from hybrid_engine import (
    ActorHybridWorker,
    ReferenceModel,
    Sampling,
    ValueModel,
    build_batch,
    generalized_advantages,
    load_config,
    value_loss,
)
from hybrid_engine.rl.losses import policy_loss

RUN, NUM_STEPS, LENGTH = Path("runs/ppo"), 8, 11
MODEL = Path(__file__).parent / "gpt_rl" / "model"  # yours: a directory or Hub id, with its weights
OPTIMIZER = {"optimizer": {"lr": 1e-2}}
config = load_config(
    {
        "model": str(MODEL),
        "random_weights": True,
        "actor_config": {
            "tensor_model_parallel_size": 2,
            "params_dtype": "float32",
            "seq_length": LENGTH,
            "micro_batch_size": 8,
            **OPTIMIZER,
        },
        "critic_config": OPTIMIZER,
        "generate_config": {"infer_tensor_parallel_size": 1, "max_model_len": 16},
    }
)
prompts = [[first, 2, 3, 4] for first in range(8)]


def rewards_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return [B, S]: the share of even tokens, at each completion's last token."""
    shares = ((batch["labels"] % 2 == 0) * batch["mask"]).sum(1) / batch["mask"].sum(1)
    last = (batch["mask"] * torch.arange(LENGTH)).argmax(1, keepdim=True)
    return torch.zeros(len(shares), LENGTH).scatter(1, last, shares[:, None])


state = RUN / "state.json"
start = json.loads(state.read_text())["step"] if state.exists() else 0
saved = RUN / f"step_{start}"
with ActorHybridWorker(config) as worker:
    with worker.forward_context():
        reference = ReferenceModel(worker)  # before load_checkpoint
    critic = ValueModel(worker, load_weights=not start)
    if start:
        with worker.train_context():
            worker.load_checkpoint(saved / "actor")
        with critic.train_context():
            critic.load_checkpoint(saved / "critic")
    for step in range(start, NUM_STEPS):
        with worker.rollout_context():
            # The sampler is in no checkpoint.
            sampling = Sampling(n=8, max_tokens=8, ignore_eos=True, seed=step)
            groups = worker.generate_sequences(prompts, sampling)
        completions = [completion for group in groups for completion in group]
        batch = build_batch([c.prompt_token_ids for c in completions], completions, LENGTH)
        rewards = rewards_of(batch)
        with worker.forward_context():
            batch["old_log_probs"] = worker.compute_log_probs(batch)
        with reference.forward_context():
            batch["ref_log_probs"] = reference.compute_log_probs(batch)
        with critic.train_context():
            batch["old_values"] = critic.values(batch)
            estimates = generalized_advantages(rewards, batch["old_values"], batch)
            batch["advantages"] = estimates.advantages
            batch["returns"] = estimates.returns
            critic.update(batch, value_loss())
            critic.save_checkpoint(RUN / f"step_{step + 1}" / "critic")
        with worker.train_context():
            report = worker.update(batch, policy_loss(0.2, 0.02))  # clip, weight of the KL
            worker.save_checkpoint(RUN / f"step_{step + 1}" / "actor")
        if worker.rank == 0:  # last: it names a checkpoint that is complete
            complete = state.with_suffix(".new")
            complete.write_text(json.dumps({"step": step + 1}))
            complete.replace(state)
        worker.barrier("writing state.json")
        reward = rewards.sum(1).mean()
        print(f"rank {worker.rank}: step {step}, reward {reward:.4f}, KL {report['kl']:.6f}")
