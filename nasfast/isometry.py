"""The isometry study: what the initialisations do to signals and gradients, beside what the paper says they do.

DI-NAS argues that orthogonal weights make every candidate a dynamical isometry (phi(J J^T) = 1, varphi(J J^T) = 0) and
that the candidates of a layer are therefore compared fairly. Its theory is of fully connected tanh layers; its blocks
have depthwise convolutions, BatchNorm and ReLU6. `isometry_study` measures a search space or any module and states
which parts hold.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nasfast.analysis.fairness import SeedStability, depth_spread, seed_stability
from nasfast.analysis.meanfield import phase_diagram
from nasfast.analysis.study import (
    EDGES,
    Effort,
    Mark,
    Row,
    block_marks,
    measure_convolutions,
    measure_module,
    measure_supernet,
    relative_gain,
)
from nasfast.config import ConfigBase
from nasfast.indicators.bn_gamma import score
from nasfast.measure.timing import random_batch
from nasfast.report import write_isometry_page
from nasfast.runtime.files import write_atomic
from nasfast.spaces import FairSampler, SearchSpace, get_space, mean_path
from nasfast.study import carry_out, check_common, maker, plain, sample_shape
from nasfast.supernet import Init, Supernet, initialize
from nasfast.train import TrainConfig, train_supernet

# Larger inputs change borders alone, and cost their area.
_DEFAULT_RESOLUTION = 64
# Enough for variances that are averaged over channels and positions.
_DEPTH_IMAGES = 16
# A spread is called smaller where it is by a fifth: seeds scatter by a tenth.
_CLEARLY = 0.8
# Spreads below this are rounding and BatchNorm's eps, and not compared.
_ROUNDING = 1e-4
# A pattern of the candidates is one of all where no more than every twentieth differs.
_NEARLY_ALL = 0.95
_SPREADS = ("f_mean", "f_var", "f_iso", "f_phi", "distortion", "disagreement")
# Further than this from 1 and 0 no reading of "~" reaches.
_NEAR = 0.1


@dataclass(frozen=True)
class IsometryConfig(ConfigBase):
    """What `isometry` measures.

    Attributes:
        space: `mobilenet_v2`, `shufflenet_v2`, `nas_bench_macro`, `digits_mini`, or the path of a YAML file.
        module: instead of a space: `package.module:factory`, a function without arguments that returns an nn.Module, or
            an nn.Module.
        input: shape of one sample of the module, such as "3,224,224".
        resolution: of the images of a space in pixels; null takes 64, or the space's where that is smaller.
        batch: samples that give BatchNorms their statistics and fairness its pairs.
        samples: Jacobians averaged per candidate.
        probes: random vectors per candidate, in all, where its Jacobian is too large to be formed.
        lanczos_steps: of the singular value densities where they come from probes.
        inputs: of the candidates: `white` noise, or what `propagated` from white images along the mean path.
        paths: random paths of the comparison by depth.
        threads: CPU threads, 0 for torch's choice.
        seed: of weights, inputs, probes and paths.
    """

    space: str = "mobilenet_v2"
    module: str | None = None
    input: str = "3,224,224"
    resolution: int | None = None
    batch: int = 64
    samples: int = 4
    probes: int = 32
    lanczos_steps: int = 8
    inputs: Literal["white", "propagated"] = "white"
    paths: int = 64
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch", 4), ("samples", 1), ("probes", 2), ("lanczos_steps", 1), ("paths", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.samples > self.batch:
            raise ValueError(f"samples must be at most batch, got {self.samples} and {self.batch}")
        check_common(self.threads, self.seed)
        if self.resolution is not None and self.resolution < 1:
            raise ValueError(f"resolution must be positive, got {self.resolution}")

    def resolve(self) -> SearchSpace:
        """The space at its resolution.

        Raises:
            ConfigError: unknown space or unreadable YAML.
        """
        space = get_space(self.space)
        return get_space(self.space, resolution=self.resolution or min(_DEFAULT_RESOLUTION, space.resolution))

    @property
    def effort(self) -> Effort:
        return Effort(self.samples, self.probes, self.lanczos_steps, self.seed)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, what was measured, and in a few words whether it holds."""

    claim: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class IsometryReport:
    """Everything measured; `str` of it is tables.

    Attributes:
        config: as asked for.
        subject: what was measured.
        reduced: what was made smaller to take minutes, one sentence each.
        settings: initialisations in order.
        rows: per setting, layer and candidate.
        fairness: per setting, layer and `indicator_bn`, the spreads of `nasfast.analysis.Fairness`.
        depth: per setting and `indicator_bn`, `nasfast.analysis.DepthSpread`.
        convolutions: per setting and kind of convolution, phi and varphi with their closed forms.
        diagram: the phase diagram of the theory's activation, tanh.
        checks: pass marks.
        claims: the paper's beside the measurement.
        seconds: it took.
    """

    config: IsometryConfig
    subject: str
    reduced: tuple[str, ...]
    settings: tuple[str, ...]
    rows: tuple[Row, ...]
    fairness: tuple[dict[str, Any], ...]
    depth: tuple[dict[str, Any], ...]
    convolutions: tuple[dict[str, Any], ...]
    diagram: dict[str, Any]
    checks: tuple[Mark, ...]
    claims: tuple[Claim, ...]
    seconds: float
    machine: dict[str, Any]
    environment: dict[str, list[str]]

    @property
    def missed(self) -> list[Mark]:
        return [check for check in self.checks if not check.passed]

    @property
    def fairness_means(self) -> list[dict[str, Any]]:
        """Means of the spreads over layers, per setting and `indicator_bn`; None where no layer has one."""
        return _fairness_means(self.fairness)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON."""
        return plain({
            "config": self.config.to_dict(),
            "subject": self.subject,
            "reduced": list(self.reduced),
            "settings": list(self.settings),
            "rows": [{**asdict(row), "gain": row.gain} for row in self.rows],
            "histogram_edges": EDGES.tolist(),
            "fairness": list(self.fairness),
            "fairness_means": self.fairness_means,
            "depth": list(self.depth),
            "convolutions": list(self.convolutions),
            "diagram": self.diagram,
            "marks": [{**asdict(check), "passed": check.passed} for check in self.checks],
            "claims": [asdict(claim) for claim in self.claims],
            "seconds": self.seconds,
            "machine": self.machine,
            "environment": self.environment,
        })  # fmt: skip

    def save(self, folder: str | Path) -> Path:
        """Write isometry.json, isometry.html and its figures into a directory; returns the page's path."""
        form = self.to_dict()
        write_atomic(Path(folder) / "isometry.json", (json.dumps(form, indent=1) + "\n").encode())
        return write_isometry_page(folder)

    def __str__(self) -> str:
        lines = [f"isometry of {self.subject}", *(f"reduced: {text}" for text in self.reduced), ""]
        lines += self._candidates() + self._convolutions() + self._fairness() + self._depth()
        if self.checks:
            lines += [f"{'pass marks':64} {'expected':>9} {'within':>8} {'measured':>9}"]
            lines += [
                f"{m.name:64} {m.expected:9.4f} {m.tolerance:8.4f} {m.measured:9.4f}  {'ok' if m.passed else 'MISSED'}"
                for m in self.checks
            ]
        for claim in self.claims:
            lines += ["", f"claim:    {claim.claim}", f"measured: {claim.measured}", f"verdict:  {claim.verdict}"]
        return "\n".join([*lines, "", f"{self.seconds:.0f} s"])

    def _candidates(self) -> list[str]:
        by_place: dict[tuple[int, str], dict[str, Row]] = {}
        for row in self.rows:
            by_place.setdefault((row.layer, row.name), {})[row.setting] = row
        width = max(len(name) for _, name in by_place)
        head = f"{'':{width + 4}}" + "".join(f" | {s:^37}" for s in self.settings)
        titles = f" | {'phi':>6} {'varphi':>7} {'gain':>5} {'mod. phi':>8} {'varphi':>7}"
        columns = f"{'':{width + 4}}" + titles * len(self.settings)
        lines = [head, columns]
        for (layer, name), found in by_place.items():
            cells = []
            for setting in self.settings:
                row = found.get(setting)
                if row is None:
                    cells.append(" " * 37)
                    continue
                module = row.module or row.branch
                cells.append(
                    f"{row.branch['phi']:6.3f} {row.branch['varphi']:7.3f} {row.gain:5.2f} "
                    f"{module['phi']:8.3f} {module['varphi']:7.3f}"
                )
            place = f"{layer:3} " if layer >= 0 else "    "
            lines.append(f"{place}{name:{width}} | " + " | ".join(cells))
        return [*lines, ""]

    def _convolutions(self) -> list[str]:
        if not self.convolutions:
            return []
        lines = [f"{'convolutions, circular':48} {'count':>5} {'phi/g^2':>8} {'varphi/g^4':>10} {'closed form':>11}"]
        for c in self.convolutions:
            expected = "-" if c["expected_varphi"] is None else f"{c['expected_varphi']:.4f}"
            name = f"{c['setting']}: {c['kind']}"
            lines.append(f"{name:48} {c['count']:5} {c['phi']:8.4f} {c['varphi']:10.4f} {expected:>11}")
        return [*lines, ""]

    def _fairness(self) -> list[str]:
        if not self.fairness:
            return []
        lines = [f"{'fairness, mean over layers (0 is fair)':44}" + "".join(f" {k:>12}" for k in _SPREADS)]
        for m in self.fairness_means:
            cells = "".join(f" {'-':>12}" if m[k] is None else f" {m[k]:12.4f}" for k in _SPREADS)
            lines.append(f"{m['setting']}, {_bn(m['indicator_bn'])}".ljust(44) + cells)
        return [*lines, ""]

    def _depth(self) -> list[str]:
        if not self.depth:
            return []
        layers = len(self.depth[0]["std"])
        shown = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers - 1})
        lines = [f"{'std of log Var(h_l) over random paths':44}" + "".join(f" {f'layer {i}':>10}" for i in shown)]
        for d in self.depth:
            name = f"{d['setting']}, {_bn(d['indicator_bn'])}"
            lines.append(f"{name:44}" + "".join(f" {d['std'][i]:10.4f}" for i in shown))
        return [*lines, ""]


