"""Recipes for published models, to be run on GPUs.

    grpo_gsm8k.py                GRPO on grade-school mathematics, beside any configuration of the engine
    qwen2.5_0.5b_gsm8k.yaml      its configuration for Qwen2.5-0.5B-Instruct on 8 GPUs
    on_ray.py                    the RL example in Ray actors, on CPUs
    several_hosts.sbatch         any script of torchrun's, under Slurm

None was run on a GPU; README.md says what was checked.
"""
