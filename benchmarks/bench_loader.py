"""Images per second of every loader against a plain torchvision DataLoader.

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
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from benchmarks.harness import positive, write_json
from nasfast.data import DataConfig, FolderSource, Loader, dali, make_loader

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WIDTH, HEIGHT, QUALITY = 500, 375, 90
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


def peer_loader(folder: Path, resolution: int, batch: int, workers: int, *, pil: bool) -> DataLoader:
    """The loader of torchvision's references: ImageFolder, v2 transforms, DataLoader; PIL images or uint8 tensors."""
    if resolution > 64:
        steps = [v2.RandomResizedCrop(resolution, antialias=True), v2.RandomHorizontalFlip()]
    else:
        steps = [v2.RandomCrop(resolution, padding=4), v2.RandomHorizontalFlip()]
    images = [v2.PILToTensor()] if pil else []
    transform = v2.Compose([*steps, *images, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    data = (
        ImageFolder(folder, transform)
        if pil
        else ImageFolder(folder, transform, loader=partial(decode_image, mode=ImageReadMode.RGB))
    )
    return DataLoader(data, batch, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0)


def our_loader(folder: Path, kind: str, resolution: int, batch: int, workers: int, cache: Path) -> Loader:
    cfg = DataConfig(loader=kind, workers=workers, batch_size=batch, cache_dir=str(cache))
    return make_loader(cfg, FolderSource(folder), resolution=resolution)


def loaders(folder: Path, resolution: int) -> list[str]:
    """The loaders that run on this machine; the cache keeps no photographs."""
    kinds = ["torchvision", "dali"] if resolution > 64 else ["torchvision", "dali", "cache"]
    if refusal := dali.refusal(FolderSource(folder)):
        print(f"dali is left out: {refusal}", flush=True)
        kinds.remove("dali")
    return kinds


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
            images = "PIL" if pil else "tensors"
            peer = peer_loader(folder, resolution, batch, workers, pil=pil)
            variants[f"{PEER}, {images}, {workers} workers"] = lambda epoch, peer=peer: iter(peer)
        for kind in loaders(folder, resolution):
            threads = workers if kind == "torchvision" else max(workers, 1)
            loader = our_loader(folder, kind, resolution, batch, threads, cache)
            variants[f"{kind}, {workers} workers"] = lambda epoch, loader=loader: loader.epoch(epoch)
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for epoch in range(rounds + 1):
        for name, variant in variants.items():
            images_per_s = rate(variant(epoch), clock)
            if epoch:  # the first epoch fills the caches of files and modules
                rates[name].append(images_per_s)
    medians = {name: statistics.median(epochs) for name, epochs in rates.items()}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, help="folder of CLASS/IMAGE of CIFAR size; without it only photographs")
    parser.add_argument("--photographs", type=positive, default=400, help="number of photographs to make")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--one-core", action="store_true", help="measure loaders on one core only")
    parser.add_argument("--quick", action="store_true", help="few images and rounds, to show that everything runs")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    if args.cifar is not None and not args.cifar.is_dir():
        parser.error(f"--cifar {args.cifar} is no folder; give one with a folder of images per class")
    if args.quick:
        args.photographs, args.rounds = 72, 1
    scratch = Path(tempfile.mkdtemp(prefix="bench_loader"))
    rows = []
    try:
        photographs = make_photographs(scratch / "photographs", args.photographs)
        bytes_each = sum(path.stat().st_size for path in photographs.glob("*/*")) / args.photographs
        print(f"{args.photographs} photographs of {WIDTH} x {HEIGHT}, {bytes_each / 1e3:.0f} kB each", flush=True)
        works = [(photographs, "500x375 JPEG -> 224", 224, 32)]
        if args.cifar is not None:
            works.append((args.cifar, "CIFAR 32x32 JPEG", 32, 128))
        for folder, work, resolution, batch in works:
            for cores in ([0], list(range(os.cpu_count())))[: 1 if args.one_core else 2]:
                rows += loader_rows(folder, work, resolution, batch, scratch / "cache", cores, args.rounds)
    finally:
        shutil.rmtree(scratch)
    if args.out is not None:
        write_json(args.out, rows)
        print(f"written: {args.out}")


if __name__ == "__main__":
    main()
