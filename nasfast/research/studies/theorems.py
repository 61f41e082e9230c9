"""Theorems on local costs (Xie et al., arXiv 2009.01272), checked on real networks in float64 and training mode.

The local cost of what an operation, edge or cell puts out is C = <dL/dX, X>. Claimed, up to O(eps) of the norms:

    T1 (theorem 1)      what reaches a node through intermediate edges that end in a norm vanishes
    T2 (corollary 1.1)  the edge costs of a cell add up to its output's cost
    T3 (corollary 1.2)  cells before the last one cost nothing
    T4 (theorem 2)      the output of the last cell costs L - H, loss minus entropy of the predictions
    T5                  the same with other norms and other orders of convolution, norm and ReLU

Why: a map f with f(s X) = f(X) for every s > 0 has <dL/dX, X> = 0. ReLU, convolution and pooling are positively
homogeneous, and a norm removes the scale, but for its eps: with A the input of the first norm behind X, exactly

    <dL/dX, X> = <dL/dA, A> = sum over the norm's statistics of eps / (var + eps) * sum (dL/dout) (out - shift)

docs/wiring.md says where the paper's wording is too strong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.research.cells.costs import NONE, SKIP_CONNECT
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.probe import sample_costs
from nasfast.research.cells.space import CELLS, CellSpace, minimal_cell
from nasfast.research.studies.commands import StudyConfig
from nasfast.research.studies.notebook import Notebook
from nasfast.research.studies.theorem_steps import (
    Step,
    chosen_gates,
    make_batch,
    make_net,
    mixed_gates,
    one_hot_gates,
    path_gradient,
    set_eps,
    take_step,
)

NET_CELLS, CHANNELS, BATCH, RESOLUTION, CLASSES = 2, 8, 32, 12, 10
EXACT = 1e-10
"""Bound of a statement that holds up to rounding."""
FIRST_ORDER = 5e-3
"""Bound of a quantity that vanishes with eps: at eps = 1e-5, relative to the largest cost of an edge."""


class Residual(NamedTuple):
    """One measured statement: what should be 0 (of an inequality: how far it is violated), and what passes."""

    name: str
    measured: float
    bound: float
    note: str = ""


def theorems(cfg: StudyConfig, notes: Notebook) -> None:
    """Theorems 1 to 5 in order, on minimal cells; theorem 2 on simplified, modified and DARTS cells too."""
    notes.say(
        f"Theorems on networks of {NET_CELLS} cells, {CHANNELS} channels, {BATCH} images, float64. C = <dL/dX, X> "
        "is the local cost of an output; a residual is what a theorem says is 0."
    )
    minimal = CellSpace("minimal", minimal_cell(), NET_CELLS, CHANNELS, resolution=RESOLUTION, num_classes=CLASSES)
    spaces = [minimal.replace(name=name, cell=CELLS[name]()) for name in ("minimal", "simplified", "modified", "darts")]
    data = make_batch(minimal, BATCH, cfg.seed)
    residuals = list(theorem_1(minimal, data, cfg.seed))
    for space in spaces:
        residuals += theorem_2(space, data, cfg.seed)
    for theorem in (theorem_3, theorem_4, theorem_5):
        residuals += theorem(minimal, data, cfg.seed)
    for name, measured, bound, note in residuals:
        notes.mark(name, measured, at_least=-bound, at_most=bound, note=note)


GATES = {"one-hot": one_hot_gates, "mixed": mixed_gates}
Data = tuple[Tensor, Tensor]


def theorem_1(space: CellSpace, data: Data, seed: int) -> Iterator[Residual]:
    """Without identity skips, what a node gets through the intermediate edges that leave it vanishes."""
    net = make_net(space, seed=seed)
    for name, make in GATES.items():
        steps = [take_step(net, make(space, seed + i), *data) for i in range(4)]
        yield _node_totals(f"T1 node totals, {name} gates", steps)
    for affine in (False, True):
        yield _exact_residual(space.replace(affine=affine), data, seed)
    yield from _two_parents(net, data)
    yield _skip_passes(net, data)


def _node_totals(name: str, steps: Iterable[Step]) -> Residual:
    """The largest path total of any intermediate node, relative to the largest cost of an edge."""
    worst, size = 0.0, 0.0
    for step in steps:
        totals = [abs(step.path_total(i, j)) for i in range(step.net.space.cells) for j in step.net.space.cell.inner]
        worst, size = max(worst, *totals), max(size, step.scale)
    return Residual(name, worst / size, FIRST_ORDER, f"{worst:.1e} where edges cost up to {size:.1e}; eps 1e-5")


def _exact_residual(space: CellSpace, data: Data, seed: int) -> Residual:
    """<dL/dX, X> through each operation with a norm on each intermediate edge against the closed form, at eps 1e-3."""
    net = make_net(space, eps=1e-3, seed=seed)
    step = take_step(net, mixed_gates(space, seed), *data)
    worst, largest = 0.0, 0.0
    for i, cell in enumerate(net.cells):
        for e, edge in enumerate(space.cell.edges):
            for k in space.candidates[e] if space.cell.is_intermediate(edge) else ():
                operation = cell.operation(e, k)
                if operation is None or space.ops[k] == SKIP_CONNECT:
                    continue
                x, gradient = step.nodes[i][edge.source], step.gradients[i][edge.target] * step.gates[i, e, k]
                x_gradient, expected = path_gradient(operation, x, gradient, space.norm)
                worst = max(worst, abs(float((x_gradient * x).sum() - expected)))
                largest = max(largest, abs(float(expected)))
    theorem, affine = "T1" if space.norm == "batch" else "T5", "with" if space.affine else "without"
    name = f"{theorem} residual of finite eps, {space.norm} norm {affine} scale and shift"
    return Residual(name, worst, EXACT, f"residuals up to {largest:.1e} at eps 1e-3, formula - measured")


def _path_costs(step: Step, cell: int, node: int) -> list[float]:
    """The part of a node's path total that belongs to each operation that enters it; the gates are one-hot."""
    gradient = step.gradients[cell][node] - step.output_gradient(cell, node)
    path_costs = []
    for e in step.net.space.cell.into(node):
        operation = step.net.cells[cell].operation(e, int(step.gates[cell, e].argmax()))
        if operation is not None:
            with torch.no_grad():
                output = operation(step.nodes[cell][step.net.space.cell.edges[e].source])
            path_costs.append(float((gradient * output).sum()))
    return path_costs


