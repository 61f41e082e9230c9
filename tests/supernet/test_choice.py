"""`Choice` and `Supernet.from_module`: any module with choices is trained, scored, searched and taken apart again."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from doc_links import ROOT
from test_snippets import blocks
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import mobilenet_backbone

import nasfast
from nasfast.config import ConfigError
from nasfast.indicators.registry import ScoreError
from nasfast.indicators.scores import Evidence, score_paths, score_table, untrained_table
from nasfast.measure import latency as latency_module
from nasfast.measure.config import LatencyConfig
from nasfast.pipeline.inputs import read_layers
from nasfast.spaces import SAMPLERS, ArchError, ModuleSpace, get_space, read_space
from nasfast.train import TrainConfig, evaluate, recalibrate_bn

PAGE = ROOT / "docs" / "choice.md"


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class Net(nn.Module):
    """Choice `first` runs twice where the image is large, by a decision of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8, 3)
        self.a = nasfast.Choice("first", {"k3": conv_bn(8, 8, 3), "k5": conv_bn(8, 8, 5), "none": nn.Identity()})
        self.b = nasfast.Choice(None, [conv_bn(8, 12, 1, 2), conv_bn(8, 12, 3, 2)])
        self.neck, self.drop = nn.BatchNorm1d(12), nn.Dropout(0.5)
        self.fc = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        repeats = 2 if x.shape[-1] > 8 else 1
        x = self.stem(x)
        for _ in range(repeats):
            x = self.a(x)
        return self.fc(self.drop(self.neck(self.b(x).mean((2, 3)))))


def supernet(side: int = 8, **settings) -> nasfast.Supernet:
    torch.manual_seed(0)
    return nasfast.Supernet.from_module(Net(), torch.randn(1, 3, side, side), classifier="fc", **settings)


def batches(count: int = 3, side: int = 8) -> list:
    torch.manual_seed(1)
    return [(torch.randn(8, 3, side, side), torch.randint(4, (8,))) for _ in range(count)]


@pytest.mark.parametrize("side", [8, 16])
def test_costs_are_those_of_every_network(side):
    """Against a count of the network that is taken out; at 16 the first choice is called twice."""
    net = supernet(side)
    assert [len(choice.inputs) for choice in net.space.choices] == [1 if side == 8 else 2, 1]
    for arch in itertools.product(*net.space.options):
        network = nasfast.inherit(net, arch).eval()
        with FlopCounterMode(display=False) as counter:
            network(torch.randn(1, 3, side, side))
        cost = net.space.cost(arch)
        assert (2 * cost.macs, cost.params) == (counter.get_total_flops(), sum(p.numel() for p in network.parameters()))


def test_the_network_of_an_architecture_is_the_path_without_choices():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    net = nasfast.Supernet.from_module(model, torch.randn(1, 3, 8, 8))
    x, _ = batches(1)[0]
    for arch in [(0, 1), (1, 0), (2, 1)]:
        network = nasfast.inherit(net, arch)
        assert not [m for m in network.modules() if isinstance(m, nasfast.Choice)]
        assert all(p.requires_grad for p in network.parameters())
        for module in (net, network):
            module.train()
            nn.Module.train(module.drop if module is network else net.module.drop, False)
        torch.testing.assert_close(network(x), net(x, arch))
        state = network.state_dict()
        assert torch.equal(state["b.0.weight"], before[f"b.candidates.{arch[1]}.0.weight"])
        recalibrate_bn(network, batches())
        for norm in (network.get_submodule("b.1"), network.get_submodule("neck")):
            assert norm.running_mean.abs().sum() > 0 and norm.num_batches_tracked == 3
        state["fc.weight"].zero_()
    assert before.keys() == model.state_dict().keys() and model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(value, before[key.removeprefix("module.")]) for key, value in net.state_dict().items())


