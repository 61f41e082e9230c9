"""Random networks as source text, and their comparison with eager PyTorch.

    python tests/random_networks.py 17         # print the network of this seed, and compare it
    python tests/random_networks.py 0-2000     # compare those of these seeds; print the ones that differ
    python tests/random_networks.py net.py     # compare an edited one

A network is a module `Net` and `SETTINGS`. It runs by `fuse` or by `torch.compile(backend="nasfast")`, and its results,
gradients and buffers are compared with those of the module itself in float64, in which an operator has its reference.
Other types may differ from float64 by little more than eager PyTorch in the same type does. TorchDynamo takes a second
for a network, so most of them run by a `Recorder` of graphs, which takes some hundredths.
"""

from __future__ import annotations

import copy
import operator
import os
import random
import sys
import time
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import nasfast
from nasfast.fusion.dynamo import compile_graph, fuse_graph
from nasfast.fusion.shapes import known_sizes

HEADER = """\
import math
import torch
import torch.nn.functional as F
from torch import nn
"""
# eager PyTorch's own error in this type, times this, may be the error of nasfast, and so much of the largest number
FACTOR, FLOOR = 4.0, {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
SMOOTH = ("tanh", "silu", "gelu", "none")
ACTIVATIONS = ("relu", "relu", "relu6", "hardswish", *SMOOTH)
MODULES = {"relu": "ReLU", "relu6": "ReLU6", "hardswish": "Hardswish", "tanh": "Tanh", "silu": "SiLU", "gelu": "GELU"}


class Invalid(Exception):
    """Eager PyTorch refuses the network."""


class Writer:
    """Writes the network of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.init: list[str] = []
        self.lines: list[str] = []
        # names, channels and sizes of the tensors so far
        self.values: list[tuple[str, int, int]] = []
        self.norms: list[str] = []
        # what can be called again: a call, channels before and after, and whether it keeps the size
        self.calls: list[tuple[str, int, int]] = []
        self.extras: list[str] = []
        self.names = 0
        way = rng.choices(["graph", "fuse", "compile"], [18, 1, 1])[0]
        kind = rng.choices(["float64", "float32", "bfloat16", "float16"], [70, 15, 10, 5])[0]
        self.settings: dict[str, Any] = {
            "way": way,
            "type": kind,
            "channels_last": rng.random() < (0.9 if way == "compile" else 0.5),
            "keep_layouts": way == "graph" and rng.random() < 0.2,
            "training": rng.random() < 0.7,
            "other_norms": rng.choice([0.0, 0.0, 0.3]),
            "mode": rng.choices(["grad", "no_grad", "inference_mode"], [60, 30, 10])[0],
            "frozen": rng.random() < 0.7,
            "size": rng.choice([5, 6, 8, 9]),
            "seed": seed,
        }
        smooth = kind != "float64" and self.settings["mode"] == "grad"  # kinks would make single gradients differ
        self.activations = SMOOTH if smooth else ACTIVATIONS

    def source(self) -> str:
        self.value("x * 1.0", 4, self.settings["size"])
        for _ in range(self.random.randint(2, 5)):
            kinds = [self.unit, self.separable, self.join, self.excite, self.other, self.again, self.disturb]
            self.random.choices(kinds, [8, 4, 4, 2, 3, 1, 2])[0]()
        results = ", ".join([self.values[-1][0], *self.extras])
        init = "\n".join(f"        {line}" for line in self.init)
        body = "\n".join(f"        {line}" for line in [*self.lines, f"return [{results}]"])
        return (
            f"{HEADER}\nSETTINGS = {self.settings!r}\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
            f"        super().__init__()\n        self.flag = True\n{init}\n\n    def forward(self, x):\n{body}\n"
        )

    # ---- parts

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    def value(self, expression: str, channels: int, size: int) -> str:
        name = self.name("v")
        self.lines.append(f"{name} = {expression}")
        self.values.append((name, channels, size))
        return name

    def module(self, kind: str, expression: str) -> str:
        name = self.name(kind)
        self.init.append(f"self.{name} = {expression}")
        return f"self.{name}"

    def last(self) -> tuple[str, int, int]:
        return self.values[-1] if self.random.random() < 0.8 else self.random.choice(self.values)

    def sometimes_disturb(self, probability: float = 0.2) -> None:
        if self.random.random() < probability:
            self.disturb()

    def conv(self, depthwise: bool = False) -> None:
        rng, (x, channels, size) = self.random, self.last()
        out = channels if depthwise else rng.choice([4, 6, 8])
        kernel, stride = rng.choice([1, 1, 3, 3, 5]), rng.choice([1, 1, 1, 2])
        kernel = 3 if depthwise and kernel == 1 else kernel
        groups = channels if depthwise else rng.choice([1, 1, 1, 2])
        arguments = f"{channels}, {out}, {kernel}, stride={stride}, groups={groups}, bias={rng.random() < 0.3}"
        padding = kernel // 2
        after = (size - 1) // stride + 1
        form = rng.choices(["zeros", "mode", "name", "same", "pad", "dilated", "function"], [10, 1, 1, 2, 2, 1, 2])[0]
        mode = rng.choice(["reflect", "replicate", "circular"])
        if form == "name" and stride == 1:
            mode = f", padding_mode={mode!r}" if rng.random() < 0.5 and size > padding else ""
            call = self.module("conv", f"nn.Conv2d({arguments}, padding='same'{mode})") + f"({x})"
        elif form == "mode" and size > padding:
            call = self.module("conv", f"nn.Conv2d({arguments}, padding={padding}, padding_mode={mode!r})") + f"({x})"
        elif form == "same":
            conv, total = self.module("conv", f"nn.Conv2d({arguments})"), self.name("p")
            self.lines.append(
                f"{total} = max((math.ceil({x}.shape[-1] / {stride}) - 1) * {stride} + {kernel} - {x}.shape[-1], 0)"
            )
            widths = f"({total} // 2, {total} - {total} // 2) * 2"
            call = f"{conv}(F.pad({x}, {widths}))"
        elif form == "pad":
            before, behind = rng.choice([(padding, padding), (max(padding - 1, 0), padding), (0, kernel)])
            conv = self.module("conv", f"nn.Conv2d({arguments})")
            after = (size + before + behind - kernel) // stride + 1
            call = f"{conv}(F.pad({x}, ({before}, {behind}) * 2))"
        elif form == "dilated":
            call = self.module("conv", f"nn.Conv2d({arguments}, padding={2 * padding}, dilation=2)") + f"({x})"
        elif form == "function":
            conv = self.module("conv", f"nn.Conv2d({arguments}, padding={padding})")
            call = f"F.conv2d({x}, {conv}.weight, {conv}.bias, {stride}, {padding}, 1, {groups})"
        else:
            conv = self.module("conv", f"nn.Conv2d({arguments}, padding={padding})")
            self.calls += [(conv, channels, out)] if stride == 1 else []
            call = f"{conv}({x})"
        self.value(call, out, after)

    def norm(self) -> None:
        rng, (x, channels, size) = self.random, self.values[-1]
        form = rng.choices(["batch", "plain", "statistics", "group", "instance"], [16, 1, 1, 1, 1])[0]
        if form == "group":
            norm = self.module("norm", f"nn.GroupNorm(2, {channels})")
        elif form == "instance" and size > 1:
            norm = self.module("norm", f"nn.InstanceNorm2d({channels}, affine=True, track_running_stats=True)")
        elif form == "statistics":
            norm = self.module("norm", f"nn.BatchNorm2d({channels}, track_running_stats=False)")
        else:
            settings = rng.choice(["", "", ", momentum=0.3", ", eps=1e-2"]) + (
                ", affine=False" if form == "plain" else ""
            )
            norm = self.module("norm", f"nn.BatchNorm2d({channels}{settings})")
            self.norms.append(norm)
        self.calls.append((norm, channels, channels))
        self.value(f"{norm}({x})", channels, size)

    def activate(self) -> None:
        rng, (x, channels, size) = self.random, self.values[-1]
        act = rng.choice(self.activations)
        if act == "none":
            return
        forms = [self.module("act", f"nn.{MODULES[act]}()") + f"({x})" if rng.random() < 0.5 else f"F.{act}({x})"]
        if act in ("relu", "relu6", "silu", "hardswish"):
            forms += [f"F.{act}({x}, inplace=True)", self.module("act", f"nn.{MODULES[act]}(inplace=True)") + f"({x})"]
        if act in ("relu", "tanh"):
            forms += [f"torch.{act}({x})", f"{x}.{act}()", f"torch.{act}_({x})", f"{x}.{act}_()"]
        self.value(rng.choice(forms), channels, size)

    # ---- statements

    def unit(self, depthwise: bool = False) -> None:
        self.conv(depthwise)
        self.sometimes_disturb()
        self.norm()
        self.sometimes_disturb()
        self.activate()

    def separable(self) -> None:
        self.unit()
        self.sometimes_disturb()
        self.unit(depthwise=True)
        self.sometimes_disturb()
        self.unit()

    def join(self) -> None:
        rng, (x, channels, size) = self.random, self.values[-1]
        others = [name for name, *shape in self.values if shape == [channels, size]]
        y = rng.choice(others)
        forms = [f"{x} + {y}", f"{y} + {x}", f"{x}.add_({y})", f"torch.add({x}, {y}, alpha=0.5)", f"{x} * {y}"]
        forms += [f"{x} + {y}.mean((2, 3), keepdim=True)", f"{y}.add({x})", f"{x}.__iadd__({y})"]
        if rng.random() < 0.25 and 2 * channels <= 16:
            self.value(f"torch.cat([{x}, {y}], 1)", 2 * channels, size)
        elif rng.random() < 0.2:
            self.lines.append(f"{x} += {y}")
        else:
            self.value(rng.choice(forms), channels, size)

    def excite(self) -> None:
        rng, (x, channels, size) = self.random, self.last()
        down = self.module("conv", f"nn.Conv2d({channels}, 4, 1)")
        up = self.module("conv", f"nn.Conv2d(4, {channels}, 1)")
        mean = self.name("m")
        self.lines.append(
            f"{mean} = " + rng.choice([f"{x}.mean((2, 3), keepdim=True)", f"F.adaptive_avg_pool2d({x}, 1)"])
        )
        self.sometimes_disturb(0.4)
        act = rng.choice(["F.silu", "torch.tanh"] if self.activations is SMOOTH else ["F.relu", "F.silu"])
        gate = rng.choice(["torch.sigmoid", "F.hardsigmoid"] if self.activations is not SMOOTH else ["torch.sigmoid"])
        scale = self.name("s")
        self.lines.append(f"{scale} = {gate}({up}({act}({down}({mean}))))")
        self.sometimes_disturb(0.3)
        self.value(f"{x} * {scale}", channels, size)

    def other(self) -> None:
        rng, (x, channels, size) = self.random, self.last()
        forms = [f"F.avg_pool2d({x}, 3, 1, 1)", f"{x}.detach()", f"{x}.flatten(2).view({x}.shape)", f"{x} * 2.0"]
        forms += [f"torch.cat({x}.chunk(2, 1)[::-1], 1)", f"{x}.permute(0, 1, 3, 2)", f"{x} if self.flag else -{x}"]
        forms += [f"{x} if self.training else {x} * 0.5", f"F.max_pool2d({x}, 3, 1, 1)", f"F.dropout({x}, 0.0)"]
        forms += [f"{x}.contiguous()", f"{x}.view({x}.size())", f"F.leaky_relu({x})", f"{x}.flip(3)"]
        if self.activations is SMOOTH:
            forms = [form for form in forms if "max_pool" not in form and "leaky" not in form]
        self.value(rng.choice([form for form in forms if ".view(" not in form or rng.random() < 0.3]), channels, size)

    def again(self) -> None:
        x, channels, size = self.last()
        fitting = [(call, after) for call, before, after in self.calls if before == channels]
        if fitting:
            call, after = self.random.choice(fitting)
            self.value(f"{call}({x})", after, size)

    def disturb(self) -> None:
        """Something between that a chain must not notice, or not hide."""
        rng, (x, *_) = self.random, self.random.choice(self.values)
        forms = [
            f"{x}.add_(0.5)",
            f"{x}[:, :1].mul_(0.5)",
            f"{x}[:, 0] = 0.25",
            f"{x}.detach().mul_(2.0)",
            f"{x}.mul_(1.0)",
        ]
        forms += [f"({x} * 2.0).add_(1.0)"]
        if self.settings["way"] != "compile":  # torch.compile raises it with any backend
            forms.append(f"try:\n            {x}[:, 99]\n        except IndexError:\n            pass")
        norm = rng.choice(self.norms) if self.norms else None
        if norm is not None and rng.random() < 0.7:
            statistics = f"{norm}.{rng.choice(['running_mean', 'running_var'])}"
            extra = self.name("r")
            forms = [
                f"{extra} = {statistics}.clone()",
                f"{extra} = {statistics} * 1.0",
                f"{extra} = {statistics}.detach()[1:].view(-1) + 0.0",
                f"{extra} = {norm}.num_batches_tracked + 0",
                f"{extra} = {x} * {statistics}.mean().to({x}.dtype)",
            ]
            if rng.random() < 0.2:
                self.lines.append(f"{statistics}.mul_(0.5)")
                return
            self.extras.append(extra)
        self.lines.append(rng.choice(forms))


def disturbed(model: nn.Module, settings: dict[str, Any]) -> nn.Module:
    """The model with BatchNorms that have seen data, and with what trains."""
    rng = random.Random(settings["seed"])
    model.train(settings["training"]).requires_grad_(True)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.InstanceNorm2d)):
            for tensor, low in (
                (module.weight, 0.5),
                (module.bias, -0.5),
                (module.running_mean, -0.5),
                (module.running_var, 0.5),
            ):
                if tensor is not None:
                    nn.init.uniform_(tensor, low, low + 1.0)
            if rng.random() < settings["other_norms"]:
                module.train(not settings["training"])
        if isinstance(module, nn.Conv2d) and settings["frozen"]:
            module.requires_grad_(False)
    return model.to(memory_format=torch.channels_last) if settings["channels_last"] else model


def observe(
    model: nn.Module, settings: dict[str, Any], cast: torch.dtype | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Results, gradients and buffers of two calls."""
    layout = torch.channels_last if settings["channels_last"] else torch.contiguous_format
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    seen: dict[str, Tensor] = {}
    for call in range(2):
        generator = torch.Generator().manual_seed(call)
        x = torch.randn(2, 4, settings["size"], settings["size"], generator=generator, dtype=torch.float64)
        x = x.to(dtype).contiguous(memory_format=layout).requires_grad_(settings["mode"] == "grad")
        model.zero_grad(set_to_none=True)
        with modes[settings["mode"]](), torch.autocast("cpu", cast) if cast is not None else nullcontext():
            results = model(x)
        trained = [y for y in results if y.requires_grad]
        if trained:
            sum((y.double() * torch.arange(y.numel()).sin().reshape(y.shape)).sum() for y in trained).backward()
        seen |= {f"result {i} of call {call}": y for i, y in enumerate(results)}
        seen |= {f"gradient of x in call {call}": x.grad} if x.grad is not None else {}
        seen |= {f"gradient of {n} in call {call}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        seen = {name: tensor.detach().clone() for name, tensor in seen.items()}
    return seen | {name: tensor.detach().clone() for name, tensor in model.named_buffers()}


class Recorder(TorchFunctionMode):
    """Records a forward as TorchDynamo does: PyTorch's functions on fake tensors, with parameters as inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph, self.fakes = fx.Graph(), FakeTensorMode()
        self.names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
        self.modules = {module: name for name, module in model.named_modules()}
        # the modules whose forward runs
        self.stack: list[nn.Module] = []
        # by the identities of tensors; they are kept so that these last
        self.nodes: dict[int, tuple[fx.Node, Tensor]] = {}
        self.fake_of: dict[int, Tensor] = {}

    def record(self, model: nn.Module, x: Tensor) -> fx.Graph:
        self.fake_of[id(x)] = fake = self.fakes.from_tensor(x)
        self.keep(fake, self.graph.placeholder("x"))
        hooks = [
            register_module_forward_pre_hook(lambda module, inputs: self.stack.append(module)),
            register_module_forward_hook(lambda module, inputs, result: self.stack.remove(module)),
        ]
        try:
            with self.fakes, known_sizes(), self:
                results = type(model).forward(model, fake)
        finally:
            for hook in hooks:
                hook.remove()
        self.graph.output(tree_map(self.node, results))
        return self.graph

    def keep(self, fake: Tensor, node: fx.Node) -> None:
        node.meta["example_value"] = fake
        stack = {"L['self']": ("L['self']", nn.Module)}
        for module in self.stack:
            stack[self.modules[module]] = (f"L['self'].{self.modules[module]}", type(module))
        node.meta["nn_module_stack"] = stack
        self.nodes[id(fake)] = node, fake

    def fake(self, value: Any) -> Any:
        """The fake tensor of a parameter or a buffer."""
        if not isinstance(value, Tensor) or id(value) in self.nodes:
            return value
        if id(value) not in self.fake_of:
            self.fake_of[id(value)] = fake = self.fakes.from_tensor(value)
            self.keep(fake, self.graph.get_attr(self.names[id(value)]))
        return self.fake_of[id(value)]

    def node(self, value: Any) -> Any:
        return self.nodes[id(self.fake(value))][0] if isinstance(value, Tensor) else value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self.fake, (args, kwargs or {}))
        result, name = func(*args, **kwargs), func.__name__
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if name == "__get__" or not (tensors or result is None):
            return result  # a size, a type or the like
        given = tree_map(self.node, (args, kwargs))
        if getattr(Tensor, name, None) is not func:
            node = self.graph.call_function(func, *given)
        elif hasattr(operator, name) and name.startswith("__"):
            node = self.graph.call_function(getattr(operator, name), *given)
        else:
            node = self.graph.call_method(name, *given)
        if isinstance(result, Tensor):
            # each result is a value of its own, also where Python has one object
            result = result.view_as(result) if id(result) in self.nodes else result
            self.keep(result, node)
        for i, item in enumerate(result if isinstance(result, (tuple, list)) else ()):
            self.keep(item, self.graph.call_function(operator.getitem, (node, i)))
        return result


class Recorded:
    """The forward of a model by the graph of its first call, with chains on the operator."""

    def __init__(self, model: nn.Module, keep_layouts: bool) -> None:
        self.model, self.keep_layouts, self.graph = model, keep_layouts, None

    def __call__(self, x: Tensor) -> Any:
        if self.graph is None:
            with torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()):
                self.graph = fx.GraphModule(self.model, Recorder(self.model).record(self.model, x))
                fuse_graph(self.graph, always=True, keep_layouts=self.keep_layouts)
        return self.graph(x)


def compare(source: str) -> None:
    """Compare a network with itself in eager PyTorch.

    Raises:
        AssertionError: they differ.
        Invalid: PyTorch itself raises.
    """
    space: dict[str, Any] = {}
    exec(compile(source, "network", "exec"), space)
    settings = dict(space["SETTINGS"])
    kind = getattr(torch, settings["type"])
    cast = kind if kind in (torch.bfloat16, torch.float16) else None
    dtype = torch.float32 if cast is not None else kind
    torch.manual_seed(settings["seed"])
    plain = disturbed(space["Net"]().double(), settings)
    try:
        exact = observe(copy.deepcopy(plain), settings, None, torch.float64)
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise Invalid(str(error)) from error
        settings["mode"] = "no_grad"  # a change in place of what backward needs
        try:
            exact = observe(copy.deepcopy(plain), settings, None, torch.float64)
        except RuntimeError as again:
            raise Invalid(str(again)) from again
    lesser = torch.float32 if kind == torch.float64 else dtype
    try:
        eager = observe(copy.deepcopy(plain).to(lesser), settings, cast, lesser)
    except RuntimeError as error:
        raise Invalid(str(error)) from error
    model = copy.deepcopy(plain).to(dtype)
    if settings["way"] == "compile":
        model.compile(backend=compile_graph, options={"inner": "eager", "only_faster": False})
    else:
        nasfast.fuse(model, only_faster=False)
    if settings["way"] == "graph":
        nasfast.unfuse(model)
        vars(model)["forward"] = Recorded(model, settings["keep_layouts"])
    got = observe(model, settings, cast, dtype)
    assert got.keys() == exact.keys(), f"{sorted(got.keys() ^ exact.keys())}"
    scale = FACTOR * (2.0**-29 if kind == torch.float64 else 1.0)
    for name, want in exact.items():
        assert got[name].shape == want.shape and (cast is None or got[name].dtype == eager[name].dtype), name
        if not want.is_floating_point():
            assert torch.equal(got[name], want), name
            continue
        error, own = ((seen[name].double() - want).norm() for seen in (got, eager))
        allowed = scale * own + FLOOR[kind] * max(float(want.norm()), 1.0)
        assert error <= allowed or not want.isfinite().all(), f"{name} differs by {error:.3g}, allowed is {allowed:.3g}"


def failure(seed: int) -> str | None:
    """The source of a network and what differs, if it differs; "" if PyTorch itself refuses it."""
    source = Writer(seed).source()
    if seed % 20 == 0:
        torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compare(source)
    except Invalid:
        return ""
    except Exception:
        error = "".join(f"# {line}\n" for line in traceback.format_exc(limit=-2).splitlines())
        return f"# seed {seed}; python tests/random_networks.py FILE compares an edited one\n{source}\n{error}"
    return None


def main(argument: str) -> int:
    if argument.endswith(".py"):
        compare(Path(argument).read_text())
        return 0
    first, _, end = argument.partition("-")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    if not end:
        print(Writer(seeds[0]).source())
    begin, refused, failed = time.process_time(), 0, []
    for seed in seeds:
        found = failure(seed)
        refused += found == ""
        if found:
            failed.append(seed)
            print(found, flush=True)
    seconds = time.process_time() - begin
    print(
        f"{len(seeds)} networks in {seconds:.0f} s of CPU time; PyTorch refuses {refused}; {len(failed)} fail: {failed}"
    )
    return bool(failed)


if __name__ == "__main__":
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX")  # oneDNN writes beyond its memory: see conftest.py
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1]))
