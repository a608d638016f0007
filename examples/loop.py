"""A loop of one's own around `ActorHybridWorker`, in the root of a checkout.

    hybrid-engine run --nproc-per-node 2 examples/loop.py

The reward, the share of even tokens, rises from 0.533 to 1.
"""

from collections.abc import Mapping

import torch

from hybrid_engine import ActorHybridWorker, Sampling, load_config

actor = {"tensor_model_parallel_size": 2, "params_dtype": "float32"}
actor |= {"seq_length": 11, "micro_batch_size": 16, "optimizer": {"lr": 1e-2}}
generate = {"infer_tensor_parallel_size": 1, "max_model_len": 16}  # two replicas
# A directory or a Hub id. Leave out random_weights where it has weights.
model = {"model": "examples/gpt_rl/model", "random_weights": True}
config = load_config({**model, "actor_config": actor, "generate_config": generate})
prompts = [[first, 2, 3, 4] for first in range(8)]
sampling = Sampling(n=8, max_tokens=8, ignore_eos=True)


def loss(batch: Mapping[str, torch.Tensor], log_probs: torch.Tensor) -> torch.Tensor:
    """Return the mean of log_probs [b, S] of completions, weighted by advantages."""
    return -(batch["advantages"][:, None] * log_probs[:, 3:]).mean()  # the first 3: the prompt's


with ActorHybridWorker(config) as worker:
    for step in range(8):
        with worker.rollout_context():  # vLLM has the weights
            groups = worker.generate_sequences(prompts, sampling)
        completions = [completion for group in groups for completion in group]
        rows = torch.tensor([[*c.prompt_token_ids, *c.token_ids] for c in completions])
        rewards = (rows[:, 4:] % 2 == 0).float().mean(1)
        batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        batch["advantages"] = rewards - rewards.mean()
        with worker.train_context():  # Megatron has the device again
            worker.update(batch, loss)
        print(f"rank {worker.rank}: step {step}, reward {rewards.mean():.3f}")
