"""What a launch takes under assumptions: the model's one estimate, and an interval around it. Imports nothing of ours.

`benchmarks/gpu.sh` fits some of the assumptions and writes constants.json, for an H200 at the edge of what it tries;
put as GPU: {...} into benchmarks/results/gpu_constants.json, they replace the assumption in every scenario.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

MEASURED = Path(__file__).parents[1] / "results" / "gpu_constants.json"
# graphs that the engine replays in a step of the 6^20 space, with a gap behind each
GRAPHS = 43


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Assumptions about one GPU.

    Attributes:
        ipc: share of the rate of instructions that a launch reaches.
        tensor: the same of the rate of products.
        clock, bandwidth: by what the model's clock and bandwidth are multiplied.
        latency: by what its latencies are multiplied.
        fixed: microseconds from the end of one empty launch to the end of the next.
        early: of these, what is saved if a launch may start before the one in front of it has ended.
        gap: microseconds between two graphs.
    """

    ipc: float
    tensor: float = 0.85
    clock: float
    bandwidth: float
    latency: float
    fixed: float
    early: float
    gap: float

    def microseconds(self, launch: Mapping[str, float]) -> float:
        """The time of a launch.

        Args:
            launch: microseconds at the model's clock and bandwidth. `work`: of the instructions, at one per cycle, on
                the busiest multiprocessor; `products`: of the tensor cores there; `memory`; `latency`: of a program
                alone, times the rounds of programs; `tail`: what the last program takes longer; `early_work` and
                `early_latency`: of these, what comes before it waits for the kernels in front, if it may start early.
                And `reach`: the share of the rate of instructions that the resident warps can reach; `may_start_early`.
        """
        hides = self.early > 0
        instructions = (launch["work"] - hides * launch["early_work"]) / min(self.ipc, launch["reach"])
        work = max(instructions, launch["products"] / self.tensor) / self.clock
        waits = self.latency * (launch["latency"] - hides * launch["early_latency"]) / self.clock
        fixed = self.fixed - self.early * launch["may_start_early"]
        tail = self.latency * launch["tail"] / self.clock
        return fixed + max(work, launch["memory"] / self.bandwidth, waits) + tail


# The clocks are relative to 1.755 GHz of an H200, which ran at 1.98 GHz after load, and to 1.71 GHz of an RTX 3080.
SCENARIOS: dict[str, dict[str, Scenario]] = {
    "H200": {
        "low": Scenario(ipc=0.70, clock=1.11, bandwidth=1.0, latency=1.0, fixed=3.3, early=1.2, gap=0.0),
        "central": Scenario(ipc=0.55, clock=1.08, bandwidth=0.9, latency=1.25, fixed=3.8, early=0.8, gap=0.7),
        "high": Scenario(ipc=0.45, clock=1.0, bandwidth=0.75, latency=1.5, fixed=3.8, early=0.3, gap=1.5),
    },
    "RTX 3080": {
        "low": Scenario(ipc=0.70, clock=1.08, bandwidth=0.95, latency=1.0, fixed=4.0, early=0.0, gap=0.0),
        "central": Scenario(ipc=0.55, clock=1.05, bandwidth=0.92, latency=1.25, fixed=4.6, early=0.0, gap=0.7),
        "high": Scenario(ipc=0.45, clock=1.0, bandwidth=0.82, latency=1.5, fixed=4.6, early=0.0, gap=1.5),
    },
}


def step_interval(gpu: str, launches: Iterable[Mapping[str, float]], others: float) -> dict[str, float]:
    """Microseconds of a step in every scenario; others: of the launches that are not in `launches`."""
    rows = list(launches)
    return {
        name: sum(scenario.microseconds(launch) for launch in rows) + GRAPHS * scenario.gap + others
        for name, scenario in scenarios(gpu).items()
    }


def scenarios(gpu: str) -> dict[str, Scenario]:
    """The scenarios of a GPU by name, with the constants that were measured on one."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8")).get(gpu, {}) if MEASURED.exists() else {}
    known = {name: value for name, value in measured.items() if name in Scenario.__dataclass_fields__}
    return {name: replace(scenario, **known) for name, scenario in SCENARIOS[gpu].items()}
