"""What `nasfast shrink` leaves for others: ONNX, PyTorch's program, weights with their recipe, and 8-bit ONNX."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nasfast.measure.deployed import CLOCKS, Timed, in_onnxruntime, second
from nasfast.measure.timing import measure, measuring, time_call
from nasfast.pipeline.run import log_stage
from nasfast.pipeline.shrinking.files import load_network, read_record, weights_digest, write_record
from nasfast.pipeline.shrinking.int8 import INT8_FILE, int8_answers, write_int8
from nasfast.pipeline.shrinking.material import Material
from nasfast.pipeline.shrinking.timing import timing_settings
from nasfast.retrain.export import ONNX_FILE, PROGRAM_FILE, write_checked_onnx, write_program
from nasfast.runtime.files import write_atomic
from nasfast.runtime.onnx import INPUT
from nasfast.settings import SMALL
from nasfast.shrink.recipe import RECIPE_FILE, WEIGHTS_FILE

_LOG = logging.getLogger(__name__)

EXPORT_FILE, CARD_FILE = "export.json", "README.md"

INT8_LOSS = 0.01
"""Loss of top-1 above which the 8-bit network is not recommended."""

_ROUNDS = 40

_CARD = """\
# {name}

A smaller network of `{base}` for images of {resolution} x {resolution} pixels and {classes} classes: {headline}

Images are resized to a short side of {short_side} pixels, cropped to the centre of {resolution}, scaled to [0, 1], and
normalised by mean {mean} and standard deviation {std}. Classes, in order: {names}.

| file | milliseconds ({runtime}) | |
|---|---|---|
{rows}

Resizing is bilinear with antialiasing. The input is float32 (N, {channels}, {resolution}, {resolution}), and logits
(N, {classes}) come out.

{uses}`{recipe}` and `{weights}` make the network again on a fresh `{base}` with {classes} classes:
`nasfast.shrink.load(model, FOLDER)`, with this folder. Its licence is that of the weights that it was made from.
"""

_ONNX_USE = f"""\
```python
import onnxruntime

(logits,) = onnxruntime.InferenceSession("{ONNX_FILE}").run(None, {{"{INPUT}": images}})
```

"""

_PROGRAM_USE = f"""\
`torch.export.load("{PROGRAM_FILE}").module()` is PyTorch's program.

