"""Isolates vLLM from training, with which it shares a process, process groups and a host.

    isolation.py         the environment before vLLM's first import, checks of the world, the model class, ending groups
    group_placement.py   which place in vLLM's groups each rank takes
    process_settings.py  keeps the environment and torch's settings (precision, threads, stream) as training has them
    random_state.py      keeps training's random state unaffected by vLLM's

`InferenceEngine` calls isolation.py, then builds vLLM inside `building_groups`. Wherever vLLM only
makes a configuration (arguments.py, native_load.py), `rank_in_instance` is enough. No module
here imports vLLM when it is imported.
"""
