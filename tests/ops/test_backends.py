import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import IMAGE_OPERATORS

from nasfast import ops
from nasfast.ops import _native, backends

X = torch.randn(2, 3, 4, 4)
OTHERS = {"bn_act", "conv_bn_act", "conv_bn_act_chain", "orthogonalize", "qr", "geqrf"}
OPS = tuple(backends._TABLE)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("NASFAST_BACKEND", raising=False)


def test_every_operator_is_in_the_tables_of_tests():
    """A new one belongs to IMAGE_OPERATORS, and with it to the tests of edges and of instruction sets, or to OTHERS."""
    assert set(OPS) == {*IMAGE_OPERATORS, *OTHERS}


@pytest.mark.parametrize("op", OPS)
def test_order_is_argument_context_environment_device(op, native, monkeypatch):
    assert ops.resolve_backend(op, X).name == "cpu"
    monkeypatch.setenv("NASFAST_BACKEND", "reference")
    assert ops.resolve_backend(op, X).name == "reference"
    with ops.use_backend("cpu"):
        assert ops.resolve_backend(op, X).name == "cpu"
        assert ops.resolve_backend(op, X, "reference").name == "reference"
    assert ops.resolve_backend(op, X).name == "reference"


def test_a_missing_emulation_and_a_broken_one_are_told_apart(native, monkeypatch):
    monkeypatch.setitem(sys.modules, "nasfast._emulation", None)
    assert "run NASFAST_EMULATION=ON pip install" in _native.why_no_emulation()

    def find_spec(name, *_):
        if name == "nasfast._emulation":
            raise ImportError("undefined symbol: f")

    monkeypatch.delitem(sys.modules, "nasfast._emulation")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    assert "cannot be loaded (undefined symbol: f): build it again" in _native.why_no_emulation()


def test_context_nests_and_ends_with_an_error_too():
    with ops.use_backend("reference"):
        with ops.use_backend("cpu"):
            assert backends._scoped_name == "cpu"
        assert ops.resolve_backend("bn_act", X).name == "reference"
    with pytest.raises(ZeroDivisionError), ops.use_backend("reference"):
        1 / 0  # noqa: B018
    assert backends._scoped_name is None


def test_unknown_names_list_the_valid_ones(monkeypatch):
    valid = "valid names are cpu, triton, cuda, reference"
    with pytest.raises(ValueError, match=f"backend: unknown backend 'gpu'; {valid}"):
        ops.resolve_backend("bn_act", X, "gpu")
    with pytest.raises(ValueError, match=f"use_backend: unknown backend 'gpu'; {valid}"), ops.use_backend("gpu"):
        pass
    monkeypatch.setenv("NASFAST_BACKEND", "gpu")
    with pytest.raises(ValueError, match=f"NASFAST_BACKEND: unknown backend 'gpu'; {valid}"):
        ops.bn_act(X, torch.ones(3), torch.zeros(3))


def test_named_backend_that_cannot_serve_raises_with_its_reason(native):
    with pytest.raises(RuntimeError, match="'cpu' .from backend. cannot serve: serves float32 and bfloat16, got"):
        ops.resolve_backend("bn_act", X.double(), "cpu")
    with pytest.raises(RuntimeError, match="'cpu'.*serves CPU tensors, got one on meta"):
        ops.resolve_backend("bn_act", X.to("meta"), "cpu")
    with pytest.raises(
        RuntimeError, match="this version has no cuda kernel for bn_act; choose from cpu, triton, reference"
    ):
        ops.resolve_backend("bn_act", X, "cuda")


def test_a_name_for_all_operators_leaves_those_that_it_lacks_to_the_automatic_choice(native, monkeypatch, caplog):
    with ops.use_backend("cuda"):
        assert ops.resolve_backend("bn_act", X).name == "cpu"
        with pytest.raises(
            RuntimeError, match="'cuda' .from use_backend. cannot serve: serves CUDA tensors, got one on"
        ):
            ops.resolve_backend("conv_bn_act", X)
    monkeypatch.setenv("NASFAST_BACKEND", "triton")
    assert ops.resolve_backend("pool_3x3", X).name == "cpu"


def test_automatic_fallback_is_logged_once(native, caplog):
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        for _ in range(3):
            assert ops.resolve_backend("bn_act", X.double()).name == "reference"
    (record,) = caplog.records
    assert "bn_act runs on the reference backend (cpu: serves float32 and bfloat16" in record.message


def test_explain_covers_every_operator_and_backend(native):
    rows = backends.explain()
    assert {(row.op, row.backend) for row in rows} == {(op, name) for op in OPS for name in ops.BACKENDS}
    chosen = {row.op: row.backend for row in rows if row.chosen}
    assert chosen == dict.fromkeys(OPS, "cpu")
    assert all(bool(row.reason) != row.available for row in rows)
    with ops.use_backend("cuda"):
        # what has CUDA kernels cannot run on a CPU
        chosen = [row.op for row in backends.explain() if row.chosen]
    assert chosen == ["bn_act", "mixed_bn", "depthwise_conv2d", "pool_3x3", "squeeze_excite"]
