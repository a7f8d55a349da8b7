"""What was found or warned of, as pairs (site, kind): tests ask for these, not for sentences."""


def ids(findings):
    """A pair for each site of each finding, in order; ``"."`` stands for the attachment."""
    return [(site, str(each.kind)) for each in findings for site in each.sites or (".",)]


def told(caught):
    """The pairs of all warnings that ``pytest.warns`` or ``warnings`` has recorded."""
    return ids(each for warning in caught for each in getattr(warning.message, "findings", ()))
