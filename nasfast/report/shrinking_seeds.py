"""report.html of `nasfast shrink --seeds N`: each network's mean and spread over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from nasfast.report.findings import Comparison, compare_runs
from nasfast.report.page import Section, escape, html_table, millions, write_page
from nasfast.report.run_files import RunFiles, config_section
from nasfast.report.seeds import missing_sentences
from nasfast.report.shrinking import ShrinkFiles
from nasfast.runtime.files import unseal
from nasfast.settings import FULL, SMALL, STABILITY_FILE


class ShrinkSeeds:
    """The finished seeds of a run, each with its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = unseal((folder / STABILITY_FILE).read_text(encoding="utf-8"))
        self.runs = [ShrinkFiles(folder / name) for name in self.record["done"]]

    @cached_property
    def networks(self) -> dict[str, list[ShrinkFiles]]:
        """Name of each network -> the seeds that have it."""
        names = dict.fromkeys(name for run in self.runs for name in run.networks)
        return {name: [run for run in self.runs if name in run.networks] for name in names}

    def results(self, name: str) -> list[dict[str, Any]]:
        """A network's results, one for each seed that has it."""
        return [run.networks[name] for run in self.networks[name]]

    def milliseconds(self, name: str) -> list[float]:
        """A network's medians, one for each seed that has it."""
        return [run.times[name]["median_ms"] for run in self.networks[name]]

    def difference(self, name: str) -> Comparison:
        """The top-1 of the result minus that of another network, in the seeds that have it."""
        runs = self.networks[name]
        return compare_runs([run.networks[SMALL] for run in runs], [run.networks[name] for run in runs])


def write_shrink_seeds_page(run_dir: str | Path) -> Path:
    """Write `report.html` from `stability.json` and the folders of the seeds."""
    seeds = ShrinkSeeds(Path(run_dir))
    sections: list[Section] = [
        ("summary", "Summary", partial(_summary, seeds)),
        ("networks", "At equal cost", partial(_networks, seeds)),
        ("seeds", "Seeds", partial(_seeds, seeds)),
        ("config", "Configuration", partial(config_section, RunFiles(seeds.folder))),
    ]
    return write_page(seeds.folder / "report.html", seeds.folder.resolve().name, "nasfast shrink --seeds", sections)


def shrink_sentences(run_dir: str | Path) -> list[str]:
    """The result over all seeds in a sentence, and what is missing."""
    return _sentences(ShrinkSeeds(Path(run_dir)))


def shrink_rows(run_dir: str | Path) -> list[list[str]]:
    """The table of all networks, its header first."""
    return _rows(ShrinkSeeds(Path(run_dir)))


def _sentences(seeds: ShrinkSeeds) -> list[str]:
    text = []
    if seeds.runs:
        d, ms = seeds.difference(FULL), {name: np.mean(seeds.milliseconds(name)) for name in (SMALL, FULL)}
        top1 = {name: _spread([100 * r["top1"] for r in seeds.results(name)]) for name in (SMALL, FULL)}
        over = "images" if len(seeds.runs) == 1 else "images and seeds"
        text.append(
            f"{ms[SMALL]:.2f} ms instead of {ms[FULL]:.2f}, at {d.gain:+.1f} points (95 % interval {d.low:+.1f} to "
            f"{d.high:+.1f}, over {over}): {top1[SMALL]} % instead of {top1[FULL]}, means of "
            f"{len(seeds.runs)} of {seeds.record['seeds']} seeds with standard deviations."
        )
    return text + missing_sentences(seeds.folder, seeds.record["missing"])


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    mean = f"{np.mean(values):.2f}"
    return f"{mean} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else mean


def _rows(seeds: ShrinkSeeds) -> list[list[str]]:
    rows = [["network", "seeds", "pixels", "MACs", "ms", "top-1 (%)", "the result is better by"]]
    for name, runs in seeds.networks.items():
        records, d = seeds.results(name), seeds.difference(name)
        rows.append(
            [
                " or ".join(dict.fromkeys(str(r["kind"]) for r in records)),
                str(len(runs)),
                ", ".join(map(str, sorted({r["size"] for r in records}, reverse=True))),
                millions(np.mean([r["macs"] for r in records])),
                _spread(seeds.milliseconds(name)),
                _spread([100 * r["top1"] for r in records]),
                "" if name == SMALL else f"{d.gain:+.1f} ({d.low:+.1f} to {d.high:+.1f})",
            ]
        )
    return rows


def _summary(seeds: ShrinkSeeds) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in _sentences(seeds))


def _networks(seeds: ShrinkSeeds) -> str:
    header, *rows = _rows(seeds)
    note = (
        "Means over the seeds with standard deviations. Every seed is a whole run, with its own order of images, "
        "random networks and views; the validation images are the same. Differences have intervals of 95 %, over the "
        "images, in pairs, and over the seeds."
    )
    return html_table(header, rows, text_columns=[0], note=note)


def _seeds(seeds: ShrinkSeeds) -> str:
    rows = []
    for number in range(seeds.record["seeds"]):
        name = f"seed-{number}"
        missing = seeds.record["missing"].get(name)
        rows.append([name, "done" if missing is None else f"{missing['status']} {missing['error']}"])
    note = "Each folder is a run directory with a page of its own, and files of its result in export/."
    return html_table(["seed", "state"], rows, text_columns=[0, 1], note=note)
