"""A matplotlib figure as SVG that follows the light or dark mode of its page and shows its values on hover."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from xml.etree import ElementTree

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

from nasfast.report.style import DARK, INK, variable

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_VALUE = "value:"
_POINTS_PER_INCH = 72
# Points nearer to each other than this, in points of 1/72 inch, share one hover value.
_NEAR = 6
_RADIUS = 4.0
# An image with more cells than this shows no values.
_MOST_CELLS = 4000
# characters that XML does not allow, from the text of a user's file
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")

ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", _XLINK)


def with_value(artist: Artist, text: str) -> None:
    """Show `text` while the pointer is on an artist. Lines, dots and images of axes show their values anyway."""
    # the SVG backend writes this id, and `svg_of` makes a <title> of it
    artist.set_gid(_VALUE + text)


def svg_of(figure: Figure, name: str, caption: str) -> str:
    """The figure as an SVG element for an HTML page, which is a file of its own too.

    Colours of `style.DARK` are CSS variables of the page. Text is text in the reader's font. A `<title>` in each bar,
    cell or dot has its value, which browsers show on hover.

    Args:
        figure: the figure.
        name: part of the identifiers in the SVG, so that two figures of a page have different ones.
        caption: what readers hear who cannot see the figure.
    """
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(_NOT_XML.sub("\ufffd", file.getvalue()))
    for child in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(child)
    for element in root.iter():
        _clean(element)
    root.set("role", "img")
    root.set("aria-label", _NOT_XML.sub("\ufffd", caption))
    root.set("style", f"fill:{variable(INK)};font-family:system-ui,sans-serif")
    root.append(_targets(figure))
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element) -> None:
    """Make colours variables and ids of `with_value` titles; drop other ids of groups, fonts and line ends."""
    style = element.get("style")
    if style is not None:
        style = re.sub(r"font-family: [^;]+;? ?", "", style)
        style = re.sub(r"#[0-9a-f]{6}", lambda m: variable(m[0]) if m[0] in DARK else m[0], style)
        element.set("style", style)
    if "d" in element.attrib:
        element.set("d", " ".join(element.attrib["d"].split()))
    if element.tag == f"{{{_SVG}}}g" and "id" in element.attrib:
        identity = element.attrib.pop("id")
        if identity.startswith(_VALUE):
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = identity.removeprefix(_VALUE)
            element.insert(0, title)


def _targets(figure: Figure) -> ElementTree.Element:
    """Invisible areas above the points of lines and the cells of images; each has its value as title."""
    group = ElementTree.Element(f"{{{_SVG}}}g", {"style": "fill:none;stroke:none;pointer-events:all"})
    scale, height = _POINTS_PER_INCH / figure.dpi, figure.get_figheight() * _POINTS_PER_INCH
    for ax in figure.axes:
        # what is drawn without axes has no values; a colour bar has those of its image
        if not ax.axison or ax.get_label() == "<colorbar>":
            continue
        texts = _text_of(ax.xaxis, "x"), _text_of(ax.yaxis, "y")
        taken: set[tuple[int, int]] = set()
        # later and higher artists hide earlier ones
        for artist in sorted(reversed(ax.get_children()), key=lambda artist: -artist.get_zorder()):
            for box, text in _values(ax, artist, *texts):
                x0, y0, x1, y1 = (value * scale for value in box)
                centre = (round((x0 + x1) / 2 / _NEAR), round((y0 + y1) / 2 / _NEAR))
                if centre in taken:
                    continue
                taken.add(centre)
                if x0 == x1:
                    tag, shape = "circle", {"cx": x0, "cy": height - y0, "r": _RADIUS}
                else:
                    low, wide, high = height - max(y0, y1), abs(x1 - x0), abs(y1 - y0)
                    tag, shape = "rect", {"x": min(x0, x1), "y": low, "width": wide, "height": high}
                place = {key: f"{value:.1f}" for key, value in shape.items()}
                target = ElementTree.SubElement(group, f"{{{_SVG}}}{tag}", place)
                ElementTree.SubElement(target, f"{{{_SVG}}}title").text = _NOT_XML.sub("\ufffd", text)
    return group


def _values(
    ax: Axes, artist: Artist, x_text: Callable[[float], str], y_text: Callable[[float], str]
) -> Iterator[tuple[Sequence[float], str]]:
    """(x0, y0, x1, y1) in pixels of the figure, and the text, of each value of an artist; a point has x0 = x1."""
    if isinstance(artist, AxesImage):
        grid = artist.get_array()
        if grid is None or grid.ndim != 2 or grid.size > _MOST_CELLS:
            return
        for (i, j), value in np.ndenumerate(np.ma.filled(np.ma.asarray(grid, dtype=float), np.nan)):
            if math.isfinite(value):
                corners = ax.transData.transform([(j - 0.5, i - 0.5), (j + 0.5, i + 0.5)]).ravel()
                yield tuple(corners), f"{y_text(i)}, {x_text(j)}: {value:.6g}"
        return
    if isinstance(artist, Line2D) and artist.get_transform() == ax.transData:
        points = np.asarray(artist.get_xydata(), dtype=float)
    elif isinstance(artist, PathCollection):
        points = np.ma.filled(np.ma.asarray(artist.get_offsets(), dtype=float), np.nan)
    else:
        return
    label = str(artist.get_label())
    name = "" if label.startswith("_") else f"{_plain(label)}\n"
    seen = ax.bbox.padded(1)
    for (x, y), place in zip(points, ax.transData.transform(points), strict=True):
        if np.isfinite(place).all() and seen.contains(*place):
            yield (*place, *place), f"{name}{x_text(x)}, {y_text(y)}"


def _text_of(axis: Axis, name: str) -> Callable[[float], str]:
    """What turns a coordinate into text: the name of its place on an axis of names, else label and number."""
    label = _plain(axis.get_label_text()) or name
    places, names = np.empty(0), []
    locator, formatter = axis.get_major_locator(), axis.get_major_formatter()
    if isinstance(locator, FixedLocator) and isinstance(formatter, (FixedFormatter, FuncFormatter)):
        places = np.asarray(locator(), dtype=float)
        names = [_plain(str(text)) for text in formatter.format_ticks(places.tolist())]

    def text(value: float) -> str:
        near = np.flatnonzero(abs(places - value) < 0.5)
        return names[near[0]] if len(near) else f"{label} {value:.6g}"

    return text


def _plain(text: str) -> str:
    """Text of a figure without the marks of formulas."""
    text = re.sub(r"(?<!\\)\$(.*?)(?<!\\)\$", lambda m: re.sub(r"\\(?:,|mathrm)|[\\{}]", "", m[1]), text)
    return text.replace(r"\$", "$")
