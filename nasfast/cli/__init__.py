"""The `nasfast` command: flags, help, errors and exit status.

May import every package but `research`, and torch only once a command runs. Begin with `main`, then
`stages`: of each command its flags, what it refuses, and what it does.
"""
