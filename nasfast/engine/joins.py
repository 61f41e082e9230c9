"""Why a captured layer is not joined to its neighbours, so that launches of their own do what its chains could do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from nasfast.engine.segments import Segment
from nasfast.ops.cuda_reasons import Unjoined
from nasfast.ops.modules import FusedConvBNAct, FusedInvertedResidual, has_forward_hooks


def obstacles(modules: Sequence[nn.Module], parts: Sequence[nn.Module]) -> tuple[Unjoined | None, Unjoined | None]:
    """Why a layer's choice can make no input, and why it can leave no result: it begins, or ends, with no chain alone.

    Args:
        modules: the modules of the layer.
        parts: the modules that the choice runs one after another.
    """
    if any(map(has_forward_hooks, modules)):
        return Unjoined.HOOK, Unjoined.HOOK
    chains = [_is_chain(part) for part in parts] or [False]
    return None if chains[0] else Unjoined.NO_CHAIN, None if chains[-1] else Unjoined.NO_CHAIN


def unjoined(
    segment: Segment, parts: Sequence[nn.Module], in_front: Unjoined | None, behind: Unjoined | None
) -> Iterator[Unjoined]:
    """What a captured segment and its neighbours do in launches of their own.

    Args:
        segment: a captured segment.
        parts: the modules that it runs one after another.
        in_front, behind: its `obstacles`.
    """
    if segment.unmade is not None:
        differentiates = segment.source_grad is not None and segment.passes_on
        if not segment.makes:
            yield in_front or Unjoined.READS
        elif differentiates and not segment.begins:
            yield Unjoined.SUMS
        elif _begins_depthwise(parts[0]):
            yield Unjoined.DEPTHWISE
    if segment.target is not None and segment.left is None:
        yield behind or Unjoined.WRITES


def _is_chain(module: nn.Module) -> bool:
    """Whether a call of this module is one chain."""
    return type(module) is FusedConvBNAct or (type(module) is FusedInvertedResidual and module.se is None)


def _begins_depthwise(chain: nn.Module) -> bool:
    """Whether the first convolution of this chain, see `_is_chain`, is depthwise."""
    first = next(module for module in chain.modules() if isinstance(module, nn.Conv2d))
    return first.groups > 1
