"""How the axes of a tensor are read.

infer           how the axes are read, from the options, what the model tells, and the shape
witnesses       where the channels are: who is asked, and in which order
hints           what a model tells about a layer, at attaching
grids           the grids of tokens that the model states
tokens          the grid of the tokens of this call
map_sizes       the sizes of maps met in this forward, before they became tokens
permutes        whether code may turn the axes of a map, read in the functions themselves
autograd_graph  where the axes of a tensor come from, read in the graph of this forward
"""
