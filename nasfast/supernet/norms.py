"""Where the BatchNorms of a network begin.

By default gamma is 1 and beta 0. Two numbers change that, so that a deep frozen network begins nearer to a linear one
(docs/method.md 1):

- A shift b is the beta of every BatchNorm in front of an activation s that is linear far above 0. Such a unit and the
  next BatchNorm multiply the squared norm of gradients by E s'(z + b)^2 / Var s(z + b) for normal z: for a ReLU 1.47
  with b = 0, 1.25 with 0.5, 1.12 with 1 and 1.02 with 2. The last unit of a path keeps 0, because there only the
  mean of its channels grows with b, and no BatchNorm behind it removes that.
- A branch scale is the gamma of the last BatchNorm of a block that adds its input. Two candidates of such a layer, and
  its skip, then differ only in a part of their output.
"""

from __future__ import annotations

from torch import nn

from nasfast.ops.modules import ConvBNAct

# tanh is most linear at 0, so a shift makes its factor larger
_SHIFTED = {"relu", "relu6", "hswish", "silu"}


def begin_norms(module: nn.Module, shift: float, branch_scale: float) -> None:
    """Set beta of the BatchNorms in front of activations to `shift`, and gamma behind branches to `branch_scale`.

    All other gammas become 1, and all other betas 0.
    """
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.reset_parameters()
    for block in module.modules():
        if getattr(block, "has_residual", False):
            nn.init.constant_(block.last_bn.weight, branch_scale)  # type: ignore[union-attr,arg-type]
    for unit in set(_units(module)).difference(_last_units(module)):
        if unit.act_name in _SHIFTED:
            nn.init.constant_(unit.bn.bias, shift)


def _units(module: nn.Module) -> list[ConvBNAct]:
    return [unit for unit in module.modules() if isinstance(unit, ConvBNAct)]


def _last_units(module: nn.Module) -> list[ConvBNAct]:
    """The last unit of a network; in a supernet without a head, the last one of each candidate of its last layer."""
    last = _units(module)[-1:]
    for layer in module.modules():
        candidates = getattr(layer, "candidates", None)
        if isinstance(candidates, nn.ModuleList) and not set(last).isdisjoint(_units(candidates)):
            return [unit for candidate in candidates for unit in _units(candidate)[-1:]]
    return last
