"""`make offline-bundle`: what the checks of tests/gpu need on a GPU machine that reaches no package registry.

    wheels.txt   the packages that are carried
    bundle.py    downloads them and packs them with this checkout: `python -m offline.bundle DIRECTORY`
    run.py       goes along in every folder; there it unpacks, and runs pytest on tests/gpu

That machine has torch 2.11 for CUDA 13, what torch requires, and Python 3.12. **Nothing of this has run there yet.**
"""
