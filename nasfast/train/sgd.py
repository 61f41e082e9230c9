"""SGD that clips the gradients, in a few launches where the parameters are on a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from nasfast.ops.reference import SgdUpdate
from nasfast.ops.training import clipped_sgd, clipped_sgd_serves


class ClippedSGD(torch.optim.SGD):
    """torch.optim.SGD with one method more; the state is the same. `dampening` must be 0, as it is by default."""

    def clipped_step(self, clip_norm: float | None) -> Tensor:
        """Scale the gradients to a norm of at most `clip_norm`, if that is neither None nor 0, and make a step.

        Parameters whose `grad` is None are left as they are, with their momentum. What is in `grad` afterwards is not
        defined.

        Returns:
            The norm of all gradients before the scaling.
        """
        clip = clip_norm or math.inf
        used = [_with_gradients(group["params"]) for group in self.param_groups]
        parameters = [p for part, _ in used for p in part]
        gradients = [gradient for _, part in used for gradient in part]
        if all(group["momentum"] for group in self.param_groups) and clipped_sgd_serves(parameters, gradients):
            groups = [(group, *part) for group, part in zip(self.param_groups, used, strict=True) if part[0]]
            return clipped_sgd([self._update(*part) for part in groups], clip)
        norm = nn.utils.clip_grad_norm_(parameters, clip)
        self.step()
        return norm

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter], gradients: list[Tensor]) -> SgdUpdate:
        return SgdUpdate(
            parameters,
            gradients,
            self._momenta(parameters),
            lr=group["lr"],
            momentum=group["momentum"],
            decay=group["weight_decay"],
            nesterov=group["nesterov"],
        )

    def _momenta(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """The momenta of these parameters, with the same strides, because the kernel pairs elements by address."""
        momenta = [self.state[p].get("momentum_buffer") for p in parameters]
        if any(m is None for m in momenta) or not all(map(Tensor.is_contiguous, [*parameters, *momenta])):
            return [self._momentum(p) for p in parameters]
        return momenta  # nearly always, and this runs at every step

    def _momentum(self, p: nn.Parameter) -> Tensor:
        state = self.state[p]
        momentum = state.get("momentum_buffer")
        if momentum is None:
            # torch.optim.SGD begins with the first gradient, which is what zeros become
            state["momentum_buffer"] = momentum = torch.zeros_like(p)
        elif not (momentum.is_contiguous() and p.is_contiguous()) and momentum.stride() != p.stride():
            # a step of torch.optim.SGD began with a gradient of other strides
            state["momentum_buffer"] = momentum = torch.empty_like(p).copy_(momentum)
        return momentum


def _with_gradients(parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Those of the parameters whose `grad` is not None, and these gradients."""
    used = [(p, gradient) for p in parameters if (gradient := p.grad) is not None]
    return [p for p, _ in used], [gradient for _, gradient in used]
