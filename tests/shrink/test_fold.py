import torch
from torch import nn

from nasfast.shrink.fold import Folded
from nasfast.shrink.graph import capture, op_name


def test_a_network_with_folded_norms_computes_the_same_without_their_calls():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=True),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8, bias=False),
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8),  # behind another BatchNorm, which no layer can take
        nn.Conv2d(8, 4, 1),
        nn.Flatten(),
        nn.Linear(16, 5),
    ).double()
    for module in network:
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    images = torch.randn(3, 3, 6, 6).double()
    program = capture(network.eval(), images)
    folded = Folded(program, network)
    seen = []
    norms = [node for node in program.nodes if op_name(node) == "batch_norm"]
    first, tensors = next(n for n in program.nodes if op_name(n) == "conv2d"), program.tensors(network)
    got, _ = program.run(
        tensors, {program.image: images}, replace=folded.changes, see=dict.fromkeys(norms, seen.append)
    )
    torch.testing.assert_close(got, network(images))
    assert len(seen) == 1
    # a layer with other weights, and something added to its outputs before the norm
    weight, extra = torch.randn_like(network[0].weight), torch.randn(8).double()
    change = {first: folded.layer(first, weight, extra)}
    got, _ = program.run(tensors, {program.image: images}, replace={**folded.changes, **change})
    network[0].weight.data.copy_(weight)
    network[0].bias.data.add_(extra)
    torch.testing.assert_close(got, network(images))
