"""`nasfast.fuse`: any model runs its chains of convolution, BatchNorm and activation fused, where that is faster.

`api` is what users call. `find` looks for the chains in traces, by the rules of `match` and `members`; a
`chain` is names first, then modules, and decides by `rule` whether it runs on the operator, folded or on PyTorch
(`stages`). Each module that owns chains gets the forward of `forward`, which asks a `Watch` whether its modules changed
since the last call, and then runs a well-known block as `blocks` spells it out, and another module's own code with
`placeholders`. `excite` is the same for squeeze-and-excitation. `dynamo` is the backend of torch.compile, which does
all of this with a compiler's graphs.
"""

from nasfast.fusion.api import fuse, unfuse
from nasfast.fusion.report import FusedChain, FuseReport, NotFused

__all__ = ["FuseReport", "FusedChain", "NotFused", "fuse", "unfuse"]
