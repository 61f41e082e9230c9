"""How logits become an architecture."""

from __future__ import annotations

from typing import get_args

import numpy as np
import torch
from torch import Tensor

from nasfast.research.cells.config import Rule
from nasfast.research.cells.costs import NONE
from nasfast.research.cells.space import CellSpace
from nasfast.spaces import Arch


def derive(space: CellSpace, logits: Tensor | np.ndarray, rule: Rule) -> Arch:
    """The architecture of given logits.

    Args:
        logits: (types, edges, ops), as in `CellSearchResult`.
        rule: `argmax` (SNAS, DSNAS, ProxylessNAS) takes the most probable candidate of every edge, None included.
            `darts` takes the most probable candidate other than None; only the two edges into every node on which that
            candidate is most probable keep it, and the others become None.
    """
    p = torch.softmax(torch.as_tensor(logits).double(), -1)
    if rule == "argmax":
        return space.check(p.argmax(-1).flatten().tolist())
    if rule not in get_args(Rule):
        raise ValueError(f"derive: unknown rule {rule!r}; valid: {', '.join(get_args(Rule))}")
    none = space.ops.index(NONE) if NONE in space.ops else None
    arch = []
    for kind in p:
        best = kind.clone()
        if none is not None:
            best[:, none] = -1
        strength, columns = best.max(-1)
        values = columns.tolist()
        for node in space.cell.inner:
            edges = sorted(space.cell.into(node), key=lambda e: -float(strength[e]))
            for e in edges[2:]:
                if none is None or none not in space.candidates[e]:
                    raise ValueError(f"derive: edge {space.cell.edges[e].name} has no candidate none to be dropped to")
                values[e] = none
        # an edge with a single candidate keeps it, even if that is none
        arch += [columns[0] if len(columns) == 1 else k for columns, k in zip(space.candidates, values, strict=True)]
    return space.check(arch)


def derivations(space: CellSpace, logits: Tensor | np.ndarray) -> dict[str, Arch]:
    """Rule -> architecture; the rule `darts` is missing where it might have to drop an edge that has no None."""
    none = space.ops.index(NONE) if NONE in space.ops else None
    into = map(space.cell.into, space.cell.inner)
    droppable = all(len(edges) <= 2 or all(none in space.candidates[e] for e in edges) for edges in into)
    return {rule: derive(space, logits, rule) for rule in ("argmax", *(("darts",) if droppable else ()))}
