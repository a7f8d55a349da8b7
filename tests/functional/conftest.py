"""The forms of a mask in eager mode, which every test of a module can be run on."""

import pytest

from dropblock_hooks.functional import sparse


@pytest.fixture(params=["seeds", "dense"])
def form(request, monkeypatch):
    """Masks by seeds, or dense, whatever the size of the tensor."""
    least = 0 if request.param == "seeds" else 2**62
    monkeypatch.setattr(sparse, "LEAST", dict.fromkeys(sparse.LEAST, least))
    return request.param
