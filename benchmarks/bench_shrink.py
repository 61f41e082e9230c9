"""A pretrained network made smaller from a few hundred images without labels, beside others of the same cost.

    python -m benchmarks.bench_shrink FILE.py:FUNCTION --fit fit.pt --test test.pt [--sizes 224 176 160]
        [--shares .78 .55 .35] [--images 400] [--epochs 3] [--pruning FIT_LABELS] [--peers torch_pruning modelopt]
        [--out FILE]

FUNCTION gives the pretrained network. Both files are of torch.save: `fit` has images (N, 3, height, width) in uint8,
`test` such images and their labels (N,). At every share of the network's MACs it compares the exact program at each
size of the images, one width for all layers with the same least squares, and the network itself at each size;
`--epochs` then trains the best of the program, and the network at the largest size that costs no more, by the logits
and features of the network at its own size. `--pruning` is a file of the labels of `fit`, for those `--peers` that are
installed: torch-pruning prunes the network by magnitude and by Taylor's criterion, with one width for all layers and
with a global order; FastNAS of nvidia-modelopt searches widths by the accuracy on `fit` (it also needs `requests` and
`torchprofile==0.0.4`). `--epochs` trains them by the logits alone. `--first` adapts the network to each size before it
is measured there, as `nasfast shrink` does. Accuracies have Wilson's 95 % interval; differences to the network, on the
same images, have that of their standard error. Each row is written as it comes.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import positive, process_memory, write_json
from nasfast import search_table, shrink
from nasfast.indicators.table import IndicatorTable
from nasfast.runtime.memory import keep_freed_memory
from nasfast.search import InfeasibleConstraintError, Limits
from nasfast.supernet.macs import count_macs

BATCH = 25


def load(source: str) -> nn.Module:
    """The network of FILE.py:FUNCTION."""
    file, _, function = source.rpartition(":")
    spec = importlib.util.spec_from_file_location("network", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = getattr(module, function)()
    return model.eval().to(memory_format=torch.channels_last)


def prepared(images: Tensor, size: int, args: argparse.Namespace) -> Tensor:
    """uint8 images at a size, normalised."""
    x = images.float() / 255
    if x.shape[-1] != size:
        x = functional.interpolate(x, size=(size, size), mode="bicubic", antialias=True).clamp(0, 1)
    return ((x - args.mean) / args.std).contiguous(memory_format=torch.channels_last)


def outputs(model: nn.Module, images: Tensor, size: int, args: argparse.Namespace) -> Tensor:
    """(N, classes) logits of uint8 images."""
    model = model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        return torch.cat([model(prepared(part, size, args)) for part in images.split(BATCH)])


def views_of(images: Tensor, count: int) -> Tensor:
    """(views, N, 3, height, width) the images, these mirrored, and random parts of more than a third of their area."""
    generator, size = torch.Generator().manual_seed(0), images.shape[-1]
    views = [images, images.flip(-1)][:count]
    while len(views) < count:
        parts = []
        for image, share, flip in zip(images, *torch.rand(2, len(images), generator=generator), strict=True):
            side = round(size * math.sqrt(0.35 + 0.65 * float(share)))
            top, left = torch.randint(0, size - side + 1, (2,), generator=generator).tolist()
            part = image[:, top : top + side, left : left + side]
            part = part.flip(-1) if flip < 0.5 else part
            whole = functional.interpolate(part[None].float(), size=(size, size), mode="bicubic", antialias=True)
            parts.append(whole[0].round().clamp(0, 255).byte())
        views.append(torch.stack(parts))
    return torch.stack(views)


class Lesson:
    """Batches of images and, by `teacher`, tensors of the network at its own size; shuffled at each iteration.

    Args:
        images: (views, N, 3, height, width); an iteration has one view of each image, by chance.
        targets: tensors (views, N, ...).
    """

    def __init__(self, images: Tensor, targets: Sequence[Tensor], size: int, args: argparse.Namespace) -> None:
        self._images, self._targets, self._size, self._args = images, targets, size, args
        self._generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return -(-self._images.shape[1] // BATCH)

    def __iter__(self) -> Iterator[Tensor]:
        for chosen in torch.randperm(self._images.shape[1], generator=self._generator).split(BATCH):
            self._chosen = torch.randint(len(self._images), chosen.shape, generator=self._generator), chosen
            yield prepared(self._images[self._chosen], self._size, self._args)

    def teacher(self, _: Tensor) -> Any:
        """Logits, or a pair of logits and features."""
        given = tuple(tensor[self._chosen] for tensor in self._targets)
        return given if len(given) > 1 else given[0]


def pruned(
    model: nn.Module,
    share: float,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    taylor: bool,
    everywhere: bool,
    kept: Sequence[str],
) -> tuple[nn.Module, float]:
    """What torch-pruning makes of a network, and its share of the MACs.

    Args:
        batches: images and labels; the first image is the example, the gradients of all are Taylor's.
        taylor: whether channels are ordered by gradients instead of magnitudes.
        everywhere: whether one order of all layers says what goes, instead of one width for all.
        kept: patterns of the names of layers whose outputs keep their width.
    """
    pruning = importlib.import_module("torch_pruning")
    example = next(iter(batches))[0][:1]
    whole = pruning.utils.count_ops_and_params(model, example)[0]

    def at(ratio: float) -> tuple[nn.Module, float]:
        small = copy.deepcopy(model).requires_grad_(True)
        importance = pruning.importance.GroupTaylorImportance if taylor else pruning.importance.GroupMagnitudeImportance
        ignored = [m for name, m in small.named_modules() if any(fnmatch(name, pattern) for pattern in kept)]
        pruner = pruning.pruner.BasePruner(
            small, example, importance(), everywhere, ratio, ignored_layers=ignored, round_to=2, max_pruning_ratio=0.9
        )
        if taylor:
            for images, labels in batches:
                functional.cross_entropy(small(images), labels).backward()
        pruner.step()
        small.zero_grad()
        return small.eval(), pruning.utils.count_ops_and_params(small, example)[0] / whole

    low, high = 0.0, 0.95
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[1] > share else (low, middle)
    return at(high)


def fastnas(
    model: nn.Module, share: float, batches: Sequence[tuple[Tensor, Tensor]], *, multiple: int, checkpoint: Path
) -> nn.Module:
    """What FastNAS of nvidia-modelopt makes of a network within a share of its MACs.

    Args:
        batches: images and labels, by which widths are judged and the statistics of BatchNorms counted.
        multiple: widths are multiples of it.
        checkpoint: file of what each width costs, which serves all shares, and with which a stopped search goes on.
    """
    prune = importlib.import_module("modelopt.torch.prune")

    def accuracy(candidate: nn.Module) -> float:
        with torch.no_grad():
            right = [(candidate(images).argmax(1) == labels).float() for images, labels in batches]
        return 100 * float(torch.cat(right).mean())

    rules = prune.fastnas.FastNASConfig().model_dump()
    for kind, name in (("nn.Conv2d", "channel_divisor"), ("nn.BatchNorm2d", "feature_divisor")):
        rules[kind]["*"][name] = multiple
    small: nn.Module = prune.prune(
        copy.deepcopy(model).to(memory_format=torch.contiguous_format),  # it refuses channels_last
        mode=[("fastnas", rules)],
        constraints={"flops": f"{share:.0%}"},
        dummy_input=batches[0][0][:1],
        config={"score_func": accuracy, "data_loader": batches, "checkpoint": str(checkpoint), "verbose": False},
    )[0]
    return small.eval()


def count_statistics(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> nn.Module:
    """The network with the statistics of its BatchNorms counted again over some batches."""
    counted = copy.deepcopy(model)
    for module in counted.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches
    with torch.no_grad():
        for images, _ in batches:
            counted.train()(images)
    return counted.eval()


def greedy(table: IndicatorTable, found: shrink.Found, limit: float) -> float:
    """Loss of the architecture that a choice by loss per MAC reaches, one change after another."""
    arch, rows = list(found.full), table.scores
    while found.space.cost(arch).macs > limit:
        changes = []
        for i, (row, choice) in enumerate(zip(rows, found.space.choices, strict=True)):
            for value, score in row.items():
                saved = choice.branches[arch[i]].macs - choice.branches[value].macs
                if saved > 0:
                    changes.append(((row[arch[i]] - score) / saved, i, value))
        _, place, arch[place] = min(changes)
    return -table.score(arch)


class Bench:
    """The network, its images and the rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = load(args.network)
        self.fit: Tensor = torch.load(args.fit)
        self.test, self.labels = (t[: args.test_images] for t in torch.load(args.test))
        self.size = int(self.fit.shape[-1])
        self.rows: list[dict[str, Any]] = []
        self.scratch = tempfile.TemporaryDirectory()
        teacher = shrink.with_features(self.model)
        self.views = views_of(self.fit[: args.lesson], args.views)
        with torch.no_grad():
            pairs = [teacher(prepared(part, self.size, args)) for part in self.views.flatten(0, 1).split(BATCH)]
        self.logits, self.features = (torch.cat(x).unflatten(0, self.views.shape[:2]) for x in zip(*pairs, strict=True))
        self.right: Tensor | None = None
        self.macs = self.found(self.model, self.size).macs

    def found(self, model: nn.Module, size: int) -> shrink.Found:
        return shrink.find(model, prepared(self.fit[:1], size, self.args), multiple=self.args.multiple)

    def row(self, network: str, model: nn.Module, size: int, macs: int, **more: Any) -> None:
        """Measure a network's accuracy and write it."""
        right = outputs(model, self.test, size, self.args).argmax(1) == self.labels
        self.right = right if self.right is None else self.right
        low, high = stats.binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
        gained, lost = int((right & ~self.right).sum()), int((~right & self.right).sum())
        difference, count = (gained - lost) / len(right), len(right)
        error = 1.96 * math.sqrt(max(gained + lost - (gained - lost) ** 2 / count, 0.0)) / count
        accuracy = float(right.float().mean())
        row = {
            "network": network,
            "size": size,
            "macs": macs / self.macs,
            "accuracy": accuracy,
            "low": low,
            "high": high,
        }
        self.rows.append({**row, "difference": difference, "error": error, **more})
        if self.args.out:
            write_json(self.args.out, self.rows)
        print(
            f"{network:24} {size} px {macs / self.macs:.3f} of the MACs: {accuracy:.2%} [{low:.2%}, {high:.2%}], "
            f"difference {difference:+.2%} +- {error:.2%} {more or ''}",
            flush=True,
        )

    def timed(self, call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        """What a call returns; and its wall and processor seconds, and peak memory so far in GB."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        peak = process_memory("VmHWM") / 1e9
        return result, {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "peak_gb": peak}

    def measure(self, size: int) -> tuple[shrink.Measured, dict[str, float]]:
        few = slice(0, self.args.images)

        def call() -> shrink.Measured:
            images = prepared(self.fit[few], size, self.args)
            model = copy.deepcopy(self.model)
            if self.args.first and size != self.size:
                self.train(model, size, self.args.first)
            found = self.found(model, size)
            return shrink.measure(found, images, score_images=self.args.score_images, batch=16)

        return self.timed(call)

    def train(self, model: nn.Module, size: int, epochs: int, kept: Tensor | None = None) -> list[float]:
        """Adapt a network to a size, by the logits, and by the features that it keeps, where they are known."""
        targets = [self.logits] if kept is None else [self.logits, self.features[..., kept]]
        lesson = Lesson(self.views, targets, size, self.args)
        return shrink.adapt(model, lesson, teacher=lesson.teacher, features=kept is not None, epochs=epochs)

    def adapted(
        self,
        network: str,
        model: nn.Module,
        size: int,
        macs: int,
        *,
        kept: Tensor | None = None,
        before: int = 0,
        **more: Any,
    ) -> None:
        """A row after training by the logits, and by the features that the network keeps, where they are known.

        A network of which nothing was adapted before trains for as many epochs more.
        """
        model = copy.deepcopy(model)
        losses, seconds = self.timed(lambda: self.train(model, size, before + self.args.epochs, kept))
        self.row(f"{network}, adapted", model, size, macs, losses=losses, **seconds, **more)

    def run(self) -> None:
        shares: dict[int, float] = {}
        for size in sorted({self.size, *self.args.sizes, *self.args.resolutions}, reverse=True):
            macs = self.found(self.model, size).macs
            shares[size] = macs / self.macs
            self.row("the network", self.model, size, macs)
        measured = {}
        for size in self.args.sizes:
            measured[size], seconds = self.measure(size)
            print(f"measured at {size} px: {seconds}", flush=True)
        for share in self.args.shares:
            for size, m in measured.items():
                self.program(m, size, share)
            joint, seconds = self.joint(measured, share)
            size = joint.measured.found.space.resolution
            small, words = shrink.cut(joint.measured, joint.arch), joint.measured.found.space.words(joint.arch)
            losses = {"predicted": joint.predicted, "divergence": joint.divergence}
            self.row("joint program", small, size, joint.macs, share=share, arch=words, **losses, **seconds)
            if self.args.pruning:
                self.pruning(share)
            fits = [s for s, cost in shares.items() if cost <= share]
            if self.args.epochs:
                recipe = shrink.make_recipe(joint.measured, joint.arch)
                kept = None if self.args.logits else shrink.kept_features(self.model, recipe)
                before = self.args.first * (size == self.size)
                self.adapted("joint program", small, size, joint.macs, kept=kept, before=before, share=share)
                for s in fits[:1]:
                    kept = None if self.args.logits else shrink.kept_features(self.model, None)
                    macs = round(shares[s] * self.macs)
                    self.adapted("the network", self.model, s, macs, kept=kept, before=self.args.first, share=share)

    def pruning(self, share: float) -> None:
        """Rows of what other libraries reach: with the statistics that they leave, counted again, and adapted."""
        labels = torch.load(self.args.pruning)
        few = range(0, self.args.images, BATCH)
        images = [prepared(self.fit[i : i + BATCH], self.size, self.args) for i in few]
        batches = [(x, labels[i : i + BATCH]) for x, i in zip(images, few, strict=True)]
        ways = itertools.product((False, True), repeat=2) if "torch_pruning" in self.args.peers else ()
        for taylor, everywhere in ways:
            small, cost = pruned(self.model, share, batches, taylor=taylor, everywhere=everywhere, kept=self.args.kept)
            name = f"torch-pruning, {'Taylor' if taylor else 'magnitude'}, {'global' if everywhere else 'one width'}"
            macs = round(cost * self.macs)
            counted = count_statistics(small, batches).requires_grad_(False)
            self.row(name, small, self.size, macs, share=share)
            self.row(f"{name}, counted", counted, self.size, macs, share=share)
            if self.args.epochs:
                self.adapted(f"{name}, counted", counted, self.size, macs, before=self.args.first, share=share)
        if "modelopt" in self.args.peers:
            file = self.args.checkpoint or Path(self.scratch.name, "fastnas.pth")
            multiple = self.args.multiple
            small, seconds = self.timed(lambda: fastnas(self.model, share, batches, multiple=multiple, checkpoint=file))
            macs = count_macs(small, (images[0][:1],), {})[0]
            small = small.requires_grad_(False)
            self.row("FastNAS", small, self.size, macs, share=share, **seconds)
            if self.args.epochs:
                self.adapted("FastNAS", small, self.size, macs, before=self.args.first, share=share)

    def program(self, measured: shrink.Measured, size: int, share: float) -> None:
        """Rows of the best sum of a table, and at the network's own size of one width for all layers."""
        space = measured.found.space
        try:
            chosen = search_table(measured.table, space, max_macs=share * self.macs)[0]
        except InfeasibleConstraintError:
            return
        loss, words = -chosen.score, space.words(chosen.arch)
        other = greedy(measured.table, measured.found, share * self.macs)
        small = shrink.cut(measured, chosen.arch)
        self.row("exact program", small, size, chosen.macs, share=share, predicted=loss, greedy=other, arch=words)
        if size == self.size:
            arch = shrink.uniform_widths(measured.found, Limits(max_macs=share * self.macs))
            if arch is not None:
                self.row("one width", shrink.cut(measured, arch), size, space.cost(arch).macs, share=share)

    def joint(self, measured: dict[int, shrink.Measured], share: float) -> tuple[shrink.Shrunk, dict[str, float]]:
        """The network of all sizes that is nearest to the network, by images that nothing was fitted to."""
        held = slice(self.args.images, self.args.images + self.args.score_images)
        images = [prepared(self.fit[held], size, self.args) for size in measured]

        def call() -> shrink.Shrunk:
            tables = list(measured.values())
            limit = share * self.macs
            return shrink.search_measured(tables, images, self.logits[0, held], top_k=4, rounds=3, max_macs=limit)[0]

        return self.timed(call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", help="FILE.py:FUNCTION")
    parser.add_argument("--fit", type=Path, required=True, help="uint8 images without labels")
    parser.add_argument("--test", type=Path, required=True, help="uint8 images and labels")
    parser.add_argument("--test-images", type=positive, default=400, help="images of --test")
    parser.add_argument("--sizes", type=positive, nargs="*", default=[224, 176], help="sizes that are measured")
    parser.add_argument("--resolutions", type=positive, nargs="*", default=[160, 128], help="more sizes of the network")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.78, 0.55, 0.35], help="of the network's MACs")
    parser.add_argument("--images", type=positive, default=400, help="images of --fit that are measured with")
    parser.add_argument("--score-images", type=positive, default=64, help="of these, images of the scores")
    parser.add_argument("--lesson", type=positive, default=1000, help="images of --fit that networks are trained on")
    parser.add_argument("--epochs", type=int, default=0, help="of this training")
    parser.add_argument("--first", type=int, default=0, help="epochs of the network at each size before it is measured")
    parser.add_argument(
        "--views", type=positive, default=1, help="of each image in a training: mirrored, and parts of it"
    )
    parser.add_argument("--logits", action="store_true", help="trains by the logits alone")
    parser.add_argument("--pruning", type=Path, help="labels of --fit, for --peers")
    parser.add_argument("--peers", nargs="*", default=["torch_pruning"], choices=["torch_pruning", "modelopt"])
    parser.add_argument(
        "--checkpoint", type=Path, help="of FastNAS, to go on with a search of the same network and images; else none"
    )
    parser.add_argument(
        "--kept", nargs="*", default=["linear", "fc", "classifier"], help="layers that torch-pruning leaves wide"
    )
    parser.add_argument(
        "--multiple", type=positive, default=8, help="widths of the program and of FastNAS are multiples of it"
    )
    parser.add_argument("--mean", type=float, default=0.5, help="of the images' normalisation")
    parser.add_argument("--std", type=float, default=0.5, help="of the images' normalisation")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    args = parser.parse_args()
    keep_freed_memory()
    Bench(args).run()


if __name__ == "__main__":
    main()
