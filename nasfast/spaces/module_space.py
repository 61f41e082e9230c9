"""The space of a module with choices, as data: what `nasfast.Supernet.from_module` traced. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from nasfast.config import ConfigBase
from nasfast.spaces.arch_space import LayerSpace
from nasfast.spaces.cost import Cost, Operator


@dataclass(frozen=True)
class Branch(ConfigBase):
    """One candidate of a choice.

    Attributes:
        label: short name, unique within the choice.
        macs: MACs of all its calls together.
        params: number of its parameters.
        identity: whether it is an `nn.Identity`.
    """

    label: str
    macs: int
    params: int
    identity: bool = False


@dataclass(frozen=True)
class ModuleChoice(ConfigBase):
    """One choice of the module, which is a layer of its space.

    Attributes:
        name: its name, unique within the module.
        branches: its candidates; an Arch value indexes them.
        inputs: for each call of one forward, the shape of the first tensor that it gets, without the batch.
    """

    name: str
    branches: tuple[Branch, ...]
    inputs: tuple[tuple[int, ...], ...]

    @property
    def options(self) -> tuple[int, ...]:
        """The values a search chooses from: all candidates."""
        return tuple(range(len(self.branches)))

    @property
    def legal(self) -> tuple[int, ...]:
        """The same: a choice is never skipped, but an identity may be a candidate."""
        return self.options

    @property
    def indicator_choice(self) -> int | None:
        """The index of the identity, if it is a candidate."""
        return next((i for i, branch in enumerate(self.branches) if branch.identity), None)

    def operator(self, choice: int) -> Operator:
        branch = self.branches[choice]
        return Operator(Cost(branch.macs, branch.params), tuple(map(math.prod, self.inputs)), branch.macs > 0)

    def label(self, choice: int) -> str:
        return self.branches[choice].label


@dataclass(frozen=True, repr=False)
class ModuleSpace(LayerSpace):
    """The space of an `nn.Module` whose places `nasfast.Choice` have several candidates.

    It has the costs of the traced call, so a table of scores is searched under limits without the module. Its networks
    are made from the module (`nasfast.inherit`).

    Attributes:
        name: shown in files and errors.
        choices: the choices in the order of `module.named_modules()`.
        fixed_macs, fixed_params: cost of the module outside of the choices.
        in_channels, resolution: channels and side of the traced images; 0 where the first argument is no square image.
        num_classes: width of the traced logits; 0 where the module returns something else.
    """

    KEY: ClassVar[str] = "fixed_macs"
    NETWORK: ClassVar[str] = ""  # the data alone cannot build one
    OTHERS: ClassVar[str] = "give another module, or inputs of another size"

    name: str
    choices: tuple[ModuleChoice, ...]
    fixed_macs: int
    fixed_params: int
    in_channels: int = 0
    resolution: int = 0
    num_classes: int = 0

    def _check_values(self) -> None:
        if not self.choices or any(len(choice.branches) < 2 for choice in self.choices):
            raise ValueError(f"space {self.name!r} needs choices, each of at least 2 branches")
        _require_unique("two choices", "name", [choice.name for choice in self.choices])
        for choice in self.choices:
            _require_unique(f"two candidates of choice {choice.name!r}", "label", [b.label for b in choice.branches])

    @property
    def layers(self) -> tuple[ModuleChoice, ...]:
        """See `LayerSpace`: the choices."""
        return self.choices

    @property
    def fixed_cost(self) -> Cost:
        """See `ArchSpace`: the cost outside of the choices."""
        return Cost(self.fixed_macs, self.fixed_params)

    def place(self, index: int) -> str:
        """See `ArchSpace`."""
        return f"choice {self.choices[index].name!r}"

    @property
    def rows(self) -> tuple[str, ...]:
        """See `ArchSpace`: the names of the choices."""
        return tuple(choice.name for choice in self.choices)

    @property
    def caption(self) -> str:
        return f"{self.name}: {len(self)} choices, {self.cardinality:.3g} architectures"


def _require_unique(what: str, kind: str, values: Iterable[str]) -> None:
    """Raise ValueError if a value occurs twice."""
    counts = Counter(values)
    for value, count in counts.items():
        if count > 1:
            raise ValueError(f"{what} have the {kind} {value!r}: results name them by it, so give each its own")
