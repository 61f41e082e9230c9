"""A step of a differentiable search on a network of cells against a straightforward PyTorch implementation.

    python -m benchmarks.bench_cells [--rounds 5] [--threads N] [--cells 8] [--batch 64] [--out FILE]

The search is DARTS on the cell with four nodes: softmax(a) mixes all operations of an edge; images are 32 x 32. `one
level` is one forward and backward pass for weights and logits. `two levels` is a pass for the logits on one batch and
then a pass for the weights on another (first order). Both include the optimisers. Peers compute the eight operations of
each edge one by one, contiguous and channels_last. Published code of `two levels` computes
the weights' gradients in the first pass, too, and discards them; a further peer computes the logits' gradients alone.
All networks get equal weights. `difference` is the largest difference between the logits' gradients of nasfast and of
the peer, relative to the largest gradient.

Memory is the bytes that one forward pass keeps for backward. It is measured on spaces whose edges have 2, 4 and 8
operations, on which methods that sample one operation must need the same memory, and on the network of the step, also
for the peer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import positive, ratios, saved_bytes, write_json
from nasfast.measure.timing import measure, measuring
from nasfast.research.cells.config import CellSearchConfig
from nasfast.research.cells.gates import Estimator, estimator_of, uniform_logits
from nasfast.research.cells.network import CellSupernet
from nasfast.research.cells.search import CellSearch, CellSearchEngine
from nasfast.research.cells.space import DARTS_OPS, CellSpace, darts_cell, darts_space


def _norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, affine=False)


def _separable(channels: int, kernel: int, dilation: int, times: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(times):
        parts += [
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel, 1, dilation * (kernel // 2), dilation, groups=channels, bias=False),
            nn.Conv2d(channels, channels, 1, bias=False),
            _norm(channels),
        ]
    return nn.Sequential(*parts)


class _MixedOp(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.ops = nn.ModuleList(
            [
                nn.Identity(),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), _norm(channels)),
                nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), _norm(channels)),
                _separable(channels, 3, 1, 2),
                _separable(channels, 3, 2, 1),
                _separable(channels, 5, 2, 1),
                _separable(channels, 5, 1, 2),
            ]
        )

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        # the first weight belongs to the operation none
        return sum(w * op(x) for w, op in zip(weights[1:], self.ops, strict=True))


class _PlainCell(nn.Module):
    def __init__(self, before: tuple[int, int], channels: int, nodes: int = 4) -> None:
        super().__init__()
        self.nodes = nodes
        self.pre = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv2d(c, channels, 1, bias=False), _norm(channels)) for c in before
        )
        self.edges = nn.ModuleList(_MixedOp(channels) for node in range(nodes) for _ in range(2 + node))

    def forward(self, inputs: list[Tensor], weights: Tensor) -> Tensor:
        states = [pre(x) for pre, x in zip(self.pre, inputs, strict=True)]
        at = 0
        for _ in range(self.nodes):
            states.append(sum(self.edges[at + i](x, weights[at + i]) for i, x in enumerate(states)))
            at += len(states) - 1
        return torch.cat(states[2:], 1)


class PlainDarts(nn.Module):
    """The S8n network in plain modules."""

    def __init__(self, cells: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 3 * channels, 3, 1, 1, bias=False), nn.BatchNorm2d(3 * channels, track_running_stats=False)
        )
        widths = [3 * channels, 3 * channels, *[4 * channels] * cells]
        self.cells = nn.ModuleList(_PlainCell((widths[i], widths[i + 1]), channels) for i in range(cells))
        self.classifier = nn.Linear(4 * channels, 10, bias=False)

    def forward(self, x: Tensor, alpha: Tensor) -> Tensor:
        weights, inputs = torch.softmax(alpha, -1), [self.stem(x)] * 2
        for cell in self.cells:
            inputs = [inputs[1], cell(inputs, weights)]
        return self.classifier(inputs[1].mean((2, 3)))


def _like(plain: PlainDarts, search: CellSearch) -> None:
    """Copy the weights of the search into the plain network; both list them in the same order."""
    pairs = list(zip(plain.parameters(), search.net.parameters(), strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    with torch.no_grad():
        for mine, theirs in pairs:
            mine.copy_(theirs)


def _optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.025, momentum=0.9, weight_decay=3e-4)


def plain_step(
    model: nn.Module, alpha: Tensor, batches: list[tuple[Tensor, Tensor]], *, two_levels: bool, alpha_alone: bool
) -> Callable[[], dict[str, float]]:
    """Make the peer's step."""
    sgd, adam = _optimizer(model), torch.optim.Adam([alpha], lr=3e-4, betas=(0.5, 0.999), weight_decay=1e-3)
    weights = list(model.parameters())

    def step() -> None:
        if two_levels:
            loss = F.cross_entropy(model(batches[1][0], alpha), batches[1][1])
            adam.zero_grad()
            if alpha_alone:
                (alpha.grad,) = torch.autograd.grad(loss, alpha)
            else:
                loss.backward()
            adam.step()
        sgd.zero_grad()
        adam.zero_grad()
        F.cross_entropy(model(batches[0][0], alpha), batches[0][1]).backward()
        nn.utils.clip_grad_norm_(weights, 5.0)
        sgd.step()
        if not two_levels:
            adam.step()

    return _timed(step)


