"""conv -> BatchNorm -> activation by kind of layer, inverted residual blocks and ShuffleNetV2 units, against PyTorch.

    python -m benchmarks.bench_conv_bn_act [--quick] [--kind WORD ...] [--out FILE]

The layers come from the mean paths of the MobileNetV2 and ShuffleNetV2 spaces, one of each kind per resolution;
convolutions are frozen, BatchNorms train. The last table sums the times by kind, where each layer stands for all layers
of its kind and resolution on the path. It shows which kind is furthest from the floor of the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import forward_backward, positive, saved_bytes, write_json
from nasfast.measure import floor
from nasfast.measure.timing import measure
from nasfast.ops.modules import ConvBNAct, FusedConvBNAct
from nasfast.spaces import Block, Layer, SearchSpace, mean_path, mobilenet_v2, shufflenet_v2
from nasfast.supernet import UnitFactory
from nasfast.supernet.blocks import build_block

BATCH, QUICK_BATCH = 32, 4
ROUNDS, QUICK_ROUNDS = 9, 3
OURS, EAGER, COMPILED = "nasfast", "eager channels_last", "compile channels_last"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """Layers of one kind and one input resolution.

    Attributes:
        kind: such as `depthwise k5 s1` or `inverted residual s2`.
        label: shape and details of this layer.
        channels, size: channels and side of the input.
        weight: MACs of all layers of this kind and resolution on the path, divided by those of this layer.
        input_grad: whether training needs the gradient of its input.
        make: builds the module, fused or plain.
    """

    kind: str
    label: str
    channels: int
    size: int
    weight: float
    input_grad: bool
    make: Callable[[bool], nn.Module]


def cases() -> list[Case]:
    """One case per kind and resolution: units and blocks of the MobileNetV2 path, units of the ShuffleNetV2 path."""
    mobilenet, shufflenet = mobilenet_v2(), shufflenet_v2()
    found = [case for layer, block in _layers(mobilenet) for case in _units(mobilenet, layer, block)]
    found += [_block(mobilenet, layer, block) for layer, block in _layers(mobilenet) if block.kind == "mbconv"]
    found += [_block(shufflenet, layer, block) for layer, block in _layers(shufflenet) if "shuffle" in block.kind]
    groups: dict[tuple[str, int], list[Case]] = {}
    for case in found:
        groups.setdefault((case.kind, case.size), []).append(case)
    return [replace(group[0], weight=sum(map(_macs, group)) / _macs(group[0])) for group in groups.values()]


def _macs(case: Case) -> int:
    return floor.trace(lambda: case.make(False), (2, case.channels, case.size, case.size)).macs


def _layers(space: SearchSpace) -> list[tuple[Layer, Block]]:
    searched = [(layer, layer.choices[choice]) for layer, choice in zip(space.layers, mean_path(space), strict=True)]
    fixed = [[(layer, layer.choices[0]) for layer in part] for part in (space.stem_layers, space.head_layers)]
    return [*fixed[0], *searched, *fixed[1]]


def _block(space: SearchSpace, layer: Layer, block: Block) -> Case:
    names = {"mbconv": "inverted residual", "shuffle": "shuffle unit", "shuffle_xception": "xception unit"}
    kind = f"{names[block.kind]} s{layer.stride}"
    label = f"{block.label} {layer.in_channels}->{layer.out_channels} @{layer.size}"

    def make(fused: bool) -> nn.Module:
        return build_block(block, layer, UnitFactory(act=space.activation, fused=fused, track_running_stats=False))

    return Case(kind, label, layer.in_channels, layer.size, 1.0, True, make)


def _units(space: SearchSpace, layer: Layer, block: Block) -> list[Case]:
    """One case for each convolution unit of a block."""
    units = UnitFactory(act=space.activation, fused=False, track_running_stats=False)
    found = []

    def note(unit: ConvBNAct, inputs: tuple, output: torch.Tensor) -> None:
        conv, size = unit.conv, inputs[0].shape[-1]
        arguments = (conv.in_channels, conv.out_channels, conv.kernel_size[0])
        options = {"stride": conv.stride[0], "groups": conv.groups, "act": unit.act_name, "track_running_stats": False}
        found.append(
            Case(
                kind=_kind_of(conv, unit.act_name),
                label=f"k{arguments[2]} {arguments[0]}->{arguments[1]} @{size}",
                channels=conv.in_channels,
                size=size,
                weight=1.0,
                input_grad=conv.in_channels != space.in_channels,
                make=lambda fused: (FusedConvBNAct if fused else ConvBNAct)(*arguments, **options),
            )
        )

    with torch.device("meta"):
        module = build_block(block, layer, units)
        for unit in module.modules():
            if isinstance(unit, ConvBNAct):
                unit.register_forward_hook(note)
        module(torch.empty(2, layer.in_channels, layer.size, layer.size))
    return found


def _kind_of(conv: nn.Conv2d, act: str) -> str:
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    if conv.groups > 1:
        return f"depthwise k{kernel} s{stride}"
    if kernel > 1:
        return f"stem k{kernel} s{stride}"
    return "pointwise project" if act == "identity" else "pointwise expand"


def bench(case: Case, dtype: str, *, batch: int, rounds: int, machine: floor.Machine) -> dict:
    """Measure one row of results: times, saved bytes and the floor of a case."""
    # without a reset, compiled graphs of other cases would change this one
    torch.compiler.reset()
    torch.manual_seed(0)
    plain, fused = (case.make(is_fused).to(memory_format=torch.channels_last).train() for is_fused in (False, True))
    fused.load_state_dict(plain.state_dict())
    shape = (batch, case.channels, case.size, case.size)
    x = torch.randn(shape).to(DTYPES[dtype], memory_format=torch.channels_last).requires_grad_(case.input_grad)
    with torch.no_grad():
        grad = torch.randn_like(plain.to(torch.float32)(x.float())).to(DTYPES[dtype])
    functions, parameters = {}, {}
    for name, module in ((OURS, fused), (EAGER, plain), (COMPILED, torch.compile(plain, dynamic=False))):
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.ndim == 1)
        parameters[name] = [p for p in module.parameters() if p.requires_grad]
        functions[name] = _under_autocast(module, dtype)
    _check_results(functions, x, dtype)
    variants = {name: forward_backward(f, [x, *parameters[name]], grad) for name, f in functions.items()}
    summaries = measure(variants, rounds=rounds)
    found = floor.trace(lambda: case.make(False), shape)
    least = floor.alone_floor(found, machine, DTYPES[dtype], input_grad=case.input_grad)
    full = {name: phases["full"]["median_ms"] for name, phases in summaries.items()}
    return {
        "kind": case.kind,
        "case": case.label,
        "dtype": dtype,
        "weight": case.weight,
        "macs": found.macs,
        "floor_ms": {"forward": 1e3 * least.forward, "backward": 1e3 * least.backward, "full": 1e3 * least.step},
        "bound": _bound(found, machine, least),
        "x_bytes": x.nbytes,
        "saved_bytes": {
            name: saved_bytes(lambda f=f: f(x), exclude=[*plain.parameters(), *fused.parameters()])
            for name, f in functions.items()
        },
        "times": summaries,
        "ratio_to_best_peer": full[OURS] / min(full[EAGER], full[COMPILED]),
        "fraction_of_floor": 1e3 * least.step / full[OURS],
    }


def _under_autocast(module: nn.Module, dtype: str) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            return module(x)

    return run


def _check_results(functions: dict[str, Callable[..., torch.Tensor]], x: torch.Tensor, dtype: str) -> None:
    """Check that all variants compute the same.

    Raises:
        RuntimeError: a result differs from that of eager PyTorch.
    """
    with torch.no_grad():
        want = functions[EAGER](x).float()
        for name, function in functions.items():
            error = float((function(x).float() - want).abs().max() / want.abs().max())
            if not error < {"fp32": 1e-3, "bf16": 1e-1}[dtype]:
                raise RuntimeError(
                    f"{name} differs from {EAGER} by {error:.3g} of the largest value: not the same work"
                )


def _bound(found: floor.Trace, machine: floor.Machine, least: floor.Floor) -> str:
    """Whether memory or arithmetic determines the floor."""
    free_memory = machine._replace(bytes=float("inf"))
    arithmetic = floor.alone_floor(found, free_memory, torch.float32).step
    return "arithmetic" if arithmetic > 0.5 * least.step else "memory"


def show_kinds(rows: list[dict]) -> None:
    """Print sums by kind and dtype, each case with its weight; the kind furthest from the floor comes first."""
    print(f"\n{'all of a kind on the path':36} {'nasfast ms':>11} {'best peer':>10} {'floor':>8} {'/ floor':>8}")
    sums = []
    for dtype in DTYPES:
        for kind in dict.fromkeys(row["kind"] for row in rows):
            members = [row for row in rows if (row["kind"], row["dtype"]) == (kind, dtype)]
            if not members:
                continue
            ours, peer, least = (
                sum(row["weight"] * value(row) for row in members)
                for value in (
                    lambda row: row["times"][OURS]["full"]["median_ms"],
                    lambda row: row["times"][OURS]["full"]["median_ms"] / row["ratio_to_best_peer"],
                    lambda row: row["floor_ms"]["full"],
                )
            )
            bounds = "/".join(sorted({row["bound"] for row in members}))
            sums.append((dtype, ours / least, kind, ours, peer, least, bounds))
    for dtype, ratio, kind, ours, peer, least, bounds in sorted(sums, key=lambda s: (s[0], -s[1])):
        print(f"{dtype:5} {kind:30} {ours:11.1f} {peer:10.1f} {least:8.1f} {ratio:8.2f}  {bounds} bound")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"batch {QUICK_BATCH}, {QUICK_ROUNDS} rounds")
    parser.add_argument("--kind", nargs="+", metavar="WORD", help="only kinds that contain one of these words")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batch", type=positive, help="images per batch")
    parser.add_argument(
        "--rounds", type=positive, help=f"timed rounds, default {ROUNDS}, or {QUICK_ROUNDS} with --quick"
    )
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batch, rounds = (QUICK_BATCH, QUICK_ROUNDS) if args.quick else (BATCH, ROUNDS)
    chosen = [case for case in cases() if args.kind is None or any(word in case.kind for word in args.kind)]
    if not chosen:
        parser.error(f"no kind contains {args.kind}; kinds: {', '.join(sorted({case.kind for case in cases()}))}")

    rows = []
    print("median ms; full: forward and backward; saved: bytes kept for backward / bytes of x")
    for dtype in args.dtype:
        machine = floor.measure_machine(DTYPES[dtype], quick=args.quick)
        for case in chosen:
            row = bench(case, dtype, batch=args.batch or batch, rounds=args.rounds or rounds, machine=machine)
            rows.append(row)
            least = row["floor_ms"]["full"]
            print(f"{dtype} {case.kind}, {case.label}, for {case.weight:.1f} on the path, floor {least:.2f} ms")
            for name, phases in row["times"].items():
                cells = [f"{phase} {phases[phase]['median_ms']:8.2f}" for phase in ("forward", "backward", "full")]
                print(f"  {name:22} {'  '.join(cells)}  saved {row['saved_bytes'][name] / row['x_bytes']:.2f}")
            of_peer, of_floor = row["ratio_to_best_peer"], row["fraction_of_floor"]
            print(f"  {of_peer:.2f} of the best peer; the floor is {of_floor:.2f} of it", flush=True)
    show_kinds(rows)
    if args.out:
        write_json(args.out, rows)


if __name__ == "__main__":
    main()
