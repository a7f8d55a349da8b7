"""Which layers are meant: selectors, matched against the names of the bare model.

select      `Select` and the selectors as text: globs, ``re:``, ``type:``, ``stage:``, ``param:``
index       the layers, parameters and rates of a model by name
kinds       the kinds of targets: layers, and the values that modules hold
dropouts    the dropouts that a model has: what they drop, and the attribute of their rate
stages      feature stages, from timm's ``feature_info``
wrappers    the model inside DDP, FSDP, ``torch.compile`` and other wrappers
"""