class _Same:
    """A held-out loader that always yields the same batch."""

    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def epoch(self, epoch: int, *, start: int = 0, device: torch.device | str = "cpu") -> Any:
        yield self._batch


def our_step(search: CellSearch, batches: list[tuple[Tensor, Tensor]]) -> Callable[[], dict[str, float]]:
    """Make the step of `nasfast.research.cells.search.search_cells`, with everything that it records."""
    sgd = _optimizer(search.net)
    weights = list(search.net.parameters())
    engine = CellSearchEngine(search, sgd, _Same(batches[1]) if search.cfg.bilevel else None)

    def step() -> None:
        search.done.zero_()  # writes the same record at every step
        engine.forward_backward(*batches[0])
        nn.utils.clip_grad_norm_(weights, 5.0)
        sgd.step()

    return _timed(step)


def _timed(step: Callable[[], None]) -> Callable[[], dict[str, float]]:
    def call() -> dict[str, float]:
        start, start_cpu = time.perf_counter(), time.process_time()
        step()
        return {"step": time.perf_counter() - start, "cpu": time.process_time() - start_cpu}

    return call


def difference(search: CellSearch, plain: PlainDarts, batch: tuple[Tensor, Tensor]) -> float:
    """Largest difference between the logits' gradients, relative to the largest gradient."""
    alpha = search.alpha[0].float().requires_grad_()
    (theirs,) = torch.autograd.grad(F.cross_entropy(plain(batch[0], alpha), batch[1]), alpha)
    draw = estimator_of(search.cfg).draw(search.logits, torch.Generator(), 0.0)
    gates = search.spread(draw.gates)
    (cost,) = torch.autograd.grad(F.cross_entropy(search.net(batch[0], gates, draw.runs), batch[1]), gates)
    mine = estimator_of(search.cfg).gradient(draw, search.collect(cost))[0]
    return float((mine - theirs).abs().max() / theirs.abs().max())


def step_row(args: argparse.Namespace, two_levels: bool) -> dict[str, Any]:
    """Measure the time of a step."""
    torch.manual_seed(0)
    space = darts_space(cells=args.cells, channels=args.channels, reductions=False)
    images = [torch.randn(args.batch, 3, 32, 32) for _ in range(2)]
    labels = [torch.randint(10, (args.batch,)) for _ in range(2)]
    cfg = CellSearchConfig(method="darts", bilevel=two_levels, records=1)
    ours = CellSearch(space, cfg, steps=10**6).to(memory_format=torch.channels_last)

    def batches(layout: torch.memory_format) -> list[tuple[Tensor, Tensor]]:
        return [(x.contiguous(memory_format=layout), y) for x, y in zip(images, labels, strict=True)]

    def peer(layout: torch.memory_format) -> PlainDarts:
        plain = PlainDarts(args.cells, args.channels)
        _like(plain, ours)
        return plain.to(memory_format=layout)

    def step(layout: torch.memory_format, *, alpha_alone: bool = False) -> Any:
        alpha = ours.alpha[0].float().clone().requires_grad_()
        return plain_step(peer(layout), alpha, batches(layout), two_levels=two_levels, alpha_alone=alpha_alone)

    nhwc = torch.channels_last
    apart = difference(ours, peer(nhwc), batches(nhwc)[0])
    variants = {
        "nasfast": our_step(ours, batches(nhwc)),
        "contiguous": step(torch.contiguous_format),
        "channels_last": step(nhwc),
    }
    if two_levels:
        variants["channels_last, logits alone"] = step(nhwc, alpha_alone=True)
    times = measure(variants, rounds=args.rounds, warmup=1)
    return {
        "name": "two levels" if two_levels else "one level",
        "cells": args.cells,
        "channels": args.channels,
        "batch": args.batch,
        "times": times,
        "difference": apart,
        "ratio": {phase: ratios(times, "nasfast", phase) for phase in ("step", "cpu")},
    }


