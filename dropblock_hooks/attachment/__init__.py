"""The handle of an attachment, and how it is made, checked and reported.

attachment   `Attachment`: the handle and its operations
lookup       sites found by key, selector or class; their rates, captures and proposed bounds
place        a spec on a model: its targets and all of its faults; the hooks, all or none
report       the table of the sites, and scalars for a logger
checks       faults of sites and of the training, such as a missing ``step``, and when they are told
watchdog     when a `Watchdog` looks, and its rules
distributed  several processes: sums of counts, and differences
state        ``state_dict`` and its loading
"""
