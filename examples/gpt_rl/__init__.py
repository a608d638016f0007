"""GRPO on two-digit addition: Megatron trains, vLLM samples, weights are resharded between them every iteration.

data/*.jsonl -> task.py (characters, problems, reward)
                     |
train.py  ->  trainer.py: warm up, then repeat
                generate   vLLM       groups of completions, reward by code
                score      Megatron   log-probabilities under the actor and the frozen reference
                update     Megatron   grpo.py: clipped policy gradient + KL, on batches.py's batches
                evaluate   vLLM       greedy accuracy on held-out problems
                     |
              run_state.py (checkpoints, resume), report.py (terminal, metrics.jsonl), curves.py (reward.png),
              loggers.py (TensorBoard, W&B)

With PPO (configs/ppo_tp2_to_dp2.yaml) a critic learns between score and update, and gives each token its advantage:
ppo.py. With FSDP2 as the trainer (configs/fsdp2_to_dp.yaml) it is the same.

settings.py            every key of `rl_config`; configs/ has one file per layout
make_data.py           writes data/
measure.py             seconds by phase, bytes and memory of an iteration
output.py              terminal and log of one rank
torchrun.py            torchrun without its own tracebacks
run_lock.py            one job at a time writes a run's directory
stopping.py            Ctrl-C and SIGTERM
pretrain_gpt_rl.py     the same inside Megatron-LM's own training loop; rollouts.py is its dataset
"""