_OPERATIONS = {
    2: ("sep_conv_3x3", "sep_conv_5x5"),
    4: ("sep_conv_3x3", "dil_conv_3x3", "dil_conv_5x5", "sep_conv_5x5"),
    8: DARTS_OPS,
}


def memory(args: argparse.Namespace, method: str, ops: tuple[str, ...]) -> int:
    """Bytes that a method keeps for backward if edges have these operations."""
    space = CellSpace(name="memory", cell=darts_cell(ops), cells=args.cells, channels=args.channels, resolution=32)
    net = CellSupernet(space).to(memory_format=torch.channels_last)
    logits = uniform_logits(space)
    # the same operation is sampled everywhere, so that only the number of operations differs
    logits[..., space.ops.index("sep_conv_5x5")] += 0 if method == "darts" else 100
    draw = Estimator(method).draw(logits, torch.Generator().manual_seed(0), 0.0)
    gates = draw.gates.expand(args.cells, -1, -1).float().requires_grad_()
    measured = torch.zeros_like(gates, requires_grad=False)
    x = torch.randn(args.batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)

    def forward(x: Tensor) -> Tensor:
        return net(x, gates, draw.runs, measures=draw.measures, measured=measured)

    return saved_bytes(forward, [x], exclude=net.parameters())


def kept(args: argparse.Namespace) -> dict[str, int]:
    """Bytes that the network of the step keeps for backward, in nasfast and in the peer."""
    space = darts_space(cells=args.cells, channels=args.channels, reductions=False)
    search = CellSearch(space, CellSearchConfig(method="darts", records=1), steps=1).to(
        memory_format=torch.channels_last
    )
    plain = PlainDarts(args.cells, args.channels).to(memory_format=torch.channels_last)
    draw = estimator_of(search.cfg).draw(search.logits, torch.Generator(), 0.0)
    gates, alpha = search.spread(draw.gates), search.alpha[0].float().requires_grad_()
    x = torch.randn(args.batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    return {
        "nasfast": saved_bytes(lambda x: search.net(x, gates, draw.runs), [x], exclude=search.net.parameters()),
        "channels_last": saved_bytes(lambda x: plain(x, alpha), [x], exclude=plain.parameters()),
    }


def show(row: dict[str, Any]) -> None:
    """Print a row of times."""
    sizes = f"{row['cells']} cells, {row['channels']} channels, batch {row['batch']}"
    print(f"{row['name']}, {sizes}; gradients differ by {row['difference']:.1e}")
    for variant, times in row["times"].items():
        parts = []
        for phase, name in (("step", "wall"), ("cpu", "CPU")):
            mine, theirs = (t[phase]["median_ms"] for t in (row["times"]["nasfast"], times))
            parts.append(f"{name} {theirs:8.0f} ms, nasfast / it {mine / theirs:.2f}")
        print(f"  {variant:28} {'   '.join(parts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--cells", type=positive, default=8)
    parser.add_argument("--channels", type=positive, default=16)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--quick", action="store_true", help="only show that everything runs")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.cells, args.channels, args.batch = 1, 1, 4, 8
    with measuring(args.threads):
        rows = []
        for two_levels in (False, True):
            rows.append(step_row(args, two_levels))
            show(rows[-1])
        rows.append({"name": "memory, step", "bytes": kept(args)})
        print("kept for backward:", ", ".join(f"{k} {b / 2**20:.0f} MiB" for k, b in rows[-1]["bytes"].items()))
        for method in ("darts", "dsnas", "proxyless"):
            found = {count: memory(args, method, ops) for count, ops in _OPERATIONS.items()}
            rows.append({"name": f"memory, {method}", "bytes_by_operations": found})
            text = ", ".join(f"{n}: {b / 2**20:.1f} MiB" for n, b in found.items())
            print(f"kept for backward, {method:10} operations: {text}", flush=True)
    if args.out:
        write_json(args.out, rows)
    else:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
