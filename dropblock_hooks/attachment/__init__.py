"""The handle of an attachment, and how it is made, checked and reported.

attachment   `Attachment`: the handle and its operations
site_list    the sites as a collection: found by key, selector or class, and set
resolve      a spec on a model: what goes where, and everything that is wrong
install      hooks of all sites, put on together or not at all
rates        values of schedules at a time, and other rates in their place
report       the table of the sites
logged       scalars and histograms for a logger
suggest      gradient bounds, proposed from the norms that were seen
epoch_checks everything that is wrong in a window, and warnings in each epoch
faults       why a site did nothing
looks        when a `Watchdog` looks, and what it reports
rules        the rules of the `Watchdog`
distributed  several processes: counts added up, and what differs
state        ``state_dict`` and its loading
"""
