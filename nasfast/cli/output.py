"""What commands of a run show at their end."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nasfast.cli.flags import is_verbose
from nasfast.display import counted, text_table
from nasfast.pipeline.inputs import read_layers
from nasfast.report.findings import (
    PROVEN,
    PROVEN_NEXT,
    Top1,
    advise,
    compare,
    is_peer,
    other_seeds,
    score_verdict,
    trainings,
)
from nasfast.search import Candidate, load_candidates
from nasfast.search.candidate import ARCHS_FILE
from nasfast.spaces import format_arch

if TYPE_CHECKING:
    from nasfast.retrain import RetrainResult


def show_retrained(out: str, results: dict[str, RetrainResult]) -> None:
    """A line per architecture with all its seeds, one for all random ones, and what was gained over these."""
    records = {name: result.to_dict() for name, result in results.items()}
    repeats = {name: other_seeds(name, records) for name in records}
    repeated = {id(record) for group in repeats.values() for record in group}
    peers = [record for name, record in records.items() if is_peer(name)]
    rows = [["network", "top-1", "MACs", "params", *(["architecture"] if is_verbose() else [])]]
    for name, record in records.items():
        if not is_peer(name) and id(record) not in repeated:
            rows.append([*_mean_cells(name, "seeds", [record, *repeats[name]]), format_arch(record["arch"])])
    if peers:
        rows.append([*_mean_cells("random", "architectures", peers), ""])
    print("\n".join(text_table([row[: len(rows[0])] for row in rows])))
    if "best" in results:
        best = results["best"]
        top1 = Top1.of(trainings("best", records))
        images = counted(best.images, "image")
        print(f"best: top-1 {top1.mean:.1%} ({top1.spread} {top1.low:.1%} to {top1.high:.1%}, {images})")
        space = read_layers(Path(out))
        print(f"  {space.words(best.arch)}")
        if (comparison := compare(records["best"], peers, repeats["best"])) is not None:
            print(comparison.headline)
            print(f"next: {advise(comparison, records, out, space.num_classes)}")
    print(f"written: {Path(out, 'retrain')}")


def _mean_cells(name: str, kind: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name, accuracy, MACs and parameters of trainings that share a line: their means, and the range of accuracies."""
    top1 = [record["top1"] for record in records]
    accuracy, macs, params = (statistics.mean(record[key] for record in records) for key in ("top1", "macs", "params"))
    costs = [f"{macs:,.0f}", f"{params:,.0f}"]
    if len(records) == 1:
        return [name, f"{accuracy:.2%}", *costs]
    spread = f"({100 * min(top1):.2f} to {100 * max(top1):.2f})"
    return [f"{name}, {len(records)} {kind}", f"{accuracy:.2%} {spread}", *costs]


def show_candidates(out: str, candidates: list[Candidate]) -> None:
    """Each architecture in words with its costs, where the tables come from, and what to do next."""
    space = read_layers(Path(out))
    tables = load_candidates(Path(out, ARCHS_FILE), space).tables
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
        print(score_verdict(out))
    print(f"written: {Path(out, ARCHS_FILE)}")
    print(f"next: nasfast retrain --out {out} trains the first one, and random ones of its cost to judge it by")