def _bn(indicator_bn: bool) -> str:
    return f"{'with' if indicator_bn else 'without'} indicator BN"


def _fairness_means(spreads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    means = []
    for setting in dict.fromkeys(s["setting"] for s in spreads):
        for indicator_bn in (True, False):
            found = [s for s in spreads if (s["setting"], s["indicator_bn"]) == (setting, indicator_bn)]
            known = {key: [s[key] for s in found if s[key] is not None] for key in _SPREADS}
            mean = {key: float(np.mean(values)) if values else None for key, values in known.items()}
            means.append({"setting": setting, "indicator_bn": indicator_bn, **mean})
    return means


def isometry_study(cfg: IsometryConfig = IsometryConfig()) -> IsometryReport:
    """Measure every candidate of a space, or the parts of a module, under orthogonal and Gaussian weights.

    Raises:
        ConfigError: unknown space, a module that cannot be imported or made, or an unusable input shape.
        ValueError: a module that cannot take the input, cannot be differentiated, or whose Jacobian is not finite.
    """
    study = (lambda: _study_space(cfg, cfg.resolve())) if cfg.module is None else (lambda: _study_module(cfg))
    return IsometryReport(**carry_out(cfg, study))


def _study_space(cfg: IsometryConfig, space: SearchSpace) -> dict[str, Any]:
    own = space.activation
    # the theory's setting first, then the space's own, then the baseline
    settings: dict[str, tuple[Init, str]] = {
        "orthogonal, tanh": ("orthogonal", "tanh"),
        f"orthogonal, {own}": ("orthogonal", own),
        f"gaussian, {own}": ("gaussian", own),
    }
    images, _ = random_batch(space, cfg.batch, seed=cfg.seed)
    images = images.contiguous()
    rows, spreads, depth, convolutions = [], [], [], []
    marks = block_marks(own, seed=cfg.seed)
    for setting, (init, act) in settings.items():
        net = Supernet(space, init=init, activation=act, layer_indicators=False, fused=False, seed=cfg.seed)
        path = mean_path(space) if cfg.inputs == "propagated" else None
        of_setting, spreads_of_setting = measure_supernet(net, images, cfg.effort, setting=setting, path=path)
        rows += of_setting
        spreads += spreads_of_setting
        for indicator_bn in (True, False):
            found = depth_spread(net, images[:_DEPTH_IMAGES], paths=cfg.paths, indicator_bn=indicator_bn, seed=cfg.seed)
            depth.append({"setting": setting, "indicator_bn": indicator_bn, **asdict(found)})
        if act == own:
            kinds, of_convolutions = measure_convolutions(net, setting=setting, scheme=init)
            convolutions += kinds
            marks += of_convolutions
    reduced = [
        f"{space.resolution} x {space.resolution} images" + (
            f" instead of {full}" if (full := get_space(cfg.space).resolution) != space.resolution else ""
        ),
        f"{cfg.samples} samples and {cfg.probes} random probes per candidate, {cfg.lanczos_steps} Lanczos steps per "
        f"density; statistics of {cfg.batch} samples",
        f"{cfg.paths} random paths, {len(images[:_DEPTH_IMAGES])} images, one seed",
    ]  # fmt: skip
    inputs = "white noise at every layer" if cfg.inputs == "white" else "white images, propagated along the mean path"
    return {
        "subject": f"space {space.name}, {len(space)} layers, inputs: {inputs}",
        "reduced": tuple(reduced),
        "settings": tuple(settings),
        "rows": tuple(rows),
        "fairness": tuple(spreads),
        "depth": tuple(depth),
        "convolutions": tuple(convolutions),
        "diagram": _diagram(),
        "checks": tuple(marks),
        "claims": tuple(_claims(own, rows, spreads, depth, convolutions)),
    }


def _study_module(cfg: IsometryConfig) -> dict[str, Any]:
    make = maker(cfg.module)
    x = torch.randn(cfg.batch, *sample_shape(cfg.input), generator=torch.Generator().manual_seed(cfg.seed))
    rows = []
    settings = ("as it is", "orthogonal", "gaussian")
    for setting in settings:
        module = make()
        try:
            if setting != "as it is":
                initialize(module, setting, seed=cfg.seed)
            rows += measure_module(module, x, cfg.effort, setting=setting)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"module {cfg.module!r}, input {cfg.input}, {setting}: {error}") from error
    return {
        "subject": f"module {cfg.module}, inputs: white noise of shape {cfg.input}",
        "reduced": (
            f"{cfg.samples} samples and {cfg.probes} random probes per part; statistics of {cfg.batch} samples",
        ),
        "settings": settings,
        "rows": tuple(rows),
        "fairness": (),
        "depth": (),
        "convolutions": (),
        "diagram": _diagram(),
        "checks": (),
        "claims": (),
    }


