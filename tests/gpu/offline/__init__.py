"""`make offline-bundle`: the checks of tests/gpu for a GPU machine that reaches no package
registry.

    wheels.txt   packages of the bundle
    bundle.py    downloads them and packs them with this checkout
    run.py       in each folder; on the target machine it unpacks the bundle and runs tests/gpu

The target machine has torch 2.11 for CUDA 13, the packages that torch requires, and Python 3.12.
The bundle was used on an H100 and an H200, see docs/gpu.md.
"""
