"""`nasfast.fuse`: any model runs its chains of convolution, BatchNorm and activation as one operator.

`find` looks for the chains, `run` runs them inside the model's own forward, `api` is what users call.
"""

from nasfast.fusion.api import FusedChain, FuseReport, NotFused, fuse, unfuse

__all__ = ["FuseReport", "FusedChain", "NotFused", "fuse", "unfuse"]
