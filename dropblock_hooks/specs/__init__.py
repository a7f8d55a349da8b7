"""A spec: which regularizers go on which layers.

spec        `Spec`: entries, to YAML and JSON and back; `Draft`: the same with its faults
convert     regularizers, schedules and selectors from plain data, and back
files       plain data from YAML and JSON, with limits and lines
"""
