"""The forms of a mask in eager mode, which every test of a module can be run on."""

import pytest

from dropblock_hooks.functional.kernels import cpu


@pytest.fixture(params=["seeds", "dense"])
def form(request, monkeypatch):
    """Masks by seeds, or dense, whatever the size of the tensor."""
    least = 0 if request.param == "seeds" else 2**62
    monkeypatch.setattr(cpu, "LEAST", dict.fromkeys(cpu.LEAST, least))
    return request.param
