"""What is found in networks, and what is refused."""

import pytest
import shrinkable
import torch
from torch import nn

from nasfast import shrink


def test_every_hidden_width_and_block_is_found(found):
    places = {place.name: [d.name for d in place.dimensions] for place in found.places}
    assert places == {
        "inverted": ["inverted.project.0"],
        "down.project.0": ["down.project.0"],
        "basic": ["basic.second.0"],
        "second_basic": ["second_basic.second.0"],
        "grouped.expand.0": ["grouped.expand.0"],
        "plain.middle.0": ["plain.middle.0", "plain.expand.0"],
        "classifier": ["classifier"],
    }
    dropped = {place.name for place in found.places if place.block is not None}
    assert dropped == {"inverted", "basic", "second_basic"}
    labels = {choice.name: [branch.label for branch in choice.branches] for choice in found.space.choices}
    assert labels["inverted"] == ["drop", "8", "12", "16", "24"]
    # four groups stay or go as wholes
    assert labels["grouped.expand.0"] == ["4", "8", "12", "16"]
    assert len(labels["plain.middle.0"]) == 16 and labels["plain.middle.0"][0] == "4x4"


def test_the_stride_is_that_of_the_smallest_map(found):
    smallest = min(m.shape[-1] for m in maps_of_convolutions(found) if m.shape[-1] > 1)
    assert found.stride == round(16 / smallest) > 1
    for side in (15, 17, 24):  # whose maps are rounded up
        odd = shrink.find(found.model, shrinkable.images(1, size=side), multiple=4, widths=4)
        assert odd.stride == found.stride


def maps_of_convolutions(found):
    """Outputs of all convolutions of the network, which has a squeeze-and-excitation of one pixel."""
    seen = []
    handles = [
        m.register_forward_hook(lambda module, args, out: seen.append(out))
        for m in found.model.modules()
        if isinstance(m, nn.Conv2d)
    ]
    found.model(shrinkable.images(1))
    for handle in handles:
        handle.remove()
    return seen


def test_what_is_not_searched_has_its_reason(found):
    reasons = found.reasons
    assert "stream" in reasons["stem.0"] and "stream" in reasons["inverted.project.0"]
    assert "squeeze-and-excitation" in reasons["inverted.excite.squeeze"]
    assert "output" in reasons["classifier"]
    rows = found.records()
    assert len(rows) == len(found.places) + len(reasons)
    assert {"part": "stem.0", "macs": "", "searched": f"no: {reasons['stem.0']}"} in rows


def test_squeeze_and_excitation_belongs_to_its_width(found):
    (dimension,) = next(place.dimensions for place in found.places if place.name == "inverted")
    assert {layer.path for layer in dimension.producers} == {"inverted.expand.0", "inverted.excite.excite"}
    assert {layer.path for layer in dimension.readers} == {"inverted.project.0", "inverted.excite.squeeze"}
    assert [layer.path for layer in dimension.tied] == ["inverted.depthwise.0"]


def test_the_network_is_not_changed_and_may_be_frozen_and_in_training(found):
    net = shrinkable.small().requires_grad_(False).train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    again = shrink.find(net, shrinkable.images(1), multiple=4, widths=4)
    assert net.training and net.head.training
    assert again.space.choices == found.space.choices
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