def test_paths_run_the_candidates_that_they_name():
    net = supernet().eval()
    x, _ = batches(1)[0]
    outputs = {arch: net(x, arch) for arch in itertools.product(*net.space.options)}
    for one, other in itertools.combinations(outputs, 2):
        assert not torch.allclose(outputs[one], outputs[other])
    assert torch.equal(net.activate((1, 1))(x), outputs[1, 1])
    with pytest.raises(
        ArchError, match="choice 'first' of space 'Net': choice 3 is not one of 0 .k3., 1 .k5., 2 .none"
    ):
        net(x, (3, 0))


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_only_what_may_train_trains_and_every_candidate_does(sampler, tmp_path):
    net = supernet(init="orthogonal")
    weight = net.module.a.candidates[1][0].weight.flatten(1)
    torch.testing.assert_close(weight @ weight.T, torch.eye(8), rtol=1e-5, atol=1e-5)
    summary = net.freeze("bn", classifier=True)
    assert summary.by_role.keys() == {"block_indicators", "other_bn", "classifier"}
    before = copy.deepcopy(net.state_dict())
    cfg = TrainConfig(epochs=2, lr=0.1, log_every=100)
    nasfast.train_supernet(net, batches(), SAMPLERS[sampler](net.space), cfg, run_dir=tmp_path)
    changed = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    # the candidates of all choices have had gradients in six steps of these seeds
    trains = {name for name, p in net.named_parameters() if p.requires_grad}
    assert changed == trains and {"module.a.candidates.0.1.bias", "module.neck.bias", "module.fc.bias"} < changed
    assert read_space(tmp_path / "space.yaml") == net.space


def test_scores_and_exact_search():
    net = supernet()
    evidence = Evidence(net, batches(), loaders=(batches(), batches()), paths=12)
    with torch.no_grad():
        net.module.b.candidates[1][1].weight.fill_(3.0)
    gamma = score_table("gamma", evidence)
    assert gamma.block == ({0: 1.0, 1: 1.0}, {0: 1.0, 1: 3.0})
    loss = score_table("path_loss", evidence, structure=1.0)
    assert {len(row) for row in loss.scores} == {3, 2}
    assert score_table("macs", evidence).scores[0] == {0: 8 * 8 * 9 * 64, 1: 8 * 8 * 25 * 64, 2: 0}
    network = nasfast.inherit(net, (1, 1))
    recalibrate_bn(network, batches())
    accuracy = evaluate(network, batches()).top1
    assert score_paths("recalibrated_accuracy", evidence, [(1, 1)]) == {(1, 1): accuracy}
    limit = net.space.cost((0, 0)).macs
    archs = [arch for arch in itertools.product(*net.space.options) if net.space.cost(arch).macs <= limit]
    (best,) = nasfast.search_table(loss, net.space, max_macs=limit, top_k=1)
    assert best.optimal and best.arch == max(archs, key=loss.score)
    assert len(archs) < net.space.cardinality
    again = nasfast.IndicatorTable.from_json(loss.to_json())
    assert again.scores == loss.scores and isinstance(again.space, ModuleSpace)


def test_scores_of_a_path_do_not_depend_on_dropout():
    net, images = supernet(), batches()
    one, other = (Evidence(net, images).outcome((0, 0)) for _ in range(2))
    assert one == other and net.module.drop.training


def test_scores_of_paths_do_not_change_the_mode_of_a_supernet_in_evaluation_mode(monkeypatch):
    """It would take a good part of a path's time in a supernet of thousands of modules."""
    net, changes = supernet().eval(), []
    evidence = Evidence(net, batches())
    monkeypatch.setattr(nn.Dropout, "train", lambda module, mode=True: changes.append(mode) or module)
    score_paths("path_loss", evidence, [(0, 0), (1, 0), (2, 1)])
    assert not changes


def test_isometry_needs_neither_training_nor_images():
    net = supernet()
    before = copy.deepcopy(net.state_dict())
    table = score_table("isometry", Evidence(net, ()))
    assert table.layer[0] == 0 and table.block[0].keys() == {0, 1} and table.block[1].keys() == {0, 1}
    assert table.block[1][0] != table.block[1][1]
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    with pytest.raises(ScoreError, match="is the space of a module: give Evidence"):
        untrained_table("isometry", net.space)


