"""How the axes of a tensor are read: where the channels are, and which map the tokens form.

options  what the user says: layout, grid, prefix_tokens
view     the answer for one tensor: its maps with the channels first, and back
graph    follows axes through the autograd graph of this forward
grids    the sizes of maps in this forward, before they became tokens
facts    what a model tells about one layer, as plain data
reader   four rules decide the layout of a tensor and the grid of tokens, or it is refused
"""
