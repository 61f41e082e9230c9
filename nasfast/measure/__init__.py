"""Measurements on this machine: timing, latency tables, profiles, the memory floor, and `nasfast doctor`.

`projection` carries measured steps over to the cards whose figures the paper publishes.
"""
