"""The `nasfast` command: usage, errors and exit status (`main`), and what each command does (`commands`).

Nothing here imports torch before a command runs, because usage must not wait for it.
"""
