"""The handle of an attachment, and how it is made, checked and reported.

attachment   `Attachment`: the handle and its operations, such as ``step``, ``set`` and ``log``
lookup       sites found by key, selector or class; their rates, captures and proposed bounds
place        a spec on a model: its targets and all of its faults; the hooks, all or none
report       the rows of the sites, also over several processes; ``tables`` prints them
faults       when sites, training and processes are searched for faults, and these told; when
             a `Watchdog` looks
endings      what is wrong with a training as a whole, such as a rate that was always 0
ticker       the clock of a `Watchdog` in compiled code, which counts without Python
alerts       judges the numbers of all `Watchdog` sites together: the findings, the first cause
state        ``state_dict`` and its loading
"""
