"""Spaces, tables and results as rows, as text, as HTML and as data frames."""

from __future__ import annotations

import sys

import pytest
from tiny import tiny_space

import nasfast
from nasfast.display import Tabular, counted
from nasfast.indicators.table import IndicatorTable
from nasfast.pipeline.stages import RunResult
from nasfast.retrain import RetrainResult

SPACE = tiny_space()
TABLE = IndicatorTable(
    SPACE, tuple({c: 10.0 * i + c for c in range(3)} for i in range(4)), (None, 0.5, None, 0.25), {"score": "gamma"}
)


def test_rows():
    assert [(row["options"], row["labels"]) for row in SPACE.records()][0] == (
        3,
        ", ".join(SPACE.label(0, c) for c in range(3)),
    )
    rows = TABLE.records()
    assert [(r["layer"], r["choice"], r["score"]) for r in rows] == [
        (i, c, 10.0 * i + c) for i in range(4) for c in range(3)
    ]
    assert [rows[i]["identity"] for i in (0, 3, 6, 9)] == [None, 0.5, None, 0.25]
    found = nasfast.search_table(TABLE, SPACE, top_k=2)
    assert [(r["arch"], r["macs"]) for r in found.records()][0] == ("2 2 2 2", SPACE.cost((2, 2, 2, 2)).macs)
    trained = RetrainResult((1, 0, 2, 1), 100, 20, 0.75, 1.0, 0.5, 3, 9.0, 2, "80")
    (row,) = RunResult([], {"best": trained}, None).records()
    assert (row["network"], row["top1"], row["arch"]) == ("best", 0.75, "1 0 2 1")


class Odd(Tabular):
    caption = "<b>&"

    def records(self):
        return [{"a<b": "<script>", "n": 12345}, {"a<b": "&amp;", "n": 0.123456789}]


def test_texts_are_escaped():
    assert Odd()._repr_html_().count("&lt;script&gt;") == 1 and "<script>" not in Odd()._repr_html_()
    assert str(Odd()).splitlines() == ["<b>&", "a<b       n", "<script>  12,345", "&amp;     0.123457"]


def test_data_frames():
    pandas = pytest.importorskip("pandas")
    assert TABLE.to_dataframe().equals(pandas.DataFrame(TABLE.records()))


def test_without_pandas_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RuntimeError, match="a DataFrame needs pandas: pip install pandas"):
        TABLE.to_dataframe()


@pytest.mark.parametrize(("number", "text"), [(0, "0 images"), (1, "1 image"), (1801, "1,801 images")])
def test_a_single_thing_has_no_plural(number, text):
    assert counted(number, "image") == text
