"""One regularizer on one layer, at run time.

site         `Site`: the state of one, and what it does with a tensor
hooks        the hooks that it puts on its layer
traced       what it does while ``torch.compile`` traces it
identity     the identity whose backward regularizes a gradient
counts       what it counts; a window is the difference of two moments
meter        what compiled code counts into
transfer     numbers of tensors, brought from their devices at once
shared       what the sites of one Attachment share: the time, the switches, the loss scale
grad_scaler  the GradScaler that multiplies the loss
indexing     one element of what a layer takes or returns
inplace      whether a layer has worked on its input in place
memory       what is remembered of shapes
"""
