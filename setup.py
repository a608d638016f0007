"""Packages of the distribution; everything else about it stands in pyproject.toml.

`patches/` stands at the top of the checkout, where users of a Megatron-LM tree look for it. The
wheel carries it inside `megatron_patches`, so that `python -m megatron_patches patch-source` finds
it. `packages.find` of pyproject.toml does not see a folder that is mapped to another place.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["hybrid_engine*", "megatron_patches*"]),
        "megatron_patches.patches",
    ],
    package_dir={"megatron_patches.patches": "patches"},
)
