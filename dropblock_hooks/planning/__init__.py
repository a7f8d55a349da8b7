"""What a spec will do on a model, before anything is put on.

plan       `plan`: all that can be said, from a forward of a copy where an input is given
table      the table of a plan, and the main rate of a regularizer over its schedule
recording  what the layers did in one forward of a copy, and shortcuts around them
dry_run    a forward of a deep copy, on fake tensors where that works
layers     `layers`: the layers of a model
builtin    `builtin`: what a model already drops, and where a site drops it again
"""
