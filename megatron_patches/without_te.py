"""Group "without_te": megatron-core without Transformer Engine, with and without CUDA."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from megatron_patches.patch import MISSING, Patch, around

_TRANSFORMER = "megatron.core.transformer"


@around
def _construct_without_te(original: Any, *args: Any, **kwargs: Any) -> None:
    # megatron-core sets the flag without looking for the package, and only this constructor
    # depends on a correct one.
    names = original.__globals__
    has_te = names["HAVE_TE"]
    names["HAVE_TE"] = has_te and find_spec("transformer_engine") is not None
    try:
        original(*args, **kwargs)
    finally:
        names["HAVE_TE"] = has_te


PATCHES = (
    Patch(
        "without_te.te_general_gemm",
        "without_te",
        f"{_TRANSFORMER}.moe.moe_utils:te_general_gemm",
        "is compared with None by the router but undefined without Transformer Engine (NameError)",
        # megatron compares it with None before it uses it
        build=lambda original: None if original is MISSING else original,
        may_be_missing=True,
        remove_when="moe_utils defines te_general_gemm without Transformer Engine",
    ),
    Patch(
        "without_te.latent_attention",
        "without_te",
        f"{_TRANSFORMER}.multi_latent_attention:MultiLatentAttention.__init__",
        "assumes that Transformer Engine is installed, and calls isinstance(..., None): TypeError",
        build=_construct_without_te,
        remove_when="multi_latent_attention checks whether Transformer Engine is installed",
    ),
)
