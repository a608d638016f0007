"""Checks of the return value of a loss function.

    def loss(micro_batch, log_probs): ...  # log_probs [b, S] of the labels, in the user's columns
        return loss                        # scalar with gradient: the mean over the micro batch
        return {"loss": loss, "kl": kl}    # the same with scalars to report; "loss" is reported too
        return loss, {"kl": kl}            # the same, but only the dict is reported

A loss function runs on the last pipeline stage only, in the middle of a schedule in which all
stages wait for each other. Therefore a fault is kept until all ranks can raise it together, before
any weight changes.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.backends.training_side import dtype_name
from hybrid_engine.errors import LossError, shortened
from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.ranks.digests import are_same, extremes_of, text_digest
from hybrid_engine.trainer.batches.token_outputs import ENTROPY, TOP_LOG_PROBS, TOP_TOKEN_IDS

Loss = tuple[torch.Tensor, Report]
"""Loss of a micro batch, and scalars to report."""
_REMEDIES_FOR_MISSING_KEYS = {
    ENTROPY: "Call update(..., entropy=True)",
    TOP_LOG_PROBS: "Call update(..., top_k=...)",
    TOP_TOKEN_IDS: "Call update(..., top_k=...)",
}
"""Key that a loss function may read -> how to request it."""

_REMEDY = 'Return a scalar tensor, a dict with "loss", or (loss, dict of scalars)'


class CheckedLoss:
    """Wrapper of a user's loss function for the micro batches of one step.

    Attributes:
        fault: the first problem; once it is set, the function is not called any more and every
            loss is 0.
    """

    def __init__(self, function: LossFunction) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._reported_names: set[str] | None = None
        # by micro batch, on the device: reading each at once would synchronize
        self._log_prob_sums: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []
        self.fault: LossError | None = None

    def __call__(self, micro_batch: Batch, log_probs: torch.Tensor) -> Loss:
        """Return the loss, and the scalars to report, without gradient."""
        if self.fault is None:
            try:
                self._log_prob_sums.append(log_probs.detach().sum())
                return self._checked(self._function(micro_batch, log_probs))
            except LossError as fault:
                self.fault = fault
            # any error of the user's function, to be raised on all ranks
            except Exception as error:
                self.fault = LossError(
                    f"loss function {self._name}: {type(error).__name__}: {error}"
                    f"{_missing_key_hint(error, micro_batch)}",
                    code="loss-function-failed",
                )
                self.fault.__cause__ = error
        # the schedule continues with a backward pass, which needs a gradient
        return log_probs.sum() * 0, {}

    def finish(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Check all micro batches together, with the other ranks of the group. Collective.

        Sets `fault` for a loss that is not finite, because it would make every weight NaN. That
        includes float16: with too large a loss scale gradients overflow, but not losses. Also sets
        it if ranks report different names, which could not be averaged. Ranks that already have a
        fault take part in the collective, but are not compared.
        """
        if self.fault is None:
            self.fault = self._not_finite()
        names = sorted(self._reported_names or ())
        digest = text_digest(*names) if self.fault is None else None
        extremes = extremes_of([digest]).to(device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        if self.fault is None and not are_same(extremes):
            self.fault = LossError(
                f"loss function {self._name} reported {', '.join(names) or 'nothing'} here and "
                "other names on other data parallel ranks. Report the same names on all ranks",
                code="other-names-reported",
            )

    def _not_finite(self) -> LossError | None:
        """Return the error for the first loss that is not finite, or None."""
        if not self._losses:
            return None
        # one synchronization for all micro batches
        losses = torch.stack(self._losses).tolist()
        log_prob_sums = torch.stack(self._log_prob_sums).tolist()
        for number, (loss, log_prob_sum) in enumerate(zip(losses, log_prob_sums, strict=True)):
            if math.isfinite(loss):
                continue
            problem = f"loss function {self._name} returned {loss} for micro batch {number}"
            if not math.isfinite(log_prob_sum):
                return LossError(
                    f"{problem}. Its input is not finite either: weights or activations are not. "
                    "Load the last checkpoint, and lower the learning rate",
                    code="loss-input-not-finite",
                )
            return LossError(
                f"{problem}. Look for a logarithm of 0, a division by 0 and an exponential of a "
                "large number, also where the mask is 0: 0 times infinity is NaN",
                code="loss-not-finite",
            )
        return None

    def _checked(self, result: object) -> Loss:
        loss, report = self._parts_of(result)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise LossError(
                f"loss function {self._name} returned {_described(loss)} as the loss; expected a "
                f"scalar tensor of a floating point type. {_REMEDY}",
                code="loss-not-a-scalar",
            )
        if not loss.requires_grad:
            raise LossError(
                f"loss function {self._name} returned a loss without gradient: it was detached, "
                "computed under no_grad, or does not depend on log_probs. Compute it from "
                "log_probs with torch's functions",
                code="loss-without-gradient",
            )
        scalars = {str(name): self._scalar(name, value, loss) for name, value in report.items()}
        if self._reported_names is not None and self._reported_names != scalars.keys():
            changed_names = ", ".join(sorted(self._reported_names ^ scalars.keys()))
            raise LossError(
                f"loss function {self._name} reported {changed_names} for one micro batch and not "
                "for another. Report the same names each time",
                code="other-names-reported",
            )
        self._reported_names = set(scalars)
        self._losses.append(loss.detach().reshape(()).clone())
        # a copy, because Megatron divides the loss in place: autograd forbids that if it has kept
        # the tensor for the backward pass, as the result of `sqrt`
        return loss.reshape(()).clone(), scalars

    def _parts_of(self, result: object) -> tuple[object, Mapping[str, Any]]:
        """Return the loss and the values to report. Raises LossError for other types."""
        if isinstance(result, torch.Tensor):
            return result, {"loss": result} if result.numel() == 1 else {}
        if isinstance(result, Mapping):
            if "loss" in result:
                return result["loss"], result
            keys = ", ".join(map(str, result)) or "nothing"
            raise LossError(
                f'loss function {self._name} returned a dict of {keys} without "loss". {_REMEDY}',
                code="no-loss",
            )
        # only this form keeps the loss out of the report
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            return result
        raise LossError(
            f"loss function {self._name} returned {_described(result)}. {_REMEDY}",
            code="no-loss",
        )

    def _scalar(self, name: object, value: object, loss: torch.Tensor) -> torch.Tensor:
        """Return a reported value as a scalar tensor on the device of the loss."""
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            # a copy, because the function may write to it later, e.g. to a sum over micro batches
            return value.detach().reshape(()).to(loss.device, copy=True)
        if isinstance(value, numbers.Real):
            return torch.tensor(float(value), device=loss.device)
        raise LossError(
            f"loss function {self._name} reported {_described(value)} as {name!r}. Report "
            "scalars: numbers, or tensors with one element",
            code="report-not-a-scalar",
        )


def _missing_key_hint(error: Exception, micro_batch: Batch) -> str:
    """Return the remedy if the error is a key that the micro batch lacks, otherwise ""."""
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(key, str) or key in micro_batch:
        return ""
    remedy = _REMEDIES_FOR_MISSING_KEYS.get(key, "Add it to the batch")
    return f". The micro batch has {', '.join(map(str, micro_batch))}. {remedy}"


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and type {dtype_name(value)}"
    if isinstance(value, tuple):
        types = ", ".join(type(element).__name__ for element in value)
        return f"a tuple of {types or 'nothing'}"
    if value is None or isinstance(value, (str, numbers.Number)):
        return shortened(value)
    return type(value).__name__
