"""The supernet: it has every candidate of every layer and runs one path at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nasfast.config import nearest
from nasfast.ops.nhwc import pixel_mean
from nasfast.runtime.arguments import check_type
from nasfast.settings import Init, Trainable
from nasfast.spaces import SKIP, Layer, ModuleSpace, SearchSpace
from nasfast.supernet.blocks import UnitFactory, build_block
from nasfast.supernet.choice import Choice, find_choices, trace_space
from nasfast.supernet.init import InitScheme, initialize


class ChoiceLayer(nn.Module):
    """The candidates of one layer, and its layer indicator: a parallel path identity -> BN (Algorithm 1's U^l)."""

    def __init__(self, layer: Layer, units: UnitFactory, *, layer_indicator: bool) -> None:
        super().__init__()
        self.layer = layer
        self.candidates = nn.ModuleList(build_block(block, layer, units) for block in layer.choices)
        has_indicator = layer_indicator and layer.indicator_choice is not None
        self.layer_indicator = units.layer_indicator(layer.in_channels) if has_indicator else None

    def forward(self, x: Tensor, choice: int) -> Tensor:
        """(N, in, H, W) -> (N, out, H', W') through candidate `choice`, or through the layer indicator."""
        module = self.chosen(choice)
        return x if module is None else module(x)

    def chosen(self, choice: int) -> nn.Module | None:
        """What runs for a choice: candidate `choice`, the layer indicator, or nothing."""
        if self.layer_indicator is not None and choice == self.layer.indicator_choice:
            return self.layer_indicator
        return None if choice == SKIP else self.candidates[choice]

    def block_indicator(self, choice: int) -> nn.BatchNorm2d | None:
        """The BatchNorm that scores a candidate; None for an identity candidate, which has only the layer indicator."""
        return getattr(self.candidates[choice], "block_indicator", None)


@dataclass(frozen=True)
class TrainableSummary:
    """What trains after `freeze`.

    Attributes:
        by_role: role -> number of parameter tensors that train, and of their elements.
        total_elements: number of elements of all parameters.
    """

    trainable: Trainable
    by_role: dict[str, tuple[int, int]]
    total_elements: int

    @property
    def elements(self) -> int:
        """Number of elements that train."""
        return sum(elements for _, elements in self.by_role.values())

    @property
    def words(self) -> str:
        """What trains, without names of parameters."""
        what = {"indicators": "the BatchNorms that score candidates", "bn": "BatchNorms", "all": "all"}[self.trainable]
        what += " and the classifier" if "classifier" in self.by_role and self.trainable != "all" else ""
        return f"{100 * self.elements / self.total_elements:.2g} % of {self.total_elements:,} weights train: {what}"

    def __str__(self) -> str:
        roles = ", ".join(
            f"{role} {tensors} tensors / {elements:,}" for role, (tensors, elements) in self.by_role.items()
        )
        share = 100 * self.elements / self.total_elements
        counts = f"{self.elements:,} of {self.total_elements:,} parameters ({share:.3g} %)"
        return f"trainable={self.trainable!r}: {counts}: {roles}"


class Supernet(nn.Module):
    """All architectures of a space in one network; each forward runs one path.

    BatchNorms use the statistics of the batch in training and in evaluation. They keep no running statistics, because
    those of one path do not fit another; `nasfast.inherit` gives a path's standalone network, which keeps them.
    `from_module` makes the supernet of a module with choices.

    Args:
        space: the search space.
        init: `orthogonal` (DI-NAS), `aligned`, `delta_orthogonal`, `gaussian`, `he` (as BN-NAS and SPOS publish), or an
            InitScheme. `aligned` is that of small spaces; `nasfast.train.supernet.make_supernet` chooses by the depth.
        activation: activation of the blocks of layers that have none of their own; None takes the space's.
        layer_indicators: whether every normal layer has a parallel path identity -> BN.
        fused: whether to use the operators of `nasfast.ops`; otherwise plain PyTorch modules with the same state dict.
        seed: seed of the initialisation.

    Raises:
        ValueError: the init or the activation is unknown, or a block kind has no module or no `block_indicator`.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        init: Init | InitScheme = "orthogonal",
        activation: str | None = None,
        layer_indicators: bool = True,
        fused: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_type("space", space, SearchSpace, advice="nasfast.spaces.get_space(NAME) makes one")
        self.space, self.init = space, init
        self.activation = activation or space.activation
        # as given: a space that has only reduction layers has no indicators, and still agrees with a sampler's setting
        self.layer_indicators = layer_indicators
        self._fused = fused
        units = UnitFactory(act=self.activation, fused=fused, track_running_stats=False)
        self.stem = nn.Sequential(*(build_block(layer.choices[0], layer, units) for layer in space.stem_layers))
        self.layers: Sequence[ChoiceLayer] = nn.ModuleList(  # type: ignore[assignment]  # it does not say what is in it
            ChoiceLayer(layer, units, layer_indicator=layer_indicators) for layer in space.layers
        )
        self.head = nn.Sequential(*(build_block(layer.choices[0], layer, units) for layer in space.head_layers))
        self.classifier = nn.Linear(space.features, space.num_classes, bias=space.classifier_bias)
        initialize(self, init, seed=seed)
        self.summary = self.freeze()

    @staticmethod
    def from_module(
        model: nn.Module,
        example: Any,
        *,
        init: Init | InitScheme | None = None,
        classifier: str | None = None,
        name: str | None = None,
        seed: int = 0,
    ) -> ModuleSupernet:
        """The supernet of any module that has a `nasfast.Choice` at some places.

        It has a copy of the module as `module`, and its space has one layer per choice and one candidate per branch.
        Samplers, `train_supernet`, scores, searches and `inherit` take both as those of other supernets. At first only
        the BatchNorms that score candidates train; `freeze` chooses others.

        Args:
            model: the module; it stays as it is.
            example: what it is called with: a tensor, or a tuple of positional arguments. One call in eval mode runs
                every candidate once, and costs are those of this call, so give one image. Python may decide in the
                forward, but not by the candidate that runs.
            init: initialisation of the weights, as in `Supernet`; None keeps those of the model.
            classifier: path of the classifier in the model, such as `fc`, for `freeze(classifier=True)`.
            name: name of the space; None takes the class of the model.
            seed: seed of the initialisation.

        Raises:
            ValueError: there is no choice, one is inside another, two have one name, one is not called by the example,
                its candidates give tensors of different shapes, or a parameter belongs to two choices.
            AttributeError: the model has no such classifier.
            RuntimeError: a candidate cannot run on the input of its choice.
            TypeError: the model is no module, or takes other arguments than the example.
        """
        return ModuleSupernet(model, example, init=init, classifier=classifier, name=name, seed=seed)

    def forward(self, x: Tensor, path: Iterable[int]) -> Tensor:
        """Logits (N, num_classes) of images (N, in_channels, resolution, resolution) through one path.

        Args:
            x: images; fp32, or bf16 under autocast.
            path: an Arch; a skipped normal layer runs its layer indicator if it has one.

        Raises:
            ArchError: the path does not belong to the space.
        """
        x = self.stem(x)
        for layer, choice in zip(self.layers, self.space.check(path), strict=True):
            x = layer(x, choice)
        x = self.head(x)
        return self.classifier(pixel_mean(x) if self._fused else x.mean((2, 3)))

    def roles(self) -> dict[str, list[nn.Parameter]]:
        """Every parameter once, by role: block_indicators, layer_indicators, other_bn, convolutions, classifier."""
        block = [bn for layer in self.layers for i in range(len(layer.candidates)) if (bn := layer.block_indicator(i))]
        layer = [layer.layer_indicator for layer in self.layers if layer.layer_indicator is not None]
        indicators = {id(bn) for bn in block + layer}
        other_bn = [m for m in self.modules() if isinstance(m, _BatchNorm) and id(m) not in indicators]
        roles = {
            "block_indicators": [p for bn in block for p in bn.parameters()],
            "layer_indicators": [p for bn in layer for p in bn.parameters()],
            "other_bn": [p for bn in other_bn for p in bn.parameters()],
            "classifier": [] if self.classifier is None else list(self.classifier.parameters()),
        }
        listed = {id(p) for parameters in roles.values() for p in parameters}
        return {**roles, "convolutions": [p for p in self.parameters() if id(p) not in listed]}

    def freeze(self, trainable: Trainable = "indicators", *, classifier: bool = False) -> TrainableSummary:
        """Choose what trains; all other parameters get `requires_grad=False`.

        Args:
            trainable: `indicators` (gamma and beta of block and layer indicators), `bn` (every BatchNorm) or `all`.
            classifier: whether the classifier trains too; `all` includes it.

        Returns:
            The summary, which is also `self.summary`.

        Raises:
            ValueError: `trainable` is unknown, or there is no classifier to train.
        """
        if classifier and self.classifier is None:
            raise ValueError("freeze: it is not known which part is the classifier: name it to Supernet.from_module")
        if trainable not in get_args(Trainable):
            raise ValueError(f"freeze: unknown trainable={trainable!r}; {nearest(trainable, get_args(Trainable))}")
        roles = self.roles()
        chosen = {
            "indicators": {"block_indicators", "layer_indicators"},
            "bn": {"block_indicators", "layer_indicators", "other_bn"},
            "all": set(roles),
        }[trainable] | ({"classifier"} if classifier else set())
        for role, parameters in roles.items():
            for parameter in parameters:
                parameter.requires_grad_(role in chosen)
        self.summary = TrainableSummary(
            trainable=trainable,
            by_role={r: (len(p), sum(t.numel() for t in p)) for r, p in roles.items() if r in chosen and p},
            total_elements=sum(p.numel() for p in self.parameters()),
        )
        return self.summary


class ModuleSupernet(Supernet):
    """The supernet that `Supernet.from_module` makes; see there.

    Its initial `freeze()` is that of any supernet: only the BatchNorms that score candidates train.

    Attributes:
        module: the copy of the model; `activate` chooses which candidates it runs.
        layers: its choices, in the order of the space.
    """

    # a supernet of blocks has more in these; what needs that refuses this kind
    space: ModuleSpace  # type: ignore[assignment]
    layers: Sequence[Choice]  # type: ignore[assignment]
    init: Init | InitScheme | None  # type: ignore[assignment]
    activation: str | None  # type: ignore[assignment]
    classifier: nn.Module | None  # type: ignore[assignment]

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        init: Init | InitScheme | None,
        classifier: str | None,
        name: str | None,
        seed: int,
    ) -> None:
        nn.Module.__init__(self)
        check_type("model", model, nn.Module, advice="build it with nasfast.Choice where candidates are to be compared")
        module = copy.deepcopy(model).eval()
        arguments = example if isinstance(example, tuple) else (example,)
        self.space = trace_space(module, arguments, name=name or type(model).__name__)
        self.module = module
        self.init, self.activation = init, None
        # no layer has any, so samplers with and without them draw the same paths
        self.layer_indicators = True
        # `module` has registered all of it
        self.layers = tuple(find_choices(module).values())
        vars(self)["classifier"] = None if classifier is None else module.get_submodule(classifier)
        self._tracked = tuple(m for m in module.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None)
        for norm in self._tracked:
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        if init is not None:
            initialize(module, init, seed=seed)
        self.train()
        self.summary = self.freeze()

    def activate(self, path: Iterable[int]) -> nn.Module:
        """Make the module run the candidates of a path, and return it: `net.activate(path)(images, targets)`.

        It stays so until the next call, which `forward` makes too.

        Raises:
            ArchError: the path does not belong to the space.
        """
        for choice, value in zip(self.layers, self.space.check(path), strict=True):
            choice.active = value
        return self.module

    def forward(self, x: Any, path: Iterable[int]) -> Any:
        """What the module gives for its only argument `x` through one path."""
        return self.activate(path)(x)

    @torch.no_grad()
    def network(self, arch: Iterable[int]) -> nn.Module:
        """A copy of the module in which the candidates of an architecture stand in the places of the choices.

        All of its parameters train. Its BatchNorms keep running statistics where those of the model did; they begin
        afresh.

        Raises:
            ArchError: `arch` does not belong to the space.
        """
        copies: dict[int, Any] = {}
        for choice, value in zip(self.layers, self.space.check(arch), strict=True):
            # wherever the copy meets the choice, it takes this in its place
            copies[id(choice)] = copy.deepcopy(choice.candidates[value], copies)
        network, device = copy.deepcopy(self.module, copies), next(self.parameters()).device
        for norm in (copies[id(norm)] for norm in self._tracked if id(norm) in copies):
            norm.track_running_stats = True
            norm.running_mean = torch.zeros(norm.num_features, device=device)
            norm.running_var = torch.ones(norm.num_features, device=device)
            norm.num_batches_tracked = torch.tensor(0, device=device)
        return network.requires_grad_(True)
