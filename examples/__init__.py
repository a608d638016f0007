"""Examples.

gpt_rl/                      a complete RL job: GRPO on two-digit addition (`make rl`)
bring_your_own_megatron.py   vLLM added to a plain megatron-core job (`hybrid_engine.attach`)
fsdp_engine.py               a transformers model, trained by FSDP2 and sampled by vLLM
one_call.py                  GRPO in one call (`hybrid_engine.rl.train`)
loop.py                      a loop around `ActorHybridWorker`
own_trainer.py               a custom trainer in 40 lines (`HybridEngine.around`)
ppo.py                       PPO with a critic and a reference that resumes to the same numbers
trl_sums.py                  TRL's GRPOTrainer with vLLM filled by this engine
recipes/                     GRPO for a published model on GPUs, and a Slurm script
"""
