"""Examples.

gpt_rl/          GRPO on two-digit addition: a complete RL job, its checkpoints and its report (`make rl`)
bring_your_own_megatron.py   plain megatron-core, and vLLM beside it (`hybrid_engine.attach`), in one page
fsdp_engine.py   an engine around a transformers model, FSDP2 and vLLM in turn, in one page
own_trainer.py   a trainer of one's own in 40 lines, and vLLM with its weights (`HybridEngine.around`)
recipes/         GRPO for a published model on GPUs, and a Slurm script
"""
