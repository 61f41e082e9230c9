"""Runs all planned cases and makes the table of their outcomes."""

from __future__ import annotations

import os
import queue
import shutil
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .case import Case, ExpectationError, NotInjectedError
from .injections import disk_full, killed, no_room, read_only
from .plans import PLANS, Plan
from .processes import ForkServer
from .runs import RECIPES, Reference, make_inputs
from .surroundings import can_mount, usable_locales


@dataclass
class Outcome:
    """What came of one case; `problem` is an expectation that the run did not meet."""

    fault: str
    recipe: str
    stage: str
    seed: str
    injected: int = 0
    lost: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def equal(self) -> bool:
        return not (self.unequal or self.problem)

    @property
    def problems(self) -> list[str]:
        return [*self.lost, *self.unequal, *filter(None, [self.problem])]


class Suite:
    """The undisturbed runs, each made when it is first needed, and the cases that are compared with them.

    Args:
        work: an empty folder.

    Attributes:
        mounts: whether this user may mount file systems.
        locales: environments with different locales.
    """

    _TRIES = 6

    def __init__(self, work: Path) -> None:
        self.work = work
        self.mounts, self.locales = can_mount(work), usable_locales(work)
        make_inputs(work)
        self._references: dict[str, Reference] = {}

    def reference(self, recipe: str, stage: str, server: ForkServer) -> Reference:
        """The undisturbed run, complete up to a stage."""
        if recipe not in self._references:
            base = RECIPES[recipe].base
            self._references[recipe] = Reference(
                recipe, self.work, None if base is None else self.reference(base, RECIPES[base].stages[0], server)
            )
        self._references[recipe].make(stage, server.start)
        return self._references[recipe]

    def can(self, plan: Plan) -> bool:
        """Whether this machine and user allow the fault."""
        if plan.inject is read_only:  # permissions do not stop root
            return self.mounts or os.geteuid() != 0
        return self.mounts or plan.inject not in (disk_full, no_room)

    def run(self, plan: Plan, seed: str, server: ForkServer, *, forked: bool) -> Outcome:
        """Carry out one case, and try again when its fault comes too late."""
        for attempt in range(self._TRIES):
            outcome = Outcome(plan.fault, plan.recipe, plan.stage, seed)
            case = Case(self, plan.recipe, plan.stage, seed, server, attempt=attempt, forked=forked)
            late = False
            try:
                plan.inject(case)
            except NotInjectedError:
                late = True
            except Exception as error:  # noqa: BLE001  even an error of the suite must not stop the other cases
                known = isinstance(error, (ExpectationError, TimeoutError))
                outcome.problem = str(error) if known else traceback.format_exc()
            finally:
                case.end()
            outcome.injected, outcome.lost, outcome.unequal = case.injected, case.lost, case.unequal
            if late or not outcome.problems:
                shutil.rmtree(case.folder)
            if not late:
                return outcome
        outcome = Outcome(plan.fault, plan.recipe, plan.stage, seed)
        outcome.problem = f"the fault came too late {self._TRIES} times"
        return outcome


def run_all(
    suite: Suite, plans: list[tuple[Plan, str]], *, jobs: int, tell: Callable[[Outcome, int], None]
) -> list[Outcome]:
    """Carry out all cases, `jobs` at a time; calls `tell` with each outcome and the number of cases done."""
    servers: queue.Queue[ForkServer] = queue.Queue()
    for number in range(jobs):
        servers.put(ForkServer(suite.work / f"server {number}.log"))
    done: list[Outcome] = []

    def carry_out(place: int) -> None:
        plan, seed = plans[place]
        server = servers.get()
        try:
            done.append(suite.run(plan, seed, server, forked=plan.inject is killed and place % 3 == 0))
        finally:
            servers.put(server)
        tell(done[-1], len(done))

    try:
        server = servers.get()
        for recipe, stage in dict.fromkeys((plan.recipe, plan.stage) for plan, _ in plans):
            suite.reference(recipe, stage, server)
        servers.put(server)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(carry_out, range(len(plans))))
    finally:
        while not servers.empty():
            servers.get().close()
    return done


def rows_of(outcomes: list[Outcome]) -> list[dict]:
    """Rows of the table: fault, stage, number of injections, losses, and how many final results are equal."""
    rows: dict[tuple[str, str], dict] = {}
    for outcome in outcomes:
        stage = f"{outcome.stage}, {outcome.recipe}" if outcome.recipe != "exact" else outcome.stage
        row = rows.setdefault(
            (outcome.fault, stage),
            {"fault": outcome.fault, "stage": stage, "injected": 0, "lost": 0, "cases": 0, "equal": 0, "problems": []},
        )
        row["injected"] += outcome.injected
        row["lost"] += len(outcome.lost)
        row["cases"] += 1
        row["equal"] += outcome.equal
        row["problems"] += [f"{outcome.seed}: {text}" for text in outcome.problems]
    order = list(dict.fromkeys(plan.fault for plan in PLANS))
    return sorted(rows.values(), key=lambda row: order.index(row["fault"]))


def table(rows: list[dict]) -> str:
    """The rows and their sums as text."""
    total = {key: sum(row[key] for row in rows) for key in ("injected", "lost", "cases", "equal")}
    lines = [f"{'fault':32} {'stage':22} {'injected':>8} {'lost':>5} {'final result equal':>19}"]
    for row in [*rows, {"fault": "all", "stage": "", **total}]:
        equal = f"{row['equal']} of {row['cases']}"
        lines.append(f"{row['fault']:32} {row['stage']:22} {row['injected']:>8} {row['lost']:>5} {equal:>19}")
    return "\n".join(lines)
