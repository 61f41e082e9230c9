"""The commands about this machine and the spaces: `latency`, `step`, `spaces` and `doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nasfast.cli.flags import Command, CommandLine, FlagError, Parser, check_run_dirs, with_defaults
from nasfast.display import text_table
from nasfast.measure.config import LatencyConfig, StepTimesConfig
from nasfast.runtime.files import write_atomic
from nasfast.spaces import BUILDERS, LayerSpace, named_space


def latency_flags(parser: Parser) -> None:
    text = "the table, as JSON; one of another space, device, runtime, dtype, threads or batch is not replaced"
    parser.add_argument("--out", metavar="FILE", default="latency.json", help=text)
    text = "latencies in ms of whole architectures on another device, JSON or CSV (arch,latency): fits a table to them"
    parser.add_argument("--measured", metavar="FILE", help=text)
    parser.add_argument("--column", help="which latency, where --measured has several per architecture")
    text = "time the candidates of a run of `nasfast shrink`, at --resolution or its own, in place of those of --space"
    parser.add_argument("--shrunk", metavar="RUN", help=text)
    parser.add_class_arguments(LatencyConfig)


def latency(line: CommandLine) -> None:
    """Time every candidate, or fit a table to what another device measured."""
    settings = line.values
    out = settings.pop("out", "latency.json")
    measured, column = settings.pop("measured", None), settings.pop("column", None)
    shrunk = settings.pop("shrunk", None)
    cfg = LatencyConfig.from_dict(settings)
    if "space" in settings:
        named_space(cfg.space)
    if measured is not None:
        _fit_latency(settings, measured, column, out)
        return
    if column is not None:
        raise FlagError("--column needs --measured FILE")
    check_run_dirs(shrunk)
    from nasfast.measure import latency as measuring  # imports torch
    from nasfast.measure.measured import check_replaceable

    subject = None
    if shrunk is not None:
        from nasfast.pipeline.shrinking.timing import subject_of_run

        subject = subject_of_run(shrunk, cfg.resolution)
    # a file that must not be replaced is named before minutes of measuring
    check_replaceable(out, measuring.table_head(cfg, cfg.resolve() if subject is None else subject.space))
    kept = Path(f"{out}.rounds")
    report = measuring.latency(cfg, subject, rounds_file=kept)
    print(report)
    report.save(out)
    kept.unlink(missing_ok=True)
    print(f"written: {out}")


def _fit_latency(settings: dict[str, Any], measured: str, column: str | None, out: str) -> None:
    if wrong := set(settings) - {"space", "num_classes", "resolution", "device", "batch"}:
        raise FlagError(f"--measured fits what another device measured, and takes no --{' or --'.join(sorted(wrong))}")
    from nasfast.indicators.accuracies import read_scores
    from nasfast.measure.measured import fit_measured

    sizes = {key: settings[key] for key in ("num_classes", "resolution") if key in settings}
    space = named_space(settings.get("space", LatencyConfig.space), **sizes)
    report = fit_measured(
        space,
        read_scores(measured, space, column=column or "latency"),
        source=Path(measured).name,
        device=settings.get("device") or column,
        batch=settings.get("batch"),
    )
    print(report)
    report.save(out)
    print(f"written: {out}")


def step_flags(parser: Parser) -> None:
    parser.add_argument("--out", metavar="FILE", help="also write the rows as JSON, with machine, versions and ISA")
    parser.add_class_arguments(StepTimesConfig)


def step(line: CommandLine) -> None:
    """Time a training step beside its peers."""
    out = line.values.pop("out", None)
    cfg = StepTimesConfig.from_dict(line.values)
    from nasfast.measure.step_times import step_times  # imports torch

    first_steps: list[dict[str, Any]] = []

    def save_first(row: dict[str, Any]) -> None:
        first_steps.append(row)
        if out is not None:  # until the report is there, which has them too
            write_atomic(Path(out), (json.dumps({"first_steps": first_steps}, indent=1) + "\n").encode())

    report = step_times(cfg, callback=save_first)
    print(report)
    if out is not None:
        report.save(out)
        print(f"written: {out}")


def spaces_flags(parser: Parser) -> None:
    parser.add_argument("--resolution", type=int, help="height and width of the images in pixels; default: the space's")
    parser.add_argument("--num_classes", type=int, help="outputs of the classifier; default: the space's")


def spaces(line: CommandLine) -> None:
    """Every built-in space of layers, with its range of MACs and parameters."""
    from nasfast.search.limits import layer_costs  # imports scipy

    args = with_defaults(line.values, line.parser)
    changes = {key: value for key in ("resolution", "num_classes") if (value := getattr(args, key)) is not None}
    rows, cells = [["space", "pixels", "classes", "layers", "architectures", "MACs", "parameters"]], []
    for name in BUILDERS:
        space = named_space(name, **changes)
        if not isinstance(space, LayerSpace):
            cells.append(name)
            continue
        macs, params = (layer_costs(space, cost).range_text for cost in ("macs", "params"))
        size = [str(space.resolution), str(space.num_classes), str(len(space)), f"{space.cardinality:.1e}"]
        rows.append([name, *size, macs, params])
    print("\n".join(text_table(rows)))
    print(f"of cells, without a limit on MACs: {', '.join(cells)}")
    print("Any of the first is a --space.name; --resolution 128 gives the costs at another size of the images.")


def doctor(line: CommandLine) -> None:
    """Print versions, hardware, and the backend of every operator."""
    from nasfast.measure.doctor import doctor as describe  # imports torch

    print(describe())


COMMANDS = {
    "latency": Command(
        "latency of every candidate on this machine, as a table for --search.max_latency_ms", latency_flags, latency
    ),
    "step": Command(
        "times of a training step: the rows of the paper's Table 2 on this machine, beside the published figures",
        step_flags,
        step,
    ),
    "spaces": Command("the built-in search spaces, with their ranges of MACs and parameters", spaces_flags, spaces),
    "doctor": Command(
        "versions, CPU and GPU, and which backend every operator uses and why", lambda parser: None, doctor
    ),
}
