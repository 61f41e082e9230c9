"""Measurements on this machine: timing, latency tables, profiles, the memory floor, and `nasfast doctor`.

`projection` computes from measured steps what they would take on other GPUs.
"""
