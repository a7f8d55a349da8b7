"""The dry run of a spec on a model, before any hook is put on.

plan       `plan`: sites, shapes and faults, from a forward of a copy, and their table
recording  `layers`; the calls of the layers in a forward of a copy, and paths around them, by
           which samples are lost
dry_run    a forward of a deep copy, on fake tensors where that works
builtin    `builtin`: the model's own dropouts, and where a site drops it again
"""
