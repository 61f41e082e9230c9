"""report.html of `nasfast run --seeds N`: is the ranking stable, what would help, and what is the answer worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nasfast.indicators.table import TABLE_FILE
from nasfast.pipeline.agreement import GOAL, STABLE_TAU
from nasfast.report.evidence import Comparison, at_chance, compare_runs, is_peer, training_top1
from nasfast.report.page import cards_of, escape, folded, interval_of, page_of, table_of
from nasfast.runtime.files import read_metrics, unseal, write_atomic
from nasfast.settings import CONFIG_FILE, STABILITY_FILE
from nasfast.spaces import format_arch

_MANY_SEEDS = 20
"""More seeds than this are no advice: what they would average away has to become smaller."""

_POOR_FIT = 0.8
"""A table whose cross-validated tau with the scores of the paths is below this loses much of what the paths say."""

_BASELINE_COST = "at most 1 % more MACs, perhaps fewer"
"""MACs of the structural baseline beside those of the answer (`nasfast.pipeline.seeds.rivals`)."""


def write_stability_page(run_dir: str | Path) -> Path:
    """Write `report.html` from `stability.json` and the folders of the seeds."""
    folder = Path(run_dir)
    form = unseal((folder / STABILITY_FILE).read_text(encoding="utf-8"))
    config = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    sections = [("summary", "Summary", _summary(folder, form))]
    if form["agreement"] is not None:
        sections += [
            ("agreement", "Agreement between seeds", _agreement(form["agreement"])),
            ("top", "Best architectures of all seeds", _top(form["agreement"])),
            ("networks", "Retrained", _networks(form["networks"])),
        ]
    sections += [
        ("seeds", "Seeds", _seeds(folder, form)),
        ("config", "Configuration", folded("all settings", f"<pre>{escape(config)}</pre>")),
    ]
    page = page_of(folder.resolve().name, "nasfast run --seeds", sections)
    path = folder / "report.html"
    write_atomic(path, page.encode(errors="replace"))
    return path


def sentences(run_dir: str | Path) -> list[str]:
    """The findings in words: stable or not and what would help, the comparisons, and what is missing."""
    folder = Path(run_dir)
    form = unseal((folder / STABILITY_FILE).read_text(encoding="utf-8"))
    found = form["agreement"]
    text = []
    if found is not None:
        text.append(_verdict(found))
        text += [] if found["stable"] else _advice(folder, form)
        text += [_compared(name, comparison) for name, comparison in comparisons(form["networks"]).items()]
        if form.get("no_structure"):
            text.append(
                "There is no structural baseline to compare with: the answer skips layers, and without skips no "
                "architecture within the limits is so cheap."
            )
        elif found["top"] and not any(n["role"] == "structure" for n in form["networks"]) and not form["missing"]:
            text.append(f"The structural baseline ({_BASELINE_COST}) is the answer itself, so nothing is compared.")
    else:
        text.append(f"{len(form['scored'])} of {form['seeds']} seeds are scored: too few to compare.")
    stopped = [name for name, m in form["missing"].items() if m["status"] == "stopped"]
    if stopped:
        text.append(
            f"The time limit came first: {len(stopped)} tasks are missing ({', '.join(stopped[:4])}"
            f"{', ...' if len(stopped) > 4 else ''}); --resume continues."
        )
    for name, missing in form["missing"].items():
        if missing["status"] == "failed":
            log = folder / name / missing["log"]
            text.append(f"{name} failed in every attempt: {missing['error']}; its log is {log}")
    return text


def comparisons(networks: Sequence[Mapping[str, Any]]) -> dict[str, Comparison]:
    """The answer compared with its rivals, by their name; those that are not trained yet are left out."""
    ours = [n["result"] for n in networks if n["role"] == "answer"]
    found = {}
    for name in ("random", "structure"):
        theirs = [n["result"] for n in networks if (is_peer(n["role"]) if name == "random" else n["role"] == name)]
        if ours and theirs:
            found[name] = compare_runs(ours, theirs)
    return found


def _verdict(found: Mapping[str, Any]) -> str:
    top, seeds = found["top"][0], found["seeds"]
    tau = f"tau between seeds is {interval_of(found['tau'])}"
    if found["learned"] is not None:
        tau += (
            f", and {interval_of(found['learned'])} without the structural baseline, which is the same for every seed"
        )
    place = f"the answer is among the best {len(found['top'])} of {top['in_top']} of {seeds} seeds"
    without = "" if found["learned"] is None else " without the baseline"
    if found["stable"]:
        return f"Stable: {tau}, and {place}. Another seed would give much the same ranking."
    return (
        f"Not stable: {tau}, and {place}. A ranking counts as stable if the interval{without} is above {STABLE_TAU} "
        "and more than half of the seeds have the answer among their best."
    )


def _advice(folder: Path, form: Mapping[str, Any]) -> list[str]:
    """What would make the ranking more stable, from what was measured."""
    found, text = form["agreement"], []
    lost = [name for name in form["scored"] if _learnt_nothing(folder / name)]
    if lost:
        text.append(
            f"Epochs: the supernets of {', '.join(lost)} classify at chance, so their scores say little. Train longer "
            "(--train.epochs), or let more parameters train (--supernet.trainable), with another --out."
        )
    fits = [tau for name in form["scored"] if (tau := _fit(folder / name)) is not None]
    if fits and min(fits) < _POOR_FIT:
        text.append(
            f"Score: the tables predict the scores of paths that they were not fitted to with a tau of {min(fits):.2f} "
            f"to {max(fits):.2f}. More paths (--score.paths) or more images (--score.images) make them more exact, "
            "with another --out."
        )
    needed, seeds = found["seeds_needed"], found["seeds"]
    if needed is not None and seeds < needed <= _MANY_SEEDS:
        text.append(
            f"Seeds: the mean of {seeds} seeds is expected to correlate with that of {seeds} others by "
            f"{found['of_mean']:.2f}; {needed} seeds would reach {GOAL}. Repeat with --seeds {needed} --resume."
        )
    elif needed is None or needed > _MANY_SEEDS:
        text.append(
            f"More seeds alone would not do: {'any number' if needed is None else f'{needed} seeds'} would be needed "
            f"for a correlation of {GOAL}. Train longer (--train.epochs), or use another score (--score.name), with "
            "another --out."
        )
    elif not lost:
        text.append(
            "The mean of the seeds is more stable than one seed, and is used for the answer; more epochs "
            "(--train.epochs, with another --out) would make each seed more stable."
        )
    return text


def _learnt_nothing(seed: Path) -> bool:
    top1 = training_top1(read_metrics(seed))
    return top1 is not None and at_chance(top1, _table(seed)["space"]["num_classes"])


def _fit(seed: Path) -> float | None:
    """Cross-validated tau of a seed's table with the scores of paths; None if it is no distilled table."""
    return _table(seed)["meta"].get("cross_validated_tau")


