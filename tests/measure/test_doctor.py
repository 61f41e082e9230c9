import pytest
import torch

from nasfast.cli.main import main
from nasfast.measure.doctor import doctor
from nasfast.ops import _native, backends


def test_names_versions_machine_and_every_operator(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch {torch.__version__.split('+')[0]}" in text
    assert f"{torch.get_num_threads()} threads" in text
    if _native.extension is not None:
        assert _native.extension.build_info().compiler in text
        assert f"nasfast uses {_native.extension.isa()}" in text
    assert "precision auto on cpu: fp32" in text
    for row in backends.explain():
        assert f"{row.op} on cpu" in text
        if not row.available:
            assert f"not {row.backend}: {row.reason}" in text


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("gpu", "NASFAST_BACKEND: unknown backend 'gpu'; valid names are"),
        ("cuda", "bn_act on cpu: none, the named backend cannot serve"),
        ("reference", "not cpu: another backend comes first"),
    ],
)
def test_environment_is_reported(monkeypatch, value, line):
    if value == "reference" and _native.extension is None:
        pytest.skip(_native.why_missing())
    monkeypatch.setenv("NASFAST_BACKEND", value)
    assert line in doctor()
