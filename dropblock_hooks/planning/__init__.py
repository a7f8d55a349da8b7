"""What a spec will do on a model, before anything is put on.

plan           `plan`: all that can be said, from a forward of a copy where an input is given
table          the table of a plan
problems       what can't work, what is likely not meant, what is good to know
probe          a spec on a copy for one forward, and what each site meets in it
dry_run        a forward of a deep copy, on fake tensors where that works
fake_tensors   fake tensors that a forward left in caches, taken out
layers         `layers`: what a model has to attach to
builtin        `builtin`: what a model drops by itself
residual       ways around a layer, read from the graph
droppers       what drops by itself, how much at once, and at which rate
dropped_twice  where a model drops by itself what a site drops again
"""
