"""Images per second of every loader against a plain torchvision DataLoader, and the cost of loading in training.

The program makes photographs of 500 x 375 pixels: 1/f noise with edges, as JPEG of quality 90, about as large as an
ImageNet file. `--cifar` names a folder of images of CIFAR size. A loader is timed for a whole epoch of normalised fp32
batches.

    python -m benchmarks.bench_loader --cifar images/cifar10/train --out benchmarks/results/loader.json
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

import nasfast
from benchmarks.harness import positive, write_json
from nasfast.data import DataConfig, FolderSource, Loader, dali, make_loader
from nasfast.train import TrainConfig

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WIDTH, HEIGHT, QUALITY = 500, 375, 90
LOADERS = ("torchvision", "dali", "cache")
PEER = "DataLoader"


def make_photographs(folder: Path, count: int) -> Path:
    """Write `folder/{0,1}/NUMBER.jpg`: colour fields with the 1/f spectrum of photographs, and straight edges."""
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None])
    frequency[0, 0] = 1
    for number in range(count):
        fields = np.fft.irfft2(
            np.fft.rfft2(rng.standard_normal((4, HEIGHT, WIDTH))) / frequency**1.1, s=(HEIGHT, WIDTH)
        )
        fields /= fields.std(axis=(1, 2), keepdims=True)
        image = 118 + 52 * fields[0, ..., None] + 14 * fields[1:].transpose(1, 2, 0)
        for _ in range(12):
            top, left = rng.integers(HEIGHT), rng.integers(WIDTH)
            image[top : top + rng.integers(150), left : left + rng.integers(200)] += rng.normal(0, 25, 3)
        path = folder / str(number % 2) / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
    return folder


# ---- the peer


def _tensor(path: str) -> Tensor:
    return decode_image(path, ImageReadMode.RGB)


def plain(folder: Path, resolution: int, batch: int, workers: int, *, pil: bool) -> DataLoader:
    """The loader of torchvision's references: ImageFolder, v2 transforms, DataLoader; PIL images or uint8 tensors."""
    if resolution > 64:
        steps = [v2.RandomResizedCrop(resolution, antialias=True), v2.RandomHorizontalFlip()]
    else:
        steps = [v2.RandomCrop(resolution, padding=4), v2.RandomHorizontalFlip()]
    images = [v2.PILToTensor()] if pil else []
    transform = v2.Compose([*steps, *images, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    data = ImageFolder(folder, transform) if pil else ImageFolder(folder, transform, loader=_tensor)
    return DataLoader(data, batch, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0)


def ours(folder: Path, kind: str, resolution: int, batch: int, workers: int, cache: Path) -> Loader:
    cfg = DataConfig(loader=kind, workers=workers, batch_size=batch, cache_dir=str(cache))
    return make_loader(cfg, FolderSource(folder), resolution=resolution)


def loaders(folder: Path, resolution: int) -> list[str]:
    """The loaders that run on this machine; the cache keeps no photographs."""
    refused = dali.refusal(FolderSource(folder))
    if refused:
        print(f"dali is left out: {refused}", flush=True)
    left_out = {"dali"} if refused else set()
    return [kind for kind in LOADERS if kind not in left_out | ({"cache"} if resolution > 64 else set())]


def rate(batches: Iterator[tuple[Tensor, Tensor]], clock: Callable[[], float]) -> float:
    """Images per second of an epoch, with its start-up."""
    start, images = clock(), 0
    for x, _ in batches:
        images += len(x)
    return images / (clock() - start)


def loader_rows(
    folder: Path, work: str, resolution: int, batch: int, cache: Path, cores: list[int], rounds: int
) -> list:
    """Measure images per second of every loader on these cores, interleaved.

    On one core this process decodes everything and its CPU time counts, over all its threads, so other programs do not
    disturb the figure. On several cores worker processes decode, so wall time counts.
    """
    clock = time.process_time if len(cores) == 1 else time.perf_counter
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    choices = [0] if len(cores) == 1 else [len(cores) - 1, len(cores), len(cores) + 1]
    variants: dict[str, Callable[[int], Iterator]] = {}
    for workers in choices:
        for pil in (True, False):
            form = "PIL" if pil else "tensors"
            peer = plain(folder, resolution, batch, workers, pil=pil)
            variants[f"{PEER}, {form}, {workers} workers"] = lambda epoch, peer=peer: iter(peer)
        for kind in loaders(folder, resolution):
            made = ours(folder, kind, resolution, batch, max(workers, 1) if kind != "torchvision" else workers, cache)
            variants[f"{kind}, {workers} workers"] = lambda epoch, made=made: made.epoch(epoch)
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for epoch in range(rounds + 1):
        for name, variant in variants.items():
            found = rate(variant(epoch), clock)
            if epoch:  # the first epoch fills the caches of files and modules
                rates[name].append(found)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    best_peer = max(value for name, value in medians.items() if name.startswith(PEER))
    rows = []
    for name, value in medians.items():
        rows.append(
            {
                "work": work,
                "cores": len(cores),
                "loader": name,
                "images_per_s": value,
                "images_per_s_per_core": value / len(cores),
                "ratio_to_best_peer": value / best_peer,
                "quartiles": np.quantile(rates[name], (0.25, 0.75)).tolist(),
            }
        )
        print(f"{work:28} {len(cores)} cores  {name:32} {value:9.0f} images/s  x{value / best_peer:.2f}", flush=True)
    return rows


# ---- the cost in a training run


class _Timed:
    """The next `steps` batches as one epoch; measures the time from the delivery of the first to that of the last."""

    def __init__(self, batches: Iterator[tuple[Tensor, Tensor]], steps: int, synchronize: Callable[[], None]) -> None:
        self._batches, self._steps, self._synchronize = batches, steps, synchronize
        self.seconds = self.waited = 0.0

    def __len__(self) -> int:
        return self._steps

    def epoch(self, epoch: int, *, start: int = 0, device: str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
        batch = next(self._batches)  # the start-up is not part of a step
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(self._steps - 1):
            yield batch
            asked = time.perf_counter()
            batch = next(self._batches)
            self.waited += time.perf_counter() - asked
        self._synchronize()
        self.seconds = time.perf_counter() - begin
        yield batch


def run_rows(
    folder: Path, work: str, space: str, batch: int, bf16: bool, cache: Path, steps: int, rounds: int, device: str
) -> list[dict]:
    """Measure time per step of supernet training with every loader, and with a batch in memory; interleaved."""
    os.sched_setaffinity(0, range(os.cpu_count()))
    torch.set_num_threads(os.cpu_count())
    shape = nasfast.spaces.get_space(space)
    threads = 1 if device == "cpu" else max(1, os.cpu_count() - 1)
    makers = {
        kind: ours(folder, kind, shape.resolution, batch, threads, cache) for kind in loaders(folder, shape.resolution)
    }
    ready = next(makers["torchvision"].epoch(0, device=device))
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None

    def endless(batches: Loader) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            yield from batches.epoch(epoch, device=device)
            epoch += 1

    sources: dict[str, Callable[[], Iterator]] = {"in memory": lambda: iter(lambda: ready, None)}
    sources |= {kind: lambda made=made: endless(made) for kind, made in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in sources}
    waits: dict[str, list[float]] = {name: [] for name in sources}
    cfg = TrainConfig(epochs=1, precision="bf16" if bf16 else "fp32", log_every=steps)
    for number in range(rounds + 1):
        for name, source in sources.items():
            net = nasfast.Supernet(shape, init="he", layer_indicators=True)
            net.freeze()
            batches = source()
            timed = _Timed(batches, steps, synchronize)
            with tempfile.TemporaryDirectory() as run_dir:
                sampler = nasfast.spaces.FairSampler(shape, seed=0)
                nasfast.train_supernet(net, timed, sampler, cfg, run_dir=run_dir, device=device)
            if number:
                times[name].append(timed.seconds / (steps - 1))
                waits[name].append(timed.waited / (steps - 1))
    base = statistics.median(times["in memory"])
    rows = []
    for name, found in times.items():
        median = statistics.median(found)
        row = {
            "work": work,
            "device": device,
            "space": space,
            "batch": batch,
            "precision": cfg.precision,
            "loader": name,
            "ms_per_step": 1e3 * median,
            "overhead": median / base - 1,
            "wait_ms_per_step": 1e3 * statistics.median(waits[name]),
            "rounds": found,
        }
        rows.append(row)
        print(
            f"{work:28} {cfg.precision}  {name:12} {1e3 * median:8.1f} ms per step, {row['overhead']:+.1%}, "
            f"waiting {row['wait_ms_per_step']:.1f} ms",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, help="folder of CLASS/IMAGE of CIFAR size; without it only photographs")
    parser.add_argument("--photographs", type=positive, default=400, help="number of photographs to make")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=16, help="steps of a training run; the first is not timed")
    parser.add_argument("--device", default="cpu", help="device of the training runs")
    parser.add_argument("--only", choices=("loaders", "runs"), help="measure only these")
    parser.add_argument("--one-core", action="store_true", help="measure loaders on one core only")
    parser.add_argument("--quick", action="store_true", help="few images and rounds, to show that everything runs")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    if args.quick:
        args.photographs, args.rounds, args.steps = 72, 1, 3
    scratch = Path(tempfile.mkdtemp(prefix="bench_loader"))
    rows = []
    try:
        photographs = make_photographs(scratch / "photographs", args.photographs)
        bytes_each = sum(path.stat().st_size for path in photographs.glob("*/*")) / args.photographs
        print(f"{args.photographs} photographs of {WIDTH} x {HEIGHT}, {bytes_each / 1e3:.0f} kB each", flush=True)
        works = [(photographs, "500x375 JPEG -> 224", 224, 32, [("mobilenet_v2", False), ("mobilenet_v2", True)])]
        if args.cifar is not None:
            works.append((args.cifar, "CIFAR 32x32 JPEG", 32, 128, [("nas_bench_macro", False)]))
        for folder, work, resolution, batch, spaces in works:
            if args.only != "runs":
                for cores in ([0], list(range(os.cpu_count())))[: 1 if args.one_core else 2]:
                    rows += loader_rows(folder, work, resolution, batch, scratch / "cache", cores, args.rounds)
            if args.only != "loaders":
                for space, bf16 in spaces:
                    rows += run_rows(
                        folder, work, space, batch, bf16, scratch / "cache", args.steps, args.rounds, args.device
                    )
    finally:
        shutil.rmtree(scratch)
    if args.out is not None:
        write_json(args.out, rows)
        print(f"written: {args.out}")


if __name__ == "__main__":
    main()
