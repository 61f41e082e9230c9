"""The DALI backend: NVIDIA DALI reads and decodes image files, on a GPU or in threads on the CPU.

On a GPU, DALI does everything there: it decodes (only the window, where the augmentation is a random resized crop),
resizes, mirrors and adds the lighting. On the CPU, DALI decodes the window and PyTorch does the rest, because its
resizing of bytes takes a fifth of the time of DALI's.

Differences from the torchvision backend for the same view, in levels of 0 to 255:
    CPU: at most 2 levels, and more than 1 for about one value in a million. Decoding is exact, also at the edges of a
        window; the difference comes from rounding the resizing weights to 16 bits instead of 32.
    GPU: not measured. nvJPEG has its own inverse DCT and chroma upsampling. DALI's resizing, measured on the CPU, is at
        most 1 level away, except for the outermost pixels of a reduced image: there it repeats the edge, where PIL
        leaves out what is beyond it. For photographs reduced to an eighth these differ by up to 30 levels.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from nasfast.config import ConfigError
from nasfast.data.augment import Augmentation, Views
from nasfast.data.backends import Decoded, Request, decode_one
from nasfast.data.datasets import ImageSource

if TYPE_CHECKING:
    from nvidia.dali import Pipeline

_LOG = logging.getLogger(__name__)

_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"\x00\x00\x00\x00IEND\xaeB`\x82"}
"""The last bytes of a complete file. They are checked because DALI decodes truncated JPEG files, which PIL refuses."""

_PNG_DEPTH = 24
"""Offset in a PNG file of the number of bits per value."""


def refusal(source: ImageSource) -> str | None:
    """Why DALI cannot decode these images here; None if it can."""
    return _no_files(source) or _missing()


def _no_files(source: ImageSource) -> str | None:
    if source.path(0) is None:
        return f"DALI decodes image files, and {type(source).__name__} has none: set another data.loader"
    return None


def _missing() -> str | None:
    try:
        import nvidia.dali  # noqa: F401
    except (ImportError, OSError) as error:  # not installed, or its libraries cannot be loaded
        return f"NVIDIA DALI cannot be imported ({error}): pip install 'nasfast[dali]'"
    return None


def _cuts_window(augmentation: Augmentation) -> bool:
    """Whether a window is cut out of the image first, so that only the window need be decoded."""
    return augmentation.kind == "imagenet"


class _Plan(NamedTuple):
    """A request with the views of its images; DALI decodes those in `rows` (n,), and PIL the others."""

    request: Request
    views: Views
    rows: np.ndarray


class _Inbox:
    """The function that a pipeline calls for its next batch.

    It has no reference to the pipeline, so that the pipeline is freed when its last user drops it.
    """

    def __init__(self, source: ImageSource, names: Sequence[str]) -> None:
        self.plans: Iterator[_Plan] = iter(())
        self._source, self._names = source, names

    def __call__(self) -> tuple[list[np.ndarray], ...]:
        request, views, rows = next(self.plans)  # StopIteration tells the pipeline that there are no more batches
        paths = [self._source.file(index) for index in request.indices[rows].tolist()]
        numbers = {
            "fit": views.fit.astype(np.float32),
            "corner": views.window[:, :2].astype(np.int32),
            "size": views.window[:, 2:].astype(np.int32),
            "mirror": views.mirror.astype(np.int32),
        }
        if views.shift is not None:
            numbers["mean"] = -views.shift
        files = [np.frombuffer(os.fsencode(path), np.uint8) for path in paths]
        return files, *(numbers[name][rows] for name in self._names)


def _pipeline(
    source: ImageSource,
    augmentation: Augmentation,
    *,
    batch_size: int,
    threads: int,
    depth: int,
    device_id: int | None,
    render: bool,
) -> tuple[Pipeline, _Inbox]:
    """A pipeline from files to (H, W, C) bytes, and the inbox from which it takes its plans.

    It works on `depth` batches at once, on the GPU `device_id` or, for None, on the CPU. With `render` it makes the
    views; otherwise it only decodes what they show: the window where it is cut out first, or the whole image.
    """
    from nvidia.dali import Pipeline, fn, types

    side, windowed = augmentation.resolution, _cuts_window(augmentation)
    lit = windowed and not augmentation.grey
    inputs = ["corner", "size"] if windowed else []
    if render:
        inputs = (inputs or ["fit", "corner"]) + ["mirror"] + ["mean"] * lit
    inbox = _Inbox(source, inputs)
    # exec_dynamic is the default execution model of DALI 2; its outputs may be kept
    pipeline = Pipeline(
        batch_size=batch_size,
        num_threads=threads,
        device_id=device_id,
        prefetch_queue_depth=depth,
        exec_dynamic=True,
    )
    # PIL does not rotate images by their EXIF data either
    options = {"device": "cpu", "adjust_orientation": False}
    if device_id is not None:
        # chroma upsampling as in libjpeg, which PIL uses; the hardware decoders' share is most DALI versions' default
        options.update(device="mixed", jpeg_fancy_upsampling=True, hw_decoder_load=0.65)
    with pipeline:
        names, *numbers = fn.external_source(source=inbox, num_outputs=1 + len(inputs))
        number = dict(zip(inputs, numbers, strict=True))
        files = fn.io.file.read(names)
        if windowed:
            images = fn.decoders.image_slice(
                files, start=number["corner"], shape=number["size"], axis_names="HW", **options
            )
        else:
            images = fn.decoders.image(files, **options)
        if augmentation.grey:
            images = fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)
        if render:
            size = [side, side] if windowed else number["fit"]
            images = fn.resize(images, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
            if not windowed:
                images = fn.slice(
                    images, start=number["corner"], shape=[side, side], axis_names="HW", out_of_bounds_policy="pad"
                )
            light = {"mean": number["mean"], "std": [1.0, 1.0, 1.0]} if lit else {}
            images = fn.crop_mirror_normalize(
                images, mirror=number["mirror"], dtype=types.UINT8, output_layout="HWC", **light
            )
        pipeline.set_outputs(images)
    return pipeline, inbox


class DaliBackend:
    """Decodes image files with NVIDIA DALI, and with PIL those that DALI does not read as PIL does.

    DALI decodes complete JPEG and PNG files with 8-bit grey or RGB values. PIL decodes all others, and those at which
    DALI fails; an image counts as unreadable only if PIL cannot read it. One case differs from PIL: a JPEG file that is
    damaged in the middle, and that PIL refuses, may be shown with its damage. The pixels of an image depend only on its
    file and its view; on a GPU with JPEG engines they also depend on its place in the request, because DALI divides the
    decoding between engines and kernels by place.
    """

    kind = "dali"

    def __init__(
        self,
        source: ImageSource,
        augmentation: Augmentation,
        *,
        batch_size: int,
        workers: int = 2,
        prefetch: int = 2,
    ) -> None:
        if reason := _no_files(source):
            raise ConfigError(reason)
        if reason := _missing():
            raise RuntimeError(reason)
        self._source, self._augmentation, self._batch_size = source, augmentation, batch_size
        self._workers, self._prefetch, self._device = max(1, workers), prefetch, torch.device("cpu")
        # heights and widths from the headers of the files: 0 if not read yet, -1 if PIL decodes the file
        self._sizes = np.zeros((len(source), 2), np.int32)
        self._idle: dict[torch.device, list[tuple[Pipeline, _Inbox]]] = {}
        self._reported: set[int] = set()

    def decode(self, requests: Sequence[Request], device: torch.device) -> Iterator[Decoded]:
        """Answers in the order of the requests; for a GPU they are decoded there. Use one device at a time."""
        # epochs that run at the same time each have a pipeline
        self._device = device
        idle = self._idle.setdefault(device, [])
        pipeline, inbox = idle.pop() if idle else self._build(self._batch_size, self._prefetch + 1)
        plans: deque[_Plan] = deque()
        try:
            with ThreadPoolExecutor(self._workers, "nasfast-dali") as pool:
                planned = inbox.plans = self._plan_all(requests, plans, pool)
                while True:
                    pipeline.schedule_run()  # takes a batch from the inbox; the first call takes `depth` batches
                    while plans and not len(plans[0].rows):
                        yield self._answer(plans.popleft(), [], pool)
                    if not plans:
                        break
                    plan = plans.popleft()
                    try:
                        images = self._outputs(pipeline)
                    except Exception as error:  # DALI raises several types for files that it cannot open or decode
                        plan, images = self._one_by_one(plan, error)
                        # DALI's documentation says that a pipeline that failed must not be used again
                        pipeline, inbox = self._build(self._batch_size, self._prefetch + 1)
                        inbox.plans = chain([later for later in plans if len(later.rows)], planned)
                    yield self._answer(plan, images, pool)
        finally:
            inbox.plans = iter(())  # DALI keeps a reference to the inbox, and the plans refer to this backend
        pipeline.reset()
        idle.append((pipeline, inbox))

    def _build(self, batch_size: int, depth: int) -> tuple[Pipeline, _Inbox]:
        device_id = None
        if self._device.type == "cuda":
            device_id = torch.cuda.current_device() if self._device.index is None else self._device.index
        return _pipeline(
            self._source,
            self._augmentation,
            batch_size=batch_size,
            threads=self._workers,
            depth=depth,
            device_id=device_id,
            render=device_id is not None,
        )

    def _plan_all(self, requests: Sequence[Request], plans: deque[_Plan], pool: ThreadPoolExecutor) -> Iterator[_Plan]:
        """Plan all requests in order; yield the plans that have images for DALI."""
        for request in requests:
            new = request.indices[self._sizes[request.indices, 0] == 0]
            for index, size in zip(new, pool.map(self._size, new.tolist()), strict=True):
                self._sizes[index] = size
            sizes = self._sizes[request.indices].astype(np.int64)
            # any size will do for images that PIL decodes: the draws of an image do not depend on other images
            views = self._augmentation.views(np.maximum(sizes, 1), epoch=request.epoch, start=request.start)
            plan = _Plan(request, views, np.flatnonzero(sizes[:, 0] > 0))
            plans.append(plan)
            if len(plan.rows):
                yield plan

    def _size(self, index: int) -> tuple[int, int]:
        """Height and width of an image that DALI reads as PIL does, judged by its header and end; otherwise -1, -1."""
        path = self._source.file(index)
        try:
            with open(path, "rb") as file, Image.open(file) as image:
                end = _ENDS[image.format or ""]
                file.seek(-len(end), os.SEEK_END)
                plain = image.mode in ("RGB", "L") and file.read() == end
                if image.format == "PNG" and plain:
                    file.seek(_PNG_DEPTH)
                    plain = file.read(1) == b"\x08" and not (
                        "transparency" in image.info or getattr(image, "is_animated", False)
                    )
                return (image.height, image.width) if plain else (-1, -1)
        except Exception:  # another format, or an error of PIL, which PIL raises again when it decodes the file
            return -1, -1

    def _outputs(self, pipeline: Pipeline) -> Sequence[np.ndarray] | Tensor:
        """The next batch: decoded (H, W, C) arrays, or on a GPU a tensor (N, resolution, resolution, C)."""
        if self._device.type != "cuda":
            (output,) = pipeline.outputs()
            return [np.asarray(output[place]) for place in range(len(output))]
        with torch.cuda.device(self._device):
            # DALI orders its output with this stream, and takes its memory back when the copy below is done
            (output,) = pipeline.outputs(cuda_stream=torch.cuda.current_stream())
            return torch.from_dlpack(output.as_tensor()).clone()

    def _one_by_one(self, plan: _Plan, failure: Exception) -> tuple[_Plan, Sequence[np.ndarray] | Tensor]:
        """Decode the images of a failed batch one by one; the plan without those that fail, and the other images."""
        pipeline, inbox = self._build(1, 1)
        rows: list[int] = []
        images: list[Any] = []
        for row in plan.rows.tolist():
            inbox.plans = iter([plan._replace(rows=np.array([row]))])
            pipeline.schedule_run()
            try:
                images.append(self._outputs(pipeline)[0])
                rows.append(row)
            except Exception as error:
                self._report(int(plan.request.indices[row]), error)
                pipeline, inbox = self._build(1, 1)
        if len(rows) == len(plan.rows):
            _LOG.warning("DALI failed at a batch, but at none of its images one by one: %s", _brief(failure))
        decoded = torch.stack(images) if images and isinstance(images[0], Tensor) else images
        return plan._replace(rows=np.array(rows, np.int64)), decoded

    def _report(self, index: int, error: Exception) -> None:
        if index not in self._reported:
            self._reported.add(index)
            _LOG.warning("DALI cannot decode %s, PIL will try: %s", self._source.name(index), _brief(error))

    def _answer(self, plan: _Plan, images: Sequence[np.ndarray] | Tensor, pool: ThreadPoolExecutor) -> Decoded:
        """The answer to a planned request, from the images that DALI decoded and those that PIL decodes now."""
        request, views, rows = plan
        count, side = len(request.indices), self._augmentation.resolution
        if isinstance(images, Tensor) and len(rows) == count:
            pixels = images
        else:
            shape = (count, side, side, 1 if self._augmentation.grey else 3)
            pixels = torch.empty(shape, dtype=torch.uint8, device=self._device)
            if isinstance(images, Tensor):
                pixels[torch.from_numpy(rows)] = images
            elif len(rows):
                self._render(plan, images, pixels, pool)
        kept, bad = np.ones(count, bool), []
        rest = np.setdiff1d(np.arange(count), rows).tolist()
        requests = [Request(request.indices[row : row + 1], request.epoch, request.start + row) for row in rest]
        decode = partial(decode_one, self._source, self._augmentation)
        for row, one in zip(rest, pool.map(decode, requests), strict=True):
            bad += one.bad
            kept[row] = not one.bad
            if not one.bad:
                pixels[row] = one.images[0].permute(1, 2, 0)
        if bad:
            pixels = pixels[torch.from_numpy(kept)]
        return Decoded(pixels.permute(0, 3, 1, 2), np.flatnonzero(kept), bad)

    def _render(self, plan: _Plan, images: Sequence[np.ndarray], pixels: Tensor, pool: ThreadPoolExecutor) -> None:
        """Fill the plan's rows of `pixels` with the views of the images that DALI decoded on the CPU."""
        _, views, rows = plan
        out = pixels.numpy()

        def place(part: np.ndarray) -> None:
            for number in part.tolist():
                self._place(images[number], views, rows[number], out[rows[number]])

        list(pool.map(place, np.array_split(np.arange(len(rows)), self._workers)))
        # PyTorch runs these operations in threads of its own, which threads of the pool must not start
        for row in rows[views.mirror[rows]].tolist():
            pixels[row] = pixels[row].flip(1)
        if views.shift is not None:
            _add(pixels, views.shift)

    def _place(self, image: np.ndarray, views: Views, row: int, out: np.ndarray) -> None:
        """Fill `out` (resolution, resolution, C) with a view of an image, which may be decoded as a window already."""
        side = self._augmentation.resolution
        if _cuts_window(self._augmentation):
            out[...] = _resize(image, (side, side))
            return
        image = _resize(image, tuple(views.fit[row].tolist()))
        top, left = views.window[row, :2].tolist()
        first, last = max(top, 0), max(0, min(top + side, image.shape[0]))
        begin, end = max(left, 0), max(0, min(left + side, image.shape[1]))
        if (last - first, end - begin) != (side, side):
            out[...] = 0
        out[first - top : last - top, begin - left : end - left] = image[first:last, begin:end]


def _resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize (H, W, C) bytes in one thread, bilinear with antialiasing as PIL does."""
    if image.shape[:2] == size:
        return image
    # the result has the strides of channels_last only if the batch has them, so add the batch axis before the permute
    batch = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    return interpolate(batch, size, mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()


def _add(pixels: Tensor, shift: np.ndarray) -> None:
    """Add (N, C) whole numbers to (N, H, W, C) bytes in place, in byte arithmetic; results are clamped to 0 and 255."""
    count, height, width, channels = pixels.shape
    shift = np.tile(np.clip(shift, -255, 255).astype(np.int64), (1, width))[:, None]
    low, high, step = (
        torch.from_numpy(values.astype(np.uint8))
        for values in (np.maximum(-shift, 0), np.minimum(255 - shift, 255), shift & 255)
    )
    pixels.view(count, height, width * channels).clamp_(low, high).add_(step)


def _brief(error: Exception) -> str:
    """The line of a long message of DALI that says what happened."""
    text = str(error)
    return (text.partition("encountered:")[2] or text).strip().partition("\n")[0]