def _diagram() -> dict[str, Any]:
    found = phase_diagram("tanh", np.linspace(0.5, 3, 51), np.linspace(0, 1, 26))
    return {"act": "tanh", **{name: np.round(values, 6).tolist() for name, values in vars(found).items()}}


def _claims(
    own: str, rows: Sequence[Row], spreads: Sequence[dict], depth: Sequence[dict], convolutions: Sequence[dict]
) -> list[Claim]:
    """The paper's sentences beside the numbers.

    Every verdict follows from them by the thresholds above; what it adds behind "theory:" is a closed form's reason.
    """
    tanh, orthogonal, gaussian = "orthogonal, tanh", f"orthogonal, {own}", f"gaussian, {own}"
    return [
        _claim_convolutions(orthogonal, convolutions),
        _claim_modules(tanh, orthogonal, rows),
        _claim_gain(own, orthogonal, rows),
        _claim_closer(orthogonal, gaussian, rows),
        _claim_fair(orthogonal, gaussian, spreads),
        _claim_norm(orthogonal, gaussian, spreads),
        _claim_depth(orthogonal, gaussian, depth),
    ]


def _isometric(phi: float, varphi: float) -> bool:
    return abs(phi - 1) <= _NEAR and abs(varphi) <= _NEAR


def _clearly_smaller(a: float, b: float) -> bool:
    return a < _CLEARLY * b and b > _ROUNDING


