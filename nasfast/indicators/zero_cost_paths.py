"""The zero-cost scores of standalone networks: of a supernet's paths with its weights, or of untrained networks."""

from __future__ import annotations

from nasfast.indicators.evidence import Evidence, NetworkEvidence
from nasfast.indicators.registry import ScoreError, register
from nasfast.indicators.zero_cost import ZERO_COST
from nasfast.spaces import Arch, format_arch
from nasfast.supernet import Supernet

_LINEAR_REGIONS = {"relu", "relu6"}


def _no_relu(net: Supernet) -> str | None:
    others = sorted({net.activation, *net.space.own_activations} - _LINEAR_REGIONS)
    return f"it counts linear regions of ReLUs, and the activation is {' and '.join(others)}" if others else None


def _register(name: str) -> None:
    refusal = _no_relu if name == "naswot" else lambda net: None

    @register(name, additive=False, trained=False, networks=True, refusal=refusal)
    def path_score(evidence: Evidence | NetworkEvidence, arch: Arch) -> float:
        # a standalone network is scored because all weights count, also those that are frozen in the supernet
        network = evidence.network(arch)
        try:
            return ZERO_COST[name](network, *evidence.batches[0])
        except ScoreError as error:
            raise ScoreError(f"path {format_arch(arch)} of {evidence.space.name} has no {name}: {error}") from error

    path_score.__doc__ = f"The zero-cost score {name} of docs/ranking_zero_cost.md, on the first batch of images."


for _name in ZERO_COST:
    _register(_name)
