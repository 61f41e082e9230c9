"""README.md of an exported network: its model card, in the form of Hugging Face's hub."""

from __future__ import annotations

from pathlib import Path

from nasfast.indicators.accuracies import top1_interval
from nasfast.retrain.export import ONNX_FILE, PROGRAM_FILE
from nasfast.retrain.retrain import RESULT_FILE, RetrainResult
from nasfast.runtime.files import write_atomic
from nasfast.search.candidate import ARCHS_FILE, load_candidates
from nasfast.spaces import LayerSpace, format_arch
from nasfast.supernet import ArchNetwork

CARD_FILE = "README.md"

_CARD = """\
---
library_name: timm
pipeline_tag: image-classification
tags: [image-classification, timm, nasfast]
---

# {name}

A network for images of {resolution} x {resolution} pixels and {classes} classes. nasfast found it in the search space \
`{space}`; its architecture is `{arch}`.

| | |
|---|---|
{rows}

{accuracy}

## Input

{input}

## Use

With PyTorch alone:

```python
network = torch.export.load("{program}").module()
logits = network(images)  # (N, {channels}, {resolution}, {resolution}) float32 -> (N, {classes})
```

With timm, as any of its models, also with `num_classes=` or `features_only=True`:

```python
import nasfast.retrain.timm_plugin  # pip install 'nasfast[timm]'
import timm

network = timm.create_model("hf-hub:OWNER/NAME", pretrained=True)  # or "local-dir:FOLDER"
```

With nasfast: `nasfast.load_model(FOLDER)`. With onnxruntime: `{onnx}`, if it was exported.
"""


def write_card(network: ArchNetwork, folder: Path, *, run_dir: Path) -> Path:
    """Write README.md: costs, accuracy with its interval, how images become the input, and how to load the files.

    The accuracy is that of result.json in the folder; archs.json of the run has costs by tables, such as the latency.
    """
    space, cost = network.space, network.space.cost(network.arch)
    rows = {"MACs per image": f"{cost.macs:,}", "parameters": f"{cost.params:,}", **_table_costs(network, run_dir)}
    result = RetrainResult.load(folder / RESULT_FILE) if (folder / RESULT_FILE).exists() else None
    if result is not None:
        low, high = top1_interval(result.top1, result.images)
        rows["top-1 accuracy"] = f"{result.top1:.2%} (95 % interval {low:.2%} to {high:.2%})"
        rows["top-5 accuracy"] = f"{result.top5:.2%}"
    text = _CARD.format(
        name=f"{space.name} {folder.name}",
        resolution=space.resolution,
        channels=space.in_channels,
        classes=network.num_classes,
        space=space.name,
        arch=format_arch(network.arch),
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        accuracy=_accuracy_note(result),
        input=_input_note(network),
        program=PROGRAM_FILE,
        onnx=ONNX_FILE,
    )
    path = folder / CARD_FILE
    write_atomic(path, text.encode())
    return path


def _table_costs(network: ArchNetwork, run_dir: Path) -> dict[str, str]:
    """The costs of a searched architecture by the tables of the search, with what these say of themselves."""
    path, space = run_dir / ARCHS_FILE, network.space
    costs = {}
    if isinstance(space, LayerSpace) and path.exists():
        front = load_candidates(path, space)
        values = next((point.values for point in front.points if point.arch == network.arch), ())
        for table, value in zip(front.tables, values, strict=False):
            costs[f"{table.quantity}, by a table of its layers"] = f"{value:.4g} {table.unit}" + (
                f" ({table.about})" if table.about else ""
            )
    return costs if "latency" in " ".join(costs) else {**costs, "latency": "not measured"}


def _accuracy_note(result: RetrainResult | None) -> str:
    if result is None:
        return f"Its accuracy is not known: there is no {RESULT_FILE} beside it."
    chosen = ", which also chose the epoch, so it is slightly too good" if result.settings.patience else ""
    return (
        f"The accuracy is that on {result.images} validation images{chosen}, after one training of "
        f"{result.stopped_after or result.epochs} epochs. Wilson's interval is that over these images; it leaves out "
        "the scatter of another training."
    )


def _input_note(network: ArchNetwork) -> str:
    images = network.images
    if images is None:
        return "How images become the input, and what the classes are, is not known: the loader did not say."
    return (
        f"The short side is resized to {images.short_side} pixels, the centre of {images.resolution} x "
        f"{images.resolution} is cropped, and values in [0, 1] are normalised with mean {list(images.mean)} and "
        f"standard deviation {list(images.std)}. `label_names` in config.json names the classes."
    )
