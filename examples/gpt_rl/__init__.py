"""GRPO on two-digit addition: Megatron trains, vLLM samples, weights are resharded between them every iteration.

data/*.jsonl -> task.py (characters, problems, reward)
                     |
train.py  ->  trainer.py: warm up, then the library's loop, hybrid_engine/rl
                generate   vLLM       groups of completions, reward by code
                score      Megatron   log-probabilities under the actor and the frozen reference
                update     Megatron   minibatches, clipped policy gradient + KL
                evaluate   vLLM       greedy accuracy on held-out problems
                     |
              report.py (terminal, metrics.jsonl, reward.png, TensorBoard)

With PPO (configs/ppo_tp2_to_dp2.yaml) a critic learns before the actor is scored, and gives each token its advantage.
With FSDP2 as the trainer (configs/fsdp2_to_dp.yaml) it is the same.

settings.py            every key of `rl_config`; configs/ has one file per layout
make_data.py           writes data/
torchrun.py            torchrun without its own tracebacks
served.py              a server beside the ranks: `make rl SERVER=1`
pretrain_gpt_rl.py     the same inside Megatron-LM's own training loop; rollouts.py is its dataset
"""
