"""Every private name of PyTorch and of the standard library that nasfast uses: what it is for, and that it does that.

A new release of PyTorch may change them without notice. A test that fails here says which part of nasfast it breaks.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

import jsonargparse
import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import batchnorm, conv, dropout
from torch.nn.modules import module as module_state
from torch.utils import _python_dispatch, _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT = Path(__file__).parents[1]
NAMES: dict[str, tuple[str, Callable[[], None]]] = {}
PUBLIC = {"_asdict", "_replace", "_fields"}  # of named tuples, which have no other way to avoid names of fields


def used_for(what: str, *names: str) -> Callable:
    """Decorator of a check of names: what breaks without them."""

    def note(check: Callable[[], None]) -> Callable[[], None]:
        NAMES.update(dict.fromkeys(names, (what, check)))
        return check

    return note


def learning() -> Tensor:
    return torch.ones(3, requires_grad=True)


@used_for("the autograd of all operators (ops/autograd.py)", "_C", "_any_requires_grad")
def _():
    assert torch._C._any_requires_grad(1.0, None, [torch.ones(1), learning()])
    assert not torch._C._any_requires_grad(1.0, None, [torch.ones(1)], torch.ones(1))


@used_for("the autograd of all operators (ops/autograd.py)", "_AutoDispatchBelowAutograd", "_after_autograd_keyset")
def _():
    keys = torch._C._after_autograd_keyset
    assert keys.has(torch._C.DispatchKey.CPU) and not keys.has(torch._C.DispatchKey.AutogradCPU)
    with torch._C._AutoDispatchBelowAutograd():
        assert not (2 * learning()).requires_grad


@used_for("the autograd of operators with lists of tensors (ops/autograd.py)", "_schema")
def _():
    schema = torch.ops.aten.cat.default._schema
    assert schema.name == "aten::cat" and str(schema.arguments[0].type) == "List[Tensor]"
    assert [argument.has_default_value() for argument in schema.arguments] == [False, True]


@used_for("activation checkpointing of fused models (ops/autograd.py)", "_autograd", "_top_saved_tensors_default_hooks")
def _():
    top = torch._C._autograd._top_saved_tensors_default_hooks
    assert top(False) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert top(False) is not None


@used_for("chains under forward-mode derivatives, which run unfused (fusion/stages.py)", "_current_level")
def _():
    assert forward_ad._current_level == -1
    with forward_ad.dual_level():
        assert forward_ad._current_level >= 0


@used_for("chains under torch.func, which run unfused (fusion/stages.py)", "_functorch")
def _():
    seen = []
    torch.func.vmap(lambda x: seen.append(torch._C._functorch.peek_interpreter_stack()) or x)(torch.ones(2))
    assert seen[0] is not None and torch._C._functorch.peek_interpreter_stack() is None


@used_for("placeholders of recorded chains (fusion/placeholders.py)", "_make_wrapper_subclass")
def _():
    class Stand(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    made = Tensor._make_wrapper_subclass(Stand, (), dtype=torch.bfloat16, device="cpu")
    assert type(made) is Stand and (made.dtype, made.device.type) == (torch.bfloat16, "cpu")


@used_for("placeholders among the arguments of a function (fusion/placeholders.py)", "_pytree")
def _():
    assert _pytree.tree_map_only(int, lambda x: -x, ((1, "a"), {"b": [2]})) == ((-1, "a"), {"b": [-2]})


@used_for("noticing writes to tensors (fusion/placeholders.py, fusion/stages.py, ops/rounded.py)", "_version")
def _():
    x = torch.ones(3)
    before, view = x._version, x[:1]
    view.add_(1)
    assert x._version == view._version > before


@used_for("timing a chain unseen by modes (fusion/rule.py)", "_disable_current_modes", "_python_dispatch")
def _():
    seen = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Sees():
        torch.ones(2).exp()
        count = len(seen)
        with _disable_current_modes():
            torch.ones(2).exp()
    assert 0 < count == len(seen) and _python_dispatch.TorchDispatchMode is TorchDispatchMode


@used_for("hooks on all modules, which need the unfused model (fusion/replaced.py)", "_has_any_global_hook")
def _():
    assert not module_state._has_any_global_hook()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert module_state._has_any_global_hook()
    handle.remove()
    assert not module_state._has_any_global_hook()


@used_for(
    "hooks inside of a chain, which then runs unfused (ops/modules.py, fusion/replaced.py)",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
def _():
    module = nn.ReLU()
    for register, hooks in (
        (module.register_forward_hook, module._forward_hooks),
        (module.register_forward_pre_hook, module._forward_pre_hooks),
        (module.register_full_backward_hook, module._backward_hooks),
        (module.register_full_backward_pre_hook, module._backward_pre_hooks),
    ):
        assert not hooks
        register(lambda *_: None)
        assert len(hooks) == 1


@used_for("reading and watching modules quickly (ops/modules.py, fusion)", "_buffers", "_parameters", "_modules")
def _():
    bn = nn.BatchNorm2d(3)
    assert bn._buffers["running_mean"] is bn.running_mean and bn._parameters["weight"] is bn.weight
    bn.weight = nn.Parameter(torch.zeros(3))
    assert vars(bn)["_parameters"]["weight"] is bn.weight
    assert vars(nn.Sequential(bn))["_modules"] == {"0": bn}


@used_for("telling patched convolutions from PyTorch's (fusion/members.py)", "_conv_forward")
def _():
    class Other(nn.Conv2d):
        def _conv_forward(self, *_):
            return "called"

    assert Other(1, 1, 1)(torch.ones(1, 1, 1, 1)) == "called"


@used_for("leaving compiled modules alone (fusion/members.py)", "_compiled_call_impl", "_dynamo")
def _():
    module = nn.ReLU()
    assert module._compiled_call_impl is None
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, sys.modules["torch._dynamo.eval_frame"].OptimizedModule)
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None


@used_for(
    "counters of batches, kept weights, gradients of ranks (fusion/chain.py, engine, train/exchange.py, research)",
    "_foreach_add_",
    "_foreach_copy_",
    "_foreach_div_",
)
def _():
    values = [torch.ones(2), torch.ones(3)]
    torch._foreach_add_(values, 1)
    torch._foreach_add_(values, [torch.ones(2), torch.ones(3)], alpha=2)
    torch._foreach_div_(values, 2.0)
    assert [x.tolist() for x in values] == [[2, 2], [2, 2, 2]]
    torch._foreach_copy_(values, [torch.zeros(2), torch.zeros(3)])
    assert [x.tolist() for x in values] == [[0, 0], [0, 0, 0]]


@used_for("finding layers of a kind", "_ConvNd", "_BatchNorm", "_NormBase", "_DropoutNd")
def _():
    assert issubclass(nn.Conv2d, conv._ConvNd) and issubclass(nn.ConvTranspose1d, conv._ConvNd)
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, batchnorm._BatchNorm)
    assert issubclass(nn.InstanceNorm2d, batchnorm._NormBase) and not issubclass(
        nn.InstanceNorm2d, batchnorm._BatchNorm
    )
    assert all(issubclass(kind, dropout._DropoutNd) for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


@used_for("the shapes of a graph engine's buffers (engine/graphs.py)", "_subclasses")
def _():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        y = torch.empty(2**40, 4) + torch.ones(4)  # more memory than any machine has
    assert y.shape == (2**40, 4)


@used_for("tensors that share memory (ops/orthogonal.py)", "_cdata")
def _():
    x = torch.ones(4)
    assert x.untyped_storage()._cdata == x[1:].untyped_storage()._cdata != torch.ones(4).untyped_storage()._cdata


@used_for("ending a failed capture (engine/capture.py); only a GPU can show that it does", "_cuda_endAllocateToPool")
def _():
    assert callable(torch.cuda.memory._cuda_endAllocateToPool)


@used_for(
    "folded chains in evaluation (fusion/stages.py)",
    "_reorder_convolution_weight",
    "_convolution_pointwise",
    "_is_mkldnn_bf16_supported",
    "_is_mkldnn_fp16_supported",
)
def _():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch was built without oneDNN")
    operators = torch.ops.mkldnn
    assert {operators._is_mkldnn_bf16_supported(), operators._is_mkldnn_fp16_supported()} <= {True, False}
    x, weight, bias = torch.randn(2, 4, 8, 8), torch.randn(6, 4, 3, 3), torch.randn(6)
    packed = operators._reorder_convolution_weight(weight, [1, 1], [1, 1], [1, 1], 1, x.shape)
    got = operators._convolution_pointwise.default(x, packed, bias, [1, 1], [1, 1], [1, 1], 1, "relu", [], "")
    torch.testing.assert_close(got, torch.conv2d(x, weight, bias, padding=1).relu())


@used_for("the nearest flag in an error (cli/flags.py)", "_option_string_actions", "_subcommands_action")
def _():
    parser = jsonargparse.ArgumentParser()
    assert {"-h", "--help"} <= parser._option_string_actions.keys() and parser._subcommands_action is None
    commands = parser.add_subcommands(dest="command")
    commands.add_subcommand("one", jsonargparse.ArgumentParser())
    assert parser._subcommands_action.choices.keys() == {"one"}


@used_for("the backend of torch.compile (fusion/dynamo.py)", "_ops", "_inductor")
def _():
    assert isinstance(torch.ops.aten.relu_.default, torch._ops.OpOverload)
    assert torch.ops.aten.relu_.default._schema.is_mutable and not torch.ops.aten.relu.default._schema.is_mutable
    assert all(name is None or isinstance(name, str) for name in torch._inductor.config.cpp.cxx)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_private_name_does_what_nasfast_needs(name):
    what, check = NAMES[name]
    try:
        check()
    except (AssertionError, AttributeError, ImportError, TypeError, RuntimeError) as error:
        raise AssertionError(f"{name} is not what it was: this breaks {what}") from error


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


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
        found |= {name: f"{where}:{node.lineno}" for name in names if private(name)}
    return found


def test_every_private_name_is_here():
    paths = [*(ROOT / "nasfast").rglob("*.py"), *(ROOT / "kernels" / "triton").glob("*.py")]
    trees = {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in paths if "_triton" not in p.parts}
    found = {name: where for name, where in foreign_names(trees).items() if name not in PUBLIC}
    assert {name: where for name, where in found.items() if name not in NAMES} == {}, (
        "use a public name, or add a check of the private one"
    )


def test_a_private_name_is_found():
    code = "import torch\nfrom torch._a import _b\ntorch._c(self._own, '_parameters', 'torch._d.e')\nself._own = 1"
    assert set(foreign_names({"here": ast.parse(code)})) == {"_a", "_b", "_c", "_d", "_parameters"}
