"""Schedules: pure functions from the epoch to a number, accepted for each rate and bound.

base      `Schedule`; the value, range and length of any rate
curves    over time: constant, linear, cosine, in steps, in a window; over the layers of an entry

A schedule holds no state. The Attachment holds the time, usually in epochs. Any function of one
number is a schedule, too, but can't be written to a file.
"""
