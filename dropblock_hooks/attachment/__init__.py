"""The handle of an attachment, and how it is made, checked and reported.

- `attachment`: `Attachment`, the handle with its operations, such as ``step``, ``set``, ``log``.
- `lookup`: finds sites by key, selector or class, with their rates, captures and bounds.
- `place`: matches a spec with a model, finds all faults, and installs all hooks or none.
- `report`: the rows of the sites, also over several processes; ``tables`` prints them.
- `history`: the rows of all epochs, with the epoch that has not ended.
- `same_masks`: blocks in which each site draws one mask.
- `state`: ``state_dict`` and its loading.
"""
