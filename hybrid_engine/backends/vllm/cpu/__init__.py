"""vLLM's CPU build inside a rank. Nothing here is imported where vLLM runs on a GPU.

cpu_worker.py    vLLM's CPU worker, isolated from its process; imported by vLLM, by name
shm_cleanup.py   unnamed shared memory, and whether there is room for it
host_memory.py   memory of weights: resized storages, and pages that successive buckets reuse
"""
