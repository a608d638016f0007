"""`make offline-bundle`: what the checks of tests/gpu need on a GPU machine that reaches no package registry.

    wheels.txt   the packages that are carried
    wheels.py    downloads them, but for what that machine has
    vllm.py      vLLM's wheel without its largest extensions
    packing.py   everything as files of a known size and hash, in folders that are small enough to be carried
    bundle.py    all of it: `python -m offline.bundle DIRECTORY`
    run.py       goes along in every folder; there it unpacks, and runs pytest on tests/gpu

That machine has torch 2.11 for CUDA 13, what torch requires, and Python 3.12. **Nothing of this has run there yet.**
"""
