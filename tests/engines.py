"""Supernets on the graph engine beside the eager one."""

import torch
from devices import DEVICE

from benchmarks.captures import EagerCapture
from nasfast.engine import EagerEngine, GraphEngine
from nasfast.measure.timing import random_batch
from nasfast.supernet import Supernet


def capture():
    """CUDA graphs on a GPU; without one, captures replay eagerly over the same static buffers."""
    return None if DEVICE == "cuda" else EagerCapture()


def networks(space, trainable, **options):
    """The same supernet twice."""
    nets = [Supernet(space, seed=3, **options) for _ in range(2)]
    for net in nets:
        net.freeze(trainable, classifier=trainable != "indicators")
        net.to(device=DEVICE, memory_format=torch.channels_last).train()
    return nets


def gradients(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def compare(space, trainable, steps, *, bf16=False, batch=4, make=networks, **options):
    eager_net, net = make(space, trainable, **options)
    images, labels = random_batch(space, batch, device=DEVICE)
    eager = EagerEngine(eager_net, 0.1, bf16)
    graphs = GraphEngine(net, tuple(images.shape), 0.1, bf16, capture())
    optimizers = [torch.optim.SGD([p for p in n.parameters() if p.requires_grad], 0.5, 0.9) for n in (eager_net, net)]
    for i, paths in enumerate(steps):
        x = images + i
        want, got = (engine.forward_backward(x, labels, paths) for engine in (eager, graphs))
        assert torch.equal(want.loss, got.loss) and torch.equal(want.correct, got.correct), (i, want, got)
        expected, found = gradients(eager_net), gradients(net)
        assert expected.keys() == found.keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name]), (i, name)
        for optimizer in optimizers:
            optimizer.step()
        for buffer in graphs.buffers():
            buffer.fill_(torch.nan)
    return graphs
