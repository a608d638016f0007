"""Integration of the switch with other frameworks' trainers. Frameworks are imported when used.

trl.py          TRL's trainers with a colocated vLLM, and its AsyncGRPOTrainer
ms_swift.py     ms-swift's trainers with a colocated vLLM
accelerated.py  shared by these two: engines around models that accelerate has prepared
verl.py         verl's checkpoint engine, checkpoint manager and actors; only verl imports it
"""

from importlib import metadata

from hybrid_engine.errors import DependencyError, needing_package

OWN_DEVICES = {
    "release_weights": False,
    "offload_train_param": False,
    "offload_train_grad": False,
    "offload_train_optimizer": False,
}
"""Keys for servers on other devices than the trainers': nothing needs to leave any device."""


def require_tested(distribution: str, tested: str, install: str) -> None:
    """Raise DependencyError if a framework is missing, or is another version than the tested one.

    Args:
        distribution: name of the framework's package.
        tested: prefix of the tested versions, e.g. "1.16" for 1.16.0.
        install: argument of pip that installs a missing framework.
    """
    with needing_package(f"{distribution} is not installed: pip install '{install}'"):
        installed = metadata.version(distribution)
    # With the dot, so that 1.160 is not taken for 1.16.
    if not f"{installed}.".startswith(f"{tested}."):
        raise DependencyError(
            f"{distribution} {installed} is installed, and {tested} was tested: "
            f"pip install '{distribution}=={tested}.*'",
            code="untested-version",
        )
