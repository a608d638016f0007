"""Recipes: on_ray.py runs the RL example in Ray actors."""
