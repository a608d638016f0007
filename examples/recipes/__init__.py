"""Recipes: grpo_gsm8k.py trains on GSM8K, on_ray.py runs the RL example in Ray actors."""
