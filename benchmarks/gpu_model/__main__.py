"""Runs the model: `python -m benchmarks.gpu_model`."""

# The model is a module of its own because processes that it spawns cannot import functions of a package's __main__.
from benchmarks.gpu_model.model import main

if __name__ == "__main__":
    main()
