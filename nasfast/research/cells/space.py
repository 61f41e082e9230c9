"""Search spaces of cells, as data: a cell is a DAG whose edges have candidates, and a network repeats it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar, Literal

from nasfast.config import ConfigBase, nearest
from nasfast.research.cells.costs import (
    NONE,
    OPERATIONS,
    SKIP_CONNECT,
    ReduceBy,
    factorized_reduce_cost,
    operation_cost,
    transition_cost,
)
from nasfast.research.cells.features import graph_features
from nasfast.spaces.arch import Arch, ArchError, parse_arch
from nasfast.spaces.arch_space import ArchSpace
from nasfast.spaces.cost import Cost, Operator, conv_bn_cost, output_size

if TYPE_CHECKING:
    import numpy as np

DARTS_OPS = OPERATIONS[:8]
"""The candidates of DARTS, in the order of all figures of the wiring study."""

NAS_BENCH_201_OPS = ("none", "skip_connect", "conv_1x1", "conv_3x3", "avg_pool_3x3")

Order = Literal["relu_conv_norm", "conv_relu_norm", "conv_norm_relu"]
Norm = Literal["batch", "layer", "instance"]


@dataclass(frozen=True)
class Edge(ConfigBase):
    """One searchable edge.

    Attributes:
        source, target: its nodes, source < target.
        ops: its candidates; a single one is fixed.
    """

    source: int
    target: int
    ops: tuple[str, ...] = DARTS_OPS

    def _check_values(self) -> None:
        if not 0 <= self.source < self.target:
            raise ValueError(f"an edge goes from a node to a later one, got {self.source} to {self.target}")
        for op in self.ops:
            if op not in OPERATIONS:
                raise ValueError(f"edge {self.name}: unknown operation {op!r}; {nearest(op, OPERATIONS)}")
        if not self.ops or len(set(self.ops)) != len(self.ops):
            raise ValueError(f"edge {self.name}: needs different operations, at least one, got {list(self.ops)}")

    @property
    def name(self) -> str:
        return f"({self.source},{self.target})"


@dataclass(frozen=True)
class Cell(ConfigBase):
    """A DAG of input nodes and then intermediate nodes, each of which is the sum of the edges into it.

    Attributes:
        inputs: number of input nodes: 1 (the output of the previous cell), or 2 (first the output of the cell before).
        nodes: number of intermediate nodes.
        edges: the searchable edges, which are sorted by target and then by source.
        outputs: the nodes whose channels are joined into the cell's output.
    """

    inputs: int
    nodes: int
    edges: tuple[Edge, ...]
    outputs: tuple[int, ...]

    def _check_values(self) -> None:
        if self.inputs not in (1, 2) or self.nodes < 1:
            raise ValueError(f"a cell has 1 or 2 inputs and at least one node, got {self.inputs} and {self.nodes}")
        object.__setattr__(self, "edges", tuple(sorted(self.edges, key=lambda e: (e.target, e.source))))
        pairs = [(e.source, e.target) for e in self.edges]
        if len(set(pairs)) != len(pairs):
            raise ValueError(f"a cell has one edge from a node to another, got {sorted(pairs)}")
        last = self.inputs + self.nodes
        for edge in self.edges:
            if not self.inputs <= edge.target < last:
                raise ValueError(f"edge {edge.name}: goes to one of the nodes {self.inputs} to {last - 1}")
        if missing := set(self.inner) - {e.target for e in self.edges}:
            raise ValueError(f"nodes {sorted(missing)} of the cell have no edge into them")
        if not self.outputs or not set(self.outputs) <= set(self.inner):
            raise ValueError(f"outputs must be some of the nodes {self.inputs} to {last - 1}, got {self.outputs}")

    @property
    def inner(self) -> range:
        """The intermediate nodes."""
        return range(self.inputs, self.inputs + self.nodes)

    def is_intermediate(self, edge: Edge) -> bool:
        """Whether the edge leaves an intermediate node; otherwise it leaves an input."""
        return edge.source >= self.inputs

    @property
    def intermediate(self) -> tuple[bool, ...]:
        """Whether each edge is intermediate, in order."""
        return tuple(map(self.is_intermediate, self.edges))

    def into(self, node: int) -> tuple[int, ...]:
        """Indices of the edges into a node."""
        return tuple(i for i, edge in enumerate(self.edges) if edge.target == node)

    def restricted(self, source: int, target: int, ops: Iterable[str]) -> Cell:
        """The cell with other candidates on one edge; a single candidate is fixed, and `("none",)` removes the edge."""
        if not any((e.source, e.target) == (source, target) for e in self.edges):
            raise ValueError(
                f"the cell has no edge ({source},{target}); it has {', '.join(e.name for e in self.edges)}"
            )
        ops = tuple(ops)
        changed = (e.replace(ops=ops) if (e.source, e.target) == (source, target) else e for e in self.edges)
        return self.replace(edges=tuple(changed))

    def without_on_intermediate(self, op: str) -> Cell:
        """The cell without a candidate on its intermediate edges."""
        edges = (
            e.replace(ops=tuple(o for o in e.ops if o != op)) if self.is_intermediate(e) else e for e in self.edges
        )
        return self.replace(edges=tuple(edges))


def full_cell(
    ops: Iterable[str] = DARTS_OPS, *, inputs: int, nodes: int, outputs: tuple[int, ...] | None = None
) -> Cell:
    """A cell with an edge from every node to every later one; its output joins all intermediate nodes by default."""
    ops, last = tuple(ops), inputs + nodes
    edges = tuple(Edge(i, j, ops) for j in range(inputs, last) for i in range(j))
    return Cell(inputs, nodes, edges, tuple(range(inputs, last)) if outputs is None else outputs)


# the smallest cell with an intermediate edge, (2,3)
minimal_cell = partial(full_cell, inputs=2, nodes=2)
# the minimal cell without its symmetry
simplified_cell = partial(full_cell, inputs=1, nodes=2)
# the simplified cell without the output edge (1,3)
modified_cell = partial(full_cell, inputs=1, nodes=2, outputs=(2,))
# 14 edges (DARTS, arXiv 1806.09055)
darts_cell = partial(full_cell, inputs=2, nodes=4)


def nas_bench_201_cell(ops: Iterable[str] = NAS_BENCH_201_OPS) -> Cell:
    """Six edges (NAS-Bench-201, arXiv 2001.00326)."""
    return full_cell(ops, inputs=1, nodes=3, outputs=(3,))


CELLS: dict[str, Callable[..., Cell]] = {
    "minimal": minimal_cell,
    "simplified": simplified_cell,
    "modified": modified_cell,
    "darts": darts_cell,
    "nas_bench_201": nas_bench_201_cell,
}


@dataclass(frozen=True, repr=False)
class CellSpace(ArchSpace):
    """A network of equal cells; its fields are also the keys of its YAML form.

    The network is a stem (3 x 3 convolution and norm), the cells, global average pooling and a classifier. If cells
    have two inputs, both inputs of the first cell are the output of the stem. An `Arch` has one value per edge, an
    index into `ops`: first the edges of the normal cell, then, if there are reduction cells, those of the reduction
    cell.

    Attributes:
        name: shown in files and errors.
        cell: the DAG of every cell.
        cells: number of cells.
        channels: channels of every node of the first cell.
        reductions: indices of cells that halve the resolution and double the channels.
        reduce_by: `cell`: in these cells the edges from input nodes have stride 2, and they have an architecture of
            their own. `conv`: a 3 x 3 convolution of stride 2 precedes them, and all cells have one architecture.
            `residual`: as `conv`, but a residual block of two 3 x 3 convolutions precedes them.
        stem_multiplier: channels of the stem divided by `channels`.
        preprocess: whether a 1 x 1 convolution brings the inputs of a cell to the cell's channels.
        head: whether a norm and a ReLU precede the pooling.
        affine: whether the norms of operations and preprocessing have scale and shift in the search.
        pool_norm: whether pooling operations end in a norm.
        order: order of the parts of a convolution operation.
        norm: what all norms average over: the batch, each image (`layer`), or each channel of an image (`instance`).
        classifier_bias: whether the classifier has a bias; theorem 2 of the wiring study holds without one.
        resolution: height and width of the input in pixels.
        num_classes: outputs of the classifier.
        in_channels: channels of the input image.
    """

    KEY: ClassVar[str] = "cell"
    NETWORK: ClassVar[str] = "nasfast.research.cells.network:CellStandalone"

    name: str
    cell: Cell
    cells: int = 8
    channels: int = 16
    reductions: tuple[int, ...] = ()
    reduce_by: ReduceBy = "cell"
    stem_multiplier: int = 3
    preprocess: bool = True
    head: bool = False
    affine: bool = False
    pool_norm: bool = True
    order: Order = "relu_conv_norm"
    norm: Norm = "batch"
    classifier_bias: bool = False
    resolution: int = 32
    num_classes: int = 10
    in_channels: int = 3

    def _check_values(self) -> None:
        where = f"cell space {self.name!r}"
        for field in ("cells", "channels", "stem_multiplier", "resolution", "num_classes", "in_channels"):
            if getattr(self, field) < 1:
                raise ValueError(f"{where}: {field} must be positive, got {getattr(self, field)}")
        outside = [i for i in self.reductions if not 0 <= i < self.cells]
        if outside or len(set(self.reductions)) != len(self.reductions):
            raise ValueError(
                f"{where}: reductions must be different indices from 0 to {self.cells - 1}, got {list(self.reductions)}"
            )
        if self.reductions and self.channels % 2:
            raise ValueError(f"{where}: reductions need an even number of channels, got {self.channels}")
        if not self.preprocess:
            if self.cell.inputs != 1 or self.stem_multiplier != 1 or len(self.cell.outputs) != 1:
                raise ValueError(f"{where}: without preprocessing cells need one input, one output, stem_multiplier 1")
            if self.reductions and self.reduce_by == "cell":
                raise ValueError(
                    f"{where}: without preprocessing, channels change by reduce_by='conv' or 'residual' alone"
                )
        elif self.reductions and self.reduce_by != "cell":
            raise ValueError(
                f"{where}: reduce_by={self.reduce_by!r} needs preprocess=False: its convolution doubles the channels"
            )

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """The operations that any edge has, in the order of `OPERATIONS`: the columns of every table of this space."""
        used = {op for edge in self.cell.edges for op in edge.ops}
        return tuple(op for op in OPERATIONS if op in used)

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The types of cells, each with an architecture of its own."""
        return ("normal", "reduction") if self.reductions and self.reduce_by == "cell" else ("normal",)

    def cell_type(self, cell: int) -> int:
        """The type of a cell, as an index into `types`."""
        return int(cell in self.reductions and self.reduce_by == "cell")

    @cached_property
    def cell_types(self) -> tuple[int, ...]:
        """The type of every cell."""
        return tuple(map(self.cell_type, range(self.cells)))

    def edge_stride(self, cell: int, edge: int) -> int:
        """Stride of an edge's operation in a cell."""
        return 2 if self.cell_type(cell) and not self.cell.intermediate[edge] else 1

    def cell_channels(self, cell: int) -> int:
        """Channels of every node of a cell."""
        return self.channels * 2 ** sum(i <= cell for i in self.reductions)

    @cached_property
    def candidates(self) -> tuple[tuple[int, ...], ...]:
        """Per edge: the values that an Arch may have, as indices into `ops`."""
        return tuple(tuple(i for i, op in enumerate(self.ops) if op in edge.ops) for edge in self.cell.edges)

    @cached_property
    def options(self) -> tuple[tuple[int, ...], ...]:
        """See `ArchSpace`: the candidates of every edge, for one type of cell after the other."""
        return self.candidates * len(self.types)

    def parse(self, text: str) -> Arch:
        """Architecture of a text: the values as `nasfast.spaces.parse_arch` reads them, or names of operations.

        Names are in the form of NAS-Bench-201, `|conv_3x3~0|+|none~0|skip_connect~1|`: for each target node, the
        operation and the source of every edge; `nor_conv_3x3` means `conv_3x3`. The cells of the space must all be of
        one type.
        """
        return self.check(self._parse_names(text) if "|" in text else parse_arch(text))

    def _parse_names(self, text: str) -> list[int]:
        edges = [(e.source, e.target) for e in self.cell.edges]
        columns = {}
        for target, group in enumerate(text.split("+"), start=self.cell.inputs):
            for part in group.strip("|").split("|"):
                op, _, source = part.partition("~")
                op = op.removeprefix("nor_")
                if op not in self.ops or not source.isdecimal() or (int(source), target) not in edges:
                    raise ArchError(
                        f"space {self.name!r} has no operation {part!r} into node {target}, in {text!r}; expected "
                        f"OPERATION~SOURCE with {', '.join(self.ops)} and edges (source, node) {edges}"
                    )
                if (int(source), target) in columns:
                    raise ArchError(f"{text!r} names edge ({source},{target}) of space {self.name!r} twice")
                columns[int(source), target] = self.ops.index(op)
        if len(self.types) > 1 or len(columns) != len(edges):
            raise ArchError(f"{text!r} names {len(columns)} of the {len(self)} values of space {self.name!r}")
        return [columns[edge] for edge in edges]

    def random(self, rng: np.random.Generator) -> Arch:
        """A uniform architecture among those in which operations other than None lead from an input to every output."""
        if not self._connected([max(values, key=lambda k: self.ops[k] != NONE) for values in self.candidates]):
            raise ValueError(f"space {self.name!r}: no operation other than {NONE} leads to some output of its cell")
        while True:
            arch = super().random(rng)
            if all(self._connected(part) for part in self.parts(arch)):
                return arch

    def _connected(self, part: Sequence[int]) -> bool:
        reached = set(range(self.cell.inputs))
        # edges come in the order of their targets, so all edges into a node precede those that leave it
        for edge, k in zip(self.cell.edges, part, strict=True):
            if edge.source in reached and self.ops[k] != NONE:
                reached.add(edge.target)
        return set(self.cell.outputs) <= reached

    def parts(self, arch: Iterable[int]) -> tuple[Arch, ...]:
        """An architecture's values by type of cell."""
        arch, edges = self.check(arch), len(self.cell.edges)
        return tuple(arch[t * edges : (t + 1) * edges] for t in range(len(self.types)))

    def encode(self, archs: Iterable[Arch]) -> list[list[int]]:
        """See `ArchSpace`: `graph_features`."""
        return graph_features(self, archs)

    def place(self, index: int) -> str:
        kind, edge = divmod(index, len(self.cell.edges))
        return f"{self.types[kind]} cell, edge {self.cell.edges[edge].name}"

    def label(self, index: int, value: int) -> str:
        return self.ops[value]

    @property
    def rows(self) -> tuple[str, ...]:
        """See `ArchSpace`, e.g. `"normal (0,2)"`."""
        return tuple(f"{kind} {edge.name}" for kind in self.types for edge in self.cell.edges)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.ops

    def format(self, arch: Arch) -> str:
        """The operations in the order of the values."""
        return " ".join(self.ops[k] for k in arch)

    def describe(self, arch: Iterable[int]) -> list[str]:
        """One label per value that names the edge too, e.g. `["normal (0,2) sep_conv_3x3", ...]`."""
        return [f"{row} {self.ops[k]}" for row, k in zip(self.rows, self.check(arch), strict=True)]

    def cell_inputs(self, cell: int) -> tuple[tuple[int, int], ...]:
        """Channels and stride of the preprocessing for every input of a cell, in the order of the input nodes.

        If the cell between was a reduction, one input's map is larger than the other's; the stride 2 halves it.
        """
        outputs = [self.stem_channels, *(self.output_channels(i) for i in range(cell))]
        inputs = []
        for back in range(self.cell.inputs, 0, -1):
            start = max(cell - back + 1, 0)
            halved = self.reduce_by == "cell" and any(i in self.reductions for i in range(start, cell))
            inputs.append((outputs[start], 2 if halved else 1))
        return tuple(inputs)

    @property
    def stem_channels(self) -> int:
        return self.stem_multiplier * self.channels

    def output_channels(self, cell: int) -> int:
        """Channels of a cell's output."""
        return len(self.cell.outputs) * self.cell_channels(cell)

    @property
    def features(self) -> int:
        """Channels that reach the classifier."""
        return self.output_channels(self.cells - 1)

    def cell_size(self, cell: int) -> int:
        """Height of the maps at a cell's input nodes, in pixels."""
        size = self.resolution
        for i in range(cell + 1):
            if i in self.reductions and (i < cell or self.reduce_by != "cell"):
                size = output_size(size, 2)
        return size

    @cached_property
    def fixed_cost(self) -> Cost:
        """See `ArchSpace`: cost of stem, preprocessing, transitions, head and classifier."""
        total = conv_bn_cost(self.in_channels, self.stem_channels, 3, self.resolution)
        for i in range(self.cells):
            channels, size = self.cell_channels(i), self.cell_size(i)
            if i in self.reductions:
                total += transition_cost(self.reduce_by, channels, size)
            if self.preprocess:
                for in_channels, stride in self.cell_inputs(i):
                    # the input of a strided preprocessing has twice the cell's size
                    if stride == 2:
                        total += factorized_reduce_cost(in_channels, channels, size)
                    else:
                        total += conv_bn_cost(in_channels, channels, 1, size)
        head = Cost(params=2 * self.features) if self.head else Cost()
        weights = self.features * self.num_classes
        return total + head + Cost(weights, weights + self.num_classes * self.classifier_bias)

    @cached_property
    def operators(self) -> tuple[dict[int, Operator], ...]:
        """See `ArchSpace`: an operator counts all cells of its type together."""
        return tuple(
            {k: self._operator(kind, e, k) for k in options}
            for kind in range(len(self.types))
            for e, options in enumerate(self.candidates)
        )

    def _operator(self, kind: int, edge: int, column: int) -> Operator:
        op, cost, inputs = self.ops[column], Cost(), []
        for i in (i for i in range(self.cells) if self.cell_type(i) == kind):
            channels, size = self.cell_channels(i), self.cell_size(i)
            reduced = output_size(size, 2) if self.cell_type(i) else size
            cost += operation_cost(op, channels, self.edge_stride(i, edge), reduced, pool_norm=self.pool_norm)
            # edges between intermediate nodes of a reduction cell work on maps that its input edges have halved
            inputs.append(channels * (reduced if self.cell.intermediate[edge] else size) ** 2)
        return Operator(cost, tuple(inputs), works=op not in (NONE, SKIP_CONNECT) and "pool" not in op)


