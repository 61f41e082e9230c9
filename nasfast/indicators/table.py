"""`IndicatorTable`: scores by layer and choice, and their JSON file. It needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from nasfast.display import Tabular
from nasfast.runtime.files import seal, unseal, write_atomic
from nasfast.spaces import SKIP, Arch, CostTable, LayerSpace, space_kind

TABLE_FILE, REFINED_FILE = "indicators.json", "refined.json"
"""In a run directory: the table of the score stage, and the one that a search with `search.refine` searched."""

_FORMAT = "nasfast.indicator_table/2"

Rule = Literal["product", "sum"]


class TableError(ValueError):
    """An indicator table cannot be used: it has another form, belongs to another space, or is incomplete."""


@dataclass(frozen=True, repr=False)
class IndicatorTable(Tabular):
    """An additive score: what every candidate of every layer adds to the score of an architecture.

    Attributes:
        space: the space of the table.
        block: for each layer, Arch value -> score of the candidate; for gammas, S_v = mean |gamma|.
        layer: for each layer, the score of the identity (`Layer.indicator_choice`); for gammas, S_u = mean |gamma| of
            the layer indicator. None on reduction and pinned layers, and where the identity has no score.
        meta: origin of the scores (method, step, checkpoint); no computation uses it.
        rule: how both give the score of a candidate on a layer that has a layer score: `product` takes S_v * S_u
            (Algorithm 2), `sum` takes only the block score.
    """

    space: LayerSpace
    block: tuple[dict[int, float], ...]
    layer: tuple[float | None, ...]
    meta: dict[str, Any] = field(default_factory=dict)
    rule: Rule = "product"

    @classmethod
    def from_rows(cls, space: LayerSpace, rows: Sequence[Mapping[int, float]], meta: dict[str, Any]) -> IndicatorTable:
        """The table with the rule `sum` that has the given scores by layer and Arch value.

        Args:
            space: the space of the table.
            rows: for each layer, a score of every candidate. The identity of a normal layer may be left out, and a
                pinned layer needs no scores.
            meta: origin of the scores.
        """
        identities = [layer.indicator_choice for layer in space.layers]
        block = tuple(
            {choice: score for choice, score in row.items() if choice not in (identity, SKIP)}
            for row, identity in zip(rows, identities, strict=True)
        )
        layer = tuple(None if v is None else row.get(v) for row, v in zip(rows, identities, strict=True))
        return cls(space, block, layer, meta, "sum")

    @classmethod
    def from_costs(cls, space: LayerSpace, costs: CostTable, meta: dict[str, Any]) -> IndicatorTable:
        """The user's values as scores, negated where lower is better, because a search maximises scores."""
        sign = 1.0 if costs.better == "higher" else -1.0
        return cls.from_rows(space, [{choice: sign * value for choice, value in row} for row in costs.rows], meta)

    @property
    def caption(self) -> str:
        score = f"{self.meta['score']} " if "score" in self.meta else ""
        return f"{score}scores of {self.space.name}: {sum(map(len, self.block))} candidates of {len(self.space)} layers"

    def records(self) -> list[dict[str, Any]]:
        """One row per candidate: its layer, its value in an Arch, its label, its score, and that of the identity."""
        return [
            {
                "layer": i,
                "choice": choice,
                "label": self.space.label(i, choice),
                "score": score,
                "identity": self.layer[i],
            }
            for i, row in enumerate(self.block)
            for choice, score in row.items()
        ]

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise TableError(f"rule must be one of {', '.join(get_args(Rule))}, got {self.rule!r}")
        if len(self.block) != len(self.space) or len(self.layer) != len(self.space):
            raise TableError(
                f"table of space {self.space.name!r} must have {len(self.space)} layers, got {len(self.block)}"
            )
        parts = zip(self.block, self.layer, self.space.layers, strict=True)
        for i, (scores, layer_score, layer) in enumerate(parts):
            expected = set(layer.options) - {layer.indicator_choice, SKIP}
            if set(scores) != expected:
                raise TableError(f"layer {i}: scores for choices {sorted(scores)}, the space has {sorted(expected)}")
            identity = SKIP if layer.indicator_choice is None else layer.indicator_choice
            for choice, score in {**scores, **({} if layer_score is None else {identity: layer_score})}.items():
                if not math.isfinite(score):
                    raise TableError(
                        f"layer {i}, choice {choice} ({layer.label(choice)}): score is {score}: the supernet diverged "
                        "before scoring"
                    )

    @cached_property
    def scores(self) -> tuple[dict[int, float], ...]:
        """For each layer the score of every option.

        With the rule `product` it is S[l, a] of Algorithm 2 (docs/method.md 2): S_v on reduction layers, S_v * S_u on
        normal layers. An identity candidate is the path of the layer indicator and has the layer score, or 0 if there
        is none. A pinned layer scores 0.
        """
        table = []
        for scores, layer_score, layer in zip(self.block, self.layer, self.space.layers, strict=True):
            factor = 1.0 if layer_score is None or self.rule == "sum" else layer_score
            combined = {choice: scores[choice] * factor for choice in layer.options if choice in scores}
            for choice in set(layer.options) - set(scores):
                combined[choice] = 0.0 if layer_score is None else layer_score
            table.append(dict(sorted(combined.items())))
        return tuple(table)

    def score(self, arch: Iterable[int]) -> float:
        """Sum over layers of the combined scores; a skipped layer scores its layer indicator, or 0 without one.

        Raises:
            ArchError: `arch` does not belong to the space.
        """
        rows = zip(self.scores, self.layer, self.space.check(arch), strict=True)
        return sum(row[choice] if choice in row else layer_score or 0.0 for row, layer_score, choice in rows)

    def argmax(self) -> Arch:
        """The best architecture without limits: the highest score of every layer; ties go to the lower index."""
        return tuple(max(row, key=lambda choice: (row[choice], -choice)) for row in self.scores)

    def to_json(self) -> str:
        """The table as JSON with a digest."""
        rows = [
            {"block": {str(k): v for k, v in scores.items()}, "layer": layer}
            for scores, layer in zip(self.block, self.layer, strict=True)
        ]
        head = {"format": _FORMAT, "rule": self.rule}
        return seal({**head, "space": self.space.to_dict(), "layers": rows, "meta": self.meta})

    @classmethod
    def from_json(cls, text: str) -> IndicatorTable:
        """Inverse of `to_json`; TableError for a text that is no table, or damaged."""
        try:
            data = unseal(text)
            if data["format"] != _FORMAT:
                raise TableError(
                    f"indicator table has format {data['format']!r}, this version reads {_FORMAT!r}: score again"
                )
            block = tuple({int(k): float(v) for k, v in row["block"].items()} for row in data["layers"])
            layer = tuple(None if row["layer"] is None else float(row["layer"]) for row in data["layers"])
            space = space_kind(data["space"]).from_dict(data["space"])
            if not isinstance(space, LayerSpace):
                raise TableError(f"space {space.name!r} is one of cells, and a table is of layers")
            return cls(space, block, layer, data["meta"], data["rule"])
        except TableError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TableError(f"not an indicator table ({type(error).__name__}: {error})") from error

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        write_atomic(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> IndicatorTable:
        """Read a table; errors as in `from_json`."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (TableError, UnicodeDecodeError) as error:
            raise TableError(f"{path}: {error}") from error
