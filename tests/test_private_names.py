"""Every private name of PyTorch and other packages that nasfast uses, and what breaks without it."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from pathlib import Path

import jsonargparse
import pytest
import torch
import torch._dynamo.config
import torch._dynamo.eval_frame
import torch._inductor.config
import torch._subclasses.fake_tensor
import torch.fx._symbolic_trace
import torch.fx.experimental._config
import torch.utils._device
import torch.utils._pytree
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import batchnorm, conv, dropout
from torch.utils import _python_dispatch

ROOT = Path(__file__).parents[1]
PUBLIC = {"_asdict", "_replace", "_fields"}  # of named tuples, which have no other way to avoid names of fields
atoms = torch.ops.aten
# what needs them: what must be there and true
NEEDED = {
    "the autograd of all operators (ops/autograd.py)": lambda: [
        torch._C._any_requires_grad(1.0, [torch.ones(1, requires_grad=True)]),
        not torch._C._any_requires_grad(1.0, [torch.ones(1)]),
        torch._C._AutoDispatchBelowAutograd,
        torch._C._after_autograd_keyset.has(torch._C.DispatchKey.CPU),
        atoms.cat.default._schema.name == "aten::cat",
    ],
    "activation checkpointing of operators (ops/autograd.py)": lambda: [
        torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    ],
    "modules that are read quickly (ops/modules.py, fusion)": lambda: [
        nn.BatchNorm2d(1)._buffers.keys() == {"running_mean", "running_var", "num_batches_tracked"},
        nn.Conv2d(1, 1, 1)._parameters.keys() == {"weight", "bias"},
        vars(nn.Sequential(nn.ReLU()))["_modules"].keys() == {"0"},
    ],
    "hooks inside of a chain, which then runs unfused (ops/modules.py, fusion/region.py)": lambda: [
        nn.ReLU()._forward_hooks == nn.ReLU()._forward_pre_hooks == {},
        nn.ReLU()._backward_hooks == nn.ReLU()._backward_pre_hooks == {},
    ],
    "hooks on all modules, which need the unfused model (fusion/region.py)": lambda: [
        not nn.modules.module._has_any_global_hook()
    ],
    "operators under torch.func and forward-mode derivatives, which run on the reference (ops/autograd.py)": lambda: [
        forward_ad._current_level == -1,
        torch._C._functorch.peek_interpreter_stack() is None,
    ],
    "batches of gradients, one by one (ops/autograd.py)": lambda: [
        torch._C._functorch._unwrap_batched,
        torch._C._functorch._add_batch_dim,
        not torch._C._dispatch_tls_is_dispatch_key_included("VmapMode"),
        "Batched" not in repr(torch._C._dispatch_keys(torch.ones(1))),
        torch._C._vmapmode_increment_nesting() - torch._C._vmapmode_decrement_nesting() == 1,
        (torch._add_batch_dim, torch._remove_batch_dim),
    ],
    "noticing writes to tensors (ops/low_precision.py)": lambda: [torch.ones(1).add_(1)._version == 1],
    "counting operations (research/zero_cost.py)": lambda: [_python_dispatch.TorchDispatchMode],
    "a trace without the checks of sizes (fusion/find.py)": lambda: [torch._assert, nn.BatchNorm2d._check_input_dim],
    "telling patched and compiled modules from PyTorch's (fusion/modules.py)": lambda: [
        nn.Conv2d._conv_forward,
        nn.ReLU()._compiled_call_impl is None,
        torch._dynamo.eval_frame.OptimizedModule,
    ],
    "capturing a module (fusion/region.py)": lambda: [
        torch._dynamo.run,
        torch._dynamo.maybe_mark_dynamic,
        torch._dynamo.lookup_backend("eager"),
        torch._dynamo.register_backend,
        "inductor" in torch._dynamo.list_backends(exclude_tags=()),
        torch._C._len_torch_dispatch_stack() == 0,
        torch.overrides._get_current_function_mode_stack() == [],
        issubclass(torch.utils._device.DeviceContext, torch.overrides.TorchFunctionMode),
        not torch.fx._symbolic_trace.is_fx_symbolic_tracing(),
        torch._dynamo.eval_frame._stance.stance == "default",
        not torch._dynamo.config.disable,
    ],
    "one capture for all sizes and numbers (fusion/region.py, fusion/shapes.py)": lambda: [
        torch.fx.experimental._config.backed_size_oblivious is False,
        torch._dynamo.config.optimize_ddp and isinstance(torch._dynamo.config.run_gc_after_compile, bool),
        isinstance(torch._dynamo.config.use_recursive_dict_tags_for_guards, bool),
        "torch.batch_norm(" in inspect.getsource(nn.functional.batch_norm),
        "torch._C._nn.hardtanh_(" in inspect.getsource(nn.functional.hardtanh),
    ],
    "the backend of torch.compile (fusion/dynamo.py)": lambda: [
        isinstance(atoms.relu_.default, torch._ops.OpOverload),
        atoms.relu_.default._schema.is_mutable and not atoms.relu.default._schema.is_mutable,
        torch._inductor.config.cpp.cxx,
    ],
    "what a graph reads, writes and pads (fusion/effects.py, fusion/match.py)": lambda: [
        torch.utils._pytree.tree_leaves([1, {"a": 2}]) == [1, 2],
        torch.ones(1).untyped_storage()._cdata,
        torch._C._nn.pad,
    ],
    "kept weights, gradients of ranks (engine, train/exchange.py)": lambda: [torch._foreach_copy_, torch._foreach_div_],
    "finding layers of a kind (fusion, research)": lambda: [
        issubclass(nn.Conv2d, conv._ConvNd) and issubclass(nn.Dropout, dropout._DropoutNd),
        issubclass(nn.SyncBatchNorm, batchnorm._BatchNorm) and issubclass(nn.InstanceNorm2d, batchnorm._NormBase),
    ],
    "the buffers of a graph engine (engine/graphs.py)": lambda: [torch._subclasses.fake_tensor.FakeTensorMode],
    "ending a failed capture (engine/capture.py)": lambda: [torch.cuda.memory._cuda_endAllocateToPool],
    "the help of all flags, and the nearest flag in an error (cli/flags.py)": lambda: [
        issubclass(argparse._HelpAction, argparse.Action),
        "--help" in jsonargparse.ArgumentParser()._option_string_actions,
        jsonargparse.ArgumentParser()._subcommands_action is None,
    ],
}
KNOWN = set(re.findall(r"\b_\w+", Path(__file__).read_text(encoding="utf-8")))


@pytest.mark.parametrize("what", NEEDED)
def test_private_names_are_what_nasfast_needs(what):
    assert all(NEEDED[what]())


def foreign_names(trees: dict[str, ast.Module]) -> dict[str, str]:
    """Private names that code uses and does not define itself -> where."""
    nodes = [(where, node) for where, tree in trees.items() for node in ast.walk(tree)]
    own = {n.name for _, n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    own |= {n.attr for _, n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {n.id for _, n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    told = {*vars(nn.Module()), "_version"}  # private names that are given as text
    found = {}
    for where, node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute) and node.attr not in own:
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("nasfast"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            names = [text] if text in told else re.findall(r"\w+", text) if text.startswith("torch._") else []
        found |= {name: f"{where}:{node.lineno}" for name in names if re.match("_[^_]", name)}
    return found


def test_every_private_name_is_here():
    trees = {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in (ROOT / "nasfast").rglob("*.py")}
    found = {name: where for name, where in foreign_names(trees).items() if name not in PUBLIC | KNOWN}
    assert found == {}, "use a public name, or say what needs the private one"


def test_a_private_name_is_found():
    code = "import torch\nfrom torch._a import _b\ntorch._c(self._own, '_parameters', 'torch._d.e')\nself._own = 1"
    assert set(foreign_names({"here": ast.parse(code)})) == {"_a", "_b", "_c", "_d", "_parameters"}
