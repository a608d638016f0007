"""vLLM in a process, on process groups and on a host that belong to somebody else.

    isolation.py        the environment before vLLM's first import, the world, the model's class, the end of groups
    group_placement.py  which place in vLLM's groups each rank takes
    shm_cleanup.py      shared memory without a name, and whether there is room for it
    cpu_worker.py       vLLM's CPU worker; imported by vLLM, by name
    random_state.py     training draws as if vLLM had not

`InferenceEngine` calls isolation.py and shm_cleanup.py, then builds vLLM inside `building_groups`. Wherever vLLM only
makes a configuration (arguments.py, native_load.py), `rank_in_instance` is enough. No module here but cpu_worker.py
imports vLLM when it is imported.
"""
