"""What a loss function may return, and what happens where it does not.

    def loss(micro_batch, log_probs): ...       # log_probs [b, S] of the labels, in the user's places
        return loss                             # a scalar with gradient: the mean over the micro batch
        return {"loss": loss, "kl": kl}         # ... beside scalars to report
        return loss, {"kl": kl}                 # ... or apart; what is reported is only what is in the dict

It runs on the last pipeline stage alone, in the middle of a schedule in which all stages wait for each other. So a
fault is kept until all ranks are there to hear of it, and then no weight changes.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.errors import LossError, shortened
from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.ranks.digests import are_same, extremes_of, text_digest
from hybrid_engine.trainer.batches.token_outputs import ENTROPY, TOP_LOG_PROBS, TOP_TOKEN_IDS

_ASKED_FOR = {
    ENTROPY: "Call update(..., entropy=True)",
    TOP_LOG_PROBS: "Call update(..., top_k=...)",
    TOP_TOKEN_IDS: "Call update(..., top_k=...)",
}
"""Key that a loss function may read -> how it gets there."""

_REMEDY = 'Return a scalar tensor, a dict with "loss", or (loss, dict of scalars)'


class CheckedLoss:
    """A user's loss function for the micro batches of one step.

    Attributes:
        fault: what went wrong first; from then on the function is not called, and every loss is 0.
    """

    def __init__(self, function: LossFunction) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._reported: set[str] | None = None
        self._given: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []
        self.fault: LossError | None = None

    def __call__(self, micro_batch: Batch, log_probs: torch.Tensor) -> tuple[torch.Tensor, Report]:
        """The loss, and what is reported, without gradient."""
        if self.fault is None:
            try:
                self._given.append(log_probs.detach().sum())
                return self._checked(self._function(micro_batch, log_probs))
            except LossError as fault:
                self.fault = fault
            except Exception as error:
                hint = _missing_key(error, micro_batch)
                self.fault = LossError(f"loss function {self._name}: {type(error).__name__}: {error}{hint}")
                self.fault.__cause__ = error
        return log_probs.sum() * 0, {}

    def finish(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Look back at all micro batches, with the other ranks of the group. Collective.

        Finds fault with losses that are not finite, of which one would make every weight NaN (with float16 as well:
        where its loss scale overflows, gradients do), and where ranks report other names, which could not be averaged.
        Ranks that are at fault already take part, and are not compared.
        """
        if self.fault is None:
            self.fault = self._not_finite()
        names_here = text_digest(*sorted(self._reported or ())) if self.fault is None else None
        extremes = extremes_of([names_here]).to(device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        if self.fault is None and not are_same(extremes):
            names = ", ".join(sorted(self._reported or ())) or "nothing"
            self.fault = self._refusal(
                f"reported {names} here and other names on other data parallel ranks",
                "Report the same names on all ranks",
            )

    def _not_finite(self) -> LossError | None:
        """What is said of the first loss that is not finite. Here, so that the device is waited for only once."""
        losses, given = (torch.stack(each).tolist() if each else [] for each in (self._losses, self._given))
        for number, (loss, sum_of_given) in enumerate(zip(losses, given, strict=True)):
            if math.isfinite(loss):
                continue
            problem = f"returned {loss} for micro batch {number}"
            if not math.isfinite(sum_of_given):
                remedy = "What it was given is not finite either: weights or activations are not"
                return self._refusal(problem, f"{remedy}. Load the last checkpoint, and lower the learning rate")
            return self._refusal(
                problem,
                "Look for a logarithm of 0, a division by 0 and an exponential of a large number, also where the "
                "mask is 0: 0 times infinity is NaN",
            )
        return None

    def _checked(self, result: object) -> tuple[torch.Tensor, Report]:
        loss, report = self._parts_of(result)
        if not isinstance(loss, torch.Tensor):
            raise self._refusal(f"returned {_described(loss)} as the loss")
        if loss.numel() != 1 or not loss.is_floating_point():
            raise self._refusal(f"returned {_described(loss)} as the loss; expected a scalar of a floating point type")
        if not loss.requires_grad:
            raise self._refusal(
                "returned a loss without gradient: it was detached, computed under no_grad, or not made of log_probs",
                "Compute it from log_probs with torch's functions",
            )
        values = {str(name): self._scalar(name, value, loss) for name, value in report.items()}
        if self._reported is not None and self._reported != values.keys():
            other = ", ".join(sorted(self._reported ^ values.keys()))
            raise self._refusal(
                f"reported {other} for one micro batch and not for another", "Report the same names each time"
            )
        self._reported = set(values)
        self._losses.append(loss.detach().reshape(()).clone())
        # Megatron divides it in place, which autograd refuses of a result that it keeps, as that of `sqrt`
        return loss.reshape(()).clone(), values

    def _parts_of(self, result: object) -> tuple[object, Mapping[str, Any]]:
        if isinstance(result, torch.Tensor):
            return result, {"loss": result} if result.numel() == 1 else {}
        if isinstance(result, Mapping):
            if "loss" not in result:
                raise self._refusal(f'returned a dict of {", ".join(map(str, result)) or "nothing"} without "loss"')
            return result["loss"], result
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            return result
        raise self._refusal(f"returned {_described(result)}")

    def _scalar(self, name: object, value: object, loss: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            # the function may go on to write to it, as to a sum over micro batches
            return value.detach().reshape(()).to(loss.device, copy=True)
        if isinstance(value, numbers.Real):
            return torch.tensor(float(value), device=loss.device)
        raise self._refusal(f"reported {_described(value)} as {name!r}", "Report scalars: numbers, or tensors of one")

    def _refusal(self, problem: str, remedy: str = _REMEDY) -> LossError:
        return LossError(f"loss function {self._name} {problem}. {remedy}")


def _missing_key(error: Exception, micro_batch: Batch) -> str:
    """What to say of a key that the micro batch lacks."""
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(key, str) or key in micro_batch:
        return ""
    remedy = _ASKED_FOR.get(key, "Add it to the batch")
    return f". The micro batch has {', '.join(map(str, micro_batch))}. {remedy}"


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(each).__name__ for each in value) or 'nothing'}"
    return shortened(value) if value is None or isinstance(value, (str, numbers.Number)) else type(value).__name__
