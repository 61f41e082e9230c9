"""A run of `nasfast shrink`: from a pretrained network, images and a limit to a smaller network, measured and exported.

Begin with `run`, which has its settings and directory, then `stages`, whose functions read what `Material` gives and
write files. `models` and `images` open what the user gives, `files` has what is kept, `latency` times candidates,
`rivals` has what the result is compared with, `exporting` what is deployed, and `plan` forecasts.
"""
