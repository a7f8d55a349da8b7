"""The handle of an attachment, and how it is made, checked and reported.

attachment   `Attachment`: the handle and its operations, such as ``step``, ``set`` and ``log``
lookup       sites found by key, selector or class; their rates, captures and proposed bounds
place        a spec on a model: its targets and all of its faults; the hooks, all or none
report       the rows of the sites, also over several processes; ``tables`` prints them
state        ``state_dict`` and its loading
"""
