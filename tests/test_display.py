"""Spaces, tables and results as text, as HTML and as data frames."""

from __future__ import annotations

import html.parser
import sys

import pytest
from tiny import tiny_space

import nasfast
from nasfast.cells import nas_bench_201_space
from nasfast.display import Tabular
from nasfast.indicators.table import IndicatorTable
from nasfast.pipeline import RunResult
from nasfast.retrain import RetrainResult
from nasfast.search import Candidates, SearchResult, TableLimit

SPACE = tiny_space()
TABLE = IndicatorTable(
    SPACE, tuple({c: 10.0 * i + c for c in range(3)} for i in range(4)), (None, 0.5, None, 0.25), {"score": "gamma"}
)


class Cells(html.parser.HTMLParser):
    """The cells of a table, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        self.inside = tag in ("td", "th")
        if self.inside:
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag):
        self.inside = False


def test_a_space_of_layers():
    assert repr(SPACE) == "<SearchSpace tiny: 4 choices, 81 architectures, 16 x 16 input, 4 classes>"
    header, *rows = Cells(SPACE._repr_html_()).rows
    assert header == ["choice", "options", "labels"]
    assert [row[1] for row in rows] == ["3", "3", "3", "3"]
    assert rows[0][2] == ", ".join(SPACE.label(0, c) for c in range(3))
    lines = str(SPACE).splitlines()
    assert lines[0] == "tiny: 4 choices, 81 architectures, 16 x 16 input, 4 classes"
    assert len(lines) == 6


def test_a_space_of_cells():
    space = nas_bench_201_space()
    rows = space.records()
    assert len(rows) == 6
    assert rows[0]["options"] == 5
    assert "skip_connect" in rows[0]["labels"]
    assert f"{5**6:.3g} architectures" in repr(space)


def test_scores_by_layer_and_choice():
    rows = TABLE.records()
    assert [(r["layer"], r["choice"], r["score"]) for r in rows] == [
        (i, c, 10.0 * i + c) for i in range(4) for c in range(3)
    ]
    assert [rows[i]["identity"] for i in (0, 3, 6, 9)] == [None, 0.5, None, 0.25]
    assert repr(TABLE) == "<IndicatorTable gamma scores of tiny: 12 candidates of 4 layers>"
    assert Cells(TABLE._repr_html_()).rows[1][-1] == "-"


def test_the_result_of_a_search_is_a_list_and_a_table():
    found = nasfast.search(TABLE, SPACE, top_k=2)
    assert isinstance(found, list)
    assert found == [found[0], found[1]]
    assert found.records()[0]["arch"] == "2 2 2 2"
    assert [r["macs"] for r in found.records()] == [SPACE.cost(c.arch).macs for c in found]
    assert f"{found[0].macs:,}" in found._repr_html_()
    assert Candidates()._repr_html_() == "<table><caption>0 architectures, best first</caption><tr></tr></table>"
    limits = (TableLimit("latency", "ms", "", 3.0),)
    result = SearchResult("tiny", "f", None, None, (found[0].replace(values=(2.5,)),), tables=limits)
    assert result.records()[0]["latency (ms)"] == 2.5


def test_retrained_networks():
    result = RetrainResult((1, 0, 2, 1), 100, 20, 0.75, 1.0, 0.5, 3, 9.0)
    (row,) = RunResult([], {"best": result}, None).records()
    assert row == {
        "network": "best",
        "top1": 0.75,
        "top5": 1.0,
        "macs": 100,
        "params": 20,
        "epochs": 3,
        "arch": "1 0 2 1",
    }


class Odd(Tabular):
    caption = "<b>&"

    def records(self):
        return [{"a<b": "<script>", "n": 12345}, {"a<b": "&amp;", "n": 0.123456789}]


def test_texts_are_escaped():
    text = Odd()._repr_html_()
    assert "<script>" not in text and "<b>" not in text
    assert Cells(text).rows == [["a<b", "n"], ["<script>", "12,345"], ["&amp;", "0.123457"]]
    assert str(Odd()).splitlines() == ["<b>&", "a<b       n", "<script>  12,345", "&amp;     0.123457"]


def test_a_data_frame_has_the_rows(monkeypatch):
    class Pandas:
        @staticmethod
        def DataFrame(rows):
            return ("frame", rows)

    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    assert TABLE.to_dataframe() == ("frame", TABLE.records())


def test_a_data_frame_of_pandas():
    pandas = pytest.importorskip("pandas")
    frame = TABLE.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["layer", "choice", "label", "score", "identity"]
    assert frame.groupby("layer")["score"].mean().tolist() == [1.0, 11.0, 21.0, 31.0]


def test_without_pandas_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RuntimeError, match="a DataFrame needs pandas: pip install pandas"):
        TABLE.to_dataframe()
