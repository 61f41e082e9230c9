"""The commands `search` and `spaces`, which need no torch where a table is saved."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from nasfast.cli.flags import Parser, is_verbose, with_defaults
from nasfast.config import ConfigError
from nasfast.display import text_table
from nasfast.pipeline.run import Run, read_layers
from nasfast.pipeline.searching import score_untrained, search
from nasfast.report.findings import PROVEN, PROVEN_NEXT, score_verdict
from nasfast.search import Candidate, load_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.search.limits import layer_costs
from nasfast.settings import RunConfig, TaskSettings
from nasfast.spaces import BUILDERS, LayerSpace, format_arch, named_space


def _search(cfg: RunConfig, tasks: TaskSettings, *, num_classes: int | None = None) -> None:
    begins = Run.look(cfg).needs_no_supernet
    if num_classes is not None and not begins:
        raise ConfigError(
            f"--num_classes is for a search without a run, and {cfg.run_dir} has one, or the score needs one"
        )
    with Run.open(cfg, begins=begins, threads=False) as run:
        if begins:
            score_untrained(run, num_classes=num_classes)
        _show_candidates(run, search(run))


def _show_candidates(run: Run, candidates: list[Candidate]) -> None:
    space = read_layers(run)
    tables = load_candidates(run.dir / ARCHS_FILE, space).tables
    for place, c in enumerate(candidates, start=1):
        costs = [f"{c.macs:,} MACs", f"{c.params:,} params"]
        costs += [f"{value:.4g} {t.unit} {t.quantity}" for t, value in zip(tables, c.values, strict=True)]
        proof = (PROVEN if place == 1 else PROVEN_NEXT) if c.optimal else c.status
        print(f"{place}. {space.words(c.arch)}\n   {'  '.join(costs)}  ({proof})")
        if is_verbose():
            print(f"   [{format_arch(c.arch)}]  score {c.score:.6g}")
    if any(re.search(r"\bk\d+ e\d", space.words(c.arch)) for c in candidates):
        print("k5 e3: a kernel of 5 x 5, and three hidden channels per input channel")
    for table in tables:
        print(f"{table.quantity}: {table.about or 'a table of your own'}")
    if any(c.optimal for c in candidates):
        print(score_verdict(run.dir))
    print(f"written: {run.dir / ARCHS_FILE}")
    print(f"next: nasfast retrain --out {run.cfg.out} trains the first one, and random ones of its cost to judge it by")


def _spaces(values: dict[str, Any], parser: Parser) -> None:
    """Every built-in space of layers, with its range of MACs and parameters."""
    args = with_defaults(values, parser)
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


COMMANDS: dict[str, Callable[..., None]] = {"search": _search, "spaces": _spaces}
"""As `nasfast.cli.commands.COMMANDS`."""
