"""What a run needs from the machine: files and locks, termination signals, devices, and ranks that train together.

May import `config`, and no torch in `files`, `lock` and `termination`. Begin with `lock` and `files`.
"""
