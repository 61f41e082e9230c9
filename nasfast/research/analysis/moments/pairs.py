"""Signal and noise as one pair, the layers that propagate both, and their moments (Labatie 2019, section 2).

The noise is the first-order response to white noise at the input: every layer applies its derivative at the signal to
it. Both are parts of one tensor, so that one call applies the same weights to both. Moments are taken over samples and
positions per channel and then averaged over channels, in float64; they are (R,), one value for each realisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nasfast.research.analysis.moments.config import Act, Padding

# `shifted` is periodic with the whole border on one side, which shifts the output relative to the input
_PAD_MODES = {"periodic": "circular", "shifted": "circular", "zero": "constant", "reflective": "reflect"}


@dataclass(frozen=True)
class Pair:
    """Signal x and noise dx of several realisations (networks) at one place.

    Attributes:
        v: (2, B, R, C, *spatial): x and dx of B samples in R realisations; a fully connected network has no spatial
            dimensions.
        log_scale: (R,) float64; the noise is exp(log_scale / 2) dx, so that dx can stay near 1.
    """

    v: Tensor
    log_scale: Tensor

    @classmethod
    def of(cls, x: Tensor, dx: Tensor) -> Pair:
        """The pair of x and dx of shape (B, R, C, *spatial)."""
        return cls(torch.stack((x, dx)), x.new_zeros(x.shape[1], dtype=torch.float64))

    @property
    def x(self) -> Tensor:
        """The signal, (B, R, C, *spatial)."""
        return self.v[0]

    @property
    def dx(self) -> Tensor:
        """The noise without its scale, (B, R, C, *spatial)."""
        return self.v[1]

    @property
    def over(self) -> tuple[int, ...]:
        """The dimensions of x that are samples and positions."""
        return (0, *range(3, self.x.ndim))

    def channels(self, values: Tensor) -> Tensor:
        """Values (R, C) or (R, 1), reshaped to broadcast with x."""
        return values.reshape(1, *values.shape, *(1,) * (self.x.ndim - 3))


def conv(
    pair: Pair, weight: Tensor, bias: Tensor | None = None, *, stride: int = 1, padding: Padding = "periodic"
) -> Pair:
    """y = w * x + b and dy = w * dx, by one convolution or matrix product for signal, noise and all realisations.

    The weight is (R, out, C, K, K), or (R, out, C) for a fully connected layer, and the bias (R, out).
    """
    v = pair.v.flatten(0, 1)
    if weight.ndim == 3:
        y = torch.bmm(v.transpose(0, 1), weight.mT).transpose(0, 1)
    else:
        realisations, out, _, kernel, _ = weight.shape
        border = (kernel - 1, 0) if padding == "shifted" else (kernel // 2,) * 2
        v = F.pad(v.flatten(1, 2), border * 2, mode=_PAD_MODES[padding])
        y = F.conv2d(v, weight.flatten(0, 1), stride=stride, groups=realisations).unflatten(1, (realisations, out))
    result = replace(pair, v=y.unflatten(0, pair.v.shape[:2]))
    if bias is not None:
        result.x.add_(pair.channels(bias))
    return result


def batch_norm(pair: Pair, eps: float) -> Pair:
    """z = (y - nu_1,c) / sqrt(mu_2,c + eps) over samples and positions, which are constants for the noise."""
    z = torch.empty_like(pair.v)
    # two passes are faster here than torch.var_mean
    centred = torch.sub(pair.x, pair.x.mean(pair.over, keepdim=True), out=z[0])
    scale = torch.rsqrt(centred.square().mean(pair.over, keepdim=True) + eps)
    centred.mul_(scale)
    torch.mul(pair.dx, scale, out=z[1])
    return replace(pair, v=z)


def layer_norm(pair: Pair, eps: float) -> Pair:
    """z = (y - m) / s over the channels and positions of one sample.

    These statistics depend on the sample, so the noise gets the full derivative dz = (dy - <dy> - z <z dy>) / s.
    """
    x, dx = pair.v
    dims = tuple(range(2, x.ndim))
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    s = torch.sqrt(variance + eps)
    z = (x - mean) / s
    dz = (dx - dx.mean(dims, keepdim=True) - z * (z * dx).mean(dims, keepdim=True)) / s
    return replace(pair, v=torch.stack((z, dz)))


def _tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x)
    return y, 1 - y * y


_ACTIVATIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    # the slopes take phi'(0) = 0
    "relu": lambda x: (x.clamp_min(0), x > 0),
    "relu6": lambda x: (x.clamp(0, 6), (x > 0) & (x < 6)),
    "tanh": _tanh,
}


def act(pair: Pair, name: Act) -> Pair:
    """x = phi(y) and dx = phi'(y) dy."""
    if name == "identity":
        return replace(pair, v=pair.v.clone())
    y = torch.empty_like(pair.v)
    y[0], slope = _ACTIVATIONS[name](pair.x)
    torch.mul(pair.dx, slope, out=y[1])
    return replace(pair, v=y)