"""


def export(work: Material, name: str, small: dict[str, Any], headline: str) -> tuple[Path, ...]:
    """Write a network's files into export/, or export/NAME/ beside the result; those of the same network are kept.

    Args:
        work: the material.
        name: of its folder in networks/; `SMALL` is the result.
        small: its result.json.
        headline: the result in a sentence, for the card.
    """
    source, started = work.run.network(name), time.monotonic()
    folder = work.run.dir / "export" / ("" if name == SMALL else name)
    network, size = load_network(source, work.form), int(small["size"])
    about = {
        "network": weights_digest(network),
        "int8": work.cfg.int8,
        "size": size,
        "arch": small["about"].get("arch"),
    }
    if (record := read_record(folder / EXPORT_FILE, about)) is None:
        work.run.begin_writing()
        folder.mkdir(parents=True, exist_ok=True)
        for file in (EXPORT_FILE, ONNX_FILE, PROGRAM_FILE, INT8_FILE):  # of another network
            (folder / file).unlink(missing_ok=True)
        for file in (RECIPE_FILE, WEIGHTS_FILE):
            write_atomic(folder / file, (source / file).read_bytes())
        shown, _ = work.images.read(work.images.train, size, 4)
        images = work.images.prepared(shown)
        info = work.images.info(size)
        facts = {"macs": small["macs"], "params": small["params"], "images": info.to_dict()}
        writers: dict[str, Callable[[Path], object]] = {
            PROGRAM_FILE: lambda path: write_program(network, images, path),
            ONNX_FILE: lambda path: write_checked_onnx(network, images, path, facts),
        }
        if work.cfg.int8:
            writers[INT8_FILE] = lambda path: write_int8(work, size, folder / ONNX_FILE, path)
        for file, write in writers.items():
            try:
                write(folder / file)
            except RuntimeError as error:
                _LOG.warning("%s is left out: %s", file, error)
                (folder / file).unlink(missing_ok=True)
        rows = _timed_files(work, folder, images[:1])
        if (folder / INT8_FILE).exists():
            rows[INT8_FILE] |= _judge_int8(work, size, folder / INT8_FILE, float(small["top1"]))
        record = write_record(folder / EXPORT_FILE, about, {"files": list(rows.values())})
        log_stage("export", started, f"{len(rows)} files of {small['kind']}")
    _write_card(work, folder, record, size, headline)
    names = (CARD_FILE, *(row["file"] for row in record["files"]))
    return tuple(folder / name for name in names)


def _judge_int8(work: Material, size: int, path: Path, top1: float) -> dict[str, Any]:
    """The top-1 of the 8-bit network on the validation images, and whether it is recommended."""
    own = int8_answers(work, size, path).top1
    lost = top1 - own
    verdict = "" if lost <= INT8_LOSS else f", more than {100 * INT8_LOSS:g}: take {ONNX_FILE}"
    # rounding may leave -0.0, which 0 is added to
    note = f"8-bit integers; top-1 {own:.1%}, {round(-100 * lost, 1) + 0:+.1f} points to {ONNX_FILE}{verdict}"
    return {"top1": own, "note": note}


def _timed_files(work: Material, folder: Path, image: Tensor) -> dict[str, dict[str, Any]]:
    """Size and milliseconds of each file, for one image, as onnxruntime's networks are timed."""
    cfg = timing_settings(work.cfg.replace(latency_device="onnx", latency_dtype="fp32"))
    runs: dict[str, Timed] = {}
    with measuring(cfg.threads), torch.inference_mode():
        for file in (ONNX_FILE, INT8_FILE):
            if (folder / file).exists():
                runs[file] = in_onnxruntime((folder / file).read_bytes(), image, cfg)
        if (folder / PROGRAM_FILE).exists():
            program = torch.export.load(folder / PROGRAM_FILE).module()
            clock = CLOCKS[cfg.clock]
            runs[PROGRAM_FILE] = lambda: {"run": time_call(lambda: program(image), image.device, clock=clock)}
        times = measure({file: second(run) for file, run in runs.items()}, rounds=_ROUNDS) if runs else {}
    rows = {}
    for file in (ONNX_FILE, INT8_FILE, PROGRAM_FILE, WEIGHTS_FILE, RECIPE_FILE):
        if (folder / file).exists():
            row: dict[str, Any] = {"file": file, "bytes": (folder / file).stat().st_size}
            rows[file] = row | ({"ms": times[file]["run"]["median_ms"]} if file in times else {})
    return rows


def _write_card(work: Material, folder: Path, record: dict[str, Any], size: int, headline: str) -> None:
    info = work.images.info(size)
    rows = [
        f"| `{row['file']}` | {row['ms']:.2f} | {row.get('note', '')} |" if "ms" in row else f"| `{row['file']}` | | |"
        for row in record["files"]
    ]
    threads, written = work.cfg.latency_threads, {row["file"] for row in record["files"]}
    uses = {ONNX_FILE: _ONNX_USE, PROGRAM_FILE: _PROGRAM_USE}
    text = _CARD.format(
        name=work.run.dir.resolve().name,
        base=work.pretrained.name,
        resolution=size,
        short_side=info.short_side,
        classes=len(info.classes),
        names=", ".join(info.classes),
        mean=list(info.mean),
        std=list(info.std),
        headline=headline,
        runtime=f"one image, {threads} thread{'s' if threads > 1 else ''}",
        rows="\n".join(rows),
        channels=work.pretrained.channels,
        uses="".join(text for file, text in uses.items() if file in written),
        recipe=RECIPE_FILE,
        weights=WEIGHTS_FILE,
    )
    write_atomic(folder / CARD_FILE, text.encode())
