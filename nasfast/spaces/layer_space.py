"""What every space of layers offers: tables of scores, samplers, limits and searches need no more. No torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, Protocol

from nasfast.spaces.arch_space import ArchSpace
from nasfast.spaces.cost import Cost, Operator


class SearchableLayer(Protocol):
    """One layer: its values, their costs and their names."""

    @property
    def options(self) -> tuple[int, ...]:
        """The values a search chooses from."""

    @property
    def legal(self) -> tuple[int, ...]:
        """Every value an Arch or a path may have here."""

    @property
    def indicator_choice(self) -> int | None:
        """The value that means the identity; None where there is none."""

    def cost(self, choice: int) -> Cost:
        """What a legal value adds to the cost of a network."""

    def operator(self, choice: int) -> Operator:
        """What a legal value stands for."""

    def label(self, choice: int) -> str:
        """Short name of a legal value."""


class LayerSpace(ArchSpace):
    """A space whose architectures choose one candidate per layer, so that costs and scores add up over layers."""

    LAYERWISE: ClassVar[bool] = True

    @property
    @abstractmethod
    def layers(self) -> Sequence[SearchableLayer]:
        """The searchable layers in order; an Arch has one value for each."""

    @cached_property
    def options(self) -> tuple[tuple[int, ...], ...]:
        """See `ArchSpace`: the options of every layer."""
        return tuple(layer.options for layer in self.layers)

    @cached_property
    def cost_table(self) -> tuple[dict[int, Cost], ...]:
        """Per layer: option -> cost."""
        return tuple({choice: layer.cost(choice) for choice in layer.options} for layer in self.layers)

    @cached_property
    def operators(self) -> tuple[dict[int, Operator], ...]:
        """See `ArchSpace`: the legal values of every layer."""
        return tuple({choice: layer.operator(choice) for choice in layer.legal} for layer in self.layers)

    def place(self, index: int) -> str:
        """See `ArchSpace`."""
        return f"layer {index}"

    def label(self, index: int, value: int) -> str:
        """See `ArchSpace`."""
        return self.layers[index].label(value)

    @property
    def rows(self) -> tuple[str, ...]:
        """See `ArchSpace`: the indices of the layers."""
        return tuple(map(str, range(len(self))))

    @property
    def columns(self) -> tuple[str, ...]:
        """See `ArchSpace`: as many indices as the layer with the most options has."""
        return tuple(map(str, range(max(map(len, self.options)))))
