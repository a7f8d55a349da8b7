"""Specs, which say what regularizers go on what layers.

- `spec`: `Spec`, a list of entries, to YAML and JSON and back; `Draft`, a spec with its faults.
- `convert`: makes regularizers, schedules and selectors from plain data, and the other way.
- `files`: reads plain data from YAML and JSON, with limits, and with the lines of keys.
"""
