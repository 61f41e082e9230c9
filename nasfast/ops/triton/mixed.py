"""Launchers of the Triton kernels of mixed_bn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nasfast._triton import mixed
from nasfast._triton.configs import FAMILIES, REDUCE_REGISTERS, TOGETHER, Config
from nasfast.ops.triton.bn import Norm, NormGradient, cdiv, fold_known, on_device_of, options


def _runs(wanted: Sequence[bool]) -> Iterator[range]:
    """The places where `wanted` is true, as ranges of at most TOGETHER consecutive places."""
    begin = 0
    for place in range(len(wanted) + 1):
        ends = place == len(wanted) or not wanted[place]
        if ends or place - begin == TOGETHER:
            if place > begin:
                yield range(begin, place)
            begin = place + 1 if ends else place


class _Part:
    """The tensors of one call that are normalised, or those that are not.

    Attributes:
        places: places of its tensors among the tensors of the call.
        xs, gates: the tensors and gates at these places.
    """

    def __init__(self, xs: Sequence[Tensor], gates: Tensor, normalize: Sequence[bool], normalized: bool) -> None:
        self.normalized = normalized
        self.places = [k for k, flag in enumerate(normalize) if flag == normalized]
        self.xs = [xs[k] for k in self.places]
        self.gates = gates if len(self.xs) == len(xs) else torch.stack([gates[k] for k in self.places] or [gates[0]])
        self.channels = xs[0].shape[1]
        self.rows = xs[0].numel() // max(1, self.channels)
        # replaced by the coefficients of BatchNorm for tensors that are normalised
        self.fold = self.back = self.gates

    def grid(self, config: Config) -> tuple[int, int]:
        return cdiv(self.rows, config.tile["ROWS"]), cdiv(self.channels, config.tile["CHANNELS"])

    def sizes(self) -> dict[str, int]:
        """Keyword arguments of every kernel."""
        return {"R": self.rows, "C": self.channels, "COUNT": len(self.xs)}

    def norm(self, eps: float, statistics: Tensor) -> Norm:
        """BatchNorm of the channels of all tensors; this part uses its fold from then on."""
        columns = len(self.xs) * self.channels
        weight = self.gates[:, None].repeat(1, self.channels).view(-1)
        self.fold = weight.new_empty((3, columns))
        return Norm(gamma=weight, beta=torch.zeros_like(weight), eps=eps, statistics=statistics, fold=self.fold)

    def measure(self, norm: Norm) -> None:
        """Compute the statistics and the fold."""
        config = FAMILIES["mixed"]
        grid = self.grid(config)
        sums = norm.sums(grid[0], grid[1] * len(self.xs))
        for run in _runs([True] * len(self.xs)):
            mixed.mixed_bn_statistics_kernel[grid](
                xs=tuple(self.xs[run.start : run.stop]), k=run.start, sums=sums, **self.sizes(), **options(config)
            )

    def reduce(self, grad: Tensor, wanted: Sequence[bool], norm: Norm | None, *, want_gates: bool) -> Tensor:
        """Compute back of the tensors that are wanted; returns their gradient sums (COUNT * C,) if want_gates."""
        columns = len(self.xs) * self.channels
        # without BatchNorm the kernel computes nothing but these sums
        sums = self.gates.new_empty(columns if want_gates or norm is None else 0)
        nothing = self.gates.new_empty(0)
        if norm is None:
            gradient = NormGradient(
                statistics=None, gamma=sums, eps=0.0, dgamma=sums, dbeta=nothing, back=self.back, rows=None
            )
        else:
            self.back = norm.fold.new_empty((2, columns))
            gradient = NormGradient(
                statistics=norm.statistics,
                gamma=norm.gamma,
                eps=norm.eps,
                dgamma=sums,
                dbeta=nothing,
                back=self.back,
                rows=self.rows,
            )

        config = FAMILIES["mixed"]._replace(registers=REDUCE_REGISTERS)
        grid = self.grid(config)
        packed = gradient.sums(grid[0], grid[1] * len(self.xs))
        for run in _runs(wanted):
            mixed.mixed_bn_reduce_kernel[grid](
                grad=grad,
                xs=tuple(self.xs[run.start : run.stop]),
                k=run.start,
                fold=self.fold,
                sums=packed,
                **self.sizes(),
                NORMALIZE=self.normalized,
                **options(config),
            )
        return sums

    def backward(self, grad: Tensor, dxs: Sequence[Tensor | None]) -> None:
        """Compute the gradients dxs, except those that are None."""
        config = FAMILIES["mixed"]
        for run in _runs([dx is not None for dx in dxs]):
            mixed.mixed_bn_backward_kernel[self.grid(config)](
                grad=grad,
                xs=tuple(self.xs[run.start : run.stop]),
                k=run.start,
                fold=self.fold,
                back=self.back,
                gates=self.gates,
                dxs=tuple(dxs[run.start : run.stop]),
                **self.sizes(),
                NORMALIZE=self.normalized,
                **options(config),
            )


def _add(parts: Sequence[_Part], y: Tensor) -> None:
    """Write the sum of all gated tensors to y."""
    launches = [(part, run) for part in parts for run in _runs([True] * len(part.xs))]
    between = y if len(launches) == 1 else torch.empty_like(y, dtype=torch.float32)

    config = FAMILIES["mixed"]
    for i, (part, run) in enumerate(launches):
        mixed.mixed_bn_kernel[part.grid(config)](
            xs=tuple(part.xs[run.start : run.stop]),
            k=run.start,
            fold=part.fold,
            gates=part.gates,
            subtotal=between,
            out=y if i == len(launches) - 1 else between,
            **part.sizes(),
            NORMALIZE=part.normalized,
            FIRST=i == 0,
            **options(config),
        )


# ---- the registered operators, with the schemas of csrc/library.cpp


def mixed_bn_fwd(xs: Sequence[Tensor], gates: Tensor, normalize: Sequence[bool], eps: float) -> tuple[Tensor, Tensor]:
    """y, statistics; see csrc/library.cpp. The statistics here are [2][tensor][channel]."""
    y = torch.empty_like(xs[0])
    parts = [_Part(xs, gates, normalize, flag) for flag in (True, False)]
    measured = parts[0]
    columns = len(measured.xs) * measured.channels
    statistics = torch.empty(2 * columns, dtype=torch.float64, device=y.device)
    if y.numel():
        with on_device_of(y):
            if measured.xs:
                measured.measure(measured.norm(eps, statistics))
            _add(parts, y)
    return y, statistics


def mixed_bn_bwd(
    grad: Tensor,
    xs: Sequence[Tensor],
    gates: Tensor,
    statistics: Tensor,
    normalize: Sequence[bool],
    eps: float,
    wants: Sequence[bool],
) -> tuple[list[Tensor], Tensor]:
    """dxs, dgates; see csrc/library.cpp."""
    *want_xs, want_gates = wants
    dxs = [torch.empty_like(x) if want else x.new_empty(0) for x, want in zip(xs, want_xs, strict=True)]
    costs = dict.fromkeys(range(len(xs)), gates.new_zeros(()))
    if grad.numel():
        with on_device_of(grad):
            for normalized in (True, False):
                part = _Part(xs, gates, normalize, normalized)
                in_sums = [want_gates or (normalized and want_xs[k]) for k in part.places]
                sums = None
                norm = part.norm(eps, statistics) if normalized and part.xs else None
                if norm is not None:
                    fold_known(norm)
                if any(in_sums):
                    sums = part.reduce(grad, in_sums, norm, want_gates=want_gates)
                if want_gates and sums is not None:
                    cost = sums.view(len(part.xs), part.channels).sum(1, dtype=torch.float64).to(gates.dtype)
                    costs |= zip(part.places, cost, strict=True)
                part.backward(grad, [dxs[k] if want_xs[k] else None for k in part.places])
    return dxs, torch.stack(list(costs.values())) if want_gates else gates.new_empty(0)