class Concatenated(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.first, self.second = shrinkable.conv(3, 16, 3), shrinkable.conv(3, 16, 3)
        self.last, self.head = shrinkable.conv(32, 16), nn.Linear(16, classes)

    def forward(self, x):
        x = torch.cat([torch.relu(self.first(x)), torch.relu(self.second(x))], 1)
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


class Twice(Concatenated):
    def forward(self, x):
        x = torch.cat([torch.relu(self.first(x)), torch.relu(self.first(x))], 1)
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


@pytest.mark.parametrize("network, reason", [(Concatenated, "cat reads"), (Twice, "conv2d")])
def test_concatenated_and_shared_layers_keep_their_width(network, reason):
    found = shrink.find(network().eval(), torch.randn(1, 3, 8, 8))
    assert [place.name for place in found.places] == ["head"]
    assert any(reason in text for text in found.reasons.values()) or reason == "conv2d"


def test_a_value_changed_in_place_is_read_as_changed():
    class InPlace(Concatenated):
        def forward(self, x):
            y = self.first(x)
            nn.functional.relu_(y)
            return self.head(torch.relu(self.last(torch.cat([y, y], 1))).mean((2, 3)))

    shrink.find(InPlace().eval(), torch.randn(1, 3, 8, 8))  # compares the graph with the forward


class Answer(nn.Module):
    """A classifier whose logits become something else."""

    def __init__(self, change):
        super().__init__()
        self.network, self.change = nn.Sequential(shrinkable.conv(3, 8), nn.Flatten(), nn.Linear(8 * 64, 4)), change

    def forward(self, x):
        return self.change(self.network(x))


@pytest.mark.parametrize(
    "network, pixels, text",
    [
        (lambda: Answer(lambda y: {"logits": y}), (1, 3, 8, 8), "gives a dict, expected logits"),
        (lambda: Answer(lambda y: y / 0), (1, 3, 8, 8), "not finite"),
        (lambda: Answer(lambda y: y.view(2, 4)), (1, 3, 8, 8), "Answer does not run with one image"),
        (
            lambda: Answer(lambda y: y.view(2, 4) if len(y) == 2 else y),
            (1, 3, 8, 8),
            "Answer does not run with one image",
        ),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()), (1, 3, 8, 8), "expected logits"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), (1, 3, 8, 8), "nothing of Sequential"),
        (lambda: shrinkable.small().float(), (1, 4, 16, 16), "cannot capture Small"),
        (lambda: shrinkable.small().float(), (3, 16, 16), "add the batch"),
    ],
)
def test_what_cannot_be_shrunk_is_refused(network, pixels, text):
    with pytest.raises(shrink.ShrinkError, match=text):
        shrink.find(network(), torch.randn(pixels))
    with pytest.raises(TypeError, match="module and a tensor"):
        shrink.find("mobilenet_v2", torch.randn(pixels))


@pytest.mark.parametrize("expand", [torch.Tensor.expand_as, lambda x, like: x.expand(like.shape)])
def test_expanded_factors_belong_to_the_width_that_they_scale(expand):
    found = shrink.find(shrinkable.excited(expand), torch.randn(1, 3, 8, 8))
    (place,) = found.places
    (dimension,) = place.dimensions
    assert {layer.path for layer in dimension.producers} == {"1.expand.0", "1.excite"}
    assert {layer.path for layer in dimension.readers} == {"1.project.0", "1.squeeze"}


def test_layouts_round_differently_in_bfloat16_and_this_is_no_side_effect():
    assert shrink.find(shrinkable.small().bfloat16(), shrinkable.images(1).bfloat16()).places


class Repeated(nn.Module):
    """A residual block that runs twice, and one that runs once."""

    def __init__(self):
        super().__init__()
        self.stem, self.repeated, self.once = shrinkable.conv(3, 8), shrinkable.Basic(8, 16), shrinkable.Basic(8, 16)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.repeated(self.repeated(torch.relu(self.stem(x))))
        return self.head(self.once(x).mean((2, 3)))


def test_a_block_that_runs_twice_stays():
    found = shrink.find(Repeated().eval(), torch.randn(1, 3, 8, 8))
    assert [place.name for place in found.places] == ["once"]
    assert "more than one residual block" in found.reasons["repeated"]


class Tree(nn.Module):
    """A block that may be given its shortcut, as those of DLA, and one that is not."""

    class Given(shrinkable.Basic):
        def forward(self, x, shortcut=None):
            y = self.second(torch.relu(self.first(x)))
            return torch.relu(y + (x if shortcut is None else shortcut))

    def __init__(self):
        super().__init__()
        self.stem, self.given, self.plain = shrinkable.conv(3, 8), self.Given(8, 16), shrinkable.Basic(8, 16)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head(self.plain(self.given(x, x)).mean((2, 3)))


def test_a_block_that_is_given_its_shortcut_stays():
    found = shrink.find(Tree().eval(), torch.randn(1, 3, 8, 8))
    assert [place.block.path for place in found.places if place.block is not None] == ["plain"]
    assert "more than one value" in found.reasons["given"]


def test_macs_of_every_operation_are_those_of_the_network():
    """A convolution whose weight is computed, and one over channels, as of ECA, are searched nowhere, and cost."""

    class Gated(shrinkable.Basic):
        def forward(self, x):
            y = self.second(torch.relu(self.first(x)))
            gate = nn.functional.conv1d(y.mean((2, 3))[:, None], torch.ones(1, 1, 3), padding=1)
            return torch.relu(x + y * gate.sigmoid().movedim(1, 2)[..., None])

    network = nn.Sequential(shrinkable.conv(3, 8), Gated(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    found = shrink.find(network.eval(), torch.randn(1, 3, 8, 8))
    layers = 64 * (3 * 8 + 2 * 9 * 8 * 16) + 8 * 3
    assert found.macs == layers + 3 * 8
    (choice,) = found.space.choices
    # a dropped block takes its convolution over channels with it
    assert choice.branches[-1].macs == 64 * 2 * 9 * 8 * 16 + 3 * 8
