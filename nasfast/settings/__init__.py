"""Settings, whose fields are the flags of the command line and the keys of the YAML files.

`run` has all settings of a run. Nothing here imports torch, because the help of a command must not wait for it.
"""
