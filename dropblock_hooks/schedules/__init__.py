"""Schedules: pure functions from the epoch to a number, usable wherever a rate or bound is taken.

base      `Schedule`; the value, range and length of any rate
curves    over time: constant, linear, cosine, in steps, in a window
by_depth  over the layers of an entry

A schedule holds no state; time is the Attachment's ``epoch``, so a resume is ``step(epoch)``. The
unit of `t` is whatever the schedule was given in (epochs, usually; fractions are allowed). Any
plain function of one number is a schedule too; it can only not be written to a file.
"""