def _two_parents(net: CellSupernet, data: Data) -> Iterator[Residual]:
    """What the intermediate edge of the minimal cell passes to each edge that enters its source."""
    rest = (NONE, "sep_conv_3x3", "sep_conv_3x3")
    one = take_step(net, chosen_gates(net.space, ("sep_conv_3x3", NONE, *rest)), *data)
    two = take_step(net, chosen_gates(net.space, ("sep_conv_3x3", "sep_conv_5x5", *rest)), *data)
    last, node = net.space.cells - 1, net.space.cell.inputs
    (alone,) = _path_costs(one, last, node)
    first, second = _path_costs(two, last, node)
    note = f"{alone:+.1e} where edges cost up to {one.scale:.1e}"
    yield Residual("T1 path cost of an only parent", abs(alone) / one.scale, FIRST_ORDER, note)
    share = abs(first + second) / max(abs(first), abs(second))
    note = f"{first:+.1e} and {second:+.1e}, sum {first + second:+.1e}: opposite, not 0"
    yield Residual("T1 path costs of two parents, sum / larger", share, FIRST_ORDER, note)


def _skip_passes(net: CellSupernet, data: Data) -> Residual:
    """An identity skip on the intermediate edge passes its own cost."""
    ops = ("sep_conv_3x3", "dil_conv_3x3", NONE, "max_pool_3x3", SKIP_CONNECT)
    step = take_step(net, chosen_gates(net.space, ops), *data)
    node, worst, costs = net.space.cell.inputs, 0.0, []
    for i in range(net.space.cells):
        passed = step.path_total(i, node) + float(step.skip_costs(i))
        costs.append(float(step.costs[i, -1, net.space.ops.index(SKIP_CONNECT)]))
        worst = max(worst, abs(passed - costs[-1]))
    return Residual("T1 identity skip passes its cost", worst, EXACT, f"C(j,k) by cell {_numbers(costs)}")


