"""Faults put into real jobs: `make test-faults`. Left out of the other runs, for they take minutes.

job.py starts the example under torchrun with a fault in one function of one rank; faulty_train.py runs in the ranks.
"""
