"""What every search space offers, whether architectures choose blocks of layers or operations of cells. No torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from nasfast.config import ConfigBase
from nasfast.display import Tabular
from nasfast.spaces.arch import Arch, ArchError, format_arch, parse_arch
from nasfast.spaces.cost import Cost, Operator

if TYPE_CHECKING:
    import numpy as np


class ArchSpace(Tabular, ConfigBase, ABC):
    """A search space: the set of its architectures, their costs and their written forms.

    The kinds of spaces are frozen dataclasses whose fields are the keys of their YAML form (`save`, `load`).
    `nasfast.spaces.registry` knows the kinds and the built-in spaces.

    Attributes:
        KEY: a key of the written form that no other kind has, from which `read_space` knows the kind.
        LAYERWISE: whether a `nasfast.Supernet` trains the space and a table of scores is searched; otherwise a search
            of cells finds its architectures.
        NETWORK: `module:class` of its standalone networks, which takes a space, an architecture and `activation`.
        name: shown in files and errors.
        resolution: height and width of the input in pixels.
        num_classes: outputs of the classifier.
        in_channels: channels of the input image.
    """

    KEY: ClassVar[str]
    LAYERWISE: ClassVar[bool] = False
    NETWORK: ClassVar[str]
    # fields of every kind; dataclasses take no fields from a class that is none
    name: str
    resolution: int
    num_classes: int
    in_channels: int

    @property
    @abstractmethod
    def options(self) -> tuple[tuple[int, ...], ...]:
        """Per choice: the values that a search chooses from."""

    @property
    @abstractmethod
    def operators(self) -> tuple[dict[int, Operator], ...]:
        """Per choice: every legal value -> what it stands for."""

    @property
    @abstractmethod
    def fixed_cost(self) -> Cost:
        """Cost of the part that every architecture has."""

    @abstractmethod
    def place(self, index: int) -> str:
        """Name of a choice in errors, e.g. `"layer 3"`."""

    @abstractmethod
    def label(self, index: int, value: int) -> str:
        """Short name of a legal value of a choice, e.g. `"k3 e6"`."""

    @property
    @abstractmethod
    def rows(self) -> tuple[str, ...]:
        """Names of the choices, which are the rows of every table of this space."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of such a table: one per candidate."""

    @abstractmethod
    def encode(self, archs: Iterable[Arch]) -> list[list[int]]:
        """[architecture][feature]: what an architecture is made of, for a model that learns from trained ones."""

    def random(self, rng: np.random.Generator) -> Arch:
        """A random architecture: every choice takes one of its options, all alike likely."""
        return tuple(int(rng.choice(values)) for values in self.options)

    def __len__(self) -> int:
        """Number of choices: values of an Arch."""
        return len(self.options)

    @property
    def cardinality(self) -> int:
        """Number of architectures; different ones may compute the same."""
        return math.prod(len(values) for values in self.options)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with anything but the name; files of another space are refused by it."""
        data = _without_nulls({k: v for k, v in self.to_dict().items() if k != "name"})
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def check(self, arch: Iterable[int]) -> Arch:
        """Return `arch` as a tuple of ints if it belongs to this space.

        Raises:
            ArchError: text, wrong length, or a value that is illegal or no integer; the message names the choice and
                its values.
        """
        if isinstance(arch, str) or not isinstance(arch, Iterable):
            raise ArchError(
                f"architecture of space {self.name!r} must have {len(self)} integers, got {arch!r}; `space.parse` "
                "reads text"
            )
        arch = tuple(arch)
        if len(arch) != len(self):
            raise ArchError(
                f"architecture of space {self.name!r} must have {len(self)} values, got {len(arch)}: {arch}"
            )
        for i, (value, legal) in enumerate(zip(arch, self.operators, strict=True)):
            # 0.0 equals 0, and would pass for it; numpy's integers are integers
            if not isinstance(value, Integral) or value not in legal:
                allowed = ", ".join(f"{k} ({self.label(i, k)})" for k in legal)
                raise ArchError(f"{self.place(i)} of space {self.name!r}: choice {value!r} is not one of {allowed}")
        return tuple(map(int, arch))

    def parse(self, text: str) -> Arch:
        """Architecture of a text form that `nasfast.spaces.parse_arch` reads.

        Raises:
            ArchError: not such a form, or not an architecture of this space.
        """
        return self.check(parse_arch(text))

    @property
    def caption(self) -> str:
        return (
            f"{self.name}: {len(self)} choices, {self.cardinality:.3g} architectures, "
            f"{self.resolution} x {self.resolution} input, {self.num_classes} classes"
        )

    def records(self) -> list[dict[str, Any]]:
        """One row per choice: where it is, how many options it has, and their labels."""
        return [
            {"choice": self.place(i), "options": len(values), "labels": ", ".join(self.label(i, v) for v in values)}
            for i, values in enumerate(self.options)
        ]

    def format(self, arch: Arch) -> str:
        """One line that names an architecture in a table."""
        return format_arch(arch)

    def describe(self, arch: Iterable[int]) -> list[str]:
        """One short label per choice, e.g. `["k3 e6", "skip", ...]`."""
        return [self.label(i, value) for i, value in enumerate(self.check(arch))]

    def words(self, arch: Iterable[int]) -> str:
        """An architecture for a reader, e.g. `k3 e6 | skip | 2 x k5 e3`; equal neighbours are counted."""
        runs = [(label, len(list(group))) for label, group in itertools.groupby(self.describe(arch))]
        return " | ".join(label if count == 1 else f"{count} x {label}" for label, count in runs)

    def cost(self, arch: Iterable[int]) -> Cost:
        """MACs per image and parameters of the standalone network of `arch`, whose norms have scale and shift.

        Raises:
            ArchError: `arch` does not belong to this space.
        """
        parts = (values[k].cost for values, k in zip(self.operators, self.check(arch), strict=True))
        return sum(parts, self.fixed_cost)


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

    def operator(self, choice: int) -> Operator:
        """What a legal value stands for."""

    def label(self, choice: int) -> str:
        """Short name of a legal value."""


class LayerSpace(ArchSpace):
    """A space whose architectures choose one candidate per layer, so that costs and scores add up over layers.

    Attributes:
        OTHERS: how a user gets a space of other costs, for errors.
    """

    LAYERWISE: ClassVar[bool] = True
    OTHERS: ClassVar[str] = "choose another space or resolution (`nasfast spaces` lists them)"

    @property
    @abstractmethod
    def layers(self) -> Sequence[SearchableLayer]:
        """The searchable layers in order; an Arch has one value for each."""

    @cached_property
    def options(self) -> tuple[tuple[int, ...], ...]:
        return tuple(layer.options for layer in self.layers)

    def option_costs(self, *, allow_identity: bool = False) -> tuple[dict[int, Cost], ...]:
        """Per layer: option -> cost, options ascending; `allow_identity` adds the skip, which is free."""
        return tuple(
            {value: row[value].cost for value in sorted(layer.legal if allow_identity else layer.options)}
            for row, layer in zip(self.operators, self.layers, strict=True)
        )

    @cached_property
    def operators(self) -> tuple[dict[int, Operator], ...]:
        """See `ArchSpace`: the legal values of every layer."""
        return tuple({choice: layer.operator(choice) for choice in layer.legal} for layer in self.layers)

    def encode(self, archs: Iterable[Arch]) -> list[list[int]]:
        """See `ArchSpace`: for each layer and option whether it is chosen, and how often each label is chosen."""
        pairs = [(i, v) for i, layer in enumerate(self.layers) for v in layer.legal]
        labels = sorted({self.label(i, v) for i, v in pairs})
        rows = []
        for arch in archs:
            counts = Counter(self.label(i, v) for i, v in enumerate(arch))
            rows.append([*(int(arch[i] == v) for i, v in pairs), *(counts[label] for label in labels)])
        return rows

    def place(self, index: int) -> str:
        return f"layer {index}"

    def label(self, index: int, value: int) -> str:
        return self.layers[index].label(value)

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(map(str, range(len(self))))

    @property
    def columns(self) -> tuple[str, ...]:
        """See `ArchSpace`: as many indices as the layer with the most options has."""
        return tuple(map(str, range(max(map(len, self.options)))))


def _without_nulls(data: Any) -> Any:
    """Nested data without the keys whose value is None: a space keeps its fingerprint when its kind gets a field."""
    if isinstance(data, dict):
        return {key: _without_nulls(value) for key, value in data.items() if value is not None}
    return [_without_nulls(value) for value in data] if isinstance(data, list) else data


def arch_to_json(arch: Arch, space: ArchSpace) -> str:
    """JSON form of an architecture: `{"space": name, "fingerprint": ..., "arch": [...]}`."""
    return json.dumps(
        {"space": space.name, "fingerprint": space.fingerprint, "arch": list(space.check(arch))}, indent=1
    )


def arch_from_json(text: str, space: ArchSpace) -> Arch:
    """Inverse of `arch_to_json`.

    Raises:
        ArchError: not that JSON form, written for another space, or not an architecture of `space`.
    """
    try:
        data = json.loads(text)
        arch, fingerprint = parse_arch(data["arch"]), data["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArchError(
            f'not an architecture in JSON: expected {{"space", "fingerprint", "arch"}}, got {text[:80]!r}'
        ) from error
    if fingerprint != space.fingerprint:
        raise ArchError(
            f"architecture was written for space {data.get('space')!r} ({fingerprint}), "
            f"this is {space.name!r} ({space.fingerprint}): load the space it was saved with"
        )
    return space.check(arch)


def load_arch(path: str | Path, space: ArchSpace) -> Arch:
    """Read a file that has the JSON form of an architecture.

    Raises:
        ArchError: see `arch_from_json`; the file is named.
    """
    try:
        return arch_from_json(Path(path).read_text(encoding="utf-8"), space)
    except ValueError as error:  # bytes that are not text raise one too
        raise ArchError(f"{path}: {error}") from error
