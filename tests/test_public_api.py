"""The names that users rely on."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import nasfast

NAMES = """
    Choice IndicatorTable RunConfig Supernet __version__ build classify data fuse inherit keep_freed_memory load_model
    ops orthogonalize_ rank retrain run score search search_table spaces supernet train train_supernet unfuse
    use_backend
""".split()


def test_names():
    assert sorted(nasfast.__all__) == sorted(NAMES)
    assert dir(nasfast) == nasfast.__all__
    for name in NAMES:
        assert getattr(nasfast, name) is not None


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        AttributeError, match="has no attribute 'supernett'; it exports Choice, IndicatorTable, RunConfig"
    ):
        _ = nasfast.supernett


@pytest.mark.parametrize(
    "package", ["data", "indicators", "ops", "report", "retrain", "search", "spaces", "supernet", "train"]
)
def test_every_exported_name_exists(package):
    module = importlib.import_module(f"nasfast.{package}")
    assert not [name for name in module.__all__ if not hasattr(module, name)]


@pytest.mark.parametrize(
    "use",
    [
        "nasfast.__version__; dir(nasfast)",
        "from nasfast.cli.main import main; main(['--help'])",
        "nasfast.spaces.FairSampler(nasfast.spaces.mobilenet_v2()).step()",
        "s = nasfast.spaces.digits_mini()\n"
        "t = nasfast.IndicatorTable(s, tuple({c: 1.0 + c for c in u.options} for u in s.layers), (None,) * 6)\n"
        "assert nasfast.search_table(t, s, top_k=1)[0].arch == (5,) * 6\n"
        "nasfast.rank",
    ],
    ids=["import nasfast", "usage", "spaces", "search"],
)
def test_it_needs_no_torch(use):
    code = f"import sys\nsys.modules['torch'] = None\nimport nasfast\n{use}"
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
