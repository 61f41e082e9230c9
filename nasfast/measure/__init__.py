"""Measurements on this machine: times of steps, latency tables, and `nasfast doctor`."""
