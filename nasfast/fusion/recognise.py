"""Writes the program of a module that owns chains, where the code of its forward allows that.

A trace has frozen what the forward decided in Python. A program replays a trace only if these decisions can be checked
before each run: if the code reads its input and attributes of its module, calls submodules and a few functions, and
nothing else.
"""

from __future__ import annotations

import dis
import operator
import re
from collections.abc import Callable, Sequence
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from nasfast.fusion.chain import Chain, Path
from nasfast.fusion.program import ChainStep, Frame, Program, Slot, Step, fingerprint

# names that the code of a recognised forward may use besides attributes of its module
_MODULES = {"torch": torch, "F": torch.nn.functional, "nn": nn}
_NAMES = {"getattr", "functional", "chunk", "add", "add_", "mul", "relu", "relu_", "relu6", "hardtanh", "tanh"}
_NAMES |= {"flatten", "hardswish", "silu", "sigmoid", "cat", "mean", "amax", "dropout"}
_NAMES |= {"hardsigmoid", "jit", "is_scripting"}
# functions that are not called while this attribute is false
_UNUSED = {"checkpoint": "grad_checkpointing", "checkpoint_seq": "grad_checkpointing"}
# instructions that may change what outlives the forward
_CHANGES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "STORE_SLICE"}
_CHANGES |= {"DELETE_ATTR", "DELETE_GLOBAL", "DELETE_SUBSCR"}
# instructions that read an attribute of what was loaded last
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_CONSTANTS = (bool, int, float, str, type(None))


class Unrecognised(Exception):
    """The forward has no program; the message says why."""


def frame_of(module: nn.Module, path: Path, *, fused: bool) -> Frame:
    """The frame of a module whose forward is replaced.

    Args:
        fused: as in `Frame`.

    Raises:
        Unrecognised: its code may read something that a program does not check.
    """
    present = tuple((name, child is not None) for name, child in module._modules.items())
    attributes: dict[str, Any] = {}
    functions = {"forward": type(module).forward}
    if type(module).forward is not nn.Sequential.forward:
        _read(module, "forward", attributes, functions)
    prints = tuple((name, fingerprint(type(module), name)) for name in functions)
    return Frame(path, present, tuple(sorted(attributes.items())), prints, fused)


def _read(module: nn.Module, name: str, attributes: dict[str, Any], functions: dict[str, Any]) -> None:
    """Add the attributes of the module that this function of its class reads, and the functions that it calls."""
    function = functions[name]
    code = getattr(function, "__code__", None)
    if code is None or code.co_freevars or any(isinstance(constant, CodeType) for constant in code.co_consts):
        raise Unrecognised("its forward is not plain code")
    inputs = code.co_argcount - len(function.__defaults__ or ())
    if inputs != 2 or code.co_kwonlyargcount or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
        raise Unrecognised("its forward takes more than one input")
    own, others = _names(code)
    for name in own:
        method = getattr(type(module), name, None)
        if name in module._modules:
            if isinstance(module._modules[name], (nn.ModuleList, nn.ModuleDict)):
                raise Unrecognised(f"its forward chooses from {name}")
        elif name in vars(module):
            value = vars(module)[name]
            if not isinstance(value, _CONSTANTS):
                raise Unrecognised(f"its forward reads {name}, a {type(value).__name__}")
            attributes[name] = value
        elif isinstance(method, FunctionType) and not hasattr(nn.Module, name):
            if name not in functions:
                functions[name] = method
                _read(module, name, attributes, functions)
        else:
            raise Unrecognised(f"its forward reads {name}")
    for name in others:
        if name in _MODULES:
            if function.__globals__.get(name) is not _MODULES[name]:
                raise Unrecognised(f"{name} is another module")
        elif name in _UNUSED and vars(module).get(_UNUSED[name]) is False:
            continue
        elif name not in _NAMES or name in function.__globals__ or any(_has(part, name) for part in module.modules()):
            raise Unrecognised(f"its forward reads {name}")


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """The names that a method reads of its module, and those that it reads of anything else.

    A name is one of the module if it is read directly behind the method's first argument.

    Raises:
        Unrecognised: the method may change what outlives it, or its first argument.
    """
    module = code.co_varnames[0]
    own: set[str] = set()
    others: set[str] = set()
    calls_getattr = "getattr" in code.co_names
    behind_module = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in _CHANGES:
            raise Unrecognised("its forward may change what outlives it")
        value = instruction.argval
        of_module = behind_module and not instruction.is_jump_target
        if instruction.opname in _ATTRIBUTES or (calls_getattr and _is_string(instruction)):
            (own if of_module else others).add(value)
        elif instruction.opcode in dis.hasname:
            others.add(value)
        # since Python 3.13 one instruction may have two variables
        kinds = re.findall("(LOAD|STORE)_FAST", instruction.opname)
        variables = list(zip(kinds, value if isinstance(value, tuple) else [value], strict=True)) if kinds else []
        if ("STORE", module) in variables:
            raise Unrecognised(f"its forward gives {module} another value")
        behind_module = variables[-1:] == [("LOAD", module)]
    return own, others


