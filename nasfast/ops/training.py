"""What a training step computes besides its network: cross_entropy with its gradient, and clipped_sgd.

A small network on a GPU would spend as long on PyTorch's launches for these as on a layer.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nasfast.ops import _triton, reference
from nasfast.ops.backends import resolve_backend
from nasfast.ops.plan import Refusal
from nasfast.ops.reference import SgdUpdate
from nasfast.ops.registry import operators

if _triton.why_missing() is None:
    from nasfast.ops.triton import training as launchers

# The most classes, of which a program has a row in registers.
_MOST_CLASSES = 1 << 14
# The most elements of an update: with more, PyTorch's launches take no longer than the memory.
_MOST_ELEMENTS = 1 << 22


def _runs_on_triton(op: str, x: Tensor, why_not: Callable[[], str], backend: str | None) -> bool:
    """Whether Triton runs this call; `why_not` says what it lacks, or returns nothing."""
    if x.device.type == "cpu" and not _triton.interpreted():
        return False

    def refusal(name: str) -> Refusal | None:
        reason = why_not() if name == "triton" else ""
        # NASFAST_BACKEND and use_backend must not raise for calls that this kernel lacks
        return Refusal(reason, "operator") if reason else None

    return resolve_backend(op, x, backend, refusal).name == "triton"


def cross_entropy(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy, its gradient, and the number of correct predictions. Records nothing for autograd.

    On a GPU all of them are one launch. A label that is no class then makes the loss NaN; on the CPU, PyTorch raises,
    or leaves out rows of label -100.

    Args:
        logits: (N, classes), any floating type; the arithmetic is float32.
        labels: (N,), int64, or (N, classes), the probability of each class, whose largest one is the correct one.
            Probabilities are for PyTorch alone.
        label_smoothing: as in torch.nn.functional.cross_entropy.
        backend: one of `nasfast.ops.BACKENDS`; None lets context, environment and device decide.

    Returns:
        (2,) float32, the mean loss and the number of correct predictions, and (N, classes), the gradient of the mean
        loss by the logits, in their type.
    """

    def why_not() -> str:
        classes = logits.shape[1]
        if labels.ndim == 2:
            return "serves labels, got probabilities of classes"
        return "" if classes <= _MOST_CLASSES else f"serves up to {_MOST_CLASSES} classes, got {classes}"

    logits = logits.detach()
    if _runs_on_triton("cross_entropy", logits, why_not, backend):
        return operators("triton").cross_entropy(logits, labels, label_smoothing)
    return reference.cross_entropy(logits, labels, label_smoothing=label_smoothing)


def clipped_sgd_serves(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], *, backend: str | None = None
) -> bool:
    """Whether `clipped_sgd` can update parameters by these gradients, and is the chosen backend's way to do it."""
    return bool(parameters) and _runs_on_triton(
        "clipped_sgd", parameters[0], lambda: _why_not_fused(parameters, gradients), backend
    )


def _why_not_fused(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> str:
    tensors = [*parameters, *gradients]
    other = {t.dtype for t in tensors} - {torch.float32}
    if other:
        return f"updates float32 parameters by float32 gradients, got {other.pop()}"
    # this runs at every step, where nearly always all are contiguous
    if not all(map(Tensor.is_contiguous, tensors)):
        for p, gradient in zip(parameters, gradients, strict=True):
            if p.is_contiguous() and gradient.is_contiguous():
                continue
            if not p.is_contiguous(memory_format=torch.channels_last) or p.stride() != gradient.stride():
                return "updates dense parameters whose gradients have the same strides"
    # every path has another number of elements, which in the reason would be another line of the log
    return "" if sum(map(Tensor.numel, parameters)) <= _MOST_ELEMENTS else f"updates up to {_MOST_ELEMENTS} elements"


def clipped_sgd(updates: Sequence[SgdUpdate], clip: float) -> Tensor:
    """Scale the gradients to a norm of at most `clip`, and make a step of SGD, as torch.optim.SGD does.

    The gradients themselves stay as they are. On a GPU this is a copy of addresses and two launches.

    Args:
        updates: of parameters for which `clipped_sgd_serves` is true; these and the momenta change.
        clip: may be infinite.

    Returns:
        The norm of all gradients before the clipping, a float32 scalar on their device.
    """
    with torch.no_grad():
        return launchers.clipped_sgd(updates, clip)
