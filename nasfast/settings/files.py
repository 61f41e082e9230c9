"""Names of the files of a run directory that several stages read."""

CONFIG_FILE = "config.yaml"
"""The resolved settings of the run."""

SPACE_FILE = "space.yaml"
"""The search space; also beside the weights of a trained network."""
