"""Spaces of cells (`space`, `costs`), their networks, the gates that mix their operations, and a search by gradients.

`space`, `costs` and `config` need no torch.
"""
