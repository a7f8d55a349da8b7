"""How the axes of a tensor are read: where the channels are, and which map the tokens form.

view     the options of a user, and the answer: maps with channels first, without prefix tokens
graph    follows axes through the autograd graph of this forward
grids    the sizes of maps in this forward, before they became tokens
facts    facts about one layer, read from the model, as plain data
reader   four rules decide the layout of a tensor and the grid of tokens, or it is refused
"""
