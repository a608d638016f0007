"""Both real engines on 2 and 4 ranks: training state, hosts, and failures.

The weights in vLLM and the models' results are in the matrix (tools/verify/test_matrix.py). Each
module launches its functions on ranks, which return frozen dataclasses.
"""
