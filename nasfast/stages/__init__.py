"""What the stages of a run share: `inputs` is what they read, `checks` is what they refuse before they begin.

`apart` retrains networks in processes of their own, `untrained` scores networks without a run. The stages themselves
are functions of `nasfast.pipeline`.
"""
