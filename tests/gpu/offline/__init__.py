"""`make offline-bundle`: the checks of tests/gpu for a GPU machine that reaches no package registry.

    wheels.txt   the packages that are carried
    bundle.py    downloads them and packs them with this checkout
    run.py       lies in each folder; on the other machine it unpacks, and runs pytest on tests/gpu

That machine has torch 2.11 for CUDA 13, what torch requires, and Python 3.12. It was used on an H100
and an H200, see docs/gpu.md.
"""