def add(a: Pair, b: Pair) -> Pair:
    """The sum of two branches, whose noise must have the same scale."""
    return replace(a, v=a.v + b.v)


def rescale(pair: Pair) -> Pair:
    """Rescale the noise to mean dx^2 = 1 in every realisation; the pair's tensor changes in place."""
    dims = (0, *range(2, pair.x.ndim))
    s = pair.dx.double().square().mean(dims) if pair.v.dtype == torch.float64 else pair.dx.square().mean(dims).double()
    # noise that is 0 stays 0
    s = torch.where(s > 0, s, 1.0)
    pair.dx.mul_(pair.channels(torch.rsqrt(s)[:, None].to(pair.v.dtype)))
    return replace(pair, log_scale=pair.log_scale + s.log())


def energies(pair: Pair) -> dict[str, Tensor]:
    """log nu_2 and log mu_2 of the signal, and log mu_2 of the noise with its scale."""
    x = pair.x.double()
    mean = x.mean(pair.over, keepdim=True)
    variance = (x - mean).square().mean(pair.over)
    noise = pair.dx.double().square().mean((0, *range(2, x.ndim)))
    return {
        "log_nu2_signal": (variance + mean.reshape(variance.shape).square()).mean(1).log(),
        "log_mu2_signal": variance.mean(1).log(),
        "log_mu2_noise": noise.log() + pair.log_scale,
    }


def shape(pair: Pair) -> dict[str, Tensor]:
    """How much the signal at pre-activations differs from a Gaussian.

    Returns:
        mu_4, the channel mean of fourth central moments (the kurtosis if mu_2 = 1); nu_1(|.|), and the channel mean of
        nu_{1,c}(|.|)^2, which theorem 3 needs; and `pseudo_linear`, the channel mean of min(share of positive elements,
        share of others), which is 0 if every unit is always on or always off.
    """
    x = pair.x.double()
    centred = x - x.mean(pair.over, keepdim=True)
    absolute = x.abs().mean(pair.over)
    on = (x > 0).double().mean(pair.over)
    return {
        "mu4_signal": centred.square().square().mean((0, *range(2, x.ndim))),
        "nu1_abs_signal": absolute.mean(1),
        "nu1_abs_squared_signal": absolute.square().mean(1),
        "pseudo_linear": torch.minimum(on, 1 - on).mean(1),
    }


def ranks(pair: Pair) -> dict[str, Tensor]:
    """The effective ranks of signal and noise."""
    return {"reff_signal": effective_rank(pair.x), "reff_noise": effective_rank(pair.dx)}


def effective_rank(x: Tensor) -> Tensor:
    """(R,) effective ranks tr C / ||C||_2 >= 1 of x (B, R, C, *spatial), float64; nan if all vectors are equal.

    C is the covariance of feature-map vectors; its eigenvalues are those of the Gram matrix of the smaller side.
    """
    rows = x.double().movedim(2, -1).movedim(1, 0).flatten(1, -2)
    rows = rows - rows.mean(1, keepdim=True)
    gram = rows @ rows.mT if rows.shape[1] < rows.shape[2] else rows.mT @ rows
    # eigvalsh needs finite matrices
    finite = torch.isfinite(gram).all((1, 2))
    values = torch.linalg.eigvalsh(torch.where(finite[:, None, None], gram, torch.zeros_like(gram)))
    return gram.diagonal(dim1=1, dim2=2).sum(1) / values[:, -1].where(values[:, -1] > 0, torch.nan)
