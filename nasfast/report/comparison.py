"""One page that compares runs: settings that differ, accuracies, agreement of their tables, costs and times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from nasfast.config import flatten, load_yaml
from nasfast.indicators.rank import Estimate, bootstrap_weights, kendall_tau
from nasfast.indicators.table import IndicatorTable
from nasfast.report.findings import Comparison, Top1, compare, compare_runs, is_peer, other_seeds, trainings
from nasfast.report.page import (
    NotRun,
    Section,
    html_figure,
    html_table,
    millions,
    percent,
    svg_text,
    write_page,
)
from nasfast.report.plots import MARKERS, SERIES, literal, new_figure
from nasfast.report.run_files import RunFiles, format_limits
from nasfast.runtime.progress import duration
from nasfast.search import sample_distinct
from nasfast.settings import CHOICES, CONFIG_FILE
from nasfast.spaces import SAMPLERS, Arch, format_arch

# Architectures and bootstrap resamples of the agreement of two tables.
_ARCHITECTURES, _RESAMPLES = 500, 200
_NONE = "-"


def write_comparison(run_dirs: Sequence[str | Path], page: str | Path) -> Path:
    """Write one page that compares runs.

    What a run does not have is a dash.

    Args:
        run_dirs: at least two run directories.
        page: the page, an HTML file; an existing one is replaced.

    Raises:
        ValueError: fewer than two runs, one twice, or a run of several seeds.
        FileNotFoundError: a run directory does not exist or has no config.yaml.
    """
    folders = [Path(run_dir) for run_dir in run_dirs]
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise ValueError(f"give at least two run directories, each once, got {', '.join(map(str, folders)) or 'none'}")
    for folder in folders:
        if seeds := sorted(path for path in folder.glob("seed-*") if (path / "config.yaml").exists()):
            raise ValueError(
                f"{folder} is a run of --seeds, and its report.html compares its seeds: give single ones of them, such "
                f"as {' '.join(map(str, seeds[:2]))}"
            )
        if not (folder / "config.yaml").exists():
            raise FileNotFoundError(
                f"{folder} is no run directory: it has no config.yaml. One seed of `nasfast run --seeds` is RUN/seed-0"
            )
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs = {name: RunFiles(folder) for name, folder in zip(names, folders, strict=True)}
    sections: list[Section] = [
        ("runs", "Runs", partial(_overview, runs)),
        ("accuracies", "Accuracies", partial(_accuracies, runs)),
        ("tables", "Agreement of the tables of scores", partial(_agreement, runs)),
        ("settings", "Settings that differ", partial(_settings, runs)),
    ]
    return write_page(Path(page), " / ".join(runs), "nasfast report", sections)


def _read_or_none(read: Callable[[], Any]) -> Any:
    """What a file of a run says, or None where it does not exist or is damaged."""
    try:
        return read()
    except (NotRun, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None


def _overview(runs: Mapping[str, RunFiles]) -> str:
    columns = [_column(run) for run in runs.values()]
    rows = [[key, *(column.get(key, _NONE) for column in columns)] for key in dict.fromkeys(itertools.chain(*columns))]
    note = (
        "Brackets: Wilson's 95 % interval over the images, which leaves out the scatter of another training; the range "
        "where an accuracy is the mean of several seeds. Scores of different spaces, methods or score settings are on "
        "different scales: compare them within one column only. Times are those of the machine that trained, and of "
        "the last run of each stage."
    )
    return html_table(["", *runs], rows, text_columns=range(len(runs) + 1), note=note)


def _column(run: RunFiles) -> dict[str, str]:
    """What is known of one run, by the name of the row."""
    config = _read_or_none(lambda: load_yaml(run.folder / CONFIG_FILE)) or {}
    column = {key: str(config[key]) for key in ("method", "seed") if key in config}
    if (space := _read_or_none(lambda: run.space)) is not None:
        column["space"] = f"{space.name}, {space.cardinality:.3g} architectures"
    if (result := _read_or_none(lambda: run.result)) is not None and result.candidates:
        best = result.candidates[0]
        column |= {
            "limits": format_limits(result),
            "best architecture": format_arch(best.arch),
            "score": f"{best.score:.5g}" + (", proven" if best.optimal else ""),
            "MACs": millions(best.macs),
            "parameters": millions(best.params),
        }
        column |= {f"{t.quantity}, {t.unit}": f"{v:.4g}" for t, v in zip(result.tables, best.values, strict=True)}
    retrained = _read_or_none(lambda: run.retrained) or {}
    if "best" in retrained:
        column |= _read_or_none(partial(_accuracy_rows, retrained)) or {}
    if (seconds := _read_or_none(partial(_supernet_seconds, run, config))) is not None:
        column["time of supernet training"] = duration(seconds)
    if seconds := sum(
        _read_or_none(partial(float, result["seconds"])) or 0.0 for result in retrained.values() if "seconds" in result
    ):
        column["time of retraining, all networks"] = duration(seconds)
    return column


def _accuracy_rows(retrained: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The rows of the accuracy of a run's best network, by their names."""
    best = retrained["best"]
    top1 = Top1.of(trainings("best", retrained))
    several = "" if top1.seeds == 1 else f" ({top1.seeds} seeds)"
    rows = {
        "top-1 of the best": f"{percent(top1.mean)} [{100 * top1.low:.2f}, {100 * top1.high:.2f}]{several}",
        "epochs of retraining": str(best["epochs"]),
    }
    peers = [result for name, result in retrained.items() if is_peer(name)]
    if (comparison := compare(best, peers, other_seeds("best", retrained))) is not None:
        rows["above random architectures of equal cost, points"] = _format_gain(comparison)
    return rows


