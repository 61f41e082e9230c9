"""`nasfast.fuse`: any model runs its chains of convolution, BatchNorm and activation fused, where that is faster.

`api` is what users call. `find` traces the model for the modules that own chains, by the rules of `match`. The model,
or each of these modules where it chooses its path, is a `region`, which TorchDynamo captures; `dynamo` puts chains, and
`excite` squeeze-and-excitations, into its graph, and is the backend of torch.compile, too. A chain decides by `rule`
whether it runs on the operator or on PyTorch (`stages`). `report` says what was found and captured.
"""

from nasfast.fusion.api import fuse, unfuse
from nasfast.fusion.report import FusedChain, FuseReport, NotFused

__all__ = ["FuseReport", "FusedChain", "NotFused", "fuse", "unfuse"]
