"""A run: each stage reads the files of the stage before from the run directory and writes its own.

supernet -> checkpoints/   score -> indicators.json   search -> archs.json   retrain -> retrain/   report -> report.html
May import every package but `cli` and `research`. Begin with `run`, which has the class Run, then `stages`.
"""
