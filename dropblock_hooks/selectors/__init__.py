"""Which layers are meant: selectors, matched against the names of the bare model.

select      `Select` and the selectors as text: globs, ``re:``, ``type:``, ``stage:``, ``param:``
index       the modules and parameters of a model by name
stages      feature stages, from timm's ``feature_info``
wrappers    the model inside DDP, FSDP, ``torch.compile`` and other wrappers
"""
