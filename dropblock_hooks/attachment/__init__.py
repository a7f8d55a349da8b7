"""The handle of what was attached, and how it comes about.

attachment   `Attachment`: the list of its sites, and all that can be done with it
find         sites by key, selector or class
rates        values at a time, and others in their place
placement    one regularizer on one layer, before it is put on
own_rates    layers that drop by themselves: what holds their rate, who acts there
resolve      a spec on a model: what goes where, and all that is wrong
training_loop  its GradScaler and optimizers, as the Attachment is told of them
install      sites and their hooks, put on
removal      all of them taken off
report       the table of the sites
logged       what a logger is given: scalars, histograms, pictures
verify       what ``verify`` lists
activity     whether what was attached is on, looked at in every epoch
faults       what is wrong at a site, and the likely cause: why a layer did nothing, say
distributed  several processes: equal masks, common counts
state        ``state_dict`` and its loading
compiled     what torch has compiled, to be compiled anew
"""
