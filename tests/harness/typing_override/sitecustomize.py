"""Gives Python 3.11 the `typing.override` of 3.12, which megatron-core imports since 0.17.

For the environments of `nox -s core-tests` alone, which put this folder on PYTHONPATH: their wheels
ask for Python 3.12, but run on 3.11 with this one name added. Python imports a module called
sitecustomize at start, in subprocesses too.
"""

import typing
from collections.abc import Callable

if not hasattr(typing, "override"):

    def override(method: Callable[..., object]) -> Callable[..., object]:
        """Return the method; the decorator is for type checkers."""
        return method

    typing.override = override
