"""Reads the axes of a tensor: where the channels are, and which map the tokens form.

- `view`: `View`, the axes of a tensor, with its maps; checks the options of a user.
- `graph`: follows axes through the autograd graph of this forward.
- `grids`: notes the sizes of maps in this forward, before they became tokens.
- `facts`: gathers facts about the axes of a layer from the model, as plain data.
- `reader`: decides the layout of a tensor and the grid of tokens by four rules, or refuses it.
"""
