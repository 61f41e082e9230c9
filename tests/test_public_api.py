"""The names that users rely on."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nasfast
from nasfast import extensions

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""}

NAMES = """
    Choice IndicatorTable RunConfig Supernet __version__ build classify data fuse inherit keep_freed_memory load_model
    ops orthogonalize_ rank retrain run score search search_table shrink spaces supernet train train_supernet unfuse
    use_backend
""".split()


def test_names():
    assert sorted(nasfast.__all__) == sorted(NAMES)
    assert dir(nasfast) == nasfast.__all__
    for name in NAMES:
        assert getattr(nasfast, name) is not None


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
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True, timeout=120)


FUSE_ALONE = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1:])
import torch, nasfast
convs = [torch.nn.Conv2d(16, 16, 1, bias=False).requires_grad_(False) for _ in range(2)]
model = torch.nn.Sequential(*(part for conv in convs for part in (conv, torch.nn.BatchNorm2d(16), torch.nn.ReLU())))
x = torch.randn(4, 16, 64, 64)
want = model(x)
assert "2 of 2 convolutions" in str(nasfast.fuse(model))
torch.testing.assert_close(model(x), want)
try:
    nasfast.Supernet
except ModuleNotFoundError as error:
    print(error)
from nasfast.__main__ import main
main()
"""


def test_fuse_needs_torch_and_numpy_alone():
    """Every package of pyproject.toml but these two is hidden, and what they have to be imported by."""
    form = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed, search = form["dependencies"], form["optional-dependencies"]["search"]
    assert [re.split("[<>=]", text)[0] for text in needed] == ["torch", "numpy"]
    others = [text for part in form["optional-dependencies"].values() for text in part]
    names = {re.split(r"[<>=\[;]", text)[0].lower() for text in others} - {"torch", "numpy"}
    modules = names - {"pyyaml", "scikit-learn"} | {"yaml", "sklearn", "PIL"}
    assert set(extensions._SEARCH_PACKAGES) <= modules and len(extensions._SEARCH_PACKAGES) == len(search) + 1, (
        "PIL has no line"
    )
    command = [sys.executable, "-c", FUSE_ALONE, *modules]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.stdout == (
        "nasfast.supernet needs yaml, which comes with the search: pip install 'nasfast[search]'\n"
    ), done.stderr
    assert done.returncode == 1 and done.stderr.endswith(
        "nasfast: nasfast.cli.flags needs jsonargparse, which comes with the search: pip install 'nasfast[search]'\n"
    )
