"""What `fuse` says about a model: before the first forward what traces tell, afterwards what was captured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nasfast.fusion.match import FusedChain, join
from nasfast.fusion.region import Region

# the number of names that are listed for one reason; further ones are only counted
_NAMES_SHOWN = 4


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
        """Every chain, in the order of the model's convolutions."""
        found: dict[tuple[str, ...], FusedChain] = {}
        # the outermost module first: what it runs captures the modules inside
        for owner in sorted(self._regions, key=lambda path: path.count(".") + bool(path)):
            facts = self._regions[owner].facts
            if facts is None:
                chains = [chain for chain in self._expected.get(owner, ()) if not self._regions[owner].problem]
            else:
                chains = [chain.below(owner) for chain in facts.chains]
            for chain in chains:
                found.setdefault(chain.convolutions, chain)
        taken: set[str] = set()
        kept = []
        for chain in found.values():
            if taken.isdisjoint(chain.convolutions):
                kept.append(chain)
                taken |= {*chain.convolutions}
        places = {name: i for i, name in enumerate(self._kinds)}
        return tuple(sorted(kept, key=lambda chain: places.get(chain.convolutions[0], -1)))

    @property
    def excitations(self) -> tuple[str, ...]:
        """Paths of the squeeze-and-excitations that were captured, each of which can run as one operator."""
        facts = {owner: region.facts for owner, region in self._regions.items()}
        found = [join(owner, path) for owner, its in facts.items() if its is not None for path in its.excitations]
        return tuple(dict.fromkeys(found))

    @property
    def left(self) -> tuple[NotFused, ...]:
        """Every convolution and BatchNorm outside of the chains and squeeze-and-excitations."""
        taken = {name for chain in self.chains for name in (*chain.convolutions, *chain.batch_norms)}
        reasons: dict[str, str] = {}
        for owner, region in self._regions.items():
            if region.facts is not None:
                reasons |= {join(owner, path): reason for path, reason in region.facts.left.items()}
            elif region.problem:
                own = [
                    name
                    for chain in self._expected.get(owner, ())
                    for name in (*chain.convolutions, *chain.batch_norms)
                ]
                reasons |= dict.fromkeys(
                    own, f"the forward of {owner or 'the model'} runs on PyTorch: {region.problem}"
                )
        inside = tuple(f"{path}." for path in self.excitations)
        return tuple(
            NotFused(name, kind, reasons.get(name) or self._reasons.get(name, "not behind a fused convolution"))
            for name, kind in self._kinds.items()
            if name not in taken and not name.startswith(inside)
        )

    @property
    def fused(self) -> int:
        """Number of convolutions in chains."""
        return sum(len(chain.convolutions) for chain in self.chains)

    def __str__(self) -> str:
        chains, excitations = self.chains, self.excitations
        lines = [
            f"{self.fused} of {count(self.convolutions, 'convolution')} are in "
            f"{count(len(chains), 'chain')} that can run fused; backend: {self.backend}"
        ]
        owners = [chain.owner or "(the model)" for chain in chains]
        width = max(map(len, owners), default=0)
        lines += [f"  {owner:<{width}}  {chain}" for owner, chain in zip(owners, chains, strict=True)]
        captured = sum(region.facts is not None for region in self._regions.values())
        if chains:
            known = f"{captured} of {count(len(self._regions), 'module')}" if captured else "nothing"
            lines.append(f"captured so far: {known}; how chains run:")
        ways: dict[str, list[str]] = defaultdict(list)
        for owner, chain in zip(owners, chains, strict=True):
            ways[chain.runs].append(owner)
        lines += [f"  {count(len(its), 'chain')} {how}: {listed(its)}" for how, its in ways.items()]
        if excitations:
            lines.append(f"one operator each where that is faster: {count(len(excitations), 'squeeze-and-excitation')}")
        stopped: dict[str, list[str]] = defaultdict(list)
        for owner, region in self._regions.items():
            if region.problem and region.captures:
                stopped[region.problem].append(owner or "(the model)")
        lines += [f"captured no more, {problem}: {listed(its)}" for problem, its in stopped.items()]
        reasons: dict[str, list[str]] = defaultdict(list)
        for entry in self.left:
            reasons[f"{entry.kind}: {entry.reason}"].append(entry.name)
        if reasons:
            lines.append("not fused:")
            lines += [f"  {reason}: {listed(names)}" for reason, names in reasons.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def listed(names: Sequence[str]) -> str:
    """The first of these names, and how many there are more."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def count(number: int, what: str) -> str:
    """A number of things in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"
