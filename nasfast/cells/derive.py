"""From logits to an architecture."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from nasfast.spaces import Arch
from nasfast.spaces.cell_costs import NONE
from nasfast.spaces.cells import CellSpace

Rule = Literal["argmax", "darts"]


def derive(space: CellSpace, logits: Tensor | np.ndarray, rule: Rule) -> Arch:
    """The architecture that logits stand for.

    Args:
        space: of the cells.
        logits: (types, edges, ops), as in `CellSearchResult`.
        rule: `argmax`: the most probable candidate of every edge, None included (SNAS, DSNAS, ProxylessNAS); `darts`:
            the most probable but None on the two edges into every node where that is most probable, None on the others.

    Raises:
        ValueError: unknown rule, or edges that have no None to be dropped to.
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
        chosen = columns.tolist()
        for node in range(space.cell.inputs, space.cell.inputs + space.cell.nodes):
            edges = sorted(space.cell.into(node), key=lambda e: -float(strength[e]))
            for e in edges[2:]:
                if none is None or none not in space.candidates[e]:
                    raise ValueError(f"derive: edge {space.cell.edges[e].name} has no candidate none to be dropped to")
                chosen[e] = none
        # an edge fixed to none stays so
        arch += [columns[0] if len(columns) == 1 else k for columns, k in zip(space.candidates, chosen, strict=True)]
    return space.check(arch)


def derivations(space: CellSpace, logits: Tensor | np.ndarray) -> dict[str, Arch]:
    """Rule -> architecture; without DARTS's rule where it would drop an edge that has no None."""
    none = space.ops.index(NONE) if NONE in space.ops else None
    nodes = range(space.cell.inputs, space.cell.inputs + space.cell.nodes)
    droppable = all(
        len(edges := space.cell.into(node)) <= 2 or all(none in space.candidates[e] for e in edges) for node in nodes
    )
    return {rule: derive(space, logits, rule) for rule in ("argmax", *(("darts",) if droppable else ()))}
