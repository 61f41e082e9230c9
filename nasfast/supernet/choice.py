"""`Choice`: a place of any module where one of several candidates runs; and the trace that makes its space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from nasfast.spaces import Branch, ModuleChoice, ModuleSpace
from nasfast.supernet.macs import count_macs


class Choice(nn.Module):
    """A place of a module where one of several candidates runs, with the arguments that the place is called with.

    `nasfast.Supernet.from_module` makes a supernet of a module that has such places. Elsewhere it runs the candidate
    `active`, at first the first one.

    Args:
        name: its name in spaces and tables; None takes its path in the module.
        candidates: two or more modules, `nn.Identity` for none; or a mapping from their labels to them, such as
            {"k3": a, "k5": b}.

    Attributes:
        name, labels: the names of the choice and of its candidates.
        candidates: the modules.
        active: the index of the one that runs.

    Raises:
        ValueError: there are fewer than two candidates, or one is given twice.
        TypeError: a candidate is no module, or the name is no string.
    """

    # what a layer of another supernet may have: a path beside the candidates
    layer_indicator: nn.BatchNorm2d | None = None

    def __init__(self, name: str | None, candidates: Sequence[nn.Module] | Mapping[str, nn.Module]) -> None:
        super().__init__()
        if name is not None and not isinstance(name, str):
            raise TypeError(f"the name of a choice must be a string or None, got {name!r}")
        if isinstance(candidates, nn.Sequential):
            raise TypeError(f"choice {name!r}: a Sequential is one candidate: give a list of candidates")
        if isinstance(candidates, Mapping):
            self.labels, modules = tuple(map(str, candidates)), list(candidates.values())
        else:
            modules = list(candidates)
            self.labels = tuple(f"{i} {type(module).__name__}" for i, module in enumerate(modules))
        where = "choice" if name is None else f"choice {name!r}"
        if wrong := [module for module in modules if not isinstance(module, nn.Module)]:
            raise TypeError(f"{where}: candidates must be modules, got {type(wrong[0]).__name__}")
        if len(modules) < 2:
            raise ValueError(f"{where} needs at least 2 candidates, got {len(modules)}: use the module itself instead")
        if len(set(modules)) < len(modules):
            raise ValueError(f"{where} has the same module twice: make a module for each candidate")
        self.name = name
        self.candidates = nn.ModuleList(modules)
        self.active = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, fx.Proxy) for value in _leaves((args, kwargs))):
            raise TypeError(
                "a Choice cannot be traced by torch.fx, which would keep one candidate: see nasfast.inherit"
            )
        return self.candidates[self.active](*args, **kwargs)

    def block_indicator(self, choice: int) -> nn.BatchNorm2d | None:
        """What scores a candidate: its `block_indicator` if it has one, else the last BatchNorm that it registers."""
        candidate = self.candidates[choice]
        norms = [module for module in candidate.modules() if isinstance(module, nn.BatchNorm2d) and module.affine]
        return getattr(candidate, "block_indicator", norms[-1] if norms else None)


def find_choices(module: nn.Module) -> dict[str, Choice]:
    """The choices of a module by name, in the order of `named_modules`."""
    choices: dict[str, Choice] = {}
    for path, choice in module.named_modules():
        if not isinstance(choice, Choice):
            continue
        name = choice.name or path or "choice"  # the module may be a choice itself
        if name in choices:
            raise ValueError(f"two choices have the name {name!r}: rename one, or name them None to take their paths")
        choices[name] = choice
        inner = [p for p, m in choice.named_modules() if isinstance(m, Choice) and m is not choice]
        if inner:
            raise ValueError(
                f"choice {name!r} has another choice inside, {inner[0]}: costs of nested choices do not add up; list "
                "the combinations as candidates of one choice"
            )
    if not choices:
        raise ValueError(
            f"{type(module).__name__} has no nasfast.Choice: put nasfast.Choice(name, [a, b]) where a or b should run"
        )
    _refuse_shared_parameters(module, choices)
    return choices


def _refuse_shared_parameters(module: nn.Module, choices: Mapping[str, Choice]) -> None:
    names = {choice: name for name, choice in choices.items()}
    paths = {p: names[m] for p, m in module.named_modules(remove_duplicate=False) if isinstance(m, Choice)}
    owners: dict[Tensor, str | None] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        inside = (name for prefix, name in paths.items() if not prefix or path.startswith(f"{prefix}."))
        owner = next(inside, None)
        other = owners.setdefault(parameter, owner)
        if other != owner:
            one, two = (f"choice {o!r}" if o is not None else "the module outside of choices" for o in (other, owner))
            raise ValueError(
                f"the parameter {path} belongs to {one} and to {two}, so numbers of parameters do not add up: give "
                "each its own, or call one Choice at both places"
            )


@torch.no_grad()
def trace_space(module: nn.Module, example: tuple[Any, ...], *, name: str) -> ModuleSpace:
    """The space of a module: each candidate runs once on every input that its choice gets in one call.

    A choice that the call uses several times is one choice: its MACs are those of all calls together. The call runs
    with the candidates that are active, in the module's present mode; nothing but MACs and shapes is kept.

    Args:
        example: positional arguments of the call; MACs are those of this call, so give one image.
    """
    traces = {name: _Trace(name, choice) for name, choice in find_choices(module).items()}
    handles = [trace.choice.register_forward_hook(trace.run_all, with_kwargs=True) for trace in traces.values()]
    try:
        total, result, uncounted = count_macs(module, example, {})
    except (AttributeError, LookupError, TypeError) as error:
        types = ", ".join(type(value).__name__ for value in example)
        raise TypeError(
            f"{type(module).__name__} fails on the example ({types}): {str(error).partition(chr(10))[0]}. An example "
            "is a tensor, or a tuple of all positional arguments; where the forward needs others, wrap the module in "
            "one that passes them"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if uncounted:
        raise ValueError(f"{type(module).__name__}: {_unknown(uncounted)}")
    if missed := [key for key, trace in traces.items() if not trace.inputs]:
        raise ValueError(f"the example does not call choice {missed[0]!r}, so its cost is unknown: give one that does")
    inside = {p for trace in traces.values() for p in trace.choice.parameters()}
    # (N, C, H, H)
    image = next((x for x in example[:1] if isinstance(x, Tensor) and x.ndim == 4 and x.shape[2] == x.shape[3]), None)
    return ModuleSpace(
        name=name,
        choices=tuple(trace.result() for trace in traces.values()),
        fixed_macs=total - sum(trace.counted_outside for trace in traces.values()),
        fixed_params=sum(p.numel() for p in module.parameters() if p not in inside),
        in_channels=0 if image is None else image.shape[1],
        resolution=0 if image is None else image.shape[2],
        num_classes=result.shape[1] if isinstance(result, Tensor) and result.ndim == 2 else 0,
    )


class _Trace:
    """What one choice does in the traced call."""

    def __init__(self, name: str, choice: Choice) -> None:
        self.name, self.choice = name, choice
        self.macs = [0] * len(choice.candidates)
        self.inputs: list[tuple[int, ...]] = []

    def run_all(self, choice: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Run all candidates behind the active one; a forward hook."""
        first = next((value for value in _leaves((args, kwargs)) if isinstance(value, Tensor)), None)
        self.inputs.append(() if first is None else tuple(first.shape[1:]))
        labels, shapes = self.choice.labels, []
        for i, candidate in enumerate(self.choice.candidates):
            try:
                macs, result, uncounted = count_macs(candidate, args, kwargs)
            except Exception as error:
                raise RuntimeError(f"choice {self.name!r}: {labels[i]} cannot run on its input: {error}") from error
            if uncounted:
                raise ValueError(f"choice {self.name!r}, candidate {labels[i]}: {_unknown(uncounted)}")
            self.macs[i] += macs
            shapes.append(_shapes(result))
        for label, shape in zip(labels, shapes, strict=True):
            if shape != shapes[0]:
                raise ValueError(
                    f"choice {self.name!r}: {labels[0]} gives {shapes[0]} and {label} gives {shape}: candidates must "
                    "give equal shapes, so that what follows costs the same"
                )

    @property
    def counted_outside(self) -> int:
        """MACs that the count of the whole call has: of the active candidate, and then of all."""
        return self.macs[self.choice.active] + sum(self.macs)

    def result(self) -> ModuleChoice:
        """The layer of the space."""
        parts = zip(self.choice.labels, self.macs, self.choice.candidates, strict=True)
        branches = [
            Branch(label, macs, sum(p.numel() for p in candidate.parameters()), type(candidate) is nn.Identity)
            for label, macs, candidate in parts
        ]
        return ModuleChoice(self.name, tuple(branches), tuple(self.inputs))


def _unknown(operations: Sequence[str]) -> str:
    """The error for operations without a formula."""
    return (
        f"the MACs of {', '.join(operations)} are not known, so a limit on them would mean nothing: give a formula by "
        "torch.utils.flop_counter.register_flop_formula"
    )


def _leaves(value: Any) -> Iterator[Any]:
    """What the lists, tuples and mappings of a nested value have in the end."""
    if isinstance(value, (list, tuple, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(part)
    else:
        yield value


def _shapes(value: Any) -> Any:
    """A nested value with shapes in place of tensors, and types in place of what else is in it."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return {key: _shapes(part) for key, part in value.items()}
    return [_shapes(part) for part in value] if isinstance(value, (list, tuple)) else type(value).__name__
