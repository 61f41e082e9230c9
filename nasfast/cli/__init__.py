"""The `nasfast` command: usage, errors and exit status (`main`), flags and help (`flags`), and what each command
does (`commands`). Only `commands` imports torch, because help must not wait for it.
"""
