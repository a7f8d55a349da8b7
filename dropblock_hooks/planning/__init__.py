"""The dry run of a spec on a model, before any hook is put on.

- `plan`: `plan`, the table of sites, shapes and faults from a forward of a copy.
- `recording`: `layers`; records calls of layers in a forward, and finds shortcuts around layers.
- `dry_run`: runs a forward of a deep copy, on fake tensors if possible.
- `builtin`: `builtin`, the model's own dropouts; finds sites that drop the same values again.
"""
