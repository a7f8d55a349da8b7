"""The handle of an attachment, and how it is made, checked and reported.

attachment   `Attachment`: the handle and its operations
lookup       sites found by key, selector or class; their rates and captures
resolve      the layers and regularizers of a spec on a model, and all of its faults
install      hooks of all sites, put on together or not at all
blocks       how the map limits a block
report       the table of the sites, and scalars and histograms for a logger
suggest      gradient bounds, proposed from the norms that were seen
checks       everything that is wrong, why a site did nothing, and when it is reported
watchdog     when a `Watchdog` looks, and its rules
distributed  several processes: sums of counts, and differences
state        ``state_dict`` and its loading
"""
