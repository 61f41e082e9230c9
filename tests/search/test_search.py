"""The files of a search."""

from __future__ import annotations

import pytest

from nasfast.config import ConfigError
from nasfast.search import Limits, load_candidates, pareto_front, save_candidates, search_table
from nasfast.spaces import nas_bench_macro


def test_archs_json_round_trip(tmp_path, small_space, make_table):
    table, path = make_table(small_space, 0), tmp_path / "archs.json"
    macs = small_space.cost((0,) * 6).macs * 1.2
    found, front = search_table(table, small_space, max_macs=macs), pareto_front(table, small_space)
    save_candidates(path, small_space, found, limits=Limits(max_macs=macs), pareto=front)
    result = load_candidates(path, small_space)
    assert list(result.candidates) == found
    assert list(result.pareto) == front
    assert (result.space, result.max_macs, result.max_params) == ("small", macs, None)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="'small'.*'nas_bench_macro'"):
        load_candidates(path, nas_bench_macro())
    path.write_text(path.read_text().replace('"optimal": true', '"optimal": false', 1))
    with pytest.raises(ConfigError, match="archs.json .* does not match its digest"):
        load_candidates(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*archs.json: No such file"),
        (b"\xff", "archs.json has no result of a search"),
        (b"{}", "archs.json: "),
    ],
)
def test_an_unusable_file_is_named(tmp_path, content, message):
    path = tmp_path / "archs.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_candidates(path)
