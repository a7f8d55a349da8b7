"""Which layers are meant: selectors, matched against the names of the bare model.

select      `Select` and the selectors as text: globs, ``re:``, ``type:``, ``stage:``, ``param:``
index       the modules and parameters of a model by name
globs       globs over name components
patterns    regular expressions, matched by ``re`` where it is quick
stages      stages, as timm's ``feature_info`` tells them
wrappers    the model inside DDP, FSDP, ``torch.compile`` and the like
"""
