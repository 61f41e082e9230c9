"""An hour of training steps with changing shapes: what it costs to keep the pages of freed memory.

    python -m benchmarks.bench_soak [--minutes 60] [--out FILE]

Three processes run beside one another, with one thread each: eager PyTorch as it is, eager PyTorch after
`nasfast.keep_freed_memory`, and `fuse` after it. Each step of torchvision's mobilenet_v2 (convolutions frozen, fp32)
has a random batch and size, the same in all. A row has one minute: CPU time (user and system) per million pixels of
the images, resident memory at the end of the minute, and the peak until then. `--draw SVG` draws the file of --out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import nasfast
from benchmarks.harness import positive, write_json
from benchmarks.steps import memory_of_process, train_batch_norms

VARIANTS = ("eager", "eager, pages kept", "fuse, pages kept")
BATCHES, SIZES, CLASSES = (2, 16), range(96, 225, 32), 1000


def soak(variant: str, minutes: int, queue: multiprocessing.Queue) -> None:
    """Run steps for this time, and put a row into the queue every minute; None at the end."""
    import torchvision

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if variant.endswith("kept"):
        nasfast.keep_freed_memory()
    network = train_batch_norms(torchvision.models.mobilenet_v2(dropout=0.0)).to(memory_format=torch.channels_last)
    if variant.startswith("fuse"):
        nasfast.fuse(network)
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.01)
    rng, costs, start = random.Random(0), [], time.monotonic()
    for minute in range(1, minutes + 1):
        while time.monotonic() < start + 60 * minute:
            shape = (rng.randint(*BATCHES), 3, *(rng.choice(SIZES),) * 2)
            images = torch.randn(shape).contiguous(memory_format=torch.channels_last)
            labels = torch.randint(CLASSES, shape[:1])
            before = time.process_time()
            loss = cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            costs.append((time.process_time() - before) / (images.numel() / 3e6))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        row = {"minute": minute, "steps": len(costs), "cpu_s_per_megapixel": statistics.median(costs)}
        queue.put({"variant": variant, **row, "resident": memory_of_process("VmRSS"), "peak": peak})
        costs.clear()
    queue.put(None)


def draw(rows: list[dict], path: Path) -> None:
    """Two panels over the minutes: CPU time of a million pixels, and resident memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for variant in VARIANTS:
        mine = [row for row in rows if row["variant"] == variant]
        minutes = [row["minute"] for row in mine]
        time_axes.plot(minutes, [row["cpu_s_per_megapixel"] for row in mine], label=variant)
        memory_axes.plot(minutes, [row["resident"] / 2**30 for row in mine], label=variant)
    for axes, label in ((time_axes, "CPU s of a step per million pixels"), (memory_axes, "resident memory, GiB")):
        axes.set(xlabel="minutes", ylabel=label, ylim=(0, None))
    time_axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=positive, default=60)
    parser.add_argument("--out", type=Path, default=Path("soak.json"), help="JSON file, written each minute")
    parser.add_argument("--draw", type=Path, metavar="SVG", help="draw the rows of --out, and run nothing")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.out.read_text())["rows"], args.draw)
        return
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue = context.Queue()
    for variant in VARIANTS:
        context.Process(target=soak, args=(variant, args.minutes, queue), daemon=True).start()
    rows, left = [], len(VARIANTS)
    while left:
        row = queue.get()
        if row is None:
            left -= 1
        else:
            rows.append(row)
            write_json(args.out, rows)


if __name__ == "__main__":
    main()
