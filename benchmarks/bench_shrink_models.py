"""What `nasfast.shrink.find` finds in models of timm and torchvision, and whether cut networks are what it says.

    python -m benchmarks.bench_shrink_models [tv:resnet18 resnet18 ...] [--resolution 96] [--out FILE]

A name with `tv:` is torchvision's, any other timm's; weights are random, and nothing is measured. Of each model, the
cuts to middle and to least widths must run and have the MACs and parameters that the space gives, and the cut that
keeps all must compute the same. A row has `error` where a model is refused, and `fault` where something else is raised.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import positive, write_json
from nasfast import shrink
from nasfast.pipeline.shrinking.norms import by_norms
from nasfast.shrink import Measured
from nasfast.spaces import Arch

MODELS = """
tv:mobilenet_v2 tv:mobilenet_v3_small tv:mobilenet_v3_large tv:mnasnet1_0 tv:efficientnet_b0 tv:efficientnet_v2_s
tv:resnet18 tv:resnet50 tv:resnext50_32x4d tv:wide_resnet50_2 tv:regnet_y_400mf tv:regnet_x_400mf tv:shufflenet_v2_x1_0
tv:densenet121 tv:vgg16_bn tv:googlenet tv:squeezenet1_1
mobilenetv2_100 mobilenetv3_large_100 efficientnet_b0 efficientnet_lite0 tf_efficientnet_b0 tf_mobilenetv3_small_100
mixnet_s resnet18 resnet26 resnet50 resnetv2_50 seresnet50 ecaresnet26t regnetx_002 regnety_004 repvgg_a0 ghostnet_100
ghostnetv2_100 mobilenetv4_conv_small hardcorenas_a fbnetc_100 spnasnet_100 mnasnet_100 semnasnet_100 lcnet_050
tinynet_a dla34 hrnet_w18_small res2net50_26w_4s skresnet18 resnest14d cspresnet50 cspdarknet53 darknet53
ese_vovnet19b_dw selecsls42 rexnet_100 convnext_atto dm_nfnet_f0 inception_v3 xception41 dpn68 mobileone_s0
""".split()


def make(name: str) -> nn.Module:
    """A model with random weights, in evaluation mode."""
    if name.startswith("tv:"):
        options = {"aux_logits": False, "init_weights": False} if name == "tv:googlenet" else {}
        model: nn.Module = torchvision.models.get_model(name.removeprefix("tv:"), weights=None, **options)
        return model.eval()
    import timm

    return timm.create_model(name).eval()


def is_as_said(measured: Measured, arch: Arch, resolution: int) -> bool:
    """Whether a cut network runs with the MACs and parameters that the space gives."""
    small, cost = shrink.cut(measured, arch), measured.found.space.cost(arch)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        small(torch.randn(1, 3, resolution, resolution))
    return counter.get_total_flops() == 2 * cost.macs and sum(p.numel() for p in small.parameters()) == cost.params


def describe(name: str, resolution: int) -> dict[str, Any]:
    """The row of a model."""
    model, start = make(name), time.process_time()
    try:
        found = shrink.find(model, torch.randn(1, 3, resolution, resolution))
    except shrink.ShrinkError as error:
        return {"model": name, "error": str(error)}
    seconds, space = time.process_time() - start, found.space
    measured, images = by_norms(found), torch.randn(2, 3, resolution, resolution)
    middle, least = tuple(len(p.candidates) // 2 for p in found.places), (0,) * len(found.places)
    with torch.no_grad():
        same = torch.equal(shrink.cut(measured, found.full)(images), model(images))
    return {
        "model": name,
        "widths": sum(len(place.dimensions) for place in found.places),
        "blocks": sum(place.block is not None for place in found.places),
        "networks": space.cardinality,
        "least_macs": space.cost(least).macs / found.macs,
        "cuts_are_as_said": all(is_as_said(measured, arch, resolution) for arch in (middle, least)),
        "full_is_the_same": same,
        "seconds": seconds,
        "not_searched": dict(Counter(found.reasons.values()).most_common(5)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="names; all of the list by default")
    parser.add_argument("--resolution", type=positive, default=96, help="side of the images in pixels")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    args = parser.parse_args()
    rows = []
    for name in args.models:
        try:
            rows.append(describe(name, args.resolution))
        except Exception as error:  # a fault is a row, and the others are tried
            rows.append({"model": name, "fault": f"{type(error).__name__}: {error}"})
        print(rows[-1], flush=True)
        if args.out:
            write_json(args.out, rows)


if __name__ == "__main__":
    main()