def test_scores_of_untrained_networks_take_the_paths_of_a_module():
    evidence = Evidence(supernet(), batches(), paths=8)
    scores = score_paths("naswot", evidence, [(0, 0), (1, 1)])
    assert scores[0, 0] != scores[1, 1]
    with pytest.raises(ScoreError, match="Net has no score 'nasi': it mixes the blocks of spaces of layers"):
        score_table("nasi", evidence)


def test_a_candidate_without_batch_norm_has_no_gamma():
    module = nn.Sequential(nasfast.Choice("pool", [nn.AvgPool2d(3, 1, 1), conv_bn(3, 3, 3)]))
    net = nasfast.Supernet.from_module(module, torch.randn(1, 3, 8, 8))
    for use in (lambda: nasfast.score(net), lambda: score_table("gamma", Evidence(net, ()))):
        with pytest.raises(ScoreError, match="choice 'pool', 0 AvgPool2d, has no BatchNorm2d"):
            use()


def test_measured_latencies_are_a_limit(monkeypatch):
    """Times that are known: a candidate takes its number + 1, a network 0.5 times that and 4 besides."""
    net = supernet()

    def whole(name: str) -> float:
        return 4 + 0.5 * sum(0 if (i, v) == (0, 2) else v + 1 for i, v in enumerate(net.space.parse(name)))

    def timed(work, **options):
        # the work runs, so that candidates get inputs of their shapes
        assert all(run()["run"] > 0 for run in work.values())
        alone = {"choice 'first', k3": 1, "choice 'first', k5": 2, "choice 'b', 0 Sequential": 1}
        alone["choice 'b', 1 Sequential"] = 2
        times = {name: alone[name] if name in alone else whole(name) for name in work}
        return {name: {"run": {"median_ms": t, "q20_ms": t, "q80_ms": t}} for name, t in times.items()}

    monkeypatch.setattr(latency_module, "measure", timed)
    table = latency_module.latency(LatencyConfig(rounds=1, calibrate=4, threads=1), net).table
    for arch in itertools.product(*net.space.options):
        assert table.cost(arch) == pytest.approx(whole(" ".join(map(str, arch))))
    with pytest.raises(ConfigError, match="calibrate must be at least 4"):
        latency_module.latency(LatencyConfig(calibrate=0), net)
    with pytest.raises(ConfigError, match="choice 'first' gets 2 inputs"):
        latency_module.latency(LatencyConfig(), supernet(16))


class Around(nn.Module):
    """The choice is of bare convolutions, and what normalises them stands behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = nasfast.Choice(None, [nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 8, 1, bias=False)])
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.choice(x)))


def test_fuse_takes_no_candidate_for_the_choice():
    net = nasfast.Supernet.from_module(Around(), torch.randn(1, 8, 64, 64))
    net.freeze("bn")
    x = torch.randn(8, 8, 64, 64).contiguous(memory_format=torch.channels_last)
    plain = [net(x, (value,)) for value in (0, 1)]
    report = nasfast.fuse(net)
    assert not report.chains and {part.name for part in report.left} >= {"module.choice.candidates.1"}
    torch.testing.assert_close([net(x, (value,)) for value in (0, 1)], plain)


class Levels(nn.Module):
    """A feature extractor that returns a dictionary; one choice is the head of both levels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = conv_bn(3, 8, 3, 2), conv_bn(8, 8, 3, 2)
        self.block = nasfast.Choice(None, [conv_bn(8, 8, 3), nn.Identity()])
        self.head = nasfast.Choice(None, [nn.Conv2d(8, 5, 1), nn.Conv2d(8, 5, 3, padding=1)])

    def forward(self, images: list[torch.Tensor], *, coarse: bool = True) -> dict[str, torch.Tensor]:
        levels = {"fine": self.stem(torch.stack(images))}
        if coarse:
            levels["coarse"] = self.block(self.down(levels["fine"]))
        return {name: self.head(level) for name, level in levels.items()}


