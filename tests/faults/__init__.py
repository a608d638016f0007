"""Faults injected into real jobs: `make test-faults`. Other runs deselect them, because they take
minutes.

job.py starts the example under torchrun with a fault in a function of one rank; faulty_train.py
runs in the ranks.
"""
