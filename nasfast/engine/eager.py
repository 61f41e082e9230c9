"""The interface of an engine, and the engine that calls the network module by module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nasfast.spaces import Arch


class StepResult(NamedTuple):
    """Result of one step, as tensors on the device: mean loss over the paths, and correct predictions of all paths.

    Both are float32, in which counts are exact up to 2^24.
    """

    loss: Tensor
    correct: Tensor


def average_paths(outcomes: Sequence[StepResult]) -> StepResult:
    """The result of a step from those of each of its paths: the mean loss, and all correct predictions."""
    if len(outcomes) == 1:
        return outcomes[0]
    losses, correct = zip(*outcomes, strict=True)
    return StepResult(torch.stack(losses).mean(), torch.stack(correct).sum())


def loss_and_gradient(logits: Tensor, labels: Tensor, label_smoothing: float) -> tuple[StepResult, Tensor]:
    """The cross-entropy in float32, the correct predictions, and the gradient that the network's backward begins with.

    Args:
        logits: (N, classes), any floating type.
        labels: (N,) int64, or (N, classes) probabilities.
        label_smoothing: as in torch.nn.functional.cross_entropy.

    Returns:
        The result of this path, and (N, classes), the gradient of the mean loss by the logits, in their type.
    """
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(leaf.float(), labels, label_smoothing=label_smoothing)
        (gradient,) = torch.autograd.grad(loss, leaf)
    correct = (leaf.detach().argmax(1) == (labels if labels.ndim == 1 else labels.argmax(1))).sum(dtype=loss.dtype)
    return StepResult(loss.detach(), correct), gradient


class Engine(Protocol):
    """Forward and backward of one optimiser step."""

    def forward_backward(self, x: Tensor, y: Tensor, paths: Sequence[Arch] | None) -> StepResult:
        """Set `grad` of the parameters on the paths to the sum over the paths, and `grad` of all others to None."""
        ...


@dataclass
class EagerEngine:
    """Calls the network directly, on any device.

    Attributes:
        model: called as model(x, path), or as model(x) where there are no paths.
        label_smoothing: label smoothing of the cross-entropy.
        bf16: whether forward runs under bfloat16 autocast.
    """

    model: nn.Module
    label_smoothing: float = 0.0
    bf16: bool = False

    def forward_backward(self, x: Tensor, y: Tensor, paths: Sequence[Arch] | None) -> StepResult:
        for parameter in self.model.parameters():
            parameter.grad = None  # the optimiser skips parameters without a gradient, also their momentum and decay
        outcomes = []
        for arguments in [(path,) for path in paths] if paths is not None else [()]:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
                logits = self.model(x, *arguments)
            outcome, gradient = loss_and_gradient(logits, y, self.label_smoothing)
            if logits.requires_grad:  # false if nothing on the path trains
                logits.backward(gradient)
            outcomes.append(outcome)
        return average_paths(outcomes)