def _in_part(names: Sequence[str], of: Sequence[str]) -> str:
    """Whether something that is so for `names` of all holds."""
    if not names:
        return "does not hold"
    return "holds" if len(names) == len(of) else f"holds in part: {', '.join(names)}"


def _claim_convolutions(setting: str, convolutions: Sequence[dict]) -> Claim:
    claim = "orthogonal convolutions are dynamical isometries: phi = 1 and varphi = 0 (up to g^2)"
    kinds = [c for c in convolutions if c["setting"] == setting]
    if not kinds:
        return Claim(claim, "no convolutions", "-")
    names = [c["kind"].replace(",", "") for c in kinds]
    isometric, biased, closed, missed = [], [], [], []
    for name, c in zip(names, kinds, strict=True):
        expected = c["expected_varphi"]
        if _isometric(c["phi"], c["varphi"]):
            isometric.append(name)
        elif expected is not None:
            (closed if abs(c["varphi"] - expected) <= _NEAR * (expected or 1) else missed).append(name)
        biased += [name] if abs(c["phi"] - 1) > _NEAR else []
    verdict = _in_part(isometric, names)
    verdict += f"; phi is not 1 for {', '.join(biased)}" if biased else ""
    verdict += f"; varphi is not that of the closed form for {', '.join(missed)}" if missed else ""
    verdict += f"; other kinds with the varphi of their closed form: {len(closed)}" if closed else ""
    if any(name.startswith("pointwise expansion") for name in closed):
        verdict += "; theory: an expansion by t has t - 1, as its output has directions that no input reaches"
    if any(name.startswith("depthwise") for name in closed):
        verdict += "; theory: a depthwise filter has 0 only with a single live tap"
    return Claim(
        claim,
        f"phi / g^2 from {min(c['phi'] for c in kinds):.3f} to {max(c['phi'] for c in kinds):.3f}; varphi / g^4: "
        + ", ".join(f"{name} {c['varphi']:.2f}" for name, c in zip(names, kinds, strict=True)),
        f"{verdict}.",
    )


