"""Measurements on this machine: times of steps, latency tables, and `nasfast doctor`.

May import `search` and all before it. Begin with `latency`; `timing` measures for all.
"""
