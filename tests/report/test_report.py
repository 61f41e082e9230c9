"""The report of finished, unfinished and damaged runs."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from nasfast.report import plots
from nasfast.report.html import write_report
from nasfast.report.page import svg_text, write_figure
from nasfast.spaces import digits_mini, mobilenet_v2, nas_bench_macro, parse_arch, shufflenet_v2

HOSTILE = '<script>alert("x")</script> $\\frac{$ & \'"'


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on unbalanced sections."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.sources, self.text, self.open = [], [], "", []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for key, value in attrs if key in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page_of(folder) -> Page:
    return Page(write_report(folder).read_text())


def test_finished_run(finished_run):
    page = page_of(finished_run)
    assert "Not run yet" not in page.text
    assert "cannot be read" not in page.text
    assert page.tags.count("figure") == 5
    figures = {p.name for p in (finished_run / "report").glob("*.svg")}
    assert figures == {"architecture.svg", "indicators.svg", "pareto.svg", "retrain.svg", "supernet.svg"}
    archs = json.loads((finished_run / "archs.json").read_text())
    assert f"{archs['candidates'][0]['macs'] / 1e6:.2f} M" in page.text
    for expected in (
        "75.12 %",
        "71.03 %",
        "4.09 percentage points above the mean of 3 random architectures of equal cost (95 % interval +",
        "over 10,000 images and the random architectures).",
        "highest score (gap",
        "The proof is about the score only. How well the score ranks trained accuracies: The predictor",
        "Kendall",
        "max_macs",
        "avx2",
        f"model = nasfast.load_model({str(finished_run / 'retrain/best')!r})",
    ):
        assert expected in page.text
    # nothing is loaded from outside the page
    assert all(source.startswith(("data:image/png;base64,", "#")) for source in page.sources)
    text = (finished_run / "report.html").read_text()
    assert "default-src 'none'" in text and "http" not in text.replace("http-equiv", "")


@pytest.mark.usefixtures("blank_figures")
def test_the_speed_of_a_training_names_its_number_type(run):
    config = run / "config.yaml"
    config.write_text("train: {precision: bf16}\nretrain: {train: {precision: fp32}}\n")
    text = page_of(run).text
    assert text.count("images per second in bfloat16 autocast.") == text.count("images per second in float32.") == 1
    config.write_text("train: [")
    assert page_of(run).text.count("images per second.") == 2


def test_empty_run_names_what_is_missing(tmp_path):
    page = page_of(tmp_path)
    assert page.text.count("Not run yet") == 12
    for command in ("supernet", "score", "search", "retrain", "rank"):
        assert f"nasfast {command}" in page.text
    assert page.tags.count("figure") == 0


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(
    ("missing", "figures"),
    [("archs.json", 3), ("indicators.json", 3), ("metrics.jsonl", 3), ("space.yaml", 4), ("rank.json", 5)],
)
def test_each_missing_file_costs_only_its_sections(run, missing, figures):
    (run / missing).unlink()
    page = page_of(run)
    assert page.tags.count("figure") == figures
    assert "Not run yet" in page.text


def change_result(folder, name, **changes):
    path = folder / "retrain" / name / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.usefixtures("blank_figures")
def test_retraining_of_an_earlier_best_is_not_shown_as_the_present_ones(run, finished_run):
    other = json.loads((finished_run / "retrain" / "random" / "result.json").read_text())["arch"]
    change_result(run, "best", arch=other)
    text = page_of(run).text
    assert text.count("The retrained network has another architecture than the best of the present search") == 2
    assert "percentage points" not in text
    assert "top-1, r" not in text.split("Best architecture:")[0]


def add_seeds(folder, *top1: float) -> None:
    """Further trainings of the best architecture with these accuracies."""
    for seed, value in enumerate(top1, 1):
        shutil.copytree(folder / "retrain" / "best", folder / "retrain" / f"best-seed-{seed}")
        right = np.random.default_rng(seed).permutation(10_000) < round(10_000 * value)
        change_result(folder, f"best-seed-{seed}", top1=value, correct=np.packbits(right).tobytes().hex())


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("more", [(), (0.7012, 0.7111)])
def test_cards_show_what_the_files_of_the_networks_say(run, more):
    """With several seeds the mean over them; what has other epochs is not compared, so it is not in a mean."""
    add_seeds(run, *more, 0.99)
    change_result(run, f"best-seed-{len(more) + 1}", epochs=7)
    change_result(run, "random-3", epochs=7, top1=0.01)
    cards = " ".join(page_of(run).text.split("Best architecture:")[0].split())
    mean = 100 * statistics.mean([0.7512, *more])
    spread = "mean of 3 seeds, 70.12 % to 75.12 %" if more else "95 % interval 74.26 % to 75.96 %"
    assert f"{mean:.2f} %top-1, retrained ({spread})" in cards
    assert "70.53 %mean top-1 of 2 random architectures of equal cost" in cards, "of 71.03 % and 70.03 %"
    assert f"{mean - 70.53:.2f} percentage points above the mean of 2" in page_of(run).text


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(("top1", "noted"), [(0.019, True), (0.03, False)])
def test_a_supernet_at_chance_is_said_to_be(run, top1, noted):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"stage": "supernet", "step": 900, "loss": 6.9, "top1": top1}) + "\n")
    assert ("accuracy is at chance" in page_of(run).text) == noted
    (run / "space.yaml").unlink()
    assert "accuracy is at chance" not in page_of(run).text


def test_a_run_without_a_table_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text("method: dinas\nscore: {name: path_loss, distill: false}\n")
    page = page_of(tmp_path)
    # the Pareto front and the heat map
    assert page.text.count("There is no table of scores: path_loss scores whole paths during the search.") == 2
    assert "nasfast score" not in page.text


@pytest.mark.slow
@pytest.mark.usefixtures("blank_figures")
def test_a_run_of_several_seeds_says_whether_they_agree(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "seed-0")
    assert "--seeds 3" in page_of(tmp_path / "seed-0").text
    tau = {"value": 0.5, "low": 0.25, "high": 0.75}
    for found, said in (
        ({"tau": tau, "learned": None, "stable": False}, "is +0.500 [+0.250, +0.750]: the ranking is not stable"),
        (
            {"tau": {"value": 0.9, "low": 0.8, "high": 1.0}, "learned": tau, "stable": False},
            "is +0.500 [+0.250, +0.750] without the structural baseline: the ranking is not stable",
        ),
        (None, "one of 3 seeds; too few of them are scored"),
    ):
        (tmp_path / "stability.json").write_text(json.dumps({"seeds": 3, "agreement": found}))
        page = page_of(tmp_path / "seed-0")
        assert said in page.text and "--seeds 3" not in page.text and "../report.html" in page.sources
    (tmp_path / "stability.json").write_text("[]")
    assert page_of(tmp_path / "seed-0").text.count("cannot be read") == 1
    # another run beside the seeds is none of them
    shutil.copytree(finished_run, tmp_path / "mine")
    assert "--seeds 3" in page_of(tmp_path / "mine").text


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 1}'])
def test_damaged_files_are_named_not_fatal(run, content):
    (run / "metrics.jsonl").unlink()
    for name in ("archs.json", "indicators.json", "rank.json", "space.yaml", "retrain/best/result.json"):
        (run / name).write_text(content)
    # summary, strip, top K, Pareto front, heat map, retraining, rank; how to use the network needs only that it exists
    no_result = content in ("{", "[]")
    assert page_of(run).text.count("cannot be read") == 7 + no_result


def test_hostile_strings_are_shown_not_obeyed(tmp_path, make_run):
    make_run(tmp_path, digits_mini().replace(name=HOSTILE), max_macs=5e6)
    (tmp_path / "config.yaml").write_text(f"note: {HOSTILE}\n")
    (tmp_path / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (tmp_path / "retrain" / "best").rename(tmp_path / "retrain" / "<b>$x$ &")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"stage": "retrain/" + HOSTILE, "step": 1, "loss": 1.0, "top1": 0.1}) + "\n")
    page = page_of(tmp_path)
    assert "script" not in page.tags
    assert "b" in page.tags  # of the cards only
    assert page.text.count(HOSTILE) >= 3
    assert "<b>$x$ &" in page.text
    assert page.tags.count("figure") == 5


@pytest.mark.parametrize(
    ("space", "arch"),
    [
        (mobilenet_v2(variant="bnnas"), "3 -1 0 4 0 -1 -1 0 4 -1 4 4 1 4 2 0 0 4 0 2 2"),
        (nas_bench_macro(), "01202112"),
        (shufflenet_v2(), "01230123012301230123"),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_strip_shows_every_layer(tmp_path, space, arch):
    figure = plots.architecture_strip(space, parse_arch(arch))
    strip, bars = figure.axes
    assert len(strip.patches) == len(bars.patches) == len(space)
    total = sum(bar.get_height() for bar in bars.patches) * 1e6 + space.fixed_cost.macs
    assert total == pytest.approx(space.cost(parse_arch(arch)).macs)
    figure.savefig(tmp_path / "strip.png")


def test_curves_average_long_runs_and_skip_gaps():
    metrics = [{"stage": "s", "step": i, "loss": float(i % 2), "top1": None} for i in range(8000)]
    loss, accuracy = plots.training_curves(metrics, ["s"]).axes
    (line,) = loss.lines
    assert len(line.get_xdata()) == 400
    assert set(line.get_ydata()) == {0.5}
    assert len(accuracy.lines[0].get_xdata()) == 0


def test_seeds_and_random_networks_share_entries_of_the_legend():
    names = ["best", "best-seed-1", "random", "random-2", "random-10"]
    stages = [f"retrain/{name}" for name in names]
    metrics = [{"stage": stage, "step": i, "loss": 1.0, "top1": 0.5} for stage in stages for i in range(3)]
    for ax in plots.training_curves(metrics, stages).axes:
        entries = [text.get_text() for text in ax.get_legend().get_texts()]
        assert entries == ["retrain/best, training", "retrain/random, training"]
        best, again, random, *others = [line.get_color() for line in ax.lines]
        assert best == again != random and set(others) == {random}


# figures in pages


def test_text_of_any_kind_is_shown_not_obeyed(tmp_path):
    figure, (ax,) = plots.new_figure(4, 2)
    ax.set_title(plots.literal("<script>\x01 & $x"))
    text = write_figure(figure, "a <caption>\x03", tmp_path / "figure.svg")
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "a &lt;caption&gt;" in text
    ElementTree.parse(tmp_path / "figure.svg")


def test_a_figure_is_the_same_every_time_and_has_identifiers_of_its_own():
    def draw(name):
        figure, (ax,) = plots.new_figure(4, 2)
        ax.plot([0, 1], [0, 1], marker="o")
        return svg_text(figure, name, "caption")

    def identities(text):
        return set(re.findall(r' id="([^"]*)"', text))

    assert draw("one") == draw("one")
    assert identities(draw("one")) and not identities(draw("one")) & identities(draw("two"))