def test_a_module_may_take_lists_and_return_dictionaries():
    net = nasfast.Supernet.from_module(Levels(), ([torch.rand(3, 16, 16)],))
    assert net.space.choices[1].inputs == ((8, 8, 8), (8, 4, 4)) and net.space.num_classes == 0
    assert [branch.macs for branch in net.space.choices[1].branches] == [40 * 80, 9 * 40 * 80]
    images = [torch.rand(3, 16, 16) for _ in range(2)]
    maps = nasfast.inherit(net, (1, 1))(images)
    assert {name: tuple(y.shape) for name, y in maps.items()} == {"fine": (2, 5, 8, 8), "coarse": (2, 5, 4, 4)}
    torch.testing.assert_close(maps, net(images, (1, 1)))
    assert net.activate((0, 0))(images, coarse=False).keys() == {"fine"}
    with pytest.raises(ValueError, match="not known which part is the classifier"):
        net.freeze("bn", classifier=True)
    with pytest.raises(ScoreError, match="Levels was not traced with square images"):
        score_table("isometry", Evidence(net, ()))


def test_the_backbone_of_a_detector_trains_with_the_losses_of_the_detector():
    backbone = mobilenet_backbone(
        backbone_name="mobilenet_v3_small", weights=None, fpn=True, trainable_layers=6, norm_layer=nn.BatchNorm2d
    )
    residual = {name: m for name, m in backbone.body.named_children() if getattr(m, "use_res_connect", False)}
    for name, block in residual.items():
        smaller = conv_bn(block.out_channels, block.out_channels, 1)
        backbone.body[name] = nasfast.Choice(None, {"published": block, "1x1": smaller, "none": nn.Identity()})
    assert len(residual) == 6
    net = nasfast.Supernet.from_module(backbone, torch.rand(1, 3, 64, 64))
    assert net.space.rows == tuple(f"body.{name}" for name in residual)
    for arch in [(0,) * 6, (1, 2, 0, 0, 1, 2)]:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            nasfast.inherit(net, arch).eval()(torch.rand(1, 3, 64, 64))
        assert 2 * net.space.cost(arch).macs == counter.get_total_flops()

    anchors = AnchorGenerator(((8, 16, 32),) * 3, ((1.0,),) * 3)
    few = {"rpn_pre_nms_top_n_train": 50, "rpn_post_nms_top_n_train": 20, "rpn_post_nms_top_n_test": 20}
    detector = FasterRCNN(backbone, 3, min_size=64, max_size=64, rpn_anchor_generator=anchors, **few)
    images = [torch.rand(3, 64, 64) for _ in range(2)]
    targets = [{"boxes": torch.tensor([[4.0, 4.0, 30.0, 30.0]]), "labels": torch.tensor([1])} for _ in images]
    net = nasfast.Supernet.from_module(detector, (images[:1],))
    net.freeze("bn")
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    before = copy.deepcopy(net.state_dict())
    (path,) = nasfast.spaces.FairSampler(net.space).step()
    sum(net.activate(path)(images, targets).values()).backward()
    optimizer.step()
    changed = {key.split(".candidates.")[0] for key, v in net.state_dict().items() if not torch.equal(v, before[key])}
    assert {f"module.backbone.body.{name}" for name, value in zip(residual, path, strict=True) if value < 2} <= changed
    found = nasfast.inherit(net, path).eval()(images)
    assert [result.keys() for result in found] == [{"boxes", "labels", "scores"}] * 2


def pair(name: str | None = "a") -> nasfast.Choice:
    return nasfast.Choice(name, [conv_bn(3, 3, 3), conv_bn(3, 3, 5)])


class Unused(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)


