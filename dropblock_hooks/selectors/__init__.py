"""Selectors of layers, parameters and rates, matched with the names of the model in its wrappers.

- `select`: `Select`, and selectors as text: globs, ``re:``, ``type:``, ``stage:``, ``param:``.
- `index`: the layers, parameters and rates of a model by name.
- `kinds`: the kinds of targets: layers, and the values that modules hold.
- `dropouts`: the model's own dropouts, with their units and the attributes of their rates.
- `stages`: feature stages, from timm's ``feature_info``.
- `wrappers`: finds the model inside DDP, FSDP, ``torch.compile`` and other wrappers.
"""
