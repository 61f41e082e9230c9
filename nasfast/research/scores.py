"""Scores of the literature that need no training: the zero-cost scores of networks, and the table of NASI."""

from __future__ import annotations

from nasfast.extensions import CELL_SCORE
from nasfast.indicators.evidence import NetworkEvidence
from nasfast.indicators.registry import ScoreError, register
from nasfast.indicators.table import IndicatorTable
from nasfast.research.nasi.config import NasiConfig
from nasfast.research.nasi.search import search
from nasfast.research.nasi.spaces import LogitTable, make_mixture, make_table
from nasfast.research.zero_cost import ZERO_COST
from nasfast.spaces import Arch, format_arch
from nasfast.supernet import ModuleSupernet, Supernet
from nasfast.train.batches import as_epochs

BENCHMARK_SCORES = (
    CELL_SCORE,
    "jacov+synflow",
    "vkdnw+jacov+expressivity+trainability+macs",
    "isometry",
    *("jacov", "synflow", "naswot", "expressivity", "progressivity", "trainability", "vkdnw"),
)
"""The rows of docs/ranking_benchmarks.md 1: the default of cells, sums of the literature, and single scores."""


def _refuse_other_than_relu(net: Supernet) -> str | None:
    if isinstance(net, ModuleSupernet):
        return None  # its activations are seen when a network runs
    unsuitable = sorted({net.activation, *net.space.own_activations} - {"relu", "relu6"})
    return (
        f"it counts linear regions of ReLUs, and the activation is {' and '.join(unsuitable)}" if unsuitable else None
    )


def _register(name: str) -> None:
    refusal = _refuse_other_than_relu if name == "naswot" else lambda net: None

    @register(name, additive=False, trained=False, networks=True, refusal=refusal)
    def path_score(evidence: NetworkEvidence, arch: Arch) -> float:
        """A zero-cost score of docs/ranking_zero_cost.md, on the first batch of images."""
        # a standalone network is scored because all weights count, also those that are frozen in the supernet
        network = evidence.network(arch)
        try:
            return ZERO_COST[name](network, *evidence.batches[0])
        except ScoreError as error:
            raise ScoreError(f"path {format_arch(arch)} of {evidence.space.name} has no {name}: {error}") from error


for _name in ZERO_COST:
    _register(_name)


def _refuse_module(net: Supernet) -> str | None:
    return "it mixes the blocks of spaces of layers or of cells" if isinstance(net, ModuleSupernet) else None


@register("nasi", additive=True, trained=False, networks=True, refusal=_refuse_module)
def nasi(evidence: NetworkEvidence) -> IndicatorTable | LogitTable:
    """The logits of a search by NASI (docs/nasi.md): 100 sampled architectures, each on a batch of its own, mu 1.

    It has an untrained supernet of its own, whose weights are PyTorch's.

    Raises:
        ScoreError: no sampled architecture has a finite Q, or none has a slope.
    """
    cfg = NasiConfig(mu=1.0, seed=evidence.seed)
    try:
        result = search(make_mixture(evidence.space, seed=evidence.seed), as_epochs(evidence.images), cfg)
    except (ValueError, FloatingPointError) as error:
        raise ScoreError(f"NASI finds no table of {evidence.space.name}: {error}") from error
    return make_table(evidence.space, result)
