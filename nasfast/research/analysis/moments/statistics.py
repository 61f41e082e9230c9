"""Moments of a layer (Labatie 2019, section 2): over samples and positions per channel, then averaged over channels.

Tensors are converted to float64 first; results are (R,), one value per realisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nasfast.research.analysis.moments.pairs import Pair


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
    """The effective rank tr C / ||C||_2 >= 1, where C is the covariance of feature-map vectors.

    It is computed from the Gram matrix of the smaller side.

    Args:
        x: (B, R, C, *spatial).

    Returns:
        (R,) float64; nan if all vectors are equal.
    """
    rows = x.double().movedim(2, -1).movedim(1, 0).flatten(1, -2)
    rows = rows - rows.mean(1, keepdim=True)
    gram = rows @ rows.mT if rows.shape[1] < rows.shape[2] else rows.mT @ rows
    # eigvalsh needs finite matrices
    finite = torch.isfinite(gram).all((1, 2))
    values = torch.linalg.eigvalsh(torch.where(finite[:, None, None], gram, torch.zeros_like(gram)))
    return gram.diagonal(dim1=1, dim2=2).sum(1) / values[:, -1].where(values[:, -1] > 0, torch.nan)