def _claim_modules(tanh: str, orthogonal: str, rows: Sequence[Row]) -> Claim:
    claim = "candidate modules with orthogonal weights are dynamical isometries"
    values = {}
    for setting in dict.fromkeys((tanh, orthogonal)):
        found = [(r.branch["phi"], r.branch["varphi"]) for r in rows if r.setting == setting]
        if found:
            values[setting] = np.median(found, axis=0)
    if not values:
        return Claim(claim, "no candidates", "-")
    near = [f"({setting})" for setting, (phi, varphi) in values.items() if _isometric(phi, varphi)]
    return Claim(
        claim,
        "medians over branches: " + "; ".join(f"{s}: phi {a:.2f}, varphi {b:.2f}" for s, (a, b) in values.items()),
        f"{_in_part(near, list(values))}; the theory assumes tanh.",
    )


def _claim_gain(own: str, setting: str, rows: Sequence[Row]) -> Claim:
    claim = "the theory of layers without BatchNorm carries over to blocks with it: differences grow as the signal does"
    r = relative_gain(own)
    # a constant output has no gain
    found = [row for row in rows if row.setting == setting and row.acts is not None and math.isfinite(row.gain)]
    if not found:
        return Claim(claim, "no candidates", "-")
    gain = float(np.median([row.gain for row in found]))
    ratios = [row.gain / r**row.acts for row in found]
    middle, low, high = np.quantile(ratios, (0.5, 0.05, 0.95))
    if abs(gain - 1) <= _NEAR:
        verdict = "holds: the gain is near 1"
    else:
        verdict = "does not hold; theory: BatchNorm makes the gain r^(number of activations), whatever the weights; "
        if abs(middle - 1) <= _NEAR:
            verdict += "this explains it"
        elif min(middle, gain) > 0 and abs(math.log(middle)) < abs(math.log(gain)) / 2:
            verdict += f"this explains most of it, but for a factor {middle:.2f}"
        else:
            verdict += "this does not explain it"
    return Claim(
        claim,
        f"gain phi Var(in) / Var(out): median {gain:.2f}; over r^(number of activations), r = {r:.3f} for {own}: "
        f"median {middle:.2f}, 5 % to 95 % from {low:.2f} to {high:.2f}; {len(found)} candidates",
        f"{verdict}.",
    )


