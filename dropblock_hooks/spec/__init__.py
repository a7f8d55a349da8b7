"""A spec: which regularizers go on which layers.

spec        `Spec`: checked entries, to YAML and JSON and back
draft       the entries of a spec, and everything that is wrong with it
convert     regularizers, schedules and selectors from plain data, and back
files       plain data from YAML and JSON, with limits and lines
"""
