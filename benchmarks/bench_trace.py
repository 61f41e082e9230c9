"""Where NASI's Q comes from on NAS-Bench-201's space: Q of untrained networks by part, beside trained accuracies.

Every row is a random cell of the table, as an untrained network on one batch of augmented CIFAR-10 images: the squared
gradient of the mean cross entropy by the weights of each part of the network (their sum is Q), the same without
BatchNorm and with He's initialisation (the setting of the paper's theory, but for the scale of the weights), and the
exact mean of |grad f_label|^2 over eight images. Rows are appended to --out, and rows in the file are not computed
again. `--summary` prints Kendall's tau of each with the accuracies, and what each operation does to Q and to accuracy.

    python -m benchmarks.bench_trace --images cifar10/train --table nas_bench_201.json --cells 5 --channels 8
"""

import argparse
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cell_judge import JUDGE, text_of
from benchmarks.harness import positive, provenance
from nasfast.cells import nas_bench_201_space
from nasfast.data import DataConfig, FolderSource, make_loader
from nasfast.indicators.accuracies import read_accuracies
from nasfast.nasi.score import squared_norms, untrained

_EXACT = 8
"""Images whose labelled logits are differentiated one by one."""
_FLOOR = 1e-9
"""Added before a logarithm: no gradient reaches the cells of a network through which nothing passes."""


