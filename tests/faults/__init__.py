"""A fault injector for runs of the command line, and its tests.

`python -m tests.faults` injects more than 100 faults.
"""