def _claim_closer(orthogonal: str, gaussian: str, rows: Sequence[Row]) -> Claim:
    claim = "orthogonal weights are nearer to isometry than Gaussian ones"
    by_place = {(r.layer, r.name): r.branch["varphi"] for r in rows if r.setting == gaussian}
    pairs = [(r.branch["varphi"], by_place[r.layer, r.name]) for r in rows if r.setting == orthogonal]
    # an estimate of a varphi of 0 may be negative
    ratios = [a / b for a, b in pairs if b > 0]
    if not ratios:
        return Claim(claim, "no candidates with a varphi to compare", "-")
    smaller, ratio = sum(a < b for a, b in pairs), float(np.median(ratios))
    middle = float(np.median([a for a, _ in pairs]))
    if smaller <= len(pairs) / 2 or ratio >= 1:
        verdict = "does not hold"
    elif smaller > _NEARLY_ALL * len(pairs) and ratio < _CLEARLY:
        verdict = "holds, " + ("and varphi is near 0" if abs(middle) <= _NEAR else "relatively: varphi is not near 0")
    else:
        verdict = "holds in part: the difference is small, or not everywhere"
    return Claim(
        claim,
        f"varphi of the branch is smaller in {smaller} of {len(pairs)} candidates; median {middle:.2f}, median ratio "
        f"{ratio:.2f}",
        f"{verdict}.",
    )


def _compared(
    orthogonal: str, gaussian: str, spreads: Sequence[dict], measured: Sequence[tuple[str, bool]]
) -> dict[str, tuple[float, float]]:
    """Means over layers of each spread measured, orthogonal and Gaussian; without those that no layer has."""
    means = {(m["setting"], m["indicator_bn"]): m for m in _fairness_means(spreads)}
    if not means:
        return {}
    both = {
        f"{key} {_bn(indicator_bn)}": tuple(means[s, indicator_bn][key] for s in (orthogonal, gaussian))
        for key, indicator_bn in measured
    }
    return {name: pair for name, pair in both.items() if all(v is not None and math.isfinite(v) for v in pair)}


def _told(pairs: dict[str, tuple[float, float]]) -> str:
    return "; ".join(f"{name} {a:.4f} against {b:.4f}" for name, (a, b) in pairs.items())


def _sides(pairs: dict[str, tuple[float, float]]) -> tuple[list[str], list[str]]:
    """The names whose first value is clearly smaller, and those whose first is clearly larger."""
    better = [name for name, (a, b) in pairs.items() if _clearly_smaller(a, b)]
    return better, [name for name, (a, b) in pairs.items() if _clearly_smaller(b, a)]


def _claim_fair(orthogonal: str, gaussian: str, spreads: Sequence[dict]) -> Claim:
    claim = "orthogonal candidates of a layer transmit signals equally, Gaussian ones do not"
    measured = (("f_var", False), ("f_iso", False), ("f_iso", True), ("f_phi", True), ("distortion", True))
    pairs = _compared(orthogonal, gaussian, spreads, measured)
    if not pairs:
        return Claim(claim, "one candidate", "-")
    better, worse = _sides(pairs)
    verdict = _in_part(better, list(pairs))
    verdict += "; no spread is clearly smaller with orthogonal weights" if not better else ""
    verdict += f"; clearly larger is {', '.join(worse)}" if worse else ""
    if max(b for _, b in pairs.values()) <= _NEAR:
        verdict += f"; Gaussian spreads are small too, all below {_NEAR}"
    return Claim(
        claim, f"spread over candidates, mean over layers, orthogonal against Gaussian: {_told(pairs)}", f"{verdict}."
    )


def _claim_norm(orthogonal: str, gaussian: str, spreads: Sequence[dict]) -> Claim:
    claim = "equal variances of the candidates come from the orthogonal weights"
    pairs = _compared(orthogonal, gaussian, spreads, (("f_var", True), ("f_var", False)))
    if len(pairs) < 2:
        return Claim(claim, "one candidate", "-")
    better, worse = _sides(pairs)
    verdict = _in_part([name.removeprefix("f_var ") for name in better], list(pairs))
    verdict += f"; clearly larger with them is {', '.join(worse)}" if worse else ""
    by_init = dict(zip(("orthogonal", "Gaussian"), zip(*pairs.values(), strict=True), strict=True))
    lowered, _ = _sides(by_init)
    if lowered:
        verdict += f"; the indicator BN makes them clearly more equal with {' and '.join(lowered)} weights"
    else:
        verdict += "; the indicator BN does not make them clearly more equal"
    return Claim(claim, f"orthogonal against Gaussian: {_told(pairs)}", f"{verdict}.")


