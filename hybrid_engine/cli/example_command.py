"""`example`: copy the RL example out of the package, so that it runs and can be changed."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from hybrid_engine.cli.options import refuse
from hybrid_engine.errors import Violation, clipped

_RUN = """\
cd {directory}
OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 --shutdown-timeout 600 \\
    -m examples.gpt_rl.train --config examples/gpt_rl/configs/tp2_to_dp2.yaml --out runs/gpt_rl"""


def folder() -> Path:
    """Return the folder of the examples: beside this module in a wheel, at the root of a checkout (setup.py)."""
    here = Path(__file__).resolve()
    return next(place for place in (here.parent / "examples", here.parents[2] / "examples") if place.is_dir())


def example(
    directory: Annotated[Path, typer.Argument(help="Gets a folder `examples`; made if it is missing.")],
) -> None:
    """Copy the examples (RL on sums, and their configurations) to a directory, and print how to run them."""
    place = directory / "examples"
    try:
        shutil.copytree(folder(), place, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError:
        refuse([Violation("DIRECTORY", f"{clipped(str(place))} exists", "Name another directory, or remove it")])
    except (OSError, shutil.Error) as error:
        problem = f"{clipped(str(place))} cannot be written: {getattr(error, 'strerror', None) or error}"
        refuse([Violation("DIRECTORY", problem, "Name a directory that can be written to")])
    typer.echo(f"Copied to {place}. To train a small GPT by RL on two ranks, here on the CPU or on two GPUs:\n")
    typer.echo(_RUN.format(directory=shlex.quote(str(directory))))
    typer.echo("\nIt needs the extra `gpu`, or `cpu`. examples/gpt_rl/README.md says what to expect.")
