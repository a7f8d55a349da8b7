"""A spec: which regularizers go on which layers.

spec        `Spec`: what was checked, to YAML and JSON and back
draft       a spec as it was given: its entries, and all that is wrong with it
convert     regularizers, schedules and selectors from plain data
copying     plain data of limited size, from what somebody gave
files       YAML and JSON, with the lines where things stand
"""
