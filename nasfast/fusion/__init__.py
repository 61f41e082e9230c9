"""`nasfast.fuse`: any model runs its chains of convolution, BatchNorm and activation fused, where that is faster.

May import `ops` and all before it. Begin with `api`, then `region` (what is captured of a module) and `dynamo` (what
becomes of the graph).
"""

from nasfast.fusion.api import fuse, unfuse
from nasfast.fusion.report import FusedChain, FuseReport, NotFused

__all__ = ["FuseReport", "FusedChain", "NotFused", "fuse", "unfuse"]