def _format_gain(comparison: Comparison) -> str:
    return f"{comparison.gain:+.2f} [{comparison.low:+.2f}, {comparison.high:+.2f}]"


def _supernet_seconds(run: RunFiles, config: Mapping[str, Any]) -> float:
    """The time of the training steps, from their logged speeds."""
    lines = [m for m in run.metrics if m["stage"] == "supernet" and m.get("images_per_s")]
    if not lines:
        raise NotRun("`nasfast supernet` trains")
    before = [0, *(m["step"] for m in lines)]
    supernet = config.get("supernet") or {}
    sampler = SAMPLERS[supernet.get("sampler") or "uniform"]
    paths = sampler(run.space, layer_indicators=bool(supernet.get("layer_indicators"))).paths_per_step
    # a speed counts an image once for each path of a step
    images = config["data"]["batch_size"] * paths
    return sum((m["step"] - b) * images / m["images_per_s"] for m, b in zip(lines, before, strict=False))


def _trainings_of_best(run: RunFiles) -> list[Mapping[str, Any]]:
    return trainings("best", run.retrained)


def _accuracies(runs: Mapping[str, RunFiles]) -> str:
    bests = {name: _read_or_none(partial(_trainings_of_best, run)) for name, run in runs.items()}
    if not any(bests.values()):
        raise NotRun("`nasfast retrain` trains networks to compare")
    images = {name: _read_or_none(partial(_validation_images, run)) for name, run in runs.items()}
    rows = []
    for one, other in itertools.combinations(runs, 2):
        first, second = bests[one], bests[other]
        if first is None or second is None:
            text = "not both are retrained"
        elif images[one] is None or images[other] is None:
            text = "the images of one are not known"
        elif images[one] != images[other] or any(first[0].get(k) != second[0].get(k) for k in ("images", "ranks")):
            text = "evaluated on other images"
        else:
            comparison = compare_runs(first, second)
            text = _format_gain(comparison)
            if not comparison.significant:
                text += ": not significant"
            if first[0]["epochs"] != second[0]["epochs"]:
                text += f"; {first[0]['epochs']} and {second[0]['epochs']} epochs of retraining"
        rows.append([one, other, text])
    note = (
        "Top-1 of the first run's best network minus that of the second, in percentage points, with its 95 % interval "
        "over the images, on which both are compared one by one, and over the seeds of a network that was trained with "
        "several. Of one training, it says nothing about other seeds, for which there is nasfast run --seeds."
    )
    header = ["run", "minus run", "difference of their best networks"]
    caption = "Top-1 of every retrained network against its MACs."
    figure = html_figure(svg_text(_figure(runs), "accuracies", caption), caption)
    return html_table(header, rows, text_columns=(0, 1, 2), note=note) + figure


