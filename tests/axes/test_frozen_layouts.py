"""Every layer is read as it was before the redesign, or it is refused with an error that helps."""

import pytest

from tests.axes.layouts_table import load, names, rows_of

timm = pytest.importorskip("timm", reason="the models are timm's")
pytest.importorskip("transformers", reason="and of transformers")

CHANNELS, MAPS, DETACHED = 4, 5, 6
REFUSED = "-"
STAGES_REFUSED = frozenset()  # docs/decisions.md says why
PLAIN = ["convnext", "swin_transformer", "vision_transformer", "BertModel", "SegformerModel"]


def changes(frozen, found):
    """Pairs of rows that are not the same."""
    assert [row[:4] for row in frozen] == [row[:4] for row in found]
    return [(old, new) for old, new in zip(frozen, found, strict=True) if old != new]


def readings(row):
    return row[CHANNELS], row[MAPS], *row[DETACHED].split(";")


def is_lost(old, new, kind):
    """Whether a row was read before and is refused now, of the channels or of maps."""
    return readings(old)[kind] != REFUSED == readings(new)[kind]


def check(changed):
    """Nothing is read in another way, nothing that was refused is read."""
    different = [
        (old, new)
        for old, new in changed
        for before, after in zip(readings(old), readings(new), strict=True)
        if after not in (before, REFUSED)
    ]
    assert not different, different[:10]
    stages = {old[0] for old, new in changed if old[2] and (is_lost(old, new, 0))}
    stages |= {old[0] for old, new in changed if old[2] and (is_lost(old, new, 1))}
    assert stages <= STAGES_REFUSED


@pytest.mark.parametrize("name", PLAIN)
def test_some_models_are_read_as_before(name):
    frozen = load()[name]
    changed = changes(frozen, rows_of(name))
    check(changed)
    assert not any(is_lost(old, new, kind) for old, new in changed for kind in (0, 1))


@pytest.mark.slow
def test_all_models_are_read_as_before_or_refused():
    table = load()
    assert set(table) == set(names())
    assert sum(map(len, table.values())) > 6500
    changed = [pair for name in names() for pair in changes(table[name], rows_of(name))]
    check(changed)
    for kind in range(4):
        lost = sum(is_lost(old, new, kind) for old, new in changed)
        read = sum(readings(row)[kind] != REFUSED for rows in table.values() for row in rows)
        print(("channels", "maps", "channels, detached", "maps, detached")[kind], lost, read)
        assert lost <= 0.04 * read