def _has(module: nn.Module, name: str) -> bool:
    """Whether the name may be one of this module where it is not read of a tensor or of torch; runs no property."""
    own = vars(module), module._modules, module._parameters, module._buffers
    return any(name in names for names in own) or hasattr(type(module), name)


def _is_string(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str)


class TracedChain:
    """What a program needs to know of a chain in a trace of its owner.

    Attributes:
        number: index in the program.
        chain: by its paths below the owner.
        nodes: its nodes, the addition included.
        kinds: for each node that calls a module, what that is; see `Program.kinds`. For others the activation.
        add: the addition to its result, or None.
    """

    def __init__(self, number: int, chain: Chain, kinds: dict[fx.Node, str], add: fx.Node | None) -> None:
        self.number, self.chain, self.kinds, self.add = number, chain, kinds, add
        self.nodes = [*kinds, *([] if add is None else [add])]


def write(graph: fx.Graph, chains: Sequence[TracedChain], frames: Sequence[Frame]) -> Program:
    """The program of a traced forward.

    Args:
        graph: the trace; modules whose forwards are no frames are called as they are.
        chains: all chains of the forward.
        frames: the modules whose forwards the trace looks into.

    Raises:
        Unrecognised: the forward does something that a program does not have.
    """
    paths = {frame.path for frame in frames}
    last = {chain.nodes[-1]: chain for chain in chains}
    inside = {node for chain in chains for node in chain.nodes}
    slots: dict[fx.Node, Slot] = {}
    steps: list[Step | ChainStep] = []
    kinds: dict[Path, str] = {}
    for node in graph.nodes:
        if node.op == "output":
            if not isinstance(node.args[0], fx.Node):
                raise Unrecognised("its result is not one tensor")
            result = slots[node.args[0]]
            return Program(tuple(c.chain for c in chains), tuple(steps), result, tuple(frames), tuple(kinds.items()))
        if node.op == "placeholder":
            if slots:
                raise Unrecognised("its forward takes more than one input")
            slots[node] = Slot(0)
        elif node in last:
            chain = last[node]
            steps.append(_chain_step(chain, slots))
            kinds |= {_path(n): kind for n, kind in chain.kinds.items() if n.op == "call_module"}
            slots[node] = Slot(len(steps))
        elif node not in inside:
            steps.append(_step(node, slots))
            slots[node] = Slot(len(steps))
        if node.op == "call_module" and any(_path(node)[:n] not in paths for n in range(len(_path(node)))):
            raise Unrecognised("its forward calls a module inside of another one")
    raise Unrecognised("its forward returns nothing")


def _chain_step(chain: TracedChain, slots: dict[fx.Node, Slot]) -> ChainStep:
    calls = list(chain.kinds)
    source = slots[cast(fx.Node, calls[0].args[0])]
    residual, in_place = None, False
    if chain.add is not None:
        (other,) = (arg for arg in chain.add.args if arg is not calls[-1])
        residual = slots[cast(fx.Node, other)]
        in_place = chain.add.target in (operator.iadd, "add_")
    modules: list[Path] = []
    functions: list[tuple[int, str]] = []
    for node in calls:
        if node.op == "call_module":
            modules.append(_path(node))
        else:
            functions.append((len(modules), chain.kinds[node]))
    return ChainStep(chain.number, source, residual, in_place, tuple(modules), tuple(functions))


def _step(node: fx.Node, slots: dict[fx.Node, Slot]) -> Step:
    args = tuple(_argument(arg, slots) for arg in node.args)
    kwargs = tuple((name, _argument(value, slots)) for name, value in node.kwargs.items())
    target: Path | Callable
    if node.op == "call_module":
        target = _path(node)
    elif node.op == "call_function":
        target = cast(Callable, node.target)
    elif node.op == "call_method" and hasattr(Tensor, str(node.target)):
        target = getattr(Tensor, str(node.target))
    else:
        raise Unrecognised(f"its forward reads {node.target}")
    return Step(target, args, kwargs)


def _argument(value: Any, slots: dict[fx.Node, Slot]) -> Any:
    if isinstance(value, fx.Node):
        return slots[value]
    if isinstance(value, (list, tuple)):
        return tuple(_argument(part, slots) for part in value)
    if isinstance(value, slice):
        return slice(*(_argument(part, {}) for part in (value.start, value.stop, value.step)))
    if not isinstance(value, _CONSTANTS):
        raise Unrecognised(f"it gives a function a {type(value).__name__}")
    return value


def _path(node: fx.Node) -> Path:
    return tuple(str(node.target).split("."))
