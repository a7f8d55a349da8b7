"""How masks of blocks are made and applied, where the general way is slow.

cpu         blocks as positions and boxes: work for the dropped places alone
units       whole channels and samples, by a factor for each
bits        sixty-four places in an integer
traced      masks in the graphs of ``torch.compile``
"""
