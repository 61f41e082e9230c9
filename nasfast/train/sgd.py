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
        used = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        parameters = [p for _, part in used for p in part]
        if all(group["momentum"] for group in self.param_groups) and clipped_sgd_serves(parameters):
            return clipped_sgd([self._update(group, part) for group, part in used if part], clip)
        norm = nn.utils.clip_grad_norm_(parameters, clip)
        self.step()
        return norm

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> SgdUpdate:
        momenta = []
        for p in parameters:
            state = self.state[p]
            momentum = state.get("momentum_buffer")
            if momentum is None:
                # torch.optim.SGD begins with the first gradient, which is what zeros become
                state["momentum_buffer"] = momentum = torch.zeros_like(p)
            elif not (momentum.is_contiguous() and p.is_contiguous()) and momentum.stride() != p.stride():
                # a step of torch.optim.SGD began with a gradient of other strides, and the kernel pairs by address
                state["momentum_buffer"] = momentum = torch.empty_like(p).copy_(momentum)
            momenta.append(momentum)
        return SgdUpdate(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            momenta,
            lr=group["lr"],
            momentum=group["momentum"],
            decay=group["weight_decay"],
            nesterov=group["nesterov"],
        )
