"""The names and arguments users rely on, and a docstring on everything public."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
from pathlib import Path

import pytest

import nasfast

ROOT = Path(nasfast.__file__).parent

NAMES = """
    IndicatorTable RunConfig Supernet __version__ build classify data fuse inherit load_model ops orthogonalize_
    rank retrain run score search spaces supernet train train_supernet unfuse use_backend
""".split()

# positional arguments, then keyword-only ones; a trailing = marks one that may be left out
SIGNATURES = {
    "nasfast.supernet:Supernet": ("space", "init= activation= layer_indicators= fused= seed="),
    "nasfast.supernet:Supernet.forward": ("self x path", ""),
    "nasfast.supernet:Supernet.freeze": ("self trainable=", "classifier="),
    "nasfast.supernet:build": ("space arch", "activation= init= seed="),
    "nasfast.supernet:inherit": ("net arch", ""),
    "nasfast.supernet:standalone_network": ("space arch", "activation="),
    "nasfast.supernet:initialize": ("module scheme", "seed="),
    "nasfast.train:train_supernet": ("net loader sampler cfg=", "run_dir= resume= overwrite= device= world="),
    "nasfast.train:train": ("model loader cfg stage", "sampler= evaluate= engine= extras= device= world="),
    "nasfast.train:TrainStage": ("name run_dir fingerprint settings= prefix= resume= quiet= overwrite= extends=", ""),
    "nasfast.train:evaluate": ("forward loader", "device= world="),
    "nasfast.runtime.distributed:start": ("device", ""),
    "nasfast.train:recalibrate_bn": ("network loader", "batches= device="),
    "nasfast.data:make_loader": ("cfg dataset=", "train= resolution in_channels= seed= policy= rank= world="),
    "nasfast.data:make_loaders": ("cfg", "resolution in_channels= seed= hold_out= policy= rank= world= images="),
    "nasfast.indicators.bn_gamma:score": ("net", "meta="),
    "nasfast.indicators.accuracy:path_accuracy": ("net arch", "train_loader val_loader recalibration_batches= device="),
    "nasfast.indicators.rank:rank": ("accuracies predictor space", None),
    "nasfast.indicators.accuracies:read_accuracies": ("path space", "column="),
    "nasfast.indicators.accuracies:read_scores": ("path space", ""),
    "nasfast.indicators.structure:structure_scores": ("space name archs", ""),
    "nasfast.indicators.structure:structure_table": ("space name", ""),
    "nasfast.indicators.zero_cost:gradient_norm": ("module images labels", ""),
    "nasfast.indicators.zero_cost:snip": ("module images labels", ""),
    "nasfast.indicators.zero_cost:synflow": ("module images labels=", ""),
    "nasfast.indicators.zero_cost:naswot": ("module images labels=", ""),
    "nasfast.indicators.zero_cost:zico": ("module images labels", "batches="),
    "nasfast.indicators.zero_cost:ntk_q": ("module images labels", ""),
    "nasfast.indicators.zero_cost:beta_norm": ("module images labels", ""),
    "nasfast.indicators.zero_cost:log_volume": ("module images labels=", ""),
    "nasfast.search:search": (
        "table space",
        "max_macs= max_params= max_latency_ms= latency_table= top_k= method= allow_identity= seed= history=",
    ),
    "nasfast.retrain:retrain": (
        "space arch train_loader val_loader cfg=",
        "run_dir name= supernet= activation= seed= resume= overwrite= device= world=",
    ),
    "nasfast.retrain:save_model": ("network path", ""),
    "nasfast.retrain:load_model": ("path", ""),
    "nasfast.retrain:classify": ("network image", "top_k="),
    "nasfast.retrain:export_onnx": ("network path", ""),
    "nasfast.cells:CellSupernet": ("space", "init= fused= seed="),
    "nasfast.cells:CellSupernet.forward": ("self x gates runs=", "measures= measured= nodes="),
    "nasfast.cells:CellStandalone": ("space arch", "activation="),
    "nasfast.cells:darts_space": ("", "cells= channels= reductions= num_classes= resolution="),
    "nasfast.cells:nas_bench_201_space": ("", "cells= channels= num_classes= resolution= reduce_by="),
    "nasfast.cells:read_space": ("path", ""),
    "nasfast.nasi.score:score": ("network x y", "kind= chunk="),
    "nasfast.nasi.score:score_architecture": ("space arch batches", "kind= seed="),
    "nasfast.nasi.search:search": ("mixture loader cfg=", "logits= device= progress="),
    "nasfast.nasi.search:solve": ("record", "mu= constraint= nu= xi="),
    "nasfast.cells.prototypes:prototypes": ("noise n_train n_test seed=", ""),
    "nasfast.nasi.layers:LayerMixture": ("space", "init= seed="),
    "nasfast.nasi.table:nasi_table": ("space result", "meta="),
    "nasfast.studies.nasi:nasi_quick_study": ("cfg=", ""),
    "nasfast.studies.nasi:nasi_search_study": ("cfg=", "out="),
    "nasfast.studies.nasi:nasi_compare_study": ("cfg", "out="),
    "nasfast.cells.search:search_cells": (
        "space loader cfg= train_cfg=", "held_out= run_dir name= resume= device= settings= fused= progress=",
    ),
    "nasfast.cells.montecarlo:monte_carlo": ("net loader", "batches seed= redraw= device="),
    "nasfast.cells.derive:derive": ("space logits rule", ""),
    "nasfast.runtime.lock:run_lock": ("run_dir", "create="),
    "nasfast.pipeline:run": ("cfg", "resume= world= tasks="),
    "nasfast.spaces:mobilenet_v2": ("", "num_classes= resolution= variant="),
    "nasfast.spaces:shufflenet_v2": ("", "num_classes= resolution="),
    "nasfast.spaces:nas_bench_macro": ("", "num_classes= resolution="),
    "nasfast.spaces:from_yaml": ("path", ""),
    "nasfast.spaces:mean_path": ("space", ""),
    "nasfast.spaces:FairSampler": ("space", "seed= layer_indicators="),
    "nasfast.spaces:StrictFairSampler": ("space", "seed= layer_indicators="),
    "nasfast.spaces:UniformSampler": ("space", "seed= layer_indicators="),
    "nasfast.fusion:fuse": ("model example=", "only_faster="),
    "nasfast.fusion:unfuse": ("model", ""),
    "nasfast.ops:mixed_bn": ("xs gates", "normalize eps= backend="),
    "nasfast.ops:orthogonalize": ("matrices", "backend="),
    "nasfast.ops:orthogonalize_": ("tensors", "seed= names= gain="),
    "nasfast.ops:depthwise_conv2d": ("x weight", "stride= dilation= backend="),
    "nasfast.ops:pool_3x3": ("x", "kind stride= backend="),
    "nasfast.ops:squeeze_excite": (
        "x squeeze_weight squeeze_bias excite_weight excite_bias",
        "act= gate= backend=",
    ),
    "nasfast.ops:use_backend": ("name", ""),
    "nasfast.measure.latency:latency": ("cfg=", ""),
    "nasfast.measure.step_times:step_times": ("cfg=", ""),
    "nasfast.studies.isometry:isometry_study": ("cfg=", ""),
    "nasfast.studies.isometry:indicator_stability": ("space loader", "init= seeds= cfg="),
    "nasfast.studies.moments:quick_study": ("cfg=", "out="),
    "nasfast.studies.moments:figures_study": ("cfg=", "out="),
    "nasfast.studies.moments:module_study": ("cfg=", ""),
    "nasfast.analysis.moments:run": ("cfg source", "realisations seed= device= file= progress="),
    "nasfast.analysis.moments:run_chunk": ("cfg source realisations", "seed= device="),
    "nasfast.analysis.moments:detect": ("depth curves", ""),
    "nasfast.analysis.moments:fit_power_law": ("depth chi increments units", ""),
    "nasfast.analysis.moments:effective_rank": ("x", ""),
    "nasfast.analysis.moments:module_chi": ("module x dx=", "draws= seed="),
    "nasfast.analysis.moments:module_moments": ("module x", "probes= draws= seed="),
    "nasfast.analysis.jacobian:isometry": (
        "module x", "samples= probes= method= bn_mode= circular= max_exact= lanczos_steps= seed=",
    ),
    "nasfast.analysis.jacobian:circular_conv_moments": ("weight groups=", "size="),
    "nasfast.analysis.fairness:fairness": ("candidates h", "names= phi="),
    "nasfast.analysis.fairness:depth_spread": ("net images", "paths= indicator_bn= seed="),
    "nasfast.analysis.fairness:seed_stability": ("rankings", ""),
    "nasfast.measure.profile:profile": ("cfg=", ""),
    "nasfast.measure.timing:measure": ("variants", "rounds warmup="),
    "nasfast.measure.doctor:doctor": ("", ""),
    "nasfast.measure.doctor:environment": ("", ""),
}  # fmt: skip


def test_names():
    assert sorted(nasfast.__all__) == sorted(NAMES)
    assert dir(nasfast) == nasfast.__all__
    for name in NAMES:
        assert getattr(nasfast, name) is not None


def test_names_are_what_they_say():
    from nasfast.indicators.bn_gamma import score
    from nasfast.pipeline import run
    from nasfast.supernet import Supernet

    assert (nasfast.score, nasfast.run, nasfast.Supernet) == (score, run, Supernet)
    assert nasfast.search.top_k is importlib.import_module("nasfast.search").top_k
    assert callable(nasfast.search)


def test_help_shows_search_as_the_function_that_it_is():
    function = nasfast.search.search
    assert inspect.signature(nasfast.search) == inspect.signature(function, eval_str=True)
    text = pydoc.plain(pydoc.render_doc(nasfast.search))
    head = text[: text.index("PACKAGE CONTENTS")]
    assert (
        "nasfast.search(table: nasfast.indicators.table.IndicatorTable," in head
        and "max_macs: largest MACs per image" in head
    )


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="has no attribute 'supernett'; it exports IndicatorTable, RunConfig"):
        _ = nasfast.supernett


def find(path: str):
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path):
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD: [], inspect.Parameter.KEYWORD_ONLY: []}
    for name, parameter in inspect.signature(find(path)).parameters.items():
        kinds[parameter.kind].append(name + ("=" if parameter.default is not inspect.Parameter.empty else ""))
    positional, keywords = (" ".join(names) for names in kinds.values())
    wanted_positional, wanted_keywords = SIGNATURES[path]
    assert positional == wanted_positional
    if wanted_keywords is not None:
        assert keywords == wanted_keywords


def operators() -> list[str]:
    """The functions that take a backend."""
    functions = [n for n in nasfast.ops.__all__ if inspect.isfunction(getattr(nasfast.ops, n))]
    return [n for n in functions if "backend" in inspect.signature(getattr(nasfast.ops, n)).parameters]


@pytest.mark.parametrize("name", operators())
def test_everything_behind_the_tensors_of_an_operator_is_keyword_only(name):
    for p in inspect.signature(getattr(nasfast.ops, name)).parameters.values():
        tensors = any(kind in str(p.annotation) for kind in ("Tensor", "ConvBNParams", "Stage"))
        if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert tensors, p.name
            assert p.default is inspect.Parameter.empty, p.name
        else:
            assert p.kind is inspect.Parameter.KEYWORD_ONLY, p.name


@pytest.mark.parametrize(
    "package",
    ["cells", "config", "data", "indicators", "ops", "report", "retrain", "search", "spaces", "supernet", "train"],
)
def test_every_exported_name_exists(package):
    module = importlib.import_module(f"nasfast.{package}")
    names = getattr(module, "__all__", [])
    assert len(names) == len(set(names))
    assert not [name for name in names if not hasattr(module, name)]
    if package not in ("config", "report"):
        assert names


def undocumented(path: Path) -> list[str]:
    """Public functions, classes and modules without a docstring."""
    tree = ast.parse(path.read_text())
    found = [] if ast.get_docstring(tree) or not tree.body else [f"{path.name}"]
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                found.append(f"{path.name}: {node.name}")
    return found


SOURCES = sorted(p for p in ROOT.rglob("*.py") if "_triton" not in p.parts)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_things_have_docstrings(path):
    assert undocumented(path) == []


def test_a_missing_docstring_is_found(tmp_path):
    path = tmp_path / "x.py"
    path.write_text('"""Doc."""\ndef f():\n    pass\nclass C:\n    """Doc."""\ndef _g():\n    pass\n')
    assert undocumented(path) == ["x.py: f"]
    path.write_text("x = 1\n")
    assert undocumented(path) == ["x.py"]
