"""Examples; each is a package of its own.

gpt_rl/   GRPO on two-digit addition: a complete RL job, its checkpoints and its report (`make rl`)
"""
