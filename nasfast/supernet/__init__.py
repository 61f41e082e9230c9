"""The supernet of a search space: blocks, freezing by role, and initialisation.

May import `ops` and all before it. Begin with `supernet`; `build` and `inherit` give the network of one architecture.
"""

from nasfast.settings import Init, Trainable
from nasfast.supernet.blocks import UnitFactory, block_builder
from nasfast.supernet.choice import Choice
from nasfast.supernet.init import InitScheme, initialize
from nasfast.supernet.standalone import ArchNetwork, StandaloneNetwork, build, inherit, standalone_network, untrained
from nasfast.supernet.supernet import ModuleSupernet, Supernet, TrainableSummary

__all__ = [
    "ArchNetwork",
    "Choice",
    "Init",
    "InitScheme",
    "ModuleSupernet",
    "StandaloneNetwork",
    "Supernet",
    "Trainable",
    "TrainableSummary",
    "UnitFactory",
    "block_builder",
    "build",
    "inherit",
    "initialize",
    "standalone_network",
    "untrained",
]
