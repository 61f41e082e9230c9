"""The trace of a forward, which looks into the modules that `find` searches."""

from __future__ import annotations

from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from nasfast.fusion import members
from nasfast.ops.modules import FusedConvBNAct, FusedInvertedResidual

OURS = (FusedConvBNAct, FusedInvertedResidual)


class Tracer(fx.Tracer):
    """Traces into every module that contains convolutions or BatchNorms, and into small wrappers of functions.

    Args:
        opaque: modules that it does not look into.
    """

    def __init__(self, opaque: set[nn.Module]) -> None:
        super().__init__()
        self._opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self._opaque or isinstance(m, (_ConvNd, _NormBase, *OURS)) or members.untouchable(m) is not None:
            return True
        if any(isinstance(inner, (_ConvNd, _NormBase)) for inner in m.modules()):
            return False
        if super().is_leaf_module(m, module_qualified_name):
            return True
        return not isinstance(m, nn.Sequential) and not members.wraps_functions(m)
