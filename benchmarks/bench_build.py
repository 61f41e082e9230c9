"""How long it takes to make the 6^20 supernet, with each initialisation of its weights.

"cpu" is the time of all threads, which another program on the same cores hardly changes.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import nasfast
from benchmarks.harness import positive, write_json
from nasfast.measure.timing import measure, measuring

ROUNDS, QUICK_ROUNDS = 15, 5
INITS = ("he", "orthogonal", "aligned")


def build(init: str) -> Callable[[], dict[str, float]]:
    """A variant for `measure`."""
    space = nasfast.spaces.mobilenet_v2()

    def run() -> dict[str, float]:
        cpu, start = time.process_time(), time.perf_counter()
        nasfast.Supernet(space, init=init)
        return {"full": time.perf_counter() - start, "cpu": time.process_time() - cpu}

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    parser.add_argument("--threads", type=positive, help="CPU threads; default: torch's choice")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    with measuring(args.threads or 0):
        times = measure({init: build(init) for init in INITS}, rounds=QUICK_ROUNDS if args.quick else ROUNDS)
        for init, found in times.items():
            print(f"{init:10} {found['full']['median_ms']:.0f} ms (CPU time {found['cpu']['median_ms']:.0f})")
        if args.out:
            write_json(args.out, [{"init": init, "times": found} for init, found in times.items()])


if __name__ == "__main__":
    main()
