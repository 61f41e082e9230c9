"""What trains after a cut, and what must not change."""

import pytest
import shrinkable
import torch
from torch import nn

import nasfast
from nasfast import shrink


@pytest.fixture
def cut(found, measured):
    return shrink.cut(measured, tuple(max(v - 2, 0) for v in found.full)).float()


@pytest.fixture(scope="module")
def teacher():
    return shrinkable.small().float()


@pytest.fixture(scope="module")
def batches():
    return list(shrinkable.images(48).float().split(12))


def test_only_scale_shift_and_classifier_train_and_the_divergence_falls(cut, teacher, batches):
    before = {name: tensor.clone() for name, tensor in cut.state_dict().items()}
    cut.stem[0].weight.requires_grad_(False)
    losses = shrink.adapt(cut, batches, teacher=teacher, epochs=4, lr=2e-3, lr_classifier=1e-2, fused=False)
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]
    norms = {name for name, m in cut.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for name, tensor in cut.state_dict().items():
        module, _, kind = name.rpartition(".")
        trains = module == "classifier" or (module in norms and kind in ("weight", "bias"))
        assert torch.equal(tensor, before[name]) != trains, name
    assert [name for name, p in cut.named_parameters() if not p.requires_grad] == ["stem.0.weight"]
    assert not cut.training and all(p.grad is None for p in cut.parameters())


@pytest.mark.parametrize("labelled", [False, True])
def test_all_weights_train_and_statistics_stay(cut, teacher, batches, labelled):
    before = {name: tensor.clone() for name, tensor in cut.state_dict().items()}
    cut.stem[0].weight.requires_grad_(False)
    data = [(x, torch.arange(12) % 5) for x in batches] if labelled else batches
    losses = shrink.adapt(cut, data, teacher=teacher, train="all", epochs=3)
    assert losses[-1] < losses[0]
    trained = {name for name, tensor in cut.state_dict().items() if not torch.equal(tensor, before[name])}
    assert trained == {name for name, _ in cut.named_parameters()}
    assert [name for name, p in cut.named_parameters() if not p.requires_grad] == ["stem.0.weight"]
    assert not cut.training and nasfast.unfuse(cut) == 0


def test_one_step_is_that_of_the_gradient_of_both_losses(cut, teacher, batches):
    labels = torch.arange(12) % 5
    logits, target = cut(batches[0]), teacher(batches[0]).softmax(1)
    p = logits.softmax(1)
    want = (target * (target / p).log()).sum(1).mean() - p[torch.arange(12), labels].log().mean()
    (loss,) = shrink.adapt(cut, [(batches[0], labels)], teacher=teacher, epochs=1, fused=False)
    assert loss == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("labelled", "taught", "rates"),
    [(False, True, (4e-4, 4e-4)), (True, True, (8e-3, 2e-3)), (True, False, (2e-3, 1e-3))],
)
def test_rates_depend_on_what_teaches(cut, teacher, batches, labelled, taught, rates):
    layers = cut.stem[1], cut.classifier
    before = [layer.weight.detach().clone() for layer in layers]
    batch = (batches[0], torch.arange(12) % 5) if labelled else batches[0]
    shrink.adapt(cut, [batch], teacher=teacher if taught else None, epochs=1, fused=False)
    # AdamW's first step is the learning rate
    steps = [float((layer.weight.detach() - w).abs().max()) for layer, w in zip(layers, before, strict=True)]
    assert steps == pytest.approx(rates, rel=0.01)


def test_one_rate_may_be_given_and_all_weights_have_their_own(cut, teacher, batches):
    data = [(batches[0], torch.arange(12) % 5)]
    for options, rates in (({"lr": 3e-3}, (3e-3, 2e-3)), ({"train": "all"}, (1e-4, 1e-4))):
        layers = cut.stem[1], cut.classifier
        before = [layer.weight.detach().clone() for layer in layers]
        shrink.adapt(cut, data, teacher=teacher, epochs=1, fused=False, **options)
        steps = [float((layer.weight.detach() - w).abs().max()) for layer, w in zip(layers, before, strict=True)]
        assert steps == pytest.approx(rates, rel=0.02)


