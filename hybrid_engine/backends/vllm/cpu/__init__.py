"""Parts for vLLM's CPU build inside a rank. Not imported if vLLM runs on a GPU.

cpu_worker.py   vLLM's CPU worker, isolated from its process; vLLM imports it by name. Its draws,
                drafts and experts of tokens
shm_cleanup.py  unlinking of shared memory, and the check of its size
host_memory.py  memory of weights: pages that are returned and reused, bucket after bucket
"""