def theorem_2(space: CellSpace, data: Data, seed: int) -> Iterator[Residual]:
    """A cell's edge costs add up to its output's cost and those of identity skips on intermediate edges."""
    net, last = make_net(space, seed=seed), space.cells - 1
    for kind, make in GATES.items():
        steps = [take_step(net, make(space, seed + i), *data) for i in range(2)]
        gaps = [
            float(step.edge_costs(i) - step.output_cost(i) - step.skip_costs(i))
            for step in steps
            for i in range(space.cells)
        ]
        worst = max(map(abs, gaps)) / max(step.scale for step in steps)
        terms = (float(term(last)) for term in (steps[0].edge_costs, steps[0].output_cost, steps[0].skip_costs))
        edges, output, skips = (f"{term:+.1e}" for term in terms)
        note = f"first draw, last cell: edges {edges}, output {output}, skips {skips}"
        yield Residual(f"T2 cell sum, {space.name} cell, {kind} gates", worst, FIRST_ORDER, note)


def theorem_3(space: CellSpace, data: Data, seed: int) -> Iterator[Residual]:
    """Before the last cell, an output costs nothing up to eps, and the edges of a cell add up to the skip term."""
    net, gates = make_net(space, seed=seed), mixed_gates(space, seed)
    step = take_step(net, gates, *data)
    costs = [float(step.output_cost(i)) for i in range(space.cells)]
    sums = [float(step.edge_costs(i) - step.skip_costs(i)) for i in range(space.cells - 1)]
    before, largest = max(map(abs, costs[:-1])) / abs(costs[-1]), max(map(abs, sums)) / step.scale
    note = f"by cell {_numbers(costs)}"
    yield Residual("T3 output cost before the last cell / last cell's", before, FIRST_ORDER, note)
    note = f"by cell {_numbers(sums)}"
    yield Residual("T3 edge costs there, less skips, / largest edge's", largest, FIRST_ORDER, note)
    outputs, sizes = [], (1e-9, 1e-7, 1e-5, 1e-3)
    for eps in sizes:
        set_eps(net, eps)
        outputs.append(abs(float(take_step(net, gates, *data).output_cost(0))))
    slope = math.log(outputs[-1] / outputs[0]) / math.log(sizes[-1] / sizes[0])
    note = f"first cell's output cost at eps 1e-9 to 1e-3: {_numbers(outputs)}"
    yield Residual("T3 slope in eps, log-log, less 1", slope - 1, 0.05, note)


def theorem_4(space: CellSpace, data: Data, seed: int) -> Iterator[Residual]:
    """The last cell's output costs L - H; where that is positive, and where it is not."""
    for bias in (False, True):
        net = make_net(space.replace(classifier_bias=bias), seed=seed)
        step = take_step(net, mixed_gates(space, seed), *data)
        cost = float(step.output_cost(space.cells - 1))
        _, loss, entropy = (x.mean() for x in sample_costs(step.logits, step.labels))
        gap = cost - float(loss - entropy)
        note = f"C {cost:+.6f}, L {float(loss):.6f}, H {float(entropy):.6f}"
        if bias:
            # <dL/dY, bias> is what the bias adds to the scale of the logits
            logits_gradient = (step.logits.softmax(1) - F.one_hot(step.labels, space.num_classes)).mean(0)
            share = float(logits_gradient @ net.classifier.bias.detach())
            name = "T4 with a classifier bias: C - (L - H) + <dL/dY, b>, / that term"
            yield Residual(name, (gap + share) / share, EXACT, f"{note}: C - (L - H) = {gap:+.1e}, not 0")
        else:
            yield Residual("T4 C - (L - H)", gap, EXACT, note)
            mean, spread = _over_labels(step.logits)
            note = f"mean over samples {float(mean.mean()):+.2e}, variance of logits {float(spread.mean()):.2e}"
            yield Residual("T4 at init: mean over labels >= 0, violation", _violation(mean), 0.0, note)
    yield from _inequalities(space.num_classes, seed)