def test_features_are_drawn_to_those_that_the_network_keeps(found, measured, teacher, batches):
    arch = tuple(max(v - 2, 0) for v in found.full)
    cut, recipe = shrink.cut(measured, arch).float(), shrink.make_recipe(measured, arch)
    kept = shrink.kept_features(teacher, recipe)
    assert len(kept) == cut.classifier.in_features < teacher.classifier.in_features
    assert shrink.kept_features(teacher, None).tolist() == list(range(teacher.classifier.in_features))
    seen = []
    for network in (teacher, cut):
        network.classifier.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        logits, want = cut(batches[0]), teacher(batches[0]).softmax(1)
        own, features = seen[0], seen[1][:, kept]
        told = shrink.with_features(teacher, recipe)(batches[0])
        torch.testing.assert_close(told, (teacher(batches[0]), features))
        divergence = (want * (want / logits.softmax(1)).log()).sum(1).mean()
    difference = ((own - features) ** 2).mean() / ((features - features.mean()) ** 2).mean()
    options = {"teacher": shrink.with_features(teacher, recipe), "features": True, "fused": False}
    (loss,) = shrink.adapt(cut, [batches[0]], epochs=1, **options)
    assert loss == pytest.approx((divergence + 10 * difference).item(), rel=1e-5)
    losses = shrink.adapt(cut, batches, epochs=4, lr=2e-3, **options)
    assert losses[-1] < losses[0]


def test_a_network_whose_outputs_are_not_those_of_its_classifier_has_no_features(cut, batches):
    class Other(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.network, self.last = cut, last

        def forward(self, x):
            return self.last(self, self.network(x))

    def refuse_more_than_five(self, y):
        if y.shape[1] > 5:
            raise ValueError("classes")
        return y

    assert shrink.gives_features(cut, batches[0])
    assert shrink.gives_features(Other(lambda self, y: y), batches[0])
    assert not shrink.gives_features(Other(lambda self, y: y.log_softmax(1)), batches[0])
    assert not shrink.gives_features(Other(lambda self, y: y @ self.network.classifier.weight), batches[0])
    assert not shrink.gives_features(Other(refuse_more_than_five), batches[0])
    # of the second, the features have their shape
    for last in (lambda self, y: y.mean(1, keepdim=True), lambda self, y: 3 * y):
        with pytest.raises(shrink.ShrinkError, match="outputs of Other are not .* leave features out"):
            shrink.adapt(Other(last), batches, teacher=shrink.with_features(cut), features=True, epochs=1, fused=False)


@pytest.mark.slow
@pytest.mark.parametrize("features", [False, True])
def test_fused_training_gives_the_same_network(found, measured, teacher, batches, features):
    arch = tuple(max(v - 2, 0) for v in found.full)
    cut, other = (shrink.cut(measured, arch).float() for _ in range(2))
    if features:
        teacher = shrink.with_features(teacher, shrink.make_recipe(measured, arch))
    losses = shrink.adapt(cut, batches, teacher=teacher, features=features, epochs=2, fused=False)
    fused = shrink.adapt(other, batches, teacher=teacher, features=features, epochs=2)
    assert fused == pytest.approx(losses, rel=1e-3)
    assert nasfast.unfuse(other) == 0
    with torch.no_grad():
        assert torch.allclose(other(batches[0]), cut(batches[0]), rtol=1e-2, atol=1e-2)


def test_images_of_the_network_may_be_smaller_than_those_of_the_teacher(cut, teacher, batches):
    seen = []
    handle = cut.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
    shrink.adapt(cut, batches[:1], teacher=teacher, epochs=1, size=12, fused=False)
    handle.remove()
    assert seen == [12]


def test_data_is_read_once_in_each_epoch(cut, teacher, batches):
    class Counted(list):
        reads = 0

        def __iter__(self):
            self.reads += 1
            return super().__iter__()

    data = Counted(batches[:2])
    shrink.adapt(cut, data, teacher=teacher, epochs=3, fused=False)
    assert data.reads == 3


def test_what_cannot_be_adapted_is_refused(cut, teacher, batches):
    with pytest.raises(shrink.ShrinkError, match="train is 'everything': give affine or all"):
        shrink.adapt(cut, batches, teacher=teacher, train="everything")
    with pytest.raises(TypeError, match="got generator: give a DataLoader"):
        shrink.adapt(cut, (batch for batch in batches), teacher=teacher, fused=False)
    with pytest.raises(shrink.ShrinkError, match="neither a teacher nor a label"):
        shrink.adapt(cut, batches, fused=False)
    with pytest.raises(shrink.ShrinkError, match="0 batches"):
        shrink.adapt(cut, [], teacher=teacher, fused=False)
    with pytest.raises(shrink.ShrinkError, match="0 BatchNorms"):
        shrink.adapt(nn.Sequential(nn.Flatten(), nn.Linear(768, 5)), batches, teacher=teacher)
    with pytest.raises(shrink.ShrinkError, match="the loss is"):
        shrink.adapt(cut, [batches[0] * float("nan")], teacher=teacher, fused=False)
