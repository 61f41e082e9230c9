"""`nasfast.fuse`: any model runs its chains of convolution, BatchNorm and activation fused, where that is faster.

`find` looks for the chains, `forward` runs them in place of the modules' forwards, `api` is what users call.
"""

from nasfast.fusion.api import FusedChain, FuseReport, NotFused, fuse, unfuse

__all__ = ["FuseReport", "FusedChain", "NotFused", "fuse", "unfuse"]
