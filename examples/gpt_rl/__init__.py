"""GRPO on two-digit addition: Megatron trains, vLLM samples, both with the same weights.

data/*.jsonl -> task.py (characters, problems, reward)
                     |
train.py  ->  trainer.py: warm up, then the library's loop, hybrid_engine/rl
                generate   vLLM       groups of completions, reward by code
                score      Megatron   log-probabilities under the actor and the frozen reference
                update     Megatron   minibatches, clipped policy gradient + KL
                evaluate   vLLM       greedy accuracy on held-out problems
                     |
              report.py (terminal, metrics.jsonl, reward.png, TensorBoard)

With PPO (configs/ppo_tp2_to_dp2.yaml) a critic is trained before the actor is scored, and provides
the advantage of each token. With configs/fsdp2_to_dp.yaml, FSDP2 replaces Megatron.

settings.py            every key of `rl_config`; configs/ has one file per layout
make_data.py           writes data/
served.py              the run with a vLLM server: `make rl SERVER=1`
pretrain_gpt_rl.py     the same in the training loop of Megatron-LM; rollouts.py is its dataset
"""