def at_thirds(cells: int) -> tuple[int, ...]:
    """Indices of the cells at one and two thirds of a network; fewer than three cells have 0 among them."""
    return tuple(sorted({cells // 3, 2 * cells // 3}))


def darts_space(
    *, cells: int = 8, channels: int = 16, reductions: bool = True, num_classes: int = 10, resolution: int = 32
) -> CellSpace:
    """The DARTS space: cells of four nodes, with reductions at one and two thirds unless `reductions=False` (S8n)."""
    return CellSpace(
        name="darts",
        cell=darts_cell(),
        cells=cells,
        channels=channels,
        reductions=at_thirds(cells) if reductions else (),
        num_classes=num_classes,
        resolution=resolution,
    )


def nas_bench_201_space(
    *,
    cells: int = 15,
    channels: int = 16,
    num_classes: int = 10,
    resolution: int = 32,
    reduce_by: ReduceBy = "residual",
) -> CellSpace:
    """NAS-Bench-201 (arXiv 2001.00326): three stages of five cells, 16 channels, a residual block between stages.

    `reduce_by="conv"` has a strided convolution instead of each residual block, which costs less.
    """
    return CellSpace(
        name="nas_bench_201",
        cell=nas_bench_201_cell(),
        cells=cells,
        channels=channels,
        reductions=tuple(index for index in at_thirds(cells) if index > 0),
        reduce_by=reduce_by,
        stem_multiplier=1,
        preprocess=False,
        head=True,
        affine=True,
        pool_norm=False,
        classifier_bias=True,
        num_classes=num_classes,
        resolution=resolution,
    )


def transnas_micro_space(
    *, cells: int = 15, channels: int = 16, num_classes: int = 10, resolution: int = 32
) -> CellSpace:
    """The cells of TransNAS-Bench-101's micro space (arXiv 2105.11871): those of NAS-Bench-201 without pooling.

    An architecture has the values 0 (none), 1 (skip), 2 (convolution 1 x 1) and 3 (convolution 3 x 3), as there. The
    network around the cells is that of NAS-Bench-201.
    """
    network = nas_bench_201_space(cells=cells, channels=channels, num_classes=num_classes, resolution=resolution)
    cell = nas_bench_201_cell(op for op in NAS_BENCH_201_OPS if op != "avg_pool_3x3")
    return network.replace(name="transnas_micro", cell=cell)


def choice_blocks_space(
    *, cells: int = 9, channels: int = 16, num_classes: int = 10, resolution: int = 32
) -> CellSpace:
    """A space like the first of NAS-Bench-1Shot1: nodes sum operations on earlier nodes.

    In NAS-Bench-1Shot1 an operation belongs to a node and works on the sum of its parents, the output joins its parents
    without an operation, and pooling separates the stages. Here an operation belongs to the edge from each parent, the
    last node is the output, and a strided convolution separates the stages, as in `nas_bench_201_space`.
    """
    ops = ("none", "max_pool_3x3", "conv_1x1", "conv_3x3")
    edges = tuple(Edge(i, j, ops) for j in range(1, 5) for i in range(j))
    network = nas_bench_201_space(
        cells=cells, channels=channels, num_classes=num_classes, resolution=resolution, reduce_by="conv"
    )
    return network.replace(name="choice_blocks", cell=Cell(1, 4, edges, (4,)), order="conv_norm_relu")
