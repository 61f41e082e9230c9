"""What a run needs from the machine: files and locks, termination signals, devices, and the ranks that train together.

`files`, `lock` and `termination` do not import torch.
"""
