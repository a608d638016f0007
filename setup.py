"""What pyproject.toml has no word for: folders of the checkout that a wheel carries inside its packages."""

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py

# From the checkout's root -> in the wheel. `folder` of megatron_patches/patch_sets.py and of
# hybrid_engine/cli/example_command.py looks in both places.
CARRIED = {
    "patches": "megatron_patches/patches",
    "examples": "hybrid_engine/cli/examples",
}


class BuildWithFolders(build_py):
    """Copies `CARRIED` beside the modules; an editable installation has the checkout itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in CARRIED.items():
                place = Path(self.build_lib) / target
                copytree(source, place, ignore=ignore_patterns("__pycache__"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFolders})
