"""NASI: architectures chosen at initialisation, in layer-wise spaces and in spaces of cells.

`score` has the score of a network, `search` the algorithm, `layers` and `cells` the supernets of both kinds of spaces.
"""

from typing import Any

from nasfast.runtime import moved


def __getattr__(name: str) -> Any:
    return moved.find(__name__, name)