def _validation_images(run: RunFiles) -> tuple[str, ...]:
    """What decides which images the networks of a run were evaluated on, and their order."""
    config = load_yaml(run.folder / CONFIG_FILE)
    data = config["data"]
    source, val, seed = (data.get(key) for key in ("source", "val", "split_seed"))
    if source not in (None, "folder"):
        return (source,)
    if val is not None:
        return "folder", val
    seed = config["seed"] if seed is None else seed
    return "folder", *(str(value) for value in (data.get("train"), data.get("val_fraction"), seed))


def _figure(runs: Mapping[str, RunFiles]) -> Figure:
    figure, (ax,) = new_figure(8, 4)
    for i, (name, run) in enumerate(runs.items()):
        retrained = _read_or_none(partial(getattr, run, "retrained")) or {}
        points = [(result["macs"] / 1e6, 100 * result["top1"]) for result in retrained.values()]
        if points:
            macs, top1 = zip(*points, strict=True)
            colour, marker = SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]
            ax.scatter(macs, top1, s=40, alpha=0.8, color=colour, marker=marker, label=literal(name))
    ax.set(xlabel="MACs (millions)", ylabel="top-1 (%)")
    ax.legend(fontsize=8, frameon=False)
    return figure


def _agreement(runs: Mapping[str, RunFiles]) -> str:
    tables = {name: _searched_table(run) for name, run in runs.items()}
    samples: dict[str, list[Arch]] = {}
    weights: dict[str, np.ndarray] = {}
    scores: dict[str, list[float]] = {}
    for name, table in tables.items():
        if table is not None:
            space = table.space
            if space.fingerprint not in samples:
                sample = sample_distinct(space, _ARCHITECTURES)
                samples[space.fingerprint] = sample
                weights[space.fingerprint] = bootstrap_weights(len(sample), _RESAMPLES, 0)
            scores[name] = [table.score(arch) for arch in samples[space.fingerprint]]
    rows = []
    for one, other in itertools.combinations(runs, 2):
        a, b = tables[one], tables[other]
        if a is None or b is None:
            tau = "not both have a table"
        elif a.space.fingerprint != b.space.fingerprint:
            tau = "tables of different spaces"
        else:
            tau = str(Estimate.from_samples(kendall_tau(scores[one], scores[other], weights[a.space.fingerprint])))
        rows.append([one, other, tau])
    note = (
        f"Kendall's tau-b over at most {_ARCHITECTURES} different random architectures, with its 95 % bootstrap "
        "interval over them. A high tau says that both rank alike, not that either ranks well: both may only follow "
        "structure."
    )
    return html_table(["run", "and run", "tau"], rows, text_columns=(0, 1, 2), note=note)


def _searched_table(run: RunFiles) -> IndicatorTable | None:
    """The table of scores; None if there is none, or if the last search scored whole paths and left an older one."""
    result = _read_or_none(lambda: run.result)
    return None if result is not None and result.scored_with is not None else _read_or_none(lambda: run.table)


def _settings(runs: Mapping[str, RunFiles]) -> str:
    columns = [_read_settings(run) for run in runs.values()]
    keys = sorted(set().union(*columns) - {"out"})
    rows = [
        [key, *(column.get(key, _NONE) for column in columns)]
        for key in keys
        if len({column.get(key) for column in columns}) > 1
    ]
    if not rows:
        return "<p>All settings are equal.</p>"
    note = f"{len(keys) - len(rows)} other settings are equal. Settings of a stage are those of its result, where "
    note += "config.yaml is newer."
    return html_table(["setting", *runs], rows, text_columns=range(len(runs) + 1), note=note)


def _read_settings(run: RunFiles) -> dict[str, str]:
    """The settings that made what the page shows, by their flags, as text."""
    result, table = _read_or_none(lambda: run.result), _searched_table(run)
    best = (_read_or_none(lambda: run.retrained) or {}).get("best") or {}
    settings = flatten(load_yaml(run.folder / CONFIG_FILE))
    if result is not None and result.settings is not None:
        settings |= flatten(result.settings.to_dict(), "search.")
    score = table.meta.get("settings") if table is not None else result and result.scored_with
    settings |= flatten(score if isinstance(score, Mapping) else {})
    # `CHOICES` do not change how one network is trained
    choices = [f"retrain.{name}" for name in CHOICES]
    training = flatten(best.get("settings") or {}, "retrain.")
    settings |= {key: value for key, value in training.items() if key not in choices}
    return {key: str(value) for key, value in settings.items()}