def _over_labels(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) mean of c over all labels, sum_n (pi_n - 1/N) Y_n, and variance of the logits."""
    classes = logits.shape[1]
    costs = [sample_costs(logits, torch.full_like(logits[:, 0], n, dtype=torch.int64))[0] for n in range(classes)]
    return torch.stack(costs, 1).mean(1), logits.var(1, unbiased=False)


def _violation(at_least_zero: Tensor) -> float:
    """By how much values fall below 0, beyond rounding."""
    return max(0.0, -float(at_least_zero.min()) - 1e-13)


def _inequalities(classes: int, seed: int) -> Iterator[Residual]:
    """Chebyshev's sum inequality, its approximation for small logits, and the sign where the label is the argmax."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4096, classes, generator=generator, dtype=torch.float64)
    scales = (0.01, 0.1, 1.0, 10.0, 100.0)
    means = [_over_labels(s * normal) for s in scales]
    right = [sample_costs(s * normal, normal.argmax(1))[0] for s in scales]
    note = f"logits of scale 0.01 to 100: least {_numbers(float(mean.min()) for mean, _ in means)}"
    violation = max(_violation(mean) for mean, _ in means)
    yield Residual("T4 any logits: mean over labels >= 0, violation", violation, 0.0, note)
    ratio = float((means[0][0] / means[0][1] - 1).abs().max())
    note = "largest of any sample at scale 0.01"
    yield Residual("T4 small logits: mean over labels / variance, less 1", ratio, 0.05, note)
    note = f"largest c {_numbers(float(c.max()) for c in right)}"
    yield Residual("T4 label is the argmax: c <= 0, violation", max(_violation(-c) for c in right), 0.0, note)


def theorem_5(space: CellSpace, data: Data, seed: int) -> Iterator[Residual]:
    """Other norms and other orders: theorem 1 holds; with instance norm and global pooling every cost is 0."""
    # in the usual order, instance norms pass no gradient from global pooling, and theorem 1 would say 0 = 0
    variants = [("layer", "relu_conv_norm"), ("instance", "conv_norm_relu")]
    variants += [("batch", "conv_relu_norm"), ("batch", "conv_norm_relu")]
    for norm, order in variants:
        other = space.replace(norm=norm, order=order)
        if norm != "batch":
            yield _exact_residual(other.replace(affine=True), data, seed)
        net = make_net(other, seed=seed)
        steps = [take_step(net, make(space, seed + i), *data) for i in range(2) for make in GATES.values()]
        yield _node_totals(f"T5 node totals, {norm} norm, {order}", steps)
    net = make_net(space.replace(norm="instance"), seed=seed)
    step = take_step(net, mixed_gates(space, seed), *data)
    other_ops = [k for k, op in enumerate(space.ops) if op != SKIP_CONNECT]
    worst, skips = (float(step.costs[..., ks].abs().max()) for ks in (other_ops, [space.ops.index(SKIP_CONNECT)]))
    note = f"skips {skips:.1e}; logits up to {float(step.logits.abs().max()):.1e}"
    yield Residual("T5 instance norm without scale: any cost but a skip's", worst, EXACT, note)


def _numbers(values: Iterable[float]) -> str:
    return " ".join(f"{value:+.1e}" for value in values)