def _table(seed: Path) -> dict[str, Any]:
    return unseal((seed / TABLE_FILE).read_text(encoding="utf-8"))


def _compared(name: str, found: Comparison) -> str:
    """A comparison in words."""
    runs = f"{found.runs} seed{'s' if found.runs > 1 else ''}"
    rival = f"the structural baseline ({_BASELINE_COST})" if name == "structure" else None
    return found.sentence(f"Retrained with {runs}, the answer", rival)


def _summary(folder: Path, form: Mapping[str, Any]) -> str:
    found, cards = form["agreement"], []
    if found is not None:
        cards = [
            ("stable" if found["stable"] else "not stable", "ranking between seeds"),
            (_number(found["tau"]["value"]), "tau between two seeds"),
            (f"{found['top'][0]['in_top']} of {found['seeds']}", "seeds with the answer among their best"),
        ]
        ours = [n["result"]["top1"] for n in form["networks"] if n["role"] == "answer"]
        if ours:
            cards.append((f"{100 * np.mean(ours):.2f} %", f"top-1 of the answer, {len(ours)} trainings"))
    text = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences(folder))
    if found is not None:
        text += f"<p>Answer: <code>{escape(format_arch(found['top'][0]['arch']))}</code></p>"
    return cards_of(cards) + text


