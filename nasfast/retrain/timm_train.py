"""Run an unmodified timm script with the architecture `nasfast` registered:

python -m nasfast.retrain.timm_train train.py DATA --model local-dir:runs/x/retrain/best
"""

import runpy
import sys
from pathlib import Path

import nasfast.retrain.timm_plugin  # noqa: F401  registers the model

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m nasfast.retrain.timm_train SCRIPT [ARGUMENTS OF THE SCRIPT]")
    sys.argv = sys.argv[1:]
    # `python SCRIPT` does so too, for the imports of the script
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
