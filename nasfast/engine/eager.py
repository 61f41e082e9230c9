"""The interface of an engine, and the engine that calls the network module by module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.spaces import Arch


class StepResult(NamedTuple):
    """Result of one step, as tensors on the device: mean loss over the paths, and correct predictions of all paths."""

    loss: Tensor
    correct: Tensor


class Engine(Protocol):
    """Forward and backward of one optimiser step."""

    def forward_backward(self, x: Tensor, y: Tensor, paths: Sequence[Arch] | None) -> StepResult:
        """Set `grad` of the parameters on the paths to the sum over the paths, and `grad` of all others to None."""
        ...


def loss_and_correct(logits: Tensor, y: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy in float32 and the number of correct predictions."""
    loss = F.cross_entropy(logits.float(), y, label_smoothing=label_smoothing)
    return loss, (logits.detach().argmax(1) == y).sum()


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
        losses, correct = [], []
        for arguments in [(path,) for path in paths] if paths is not None else [()]:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
                logits = self.model(x, *arguments)
            loss, right = loss_and_correct(logits, y, self.label_smoothing)
            if loss.requires_grad:  # false if nothing on the path trains
                loss.backward()
            losses.append(loss.detach())
            correct.append(right)
        return StepResult(torch.stack(losses).mean(), torch.stack(correct).sum())