def shared_candidate() -> nn.Module:
    block = conv_bn(3, 3, 3)
    return nn.Sequential(block, nasfast.Choice("a", [block, conv_bn(3, 3, 5)]))


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: conv_bn(3, 3, 3), ValueError, "Sequential has no nasfast.Choice"),
        (lambda: nasfast.Choice("a", [conv_bn(3, 3, 3)]), ValueError, "choice 'a' needs at least 2 candidates, got 1"),
        (lambda: nasfast.Choice("a", [torch.relu, nn.ReLU()]), TypeError, "must be modules, got builtin_function"),
        (lambda: nasfast.Choice("a", [nn.ReLU()] * 2), ValueError, "choice 'a' has the same module twice"),
        (lambda: nasfast.Choice(3, [nn.ReLU(), nn.Tanh()]), TypeError, "must be a string or None, got 3"),
        (lambda: nasfast.Choice("a", conv_bn(3, 3, 3)), TypeError, "choice 'a': a Sequential is one candidate"),
        (lambda: nn.Sequential(pair(), pair()), ValueError, "two choices have the name 'a'"),
        (
            lambda: nasfast.Choice("a", [pair("b"), conv_bn(3, 3, 3)]),
            ValueError,
            "choice 'a' has another choice inside, candidates.0",
        ),
        (
            lambda: nn.Sequential(nasfast.Choice("a", [conv_bn(3, 3, 3), conv_bn(3, 3, 3, 2)])),
            ValueError,
            r"choice 'a': 0 Sequential gives \(1, 3, 8, 8\) and 1 Sequential gives \(1, 3, 4, 4\)",
        ),
        (
            lambda: nn.Sequential(nasfast.Choice("a", [conv_bn(3, 3, 3), conv_bn(4, 3, 3)])),
            RuntimeError,
            "choice 'a': 1 Sequential cannot run on its input",
        ),
        (lambda: Unused(pair("a"), pair("b")), ValueError, "the example does not call choice 'b'"),
        (shared_candidate, ValueError, "belongs to the module outside of choices and to choice 'a'"),
    ],
)
def test_what_costs_cannot_describe_is_refused(build, error, text):
    with pytest.raises(error, match=text):
        nasfast.Supernet.from_module(build(), torch.randn(1, 3, 8, 8))


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = pair()

    def forward(self, *, image: torch.Tensor) -> torch.Tensor:
        return self.inner(image)


@pytest.mark.parametrize(
    ("build", "example", "text"),
    [
        (pair, [torch.randn(1, 3, 8, 8)], r"fails on the example \(list\).*a tensor, or a tuple"),
        (pair, {"x": torch.randn(1, 3, 8, 8)}, r"fails on the example \(dict\)"),
        (ByName, torch.randn(1, 3, 8, 8), "where the forward needs others, wrap the module"),
        (lambda: nn.Sequential(pair()), (torch.randn(1, 3, 8, 8),) * 2, r"the example \(Tensor, Tensor\)"),
    ],
)
def test_an_example_of_other_arguments_is_refused(build, example, text):
    with pytest.raises(TypeError, match=text):
        nasfast.Supernet.from_module(build(), example)


def test_one_choice_at_two_places_is_one_decision():
    choice = pair()
    net = nasfast.Supernet.from_module(nn.Sequential(choice, conv_bn(3, 3, 1), choice), torch.randn(1, 3, 8, 8))
    (layer,) = net.space.choices
    assert layer.branches[0].macs == 2 * 81 * 64 and layer.branches[0].params == 81 + 6
    network = nasfast.inherit(net, (1,))
    assert network[0] is network[2] and network[0][0].kernel_size == (5, 5)


def test_a_space_of_a_module_alone_builds_nothing(tmp_path):
    net = supernet()
    net.space.save(tmp_path / "space.yaml")
    assert read_space(tmp_path / "space.yaml") == net.space
    with pytest.raises(TypeError, match="is of a module, whose supernet gives its networks"):
        nasfast.build(net.space, (0, 0))
    for use in (
        lambda: get_space(str(tmp_path / "space.yaml")),
        lambda: read_layers(tmp_path),
    ):
        with pytest.raises(ConfigError, match="is that of a Python module, which no command can build"):
            use()


def test_a_choice_alone_runs_its_first_candidate_and_is_not_traced():
    choice = pair().eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(choice(x), choice.candidates[0](x))
    with pytest.raises(TypeError, match="cannot be traced by torch.fx"):
        torch.fx.symbolic_trace(choice)


@pytest.mark.slow
def test_the_example_of_the_documentation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = "\n".join(blocks(PAGE, ("python",))[:1])
    assert len(program.splitlines()) <= 45
    names: dict = {}
    exec(compile(program, str(PAGE), "exec"), names)
    network, best = names["network"], names["best"]
    assert best[0].optimal and best[0].macs <= names["limit"]
    assert not [m for m in network.modules() if isinstance(m, nasfast.Choice)]
    assert names["result"].top1 > 0.5
