"""The supernet of cells: one-hot gates are a standalone network, gradients of gates are local costs, nothing is shared
that would change a result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.research.cells.network import CellStandalone, CellSupernet
from nasfast.research.cells.operations import Style, make_transition
from nasfast.research.cells.space import CellSpace, darts_space, minimal_cell, nas_bench_201_space
from nasfast.spaces import ArchError, ArchSpace
from nasfast.supernet import build, initialize, standalone_network

S1 = CellSpace("s1", minimal_cell(), cells=1, channels=4, resolution=8, num_classes=3)


def images(space: CellSpace, n: int = 3) -> Tensor:
    x = torch.randn(n, space.in_channels, space.resolution, space.resolution)
    return x.contiguous(memory_format=torch.channels_last)


def gates_of(space: CellSpace, arch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """One-hot gates of every cell, and the operations that run."""
    gates = F.one_hot(torch.tensor(space.parts(arch)), len(space.ops)).float()
    return gates[[space.cell_type(i) for i in range(space.cells)]], gates > 0


def with_weights_of(network: CellStandalone, net: CellSupernet) -> CellStandalone:
    """The standalone network with the supernet's weights; what the supernet's norms lack stays as it was made."""
    weights = {k: v for k, v in net.state_dict().items() if k in network.state_dict()}
    absent = network.load_state_dict(weights, strict=False).missing_keys
    modules = dict(network.named_modules())
    for key in absent:
        assert isinstance(modules[key.rpartition(".")[0]], (nn.BatchNorm2d, nn.GroupNorm)), key
    return network


def test_one_hot_gates_are_the_standalone_network(space, fused):
    """Both networks are in training mode and normalise by the batch. All candidates run, then only the chosen ones."""
    arch = ArchSpace.random(space, np.random.default_rng(0))
    net = CellSupernet(space, fused=fused).train()
    network = with_weights_of(CellStandalone(space, arch), net).train()
    x, (gates, runs) = images(space), gates_of(space, arch)
    want = network(x)
    torch.testing.assert_close(net(x, gates), want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(net(x, gates, runs), want, rtol=1e-3, atol=1e-4)


def mixed_by_hand(net: CellSupernet, x: Tensor, gates: Tensor) -> Tensor:
    """The network as a double sum over edges and operations, each called as a module of its own."""
    space = net.space
    x = net.stem(x)
    inputs = [x] * space.cell.inputs
    for i, cell in enumerate(net.cells):
        if str(i) in net.transitions:
            inputs = [net.transitions[str(i)](y) for y in inputs]
        states = [m(y) for m, y in zip(cell.preprocess, inputs, strict=True)] if cell.preprocess else list(inputs)
        for node in range(space.cell.inputs, space.cell.inputs + space.cell.nodes):
            terms = []
            for e, edge in enumerate(space.cell.edges):
                if edge.target == node:
                    for k, op in enumerate(space.ops):
                        if op in cell.edges[e]:
                            terms.append(gates[i, e, k] * cell.edges[e][op](states[edge.source]))
            states.append(sum(terms))
        output = torch.cat([states[n] for n in space.cell.outputs], 1)
        inputs = [*inputs[1:], output]
    return net.classifier(net.head(inputs[-1]).mean((2, 3)))


def test_sharing_changes_nothing(space, fused):
    """ReLU of a source, pools and identities are computed once for all edges that have them."""
    net = CellSupernet(space, fused=fused, seed=1).double()
    x, y = images(space, 4).double(), torch.tensor([0, 1, 2, 0])
    results = []
    for forward in (net, lambda *args: mixed_by_hand(net, *args)):
        gates = torch.rand(net.gate_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        gates.requires_grad_()
        logits = forward(x, gates)
        wanted = [gates, *net.parameters()]
        gradients = torch.autograd.grad(F.cross_entropy(logits, y), wanted, materialize_grads=True)
        results.append([logits, *gradients])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
    assert results[0][1].abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("space", ["reductions", "201", "conv_norm_relu"], indirect=True)
def test_gradients_in_single_precision(space, fused):
    """The oracles are float64 and plain PyTorch; in float64 the operators use their references."""
    gates = torch.rand(CellSupernet(space, fused=False).gate_shape)
    x, y, found = images(space, 8), torch.arange(8) % 3, []
    for net, dtype in (
        (CellSupernet(space, fused=fused), torch.float32),
        (CellSupernet(space, fused=False), torch.float64),
    ):
        net, z = net.to(dtype), gates.to(dtype).requires_grad_()
        loss = F.cross_entropy(net(x.to(dtype), z), y)
        parts = torch.autograd.grad(loss, [z, *net.parameters()], materialize_grads=True)
        found.append(torch.cat([part.double().flatten() / (1 + part.double().norm()) for part in parts]))
    assert (found[0] - found[1]).norm() < 1e-3 * found[1].norm()


@pytest.mark.parametrize("make", [darts_space, nas_bench_201_space])
def test_a_network_of_none_alone_answers_with_its_bias(make, fused):
    space = make(cells=4, channels=4, num_classes=3, resolution=9)
    arch = (0,) * len(space)
    net = CellSupernet(space, fused=fused)
    gates, runs = gates_of(space, arch)
    for logits in (net(images(space), gates, runs), CellStandalone(space, arch)(images(space))):
        assert logits.shape == (3, 3)
        assert torch.equal(logits, logits[:1].expand(3, 3))
    if not space.classifier_bias:
        assert not logits.any()


@pytest.mark.parametrize("size", [8, 9])
def test_the_residual_block_between_stages(size):
    """Each part by plain functions of its weights; an odd map is pooled to the size that the convolution leaves."""
    block = make_transition("residual", 8, Style()).double().train()
    x = torch.randn(4, 4, size, size, dtype=torch.float64)

    def unit(y, part, stride):
        y = F.conv2d(y.clamp(min=0), part[1].weight, stride=stride, padding=1)
        mean, variance = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), unbiased=False, keepdim=True)
        return (y - mean) / (variance + 1e-5).sqrt()

    pooled = torch.stack(
        [x[:, :, i : i + 2, j : j + 2].mean((2, 3)) for i in range(0, size, 2) for j in range(0, size, 2)], -1
    )
    beside = torch.einsum("oc,ncp->nop", block.beside[1].weight[:, :, 0, 0], pooled)
    want = unit(unit(x, block.first, 2), block.second, 1) + beside.view(4, 8, -(-size // 2), -(-size // 2))
    torch.testing.assert_close(block(x), want, rtol=1e-9, atol=1e-10)


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_weights_are_those_of_the_seed():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    net = CellSupernet(S1, fused=False, seed=7)
    assert torch.equal(torch.get_rng_state(), before), "the global generator has moved"
    torch.manual_seed(4)
    assert equal(net, CellSupernet(S1, fused=True, seed=7))
    assert not equal(net, CellSupernet(S1, fused=False, seed=8))


def test_evaluation_normalises_by_the_batch_too():
    net = CellSupernet(S1, fused=False)
    x, gates = images(S1), torch.rand(net.gate_shape)
    assert torch.equal(net.train()(x, gates), net.eval()(x, gates))


def test_maps_stay_channels_last(fused):
    """Where nothing enters a node, too."""
    net, nodes = CellSupernet(S1, fused=fused).to(memory_format=torch.channels_last), []
    net(images(S1), *gates_of(S1, (0, 0, 4, 2, 0)), nodes=nodes)
    assert all(state.is_contiguous(memory_format=torch.channels_last) for state in nodes[0])


# --- the standalone network


def test_a_cell_space_has_standalone_networks():
    arch = (4, 1, 0, 2, 5)
    network = standalone_network(S1, iter(arch))
    assert (type(network), network.space, network.arch, network.activation) == (CellStandalone, S1, arch, "relu")
    initialize(network, "orthogonal", seed=3)
    assert equal(build(S1, arch, seed=3), network)
    x = images(S1)
    network.eval()
    torch.testing.assert_close(network(x), network.classifier(network.forward_features(x).mean((2, 3))))
    assert all(m.affine and m.track_running_stats for m in network.modules() if isinstance(m, nn.BatchNorm2d))


def test_what_it_cannot_be():
    with pytest.raises(ArchError, match="must have 5 values"):
        standalone_network(S1, (0,))
    with pytest.raises(ValueError, match="networks of cells have ReLU, got activation='tanh'"):
        build(S1, (0,) * 5, activation="tanh")
    with pytest.raises(ValueError, match=r"gates must be \(1, 5, 8\) \(cells, edges, ops\), got \(2, 5, 8\)"):
        CellSupernet(S1, fused=False)(images(S1), torch.ones(2, 5, 8))
    with pytest.raises(TypeError, match="expected a search space, got str"):
        standalone_network("s1", (0,) * 5)


def test_pools_of_the_standalone_network_are_each_their_own():
    """Two edges from one node with the same pool: the norms have weights of their own, so nothing is shared."""
    network = CellStandalone(S1, (2, 0, 2, 0, 0)).train()
    cell, nodes = network.cells[0], []
    nn.init.constant_(cell.edges[0]["max_pool_3x3"].norm.weight, 3.0)
    network._features(images(S1), None, network._runs, nodes=nodes)
    torch.testing.assert_close(nodes[0][2], 3 * nodes[0][3])