def _agreement(found: Mapping[str, Any]) -> str:
    rows = [["score", interval_of(found["tau"])]]
    if found["learned"] is not None:
        rows.append(["score without the structural baseline in it", interval_of(found["learned"])])
    scores = "all seeds" if found["learned"] is None else "what all seeds learned"
    covers = "the architectures and the seeds"
    if found["seeds"] == 2:
        covers = "only the architectures: two seeds give no estimate of their own scatter"
    note = (
        f"Mean of Kendall's tau-b between two seeds, over {found['architectures']:,} random architectures within the "
        f"limits; the 95 % interval covers {covers}. The mean of {scores} is expected to correlate with the mean "
        f"of as many others by {found['of_mean']:.2f}."
    )
    if found["learned"] is not None:
        note += " The structural baseline is the same for every seed, so only the second row is about what was learned."
    return table_of(["", "tau between seeds"], rows, text_columns=(0,), note=note)


def _top(found: Mapping[str, Any]) -> str:
    rows = [
        [
            i,
            f"{p['mean_rank']:.1f}",
            f"{p['in_top']} of {found['seeds']}",
            f"{p['macs']:,}",
            f"{p['params']:,}",
            format_arch(p["arch"]),
        ]
        for i, p in enumerate(found["top"], 1)
    ]
    k = len(found["top"])
    note = (
        f"Mean rank over the seeds, among the {k} best of each seed and of the mean of their tables, each found by the "
        f"exact search. Times in the top {k}: seeds whose own {k} best have the architecture."
    )
    header = ["#", "mean rank", f"in the top {k}", "MACs", "parameters", "architecture"]
    return table_of(header, rows, text_columns=(5,), note=note)


def _networks(networks: Sequence[Mapping[str, Any]]) -> str:
    if not networks:
        return '<p class="soft">No network is retrained yet.</p>'
    rows = []
    for role in dict.fromkeys(n["role"] for n in networks):
        runs = [n for n in networks if n["role"] == role]
        top1 = [100 * n["result"]["top1"] for n in runs]
        spread = f" ± {np.std(top1, ddof=1):.2f}" if len(top1) > 1 else ""
        first = runs[0]["result"]
        rows.append(
            [
                role,
                f"{np.mean(top1):.2f}{spread} %",
                len(runs),
                f"{first['macs']:,}",
                f"{first['params']:,}",
                format_arch(runs[0]["arch"]),
            ]
        )
    header = ["network", "top-1 (± standard deviation)", "seeds", "MACs", "parameters", "architecture"]
    note = "structure: the highest sqrt_size of at most the answer's MACs + 1 %. random: of the answer's MACs ± 1 %."
    text = "".join(f"<p>{escape(_compared(n, c))}</p>" for n, c in comparisons(networks).items())
    return table_of(header, rows, text_columns=(0, 5), note=note) + text


def _seeds(folder: Path, form: Mapping[str, Any]) -> str:
    rows = []
    for number in range(form["seeds"]):
        name = f"seed-{number}"
        missing = form["missing"].get(name)
        top1 = training_top1(read_metrics(folder / name))
        state = "scored" if missing is None else f"{missing['status']} {missing['error']}"
        rows.append([name, state, "" if top1 is None else f"{100 * top1:.2f} %"])
    note = "Each folder is a run directory: nasfast report --out RUN/seed-0 writes its own page."
    header = ["seed", "state", "training top-1 of the supernet at the end"]
    return table_of(header, rows, text_columns=(0, 1), note=note)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"
