"""Other frameworks' trainers with this switch; each module imports its framework when it is used.

trl.py          TRL's trainers with a colocated vLLM, and its AsyncGRPOTrainer
ms_swift.py     ms-swift's trainers with a colocated vLLM
accelerated.py  what these two share
verl.py         verl's checkpoint engine, checkpoint manager and actors; verl imports it, and nobody else
"""

from importlib import metadata

from hybrid_engine.errors import DependencyError

NAME = "hybrid_engine"
"""Of the load format and the weight transfer backend that a server must have."""


def require_tested(distribution: str, tested: str, install: str) -> None:
    """Raise DependencyError where a framework is not installed, or another version than the one that was tested.

    Args:
        tested: its version, with any further numbers behind it.
        install: what to give pip where it is missing.
    """
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError as error:
        raise DependencyError(f"{distribution} is not installed: pip install '{install}'") from error
    if not f"{found}.".startswith(f"{tested}."):
        raise DependencyError(
            f"{distribution} {found} is installed, and {tested} was tested: pip install '{distribution}=={tested}.*'"
        )
