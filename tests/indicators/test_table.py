"""Combined scores of Algorithm 2, the JSON form, refusals."""

from __future__ import annotations

import json

import pytest

from nasfast.indicators.table import IndicatorTable, TableError
from nasfast.spaces import SKIP, ArchError, mobilenet_v2, nas_bench_macro


def macro_table(*, layer_indicators: bool) -> IndicatorTable:
    """Layer i, choice c scores 10 i + c; layer i's indicator scores 2 + i / 10."""
    space = nas_bench_macro()
    block = tuple({c: 10.0 * i + c for c in u.options if c != u.indicator_choice} for i, u in enumerate(space.layers))
    layer = tuple(
        2 + i / 10 if layer_indicators and u.indicator_choice is not None else None for i, u in enumerate(space.layers)
    )
    return IndicatorTable(space, block, layer, {"step": 5})


def test_combined_scores_follow_algorithm_2():
    scores = macro_table(layer_indicators=True).scores
    # layers 0, 2 and 5 are reductions: the block score, the identity being a strided convolution with its own BN
    assert scores[2] == {0: 20.0, 1: 21.0, 2: 22.0}
    # a normal layer: S_v * S_u, and the identity is the layer indicator alone
    assert scores[3] == {0: 2.3, 1: 31 * 2.3, 2: 32 * 2.3}


def test_rows_of_scores_add_up():
    space = nas_bench_macro()
    rows = [{c: 10.0 * i + c for c in range(3)} for i in range(8)]
    table = IndicatorTable.from_rows(space, rows, {"step": 5})
    assert list(table.scores) == rows
    assert table.score((0, 1, 2, 0, 1, 2, 0, 1)) == sum(10 * i + c for i, c in enumerate((0, 1, 2, 0, 1, 2, 0, 1)))
    # the identities of normal layers are layer scores, those of reductions are candidates like others
    assert table.layer == tuple(None if u.indicator_choice is None else rows[i][0] for i, u in enumerate(space.layers))
    skippable = mobilenet_v2()
    table = IndicatorTable.from_rows(skippable, [{c: float(c) for c in u.legal} for u in skippable.layers], {})
    assert table.score(SKIP if skippable.layers[i].normal else 5 for i in range(20)) == 5 * 5 - 15
    again = IndicatorTable.from_json(table.to_json())
    assert (again.scores, again.layer, again.rule) == (table.scores, table.layer, "sum")


def test_pinned_layers_score_zero():
    space = mobilenet_v2(variant="bnnas")
    block = tuple({c: 1.0 for c in u.options if c != SKIP} for u in space.layers)
    table = IndicatorTable(space, block, (None,) * len(space))
    assert table.scores[1] == {SKIP: 0.0}
    # a tie goes to the lower index
    assert table.argmax() == tuple(SKIP if i in (1, 5, 6, 9) else 0 for i in range(21))
    assert table.score(table.argmax()) == 17.0


def test_score_sums_layers_and_checks_the_architecture():
    table = macro_table(layer_indicators=True)
    arch = (1, 0, 2, 1, 0, 0, 2, 1)
    assert table.score(arch) == pytest.approx(sum(row[c] for row, c in zip(table.scores, arch, strict=True)))
    with pytest.raises(ArchError, match="must have 8 values"):
        table.score(arch[:7])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda form: form.update(format="other/1"), "'other/1'"),
        (lambda form: form.update(rule="mean"), "rule must be one of product, sum, got 'mean'"),
        (lambda form: form["layers"].pop(), "must have 8 layers, got 7"),
        (lambda form: form["layers"][1]["block"].pop("2"), "layer 1: scores for choices"),
        (
            lambda form: form["layers"][0]["block"].update({"1": float("nan")}),
            r"layer 0, choice 1 \(k3 e3\): score is nan",
        ),
        (lambda form: form["layers"][0]["block"].update({"1": None}), "not an indicator table"),
        (lambda form: form.pop("space"), "not an indicator table"),
    ],
    ids=["format", "rule", "layers", "choices", "nan", "null", "no_space"],
)
def test_unusable_files_are_refused(change, message):
    form = json.loads(macro_table(layer_indicators=True).to_json())
    del form["digest"]  # as written by hand
    change(form)
    with pytest.raises(TableError, match=message):
        IndicatorTable.from_json(json.dumps(form))


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "indicators.json"
    macro_table(layer_indicators=True).save(path)
    assert IndicatorTable.load(path) == macro_table(layer_indicators=True)
    text = path.read_text()
    for damaged in (text.replace("0.", "1.", 1).encode(), text.encode()[:-30], b"\xff" + text.encode()):
        assert damaged != text.encode()
        path.write_bytes(damaged)
        with pytest.raises(TableError, match=str(path)):
            IndicatorTable.load(path)
