"""Trainers that attach by themselves. Nothing here is imported unless it is asked for.

lightning  `Regularize`: a callback for the Trainer of Lightning, under both of its names
"""
