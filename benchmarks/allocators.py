"""Runs `bench_steps` on the CPU with each allocator, and compares with the best peer under any of them.

    python -m benchmarks.allocators [--jemalloc FILE] [--out FILE] [options of bench_steps]

PyTorch takes memory from malloc and gives it back after every operator, so the allocator decides how long eager steps
wait for pages: a peer at its best has the best allocator. jemalloc takes part where --jemalloc names its library, such
as libjemalloc.so.2 of Debian's package libjemalloc2.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import medians, read_json, write_json

KEEPS = "keeps its pages"
ALLOCATORS = {
    "glibc": {},
    "glibc, huge pages": {"THP_MEM_ALLOC_ENABLE": "1"},
    f"glibc that {KEEPS}": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(2**28),
    },
}
JEMALLOC = f"jemalloc that {KEEPS}"


def environments(jemalloc: Path | None) -> dict[str, dict[str, str]]:
    """The variables of each allocator, by its name."""
    if jemalloc is None:
        return ALLOCATORS
    conf = "background_thread:true,dirty_decay_ms:-1,muzzy_decay_ms:-1"
    return {**ALLOCATORS, JEMALLOC: {"LD_PRELOAD": str(jemalloc.resolve()), "MALLOC_CONF": conf}}


def run(options: list[str], variables: dict[str, str]) -> list[dict]:
    """The rows of `bench_steps`, run in a process with these variables."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.bench_steps", *options, "--out", str(out)]
        subprocess.run(command, env={**os.environ, **variables}, check=True)
        return read_json(out)


def table(rows: list[dict], workload: str, dtype: str) -> list[str]:
    """Each allocator's step of ours and of its best peer, and the best of all."""
    lines, ours, peers = [], {}, {}
    for row in (row for row in rows if row["workload"] == workload):
        times = medians({name: variant["times"] for name, variant in row["variants"].items() if name.endswith(dtype)})
        own = [ms for name, ms in times.items() if name.startswith("nasfast")]
        peer = min((name for name in times if not name.startswith("nasfast")), key=times.get, default=None)
        if not own or peer is None:
            continue
        ours[row["allocator"]], peers[f"{peer}, {row['allocator']}"] = ms, peer_ms = min(own), times[peer]
        lines.append(f"| {row['allocator']} | {ms:.0f} | {peer_ms:.0f} ({peer}) | {ms / peer_ms:.2f} |")
    if not lines:
        return []
    best, peer = min(ours, key=ours.get), min(peers, key=peers.get)
    lines.append(
        f"| **best** | {ours[best]:.0f} ({best}) | {peers[peer]:.0f} ({peer}) | **{ours[best] / peers[peer]:.2f}** |"
    )
    return [
        f"\n{workload}, {dtype}\n",
        "| allocator | nasfast ms | best peer ms | ratio |",
        "|---|---|---|---|",
        *lines,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jemalloc", type=Path, help="library of jemalloc, to be preloaded")
    parser.add_argument("--out", type=Path, help="JSON file for the rows, written after every allocator")
    args, options = parser.parse_known_args()
    if args.jemalloc and not args.jemalloc.exists():
        parser.error(f"--jemalloc: there is no file {args.jemalloc}")
    rows: list[dict] = []
    for name, variables in environments(args.jemalloc).items():
        print(f"\n# {name}", flush=True)
        measured = [{"allocator": name, **row} for row in run(options, variables)]
        if name == JEMALLOC:  # it keeps what malloc_trim of glibc would give back, so resident memory says nothing
            for variant in (variant for row in measured for variant in row["variants"].values()):
                del variant["memory"]["kept"], variant["memory"]["peak"]
        rows += measured
        if args.out:
            write_json(args.out, rows)
    for workload in dict.fromkeys(row["workload"] for row in rows):
        for dtype in ("fp32", "bf16"):
            print("\n".join(table(rows, workload, dtype)))


if __name__ == "__main__":
    main()
