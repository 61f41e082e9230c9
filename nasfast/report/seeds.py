"""report.html of `nasfast run --seeds N`: is the ranking stable, what would help, and what is the answer worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nasfast.indicators.table import TABLE_FILE
from nasfast.report.agreement import GOAL, STABLE_TAU
from nasfast.report.findings import at_chance, compare_runs, is_peer, training_top1
from nasfast.report.page import Section, escape, format_interval, html_cards, html_table, write_page
from nasfast.report.run_files import RunFiles, config_section
from nasfast.runtime.files import read_metrics, unseal
from nasfast.settings import STABILITY_FILE
from nasfast.spaces import format_arch

_MANY_SEEDS = 20
"""More seeds than this are no advice: what they would average away has to become smaller."""

_POOR_FIT = 0.8
"""A table whose cross-validated tau with the scores of the paths is below this loses much of what the paths say."""

_BASELINE_COST = "at most 1 % more MACs, perhaps fewer"
"""MACs of the structural baseline beside those of the answer (`nasfast.pipeline.seeds.find_rivals`)."""


def write_stability_page(run_dir: str | Path) -> Path:
    """Write `report.html` from `stability.json` and the folders of the seeds."""
    folder = Path(run_dir)
    stability = _read(folder)
    agreement, networks = stability["agreement"], stability["networks"]
    sections: list[Section] = [("summary", "Summary", partial(_summary, folder, stability))]
    if agreement is not None:
        sections += [
            ("agreement", "Agreement between seeds", partial(_agreement, agreement)),
            ("top", "Best architectures of all seeds", partial(_top, agreement)),
            ("networks", "Retrained", partial(_networks, networks)),
        ]
    sections += [
        ("seeds", "Seeds", partial(_seeds, folder, stability)),
        ("config", "Configuration", partial(config_section, RunFiles(folder))),
    ]
    return write_page(folder / "report.html", folder.resolve().name, "nasfast run --seeds", sections)


def sentences(run_dir: str | Path) -> list[str]:
    """The findings in words: stable or not and what would help, the comparisons, and what is missing."""
    return _sentences(Path(run_dir), _read(Path(run_dir)))


def _read(folder: Path) -> dict[str, Any]:
    return unseal((folder / STABILITY_FILE).read_text(encoding="utf-8"))


def _sentences(folder: Path, stability: Mapping[str, Any]) -> list[str]:
    agreement = stability["agreement"]
    text = []
    if agreement is not None:
        text.append(_verdict(agreement))
        text += [] if agreement["stable"] else _advice(folder, stability)
        text += _comparisons(stability["networks"])
        if stability.get("no_structure"):
            text.append(
                "There is no structural baseline to compare with: the answer skips layers, and without skips no "
                "architecture within the limits is so cheap."
            )
        elif agreement["top"] and not stability["missing"]:
            if not any(network["role"] == "structure" for network in stability["networks"]):
                text.append(f"The structural baseline ({_BASELINE_COST}) is the answer itself, so nothing is compared.")
    else:
        text.append(f"{len(stability['scored'])} of {stability['seeds']} seeds are scored: too few to compare.")
    return text + missing_sentences(folder, stability["missing"])


def missing_sentences(folder: Path, missing: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is missing, by the names of tasks in a folder, and why."""
    text = []
    stopped = [name for name, m in missing.items() if m["status"] == "stopped"]
    if stopped:
        text.append(
            f"The time limit came first: {len(stopped)} tasks are missing ({', '.join(stopped[:4])}"
            f"{', ...' if len(stopped) > 4 else ''}); --resume continues."
        )
    for name, m in missing.items():
        if m["status"] == "failed":
            log = folder / name / m["log"]
            text.append(f"{name} failed in every attempt: {m['error']}; its log is {log}")
    return text


