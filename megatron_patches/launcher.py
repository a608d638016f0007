"""``python -m megatron_patches SCRIPT arguments``: a Megatron-LM entry script, with --enable-resharding."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_patches import script
from megatron_patches.applying import apply
from megatron_patches.errors import MegatronPatchError

logger = logging.getLogger(__name__)


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run `path` as ``python path arguments`` would, with the patches of group "script" on megatron.training.

    Without CUDA also with those that let Megatron run on CPU. Exits with a message, before the script starts, if the
    file is missing, there is no megatron.training beside it, or the patches do not support its version. The last is a
    warning where the script does not reshard: then it runs as it is.
    """
    if not Path(path).is_file():
        sys.exit(f"{path}: no such file; usage: python -m megatron_patches SCRIPT [arguments]")
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        sys.exit(
            f"{path}: there is no megatron.training, which megatron-core's package has since 0.17 only; "
            "run an entry script of a Megatron-LM checkout, or add the checkout to PYTHONPATH"
        )
    importlib.import_module("megatron.training")  # if a dependency of it is missing, this says which
    try:
        apply(("script",), allow_version=script.allows_version())
        script.run_without_cuda()
    except MegatronPatchError as error:
        if script.is_enabled():
            script.refuse(error)
        logger.warning("%s; the script runs as it is", error)
    runpy.run_path(path, run_name="__main__")
