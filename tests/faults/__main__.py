"""Injects faults into real runs of the command line, and compares the results with those of undisturbed runs.

    python -m tests.faults [--seed 0] [--scale 1.0] [--kinds KIND ...] [--jobs 2] [--work DIR] [--out FILE]

Every case copies the files of the earlier stages, disturbs one stage at a random moment, and checks that nothing that
was saved is lost. Then it does what a user would do: it runs the stage again, with --resume where the stage trains, and
compares every file with that of the undisturbed run. `--scale 0.1` injects a tenth of the faults. Small and read-only
file systems are mounts, which need privileges; without these the injector uses limits of file sizes and permissions
alone, and prints that it cannot mount. Disturbed runs are separate processes, except for a third of the killed ones:
these, and the runs that follow a fault, are forks of a process that has already imported torch, which saves seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import positive, write_json

from .plans import PLANS, Plan
from .suite import Outcome, Suite, rows_of, run_all, table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of faults; each kind has one")
    parser.add_argument("--kinds", nargs="+", help="only faults whose name in the table begins with one of these")
    parser.add_argument("--jobs", type=positive, default=2, help="cases at a time")
    parser.add_argument("--work", type=Path, help="keep all files in this new folder; default: a temporary one")
    parser.add_argument("--out", type=Path, help="also write the table and all problems as JSON")
    return parser


def _planned(suite: Suite, args: argparse.Namespace) -> list[tuple[Plan, str]]:
    """The cases in random order, each with its seed."""
    plans = [
        (plan, f"{args.seed} {plan.fault} {plan.recipe} {plan.stage} {number}")
        for plan in PLANS
        if suite.can(plan) and (not args.kinds or plan.fault.startswith(tuple(args.kinds)))
        for number in range(max(1, round(args.scale * plan.times)))
    ]
    print(f"{len(plans)} cases; mounts: {'yes' if suite.mounts else 'no'}; locales: {len(suite.locales)}")
    random.Random(args.seed).shuffle(plans)
    return plans


def main() -> int:
    args = _parser().parse_args()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        if args.work:
            args.work.mkdir(parents=True)
        suite = Suite(args.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nasfast-faults-"))))
        plans = _planned(suite, args)

        def tell(outcome: Outcome, count: int) -> None:
            state = (
                "equal" if outcome.equal and not outcome.lost else f"{outcome.lost} {outcome.unequal} {outcome.problem}"
            )
            print(f"{count}/{len(plans)}  {outcome.fault}  {outcome.stage}: {state}", file=sys.stderr, flush=True)

        rows = rows_of(run_all(suite, plans, jobs=args.jobs, tell=tell))
    print(table(rows))
    for row in rows:
        for problem in row["problems"]:
            print(f"\n{row['fault']}, {row['stage']}: {problem}")
    print(f"\n{time.monotonic() - started:.0f} s")
    if args.out:
        write_json(args.out, rows)
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