def _comparisons(networks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The answer compared with its rivals, in words; those that are not trained yet are left out."""
    answers = [n["result"] for n in networks if n["role"] == "answer"]
    random = [n["result"] for n in networks if is_peer(n["role"])]
    structure = [n["result"] for n in networks if n["role"] == "structure"]
    texts = []
    for rival, results in ((None, random), (f"the structural baseline ({_BASELINE_COST})", structure)):
        if answers and results:
            comparison = compare_runs(answers, results)
            runs = f"{comparison.runs} seed{'s' if comparison.runs > 1 else ''}"
            texts.append(comparison.sentence(f"Retrained with {runs}, the answer", rival))
    return texts


def _verdict(agreement: Mapping[str, Any]) -> str:
    top, seeds = agreement["top"][0], agreement["seeds"]
    tau, without = f"tau between seeds is {format_interval(agreement['tau'])}", ""
    if agreement["learned"] is not None:
        learned, without = format_interval(agreement["learned"]), " without the baseline"
        tau += f", and {learned} without the structural baseline, which is the same for every seed"
    place = f"the answer is among the best {len(agreement['top'])} of {top['in_top']} of {seeds} seeds"
    if agreement["stable"]:
        return f"Stable: {tau}, and {place}. Another seed would give much the same ranking."
    return (
        f"Not stable: {tau}, and {place}. A ranking counts as stable if the interval{without} is above {STABLE_TAU} "
        "and more than half of the seeds have the answer among their best."
    )


def _advice(folder: Path, stability: Mapping[str, Any]) -> list[str]:
    """What would make the ranking more stable, from what was measured."""
    agreement, text = stability["agreement"], []
    untaught, fits = [], []
    for name in stability["scored"]:
        table = unseal((folder / name / TABLE_FILE).read_text(encoding="utf-8"))
        top1 = training_top1(read_metrics(folder / name))
        if top1 is not None and at_chance(top1, table["space"]["num_classes"]):
            untaught.append(name)
        if (tau := table["meta"].get("cross_validated_tau")) is not None:  # of a distilled table
            fits.append(tau)
    if untaught:
        text.append(
            f"Epochs: the supernets of {', '.join(untaught)} classify at chance, so their scores say little. Train "
            "longer (--train.epochs), or let more parameters train (--supernet.trainable), with another --out."
        )
    if fits and min(fits) < _POOR_FIT:
        text.append(
            f"Score: the tables predict the scores of paths that they were not fitted to with a tau of {min(fits):.2f} "
            f"to {max(fits):.2f}. More paths (--score.paths) or more images (--score.images) make them more exact, "
            "with another --out."
        )
    needed, seeds = agreement["seeds_needed"], agreement["seeds"]
    if needed is not None and seeds < needed <= _MANY_SEEDS:
        text.append(
            f"Seeds: the mean of {seeds} seeds is expected to correlate with that of {seeds} others by "
            f"{agreement['of_mean']:.2f}; {needed} seeds would reach {GOAL}. Repeat with --seeds {needed} --resume."
        )
    elif needed is None or needed > _MANY_SEEDS:
        text.append(
            f"More seeds alone would not do: {'any number' if needed is None else f'{needed} seeds'} would be needed "
            f"for a correlation of {GOAL}. Train longer (--train.epochs), or use another score (--score.name), with "
            "another --out."
        )
    elif not untaught:
        text.append(
            "The mean of the seeds is more stable than one seed, and is used for the answer; more epochs "
            "(--train.epochs, with another --out) would make each seed more stable."
        )
    return text


def _summary(folder: Path, stability: Mapping[str, Any]) -> str:
    agreement, cards = stability["agreement"], []
    if agreement is not None:
        tau = agreement["tau"]["value"]
        cards = [
            ("stable" if agreement["stable"] else "not stable", "ranking between seeds"),
            ("undefined" if tau is None else f"{tau:.3f}", "tau between two seeds"),
            (f"{agreement['top'][0]['in_top']} of {agreement['seeds']}", "seeds with the answer among their best"),
        ]
        top1 = [n["result"]["top1"] for n in stability["networks"] if n["role"] == "answer"]
        if top1:
            cards.append((f"{100 * np.mean(top1):.2f} %", f"top-1 of the answer, {len(top1)} trainings"))
    text = "".join(f"<p>{escape(sentence)}</p>" for sentence in _sentences(folder, stability))
    if agreement is not None:
        text += f"<p>Answer: <code>{escape(format_arch(agreement['top'][0]['arch']))}</code></p>"
    return html_cards(cards) + text


def _agreement(agreement: Mapping[str, Any]) -> str:
    rows = [["score", format_interval(agreement["tau"])]]
    if agreement["learned"] is not None:
        rows.append(["score without the structural baseline in it", format_interval(agreement["learned"])])
    scores = "all seeds" if agreement["learned"] is None else "what all seeds learned"
    covers = "the architectures and the seeds"
    if agreement["seeds"] == 2:
        covers = "only the architectures: two seeds give no estimate of their own scatter"
    note = (
        f"Mean of Kendall's tau-b between two seeds, over {agreement['architectures']:,} random architectures within "
        f"the limits; the 95 % interval covers {covers}. The mean of {scores} is expected to correlate with the mean "
        f"of as many others by {agreement['of_mean']:.2f}."
    )
    if agreement["learned"] is not None:
        note += " The structural baseline is the same for every seed, so only the second row is about what was learned."
    return html_table(["", "tau between seeds"], rows, text_columns=(0,), note=note)


def _top(agreement: Mapping[str, Any]) -> str:
    rows = [
        [
            i,
            f"{p['mean_rank']:.1f}",
            f"{p['in_top']} of {agreement['seeds']}",
            f"{p['macs']:,}",
            f"{p['params']:,}",
            format_arch(p["arch"]),
        ]
        for i, p in enumerate(agreement["top"], 1)
    ]
    k = len(agreement["top"])
    note = (
        f"Mean rank over the seeds, among the {k} best of each seed and of the mean of their tables, each found by the "
        f"exact search. Times in the top {k}: seeds whose own {k} best have the architecture."
    )
    header = ["#", "mean rank", f"in the top {k}", "MACs", "parameters", "architecture"]
    return html_table(header, rows, text_columns=(5,), note=note)


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
    text = "".join(f"<p>{escape(sentence)}</p>" for sentence in _comparisons(networks))
    return html_table(header, rows, text_columns=(0, 5), note=note) + text


def _seeds(folder: Path, stability: Mapping[str, Any]) -> str:
    rows = []
    for number in range(stability["seeds"]):
        name = f"seed-{number}"
        missing = stability["missing"].get(name)
        top1 = training_top1(read_metrics(folder / name))
        state = "scored" if missing is None else f"{missing['status']} {missing['error']}"
        rows.append([name, state, "" if top1 is None else f"{100 * top1:.2f} %"])
    note = "Each folder is a run directory: nasfast report --out RUN/seed-0 writes its own page."
    header = ["seed", "state", "training top-1 of the supernet at the end"]
    return html_table(header, rows, text_columns=(0, 1), note=note)
