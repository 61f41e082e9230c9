"""The zero-cost scores as scores of paths; a path is scored as a standalone network with the supernet's weights."""

from __future__ import annotations

from nasfast.indicators.evidence import Evidence
from nasfast.indicators.registry import ScoreError, register
from nasfast.indicators.zero_cost import ZERO_COST
from nasfast.spaces import Arch, format_arch
from nasfast.supernet import Supernet, inherit

_LINEAR_REGIONS = {"relu", "relu6"}


def _no_relu(net: Supernet) -> str | None:
    others = sorted({net.activation, *net.space.own_activations} - _LINEAR_REGIONS)
    return f"it counts linear regions of ReLUs, and the activation is {' and '.join(others)}" if others else None


def _register(name: str) -> None:
    @register(name, additive=False, trained=False, refusal=_no_relu if name == "naswot" else lambda net: None)
    def path_score(evidence: Evidence, arch: Arch) -> float:
        # a standalone network is scored because all weights count, also those that are frozen in the supernet
        network = inherit(evidence.net, arch)
        try:
            return ZERO_COST[name](network, *evidence.batches[0])
        except ScoreError as error:
            raise ScoreError(f"path {format_arch(arch)} of {evidence.net.space.name} has no {name}: {error}") from error

    path_score.__doc__ = f"The zero-cost score {name} of docs/ranking_zero_cost.md, on the first batch of images."


for _name in ZERO_COST:
    _register(_name)
