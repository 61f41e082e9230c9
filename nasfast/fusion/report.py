"""What `fuse` says about a model: before the first forward what traces tell, afterwards what was captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch

from nasfast.fusion.match import FusedChain, join
from nasfast.fusion.region import Graph, Region

# the number of names that are listed for one reason; further ones are only counted
_MOST_NAMES = 4
_MODEL = "(the model)"
FUSED = "fused"


@dataclass(frozen=True)
class NotFused:
    """A convolution or BatchNorm that is in no chain: its path, its type, and why."""

    name: str
    kind: str
    reason: str


class FuseReport:
    """What `fuse` did; `str()` of it is a table. It follows the model: what was captured replaces what was expected.

    Args:
        expected: every chain that traces have, by the module whose forward is to be captured.
        reasons: why a convolution or BatchNorm is in none of them.
        kinds: the type of every convolution and BatchNorm of the model.
        convolutions: number of convolutions of the model.
        backend: the backend that serves the model's type on its device, or why none does.
        notes: reasons why a chain may be slow.
        regions: what was captured of the modules, by their paths.
    """

    def __init__(
        self,
        expected: Mapping[str, Sequence[FusedChain]],
        reasons: Mapping[str, str],
        kinds: Mapping[str, str],
        convolutions: int,
        backend: str,
        notes: Sequence[str],
        regions: Mapping[str, Region],
    ) -> None:
        self._expected, self._reasons, self._kinds, self._regions = expected, reasons, kinds, regions
        self.convolutions, self.backend, self.notes = convolutions, backend, tuple(notes)

    @property
    def chains(self) -> tuple[FusedChain, ...]:
        """Every chain, in the order of the model's convolutions; `runs` says how it ran in the last forward, if any."""
        chains: list[FusedChain] = []
        covered: set[str] = set()
        # the outermost module first: what it runs captures the modules inside
        for owner in sorted(self._regions, key=lambda path: path.count(".") + bool(path)):
            region = self._regions[owner]
            if region.last is not None:
                own: Sequence[FusedChain] = [chain.with_owner(owner) for chain in _as_they_ran(*region.last)]
            else:
                own = () if region.own else self._expected.get(owner, ())
            for chain in own:
                if covered.isdisjoint(chain.convolutions):
                    covered |= {*chain.convolutions}
                    chains.append(chain)
        order = {name: i for i, name in enumerate(self._kinds)}
        return tuple(sorted(chains, key=lambda chain: order.get(chain.convolutions[0], -1)))

    @property
    def excitations(self) -> tuple[str, ...]:
        """Paths of the squeeze-and-excitations that were captured, each of which can run as one operator."""
        lasts = [(owner, region.last) for owner, region in self._regions.items() if region.last is not None]
        return tuple(
            dict.fromkeys(join(owner, path) for owner, (graph, _) in lasts for path in graph.facts.excitations)
        )

    @property
    def left(self) -> tuple[NotFused, ...]:
        """Every convolution and BatchNorm outside of the chains and squeeze-and-excitations."""
        reasons = {**self._reasons}
        for owner, region in self._regions.items():
            if region.last is not None:
                reasons |= {join(owner, path): reason for path, reason in region.last[0].facts.reasons.items()}
            elif region.own:
                reason = f"the forward of {owner or 'the model'} runs on PyTorch: {_problem(region)}"
                reasons |= dict.fromkeys(_members(self._expected.get(owner, ())), reason)
        covered = {*_members(self.chains)}
        inside = tuple(f"{path}." for path in self.excitations)
        return tuple(
            NotFused(name, kind, reasons.get(name, "not behind a fused convolution"))
            for name, kind in self._kinds.items()
            if name not in covered and not name.startswith(inside)
        )

    @property
    def fused(self) -> int:
        """Number of convolutions in chains."""
        return sum(len(chain.convolutions) for chain in self.chains)

    def __str__(self) -> str:
        chains, excitations, regions = self.chains, self.excitations, self._regions
        lines = [
            f"{self.fused} of {count(self.convolutions, 'convolution')} are in "
            f"{count(len(chains), 'chain')} that can run fused; backend: {self.backend}"
        ]
        ran = [region.last for region in regions.values() if region.last is not None]
        if ran:
            fused = sum(chain.runs == FUSED for chain in chains)
            sizes = (
                ", ".join(dict.fromkeys(str(tuple(shapes[0])) for _, shapes in ran if shapes)) if len(ran) == 1 else ""
            )
            lines.insert(
                0, f"last forward{sizes and f' on {sizes}'}: {fused} of {count(len(chains), 'chain')} ran fused"
            )
        elif chains and not any(region.own for region in regions.values()):
            lines.append("no forward has run yet; what is expected:")
        names = [_name(chain) for chain in chains]
        width = max(map(len, names), default=0)
        lines += [f"  {name:<{width}}  {chain}: {chain.runs}" for name, chain in zip(names, chains, strict=True)]
        if excitations:
            lines.append(f"one operator each where that is faster: {count(len(excitations), 'squeeze-and-excitation')}")
        stopped = _grouped((_problem(r), owner or _MODEL) for owner, r in regions.items() if r.own and r.graphs)
        lines += [f"captured no more, {problem}: {listed(names)}" for problem, names in stopped.items()]
        reasons = _grouped((f"{entry.kind}: {entry.reason}", entry.name) for entry in self.left)
        lines += ["not fused:"] if reasons else []
        lines += [f"  {reason}: {listed(names)}" for reason, names in reasons.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _as_they_ran(graph: Graph, shapes: tuple[torch.Size, ...]) -> list[FusedChain]:
    """The chains of a graph as they ran for inputs of these shapes."""
    savings = dict(zip([saved.chain for saved in graph.facts.savings], graph.savings(shapes), strict=True))
    pays = graph.pays
    ran = []
    for chain in graph.facts.chains:
        runs = chain.runs
        if savings.get(chain, -1.0) >= 0.0:
            runs = FUSED if pays else "not at this size, where too little pays for the guards of a graph"
        elif chain in savings:
            runs = f"not at this size: {runs}"
        ran.append(replace(chain, runs=runs))
    return ran


def _problem(region: Region) -> str:
    """The last reason why calls run the module's own forward."""
    return [*region.own.values()][-1]


def _name(chain: FusedChain) -> str:
    """The path that all of its modules have in common, or that of its first convolution."""
    paths = [path.split(".") for path in (*chain.convolutions, *chain.batch_norms)]
    # zip to the shortest
    common = takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in common) or chain.convolutions[0]


def _members(chains: Iterable[FusedChain]) -> list[str]:
    """Paths of the convolutions and BatchNorms of these chains."""
    return [name for chain in chains for name in (*chain.convolutions, *chain.batch_norms)]


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The second texts of these pairs by the first."""
    groups: dict[str, list[str]] = {}
    for key, name in pairs:
        groups.setdefault(key, []).append(name)
    return groups


def listed(names: Sequence[str]) -> str:
    """The first of these names, and how many there are more."""
    first = ", ".join(names[:_MOST_NAMES])
    return first if len(names) <= _MOST_NAMES else f"{first} and {len(names) - _MOST_NAMES} more"


def count(number: int, what: str) -> str:
    """A number of things in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"