def squares(network: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """The squared gradient by the parameters of each part; `cells.3` is a part, and so is `transitions.3`."""
    names, parameters = zip(*network.named_parameters(), strict=True)
    gradients = torch.autograd.grad(F.cross_entropy(network(x), y), parameters, allow_unused=True)
    parts: dict[str, float] = defaultdict(float)
    for name, gradient in zip(names, gradients, strict=True):
        first, second, *_ = name.split(".")
        part = f"{first}.{second}" if first in ("cells", "transitions") else first
        parts[part] += 0.0 if gradient is None else float(gradient.double().square().sum())
    return {part: float(f"{value:.5g}") for part, value in parts.items()}


def without_norms(network: nn.Module, seed: int) -> nn.Module:
    """The network with identities for BatchNorms; weights keep the variance of what enters them (He, Gaussian)."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda _module, inputs, _output: inputs[0])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if p.ndim > 1:
                # no ReLU stands before these
                gain = 1.0 if any(part in name for part in ("stem", "beside", "classifier")) else 2.0
                p.copy_(torch.randn(p.shape, generator=generator) * math.sqrt(gain * len(p) / p.numel()))
            elif "classifier" in name:
                p.zero_()
    return network


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    space = nas_bench_201_space(cells=args.cells, channels=args.channels)
    truth = read_accuracies(args.table, space, column=JUDGE)
    archs = random.Random(args.seed).sample(sorted(truth), min(args.architectures, len(truth)))
    asked = [space.parse(text) for text in args.arch]
    loader = make_loader(
        DataConfig(train=args.images, batch_size=args.batch, workers=0),
        FolderSource(args.images),
        resolution=space.resolution,
        seed=args.seed,
    )
    x, y = next(iter(loader.epoch(0)))
    settings = {"cells": args.cells, "channels": args.channels, "batch": len(x), "seed": args.seed}
    done = {r["arch"] for r in rows(args.out) if all(r[k] == v for k, v in settings.items())}
    for arch in asked or archs:
        text = text_of(space, arch)
        if text in done:
            continue
        network = untrained(space, arch, seed=args.seed)
        row = {"arch": text, "accuracy": truth.get(arch), **settings, "q": squares(network, x, y)}
        if args.exact:
            labelled = network(x[:_EXACT]).gather(1, y[:_EXACT, None])[:, 0]
            row["trace_label"] = float(squared_norms(labelled, list(network.parameters())).mean())
        if asked:
            row["asked"] = True
        row["no_norm"] = squares(without_norms(network, args.seed), x, y)
        with args.out.open("a") as file:
            for form in [row] if args.out.stat().st_size else [provenance(), row]:
                file.write(json.dumps(form) + "\n")


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the file; its first line, the provenance, is left out."""
    forms = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [form for form in forms if "arch" in form]


def _part(key: str, prefix: str = "") -> Callable[[dict[str, Any]], float]:
    return lambda row: sum(value for name, value in row[key].items() if name.startswith(prefix))


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Markdown by size of the network: tau of each quantity, then the effects of operations."""
    lines: list[str] = []
    for size in dict.fromkeys((r["cells"], r["channels"], r["batch"]) for r in found):
        same = [r for r in found if (r["cells"], r["channels"], r["batch"]) == size]
        mine, asked = [r for r in same if "asked" not in r], [r for r in same if "asked" in r]
        lines += ["\n{} cells of {} channels, {} images, {} networks\n".format(*size, len(mine)), *_taus(mine)]
        lines += [*_effects(mine), ""]
        for row in asked:
            below = np.mean([_part("q")(other) <= _part("q")(row) for other in mine])
            lines.append(f"`{row['arch']}`: Q {_part('q')(row):.3g}, above {below:.0%} of the networks")
    return "\n".join(lines)


def _taus(found: Sequence[dict[str, Any]]) -> list[str]:
    accuracy = [r["accuracy"] for r in found]
    last = f"cells.{found[0]['cells'] - 1}"
    quantities: dict[str, Callable[[dict[str, Any]], float]] = {
        "Q": _part("q"),
        "of the cells": _part("q", "cells"),
        "of the first cell": _part("q", "cells.0"),
        "of the last cell": _part("q", last),
        "of the blocks between stages": _part("q", "transitions"),
        "of the classifier": _part("q", "classifier"),
        "Q without norms": _part("no_norm"),
    }
    if all("trace_label" in r for r in found):
        quantities["mean squared gradient of the labelled logit"] = lambda row: row["trace_label"]
    lines = ["| | tau | nearness of its logarithm to the median: tau | 10 %, median, 90 % |", "|---|---|---|---|"]
    for name, function in quantities.items():
        values = np.array([function(r) for r in found])
        logs = np.log(values + _FLOOR)
        tau, near = (kendalltau(v, accuracy).statistic for v in (values, -np.abs(logs - np.median(logs))))
        shown = ", ".join(f"{v:.3g}" for v in np.quantile(values, [0.1, 0.5, 0.9]))
        lines.append(f"| {name} | {tau:+.2f} | {near:+.2f} | {shown} |")
    return lines


def _effects(found: Sequence[dict[str, Any]]) -> list[str]:
    """Means over the cells with an operation minus those over all cells, on all edges and on the direct edge 0 to 3."""
    space = nas_bench_201_space()
    archs = np.array([space.parse(r["arch"]) for r in found])
    values = {
        "log10 Q": np.log10([_part("q")(r) + _FLOOR for r in found]),
        "log10 Q without norms": np.log10([_part("no_norm")(r) + _FLOOR for r in found]),
        "accuracy": np.array([r["accuracy"] for r in found]),
    }
    direct = next(i for i, edge in enumerate(space.cell.edges) if edge.name == "(0,3)")
    lines = ["", f"| effect on | {' | '.join(space.ops)} |", "|---" * (1 + len(space.ops)) + "|"]
    for name, value in values.items():
        each = np.full((archs.shape[1], len(space.ops)), np.nan)
        for e, k in np.ndindex(each.shape):
            if (archs[:, e] == k).any():
                each[e, k] = value[archs[:, e] == k].mean() - value.mean()
        for where, row in (("mean of the edges", np.nanmean(each, 0)), ("edge 0 to 3", each[direct])):
            lines.append(f"| {name}, {where} | {' | '.join(f'{v:+.2f}' for v in row)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="folder of CIFAR-10 training images, one sub-folder per class")
    parser.add_argument("--table", help="JSON of NAS-Bench-201")
    parser.add_argument("--cells", type=positive, default=15)
    parser.add_argument("--channels", type=positive, default=16)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--architectures", type=positive, default=120)
    parser.add_argument("--seed", type=int, default=100, help="for architectures, weights and images")
    parser.add_argument("--arch", nargs="*", default=[], help="these cells instead of random ones")
    parser.add_argument("--exact", action="store_true", help="also the gradients of labelled logits, one by one")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "trace_nas_bench_201.jsonl")
    parser.add_argument("--summary", action="store_true", help="only print the rows of --out as Markdown")
    args = parser.parse_args(argv)
    if args.summary:
        print(summary(rows(args.out)))
        return
    if None in (args.images, args.table):
        parser.error("give --images and --table, or --summary")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.touch()
    run(args)


if __name__ == "__main__":
    main()