def _growth(std: Sequence[float]) -> tuple[float, float]:
    """How much a spread grows from the first quarter of the layers to the last, and how much it would if each layer
    added a difference of its own: as the root of depth. Layers without any spread are left out: a BatchNorm at the end
    of a reduction sets it to 0, whatever the depth."""
    deep = np.array([i for i, value in enumerate(std) if value > _ROUNDING], dtype=int)
    if len(deep) < 2:
        return 1.0, 1.0
    quarter = max(1, len(deep) // 4)
    first, last = deep[:quarter], deep[-quarter:]
    known = np.array(std)
    return float(known[last].mean() / known[first].mean()), float(np.sqrt(last + 1).mean() / np.sqrt(first + 1).mean())


def _claim_depth(orthogonal: str, gaussian: str, depth: Sequence[dict]) -> Claim:
    claim = "with orthogonal weights the differences between paths do not add up with depth, with Gaussian ones they do"
    # one layer's std is known to a tenth from 64 paths
    std = {(d["setting"], d["indicator_bn"]): d["std"] for d in depth}
    texts, apart, adding, means = [], [], {True: [], False: []}, {}
    for indicator_bn in (True, False):
        pair = [std.get((s, indicator_bn), ()) for s in (orthogonal, gaussian)]
        if min(map(len, pair)) < 2 or max(map(max, pair)) <= _ROUNDING:
            continue
        grown = [_growth(values) for values in pair]
        name = _bn(indicator_bn)
        means[name] = tuple(float(np.mean(values)) for values in pair)
        adds = [value >= max(1 / _CLEARLY, _CLEARLY * alone) for value, alone in grown]
        for kind, so in zip(("orthogonal", "Gaussian"), adds, strict=True):
            adding[so].append(f"{kind} {name}")
        apart += [name] if adds == [False, True] else []
        texts.append(
            f"{name} mean over layers {means[name][0]:.4f} against {means[name][1]:.4f}, last quarter over first "
            f"{grown[0][0]:.2f} against {grown[1][0]:.2f} (adding up: {grown[0][1]:.2f} and {grown[1][1]:.2f})"
        )
    if not texts:
        return Claim(claim, "no differences between paths", "-")
    better, worse = _sides(means)
    verdict = f"{_in_part(apart, list(means))}; differences add up with {', '.join(adding[True]) or 'neither'}"
    verdict += f"; clearly smaller with orthogonal weights: {', '.join(better)}" if better else ""
    verdict += f"; clearly larger with orthogonal weights: {', '.join(worse)}" if worse else ""
    return Claim(
        claim, f"std of log Var(h) over random paths, orthogonal against Gaussian: {'; '.join(texts)}", f"{verdict}."
    )


def indicator_stability(
    space: SearchSpace,
    loader: object,
    *,
    init: Init = "orthogonal",
    seeds: Sequence[int] = (0, 1),
    cfg: TrainConfig | None = None,
) -> SeedStability:
    """Train the indicators of one space from several seeds and compare their rankings of candidates.

    This is the test that decides whether one initialisation ranks more fairly than another; it takes one supernet
    training per seed.

    Args:
        space: of the supernet.
        loader: as for `train_supernet`.
        init: of the frozen weights.
        seeds: of weights and paths, at least two.
        cfg: of each training; None for one epoch.

    Raises:
        ValueError: fewer than two seeds.
    """
    if len(seeds) < 2:
        raise ValueError(f"indicator_stability: needs two seeds to compare, got {len(seeds)}")
    tables = []
    for seed in seeds:
        net = Supernet(space, init=init, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            sampler = FairSampler(space, seed=seed, layer_indicators=True)
            train_supernet(net, loader, sampler, cfg or TrainConfig(epochs=1), run_dir=folder)
        tables.append(score(net))
    return seed_stability(tables)
