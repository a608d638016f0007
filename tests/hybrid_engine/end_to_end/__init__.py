"""Both real engines on 2 and 4 ranks: what training keeps, what hosts see, what failures leave.

What reaches vLLM and what the models compute is in the matrix (tools/verify/test_matrix.py). Each test module launches
functions of its own on the ranks; what they bring back are frozen dataclasses.
"""
