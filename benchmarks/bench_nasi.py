"""A sampling step of NASI: gradients from the sampled path against double backward through all candidates.

The peer is eager PyTorch, because torch.compile has no double backward. Both sample the same architectures.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness import in_new_process, medians, peak_growth, positive, ratios, timed, write_json
from benchmarks.straight_through import gradient_of_q
from nasfast.measure.timing import measure
from nasfast.research.nasi.search import NasiConfig, sample
from nasfast.research.nasi.spaces import make_mixture
from nasfast.research.studies.commands import NasiSearchConfig
from nasfast.research.studies.nasi_search import searched_space, synthetic

OURS = "nasfast"
PEERS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
# images per batch; the peer needs so much memory for DARTS cells that a small machine allows no more
BATCHES = {"nas_bench_201": 64, "nas_bench_macro": 16, "darts": 16, "mobilenet_v2": 8}
ROUNDS, QUICK_ROUNDS = 9, 2


def variants(space: str, batch: int) -> dict[str, Callable[[], dict[str, float]]]:
    """Name -> function for one step; the n-th step of every variant samples the same architecture."""
    named = searched_space(NasiSearchConfig(space=space))
    x, y = next(synthetic(named, batch=batch, seed=0).epoch(0))
    mixture = make_mixture(named)

    def ours(i: int) -> object:
        return sample(mixture, [(x.contiguous(memory_format=torch.channels_last), y)], NasiConfig(steps=1, seed=i))

    def peer(layout: torch.memory_format) -> Callable[[int], object]:
        images = x.contiguous(memory_format=layout)
        return lambda i: gradient_of_q(mixture, images, y, seed=i)

    def counted(step: Callable[[int], object]) -> Callable[[], dict[str, float]]:
        counter = itertools.count()
        return timed(lambda: step(next(counter)))

    return {OURS: counted(ours), **{name: counted(peer(layout)) for name, layout in PEERS.items()}}


def peak_mib(space: str, batch: int, name: str, threads: int) -> float:
    """Growth of this process in a second step, in MiB."""
    torch.set_num_threads(threads)
    step = variants(space, batch)[name]
    step()
    return peak_growth(step) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spaces", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    parser.add_argument("--threads", type=positive, help="CPU threads of PyTorch; default: all")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows, threads = [], torch.get_num_threads()
    for space in args.spaces:
        batch = BATCHES[space]
        times = measure(variants(space, batch), rounds=QUICK_ROUNDS if args.quick else ROUNDS, warmup=1)
        memory = {name: in_new_process(peak_mib, space, batch, name, threads) for name in (OURS, "channels_last")}
        row = {
            "space": space,
            "batch": batch,
            "threads": threads,
            "times": times,
            "speedup": ratios(times, OURS, "step"),
            "peak_mib": memory,
        }
        rows.append(row)
        shown = "  ".join(f"{name} {ms:.0f} ms" for name, ms in medians(times).items())
        grown = "  ".join(f"{name} {value:.0f} MiB" for name, value in memory.items())
        print(f"{space:16} batch {batch:3}  {shown}  best peer / ours {row['speedup']['best_peer']:.2f}  {grown}")
    if args.out:
        write_json(args.out, rows)


if __name__ == "__main__":
    main()
