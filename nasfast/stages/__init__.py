"""What the stages of a run share: `inputs` is what they read, `checks` is what they refuse before they begin.

`untrained` scores networks without a run. The stages themselves are functions of `nasfast.pipeline`.
"""
