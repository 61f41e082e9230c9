"""MACs of calls, counted by hand: what a candidate computes counts in every mode, or is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from nasfast import Choice, Supernet
from nasfast.ops.modules import ConvBNAct, ConvBNActSequential
from nasfast.supernet.macs import count_macs

D, T = 8, 6
"""Channels, and places of a sequence."""


class Call(nn.Module):
    """A module of a function of x (T, D), with parameters that the function takes."""

    def __init__(self, function, *parameters: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.modules_, self.tensors = nn.ModuleList(), nn.ParameterList()
        for part in parameters:
            (self.modules_ if isinstance(part, nn.Module) else self.tensors).append(part)

    def forward(self, x):
        return self.function(x, *self.modules_, *self.tensors)


@torch.inference_mode()
def infer(x, layer):
    return layer(x)


def attend(x, layer):
    return layer(x[None], x[None], x[None], need_weights=False)[0]


def sdpa(x):
    q = x.reshape(1, 2, T, D // 2)
    return nn.functional.scaled_dot_product_attention(q, q, q)


def packed(x, layer):
    return layer(pack_padded_sequence(torch.stack([x, x]), [T, 2], batch_first=True))[0].data


SCORES = 2 * T * T * D
"""Two products of all places with all places."""

COUNTED = {
    "attention": (lambda: Call(sdpa), SCORES),
    "MultiheadAttention": (lambda: Call(attend, nn.MultiheadAttention(D, 2, batch_first=True)), SCORES + 4 * T * D * D),
    "TransformerEncoderLayer": (
        lambda: Call(lambda x, layer: layer(x[None]), nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True)),
        SCORES + 4 * T * D * D + 2 * T * D * 16,
    ),
    "LSTM": (lambda: Call(lambda x, layer: layer(x)[0], nn.LSTM(D, 5)), T * 4 * (5 * D + 5 * 5)),
    "LSTM, two layers in both directions": (
        lambda: Call(lambda x, layer: layer(x)[0], nn.LSTM(D, 5, 2, bidirectional=True)),
        T * 2 * 4 * ((5 * D + 5 * 5) + (5 * 10 + 5 * 5)),
    ),
    "LSTM, projected": (
        lambda: Call(lambda x, layer: layer(x)[0], nn.LSTM(D, 5, proj_size=3)),
        T * (4 * (5 * D + 5 * 3) + 3 * 5),
    ),
    "LSTM, packed": (lambda: Call(packed, nn.LSTM(D, 5, batch_first=True)), (T + 2) * 4 * (5 * D + 5 * 5)),
    "GRU": (lambda: Call(lambda x, layer: layer(x)[0], nn.GRU(D, 5)), T * 3 * (5 * D + 5 * 5)),
    "RNN": (lambda: Call(lambda x, layer: layer(x)[0], nn.RNN(D, 5)), T * (5 * D + 5 * 5)),
    "GRUCell": (lambda: Call(lambda x, layer: layer(x), nn.GRUCell(D, 5)), T * 3 * (5 * D + 5 * 5)),
    "Bilinear": (lambda: Call(lambda x, layer: layer(x, x), nn.Bilinear(D, D, 3)), T * D * D * 3),
    "einsum": (lambda: Call(lambda x, w: torch.einsum("td,de->te", x, w), torch.ones(D, 3)), T * D * 3),
    "inference mode": (lambda: Call(infer, nn.Linear(D, 3)), T * D * 3),
    "matrix by vector": (lambda: Call(lambda x, w: x @ w, torch.ones(D)), T * D),
    "vector by vector": (lambda: Call(lambda x: torch.dot(x[0], x[1])), D),
    "in place": (lambda: Call(lambda x, w: torch.zeros(T, 3).addmm_(x, w), torch.ones(D, 3)), T * D * 3),
    "sum of products": (lambda: Call(lambda x: torch.zeros(T, T).addbmm(x[None], x.t()[None])), T * T * D),
    "outer product": (lambda: Call(lambda x: torch.zeros(D, D).addr(x[0], x[1])), D * D),
    "distances": (lambda: Call(lambda x: torch.cdist(x, x, p=1.0)), T * T * D),
    "scripted": (lambda: torch.jit.script(nn.Linear(D, 3)), T * D * 3),
    "compiled": (lambda: torch.compile(nn.Linear(D, 3)), T * D * 3),
    "work element by element": (lambda: Call(lambda x: nn.functional.normalize(x.softmax(-1) * x)), 0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["train", "eval", "frozen"])
@pytest.mark.parametrize("name", COUNTED)
def test_macs_by_hand_in_every_mode(name, mode):
    make, macs = COUNTED[name]
    module = make().train(mode == "train")
    if mode == "frozen":
        for parameter in module.parameters():  # a scripted module cannot be asked as a whole
            parameter.requires_grad_(False)
    with torch.no_grad():
        assert count_macs(module, (torch.randn(T, D),), {})[::2] == (macs, [])


def test_a_deformable_convolution_counts_as_one_of_its_size():
    ops = pytest.importorskip("torchvision.ops")
    layer, x, offset = ops.DeformConv2d(4, 6, 3, groups=2, padding=1), torch.randn(2, 4, 5, 5), torch.zeros(2, 18, 5, 5)
    with torch.no_grad():
        assert count_macs(layer, (x, offset), {})[::2] == (2 * 6 * 25 * 2 * 9, [])


@torch.library.custom_op("nasfast_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.fft.rfft2, "aten::_fft_r2c"),
        (twice, "nasfast_tests::twice"),
        (lambda x: x @ torch.linalg.inv(x[:, :D] + torch.eye(D)), "aten::linalg_inv_ex"),
        (lambda x: torch.linalg.svdvals(x), "aten::_linalg_svd"),
    ],
)
def test_what_has_no_formula_is_refused_by_name(function, name):
    class Part(nn.Module):
        def forward(self, x):
            return x + function(x).real.sum()

    def net(part, outside):
        return nn.Sequential(Choice("c", {"part": part, "none": nn.Identity()}), outside)

    x = torch.randn(D, D)
    with pytest.raises(
        ValueError, match=rf"choice 'c', candidate part: the MACs of {name} are not known.*register_flop"
    ):
        Supernet.from_module(net(Part(), nn.Identity()), x, init=None)
    with pytest.raises(ValueError, match=rf"^Sequential: the MACs of {name} are not known"):
        Supernet.from_module(net(nn.Linear(D, D), Part()), x, init=None)


def test_a_formula_of_the_user_counts():
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    register_flop_formula(torch.ops.nasfast_tests.twice)(lambda x, out_shape=None, **_: 2 * 7)
    try:
        assert count_macs(Call(twice), (torch.randn(T, D),), {})[::2] == (7, [])
    finally:
        del flop_registry[torch.ops.nasfast_tests.twice]


def test_operators_of_nasfast_count_as_what_they_compute():
    with torch.no_grad():
        chain = ConvBNActSequential(ConvBNAct(4, 6, 3), ConvBNAct(6, 8, 1), fused=True)
        found = count_macs(chain.requires_grad_(False), (torch.randn(1, 4, 5, 5),), {})
    assert found[::2] == (25 * (6 * 4 * 9 + 8 * 6), [])


def test_the_fast_path_is_as_it_was():
    fast = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(RuntimeError):
        count_macs(nn.Linear(3, 4), (torch.randn(2, 2),), {})
    assert torch.backends.mha.get_fastpath_enabled() == fast
