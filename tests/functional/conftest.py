"""The forms of a mask in eager mode, which every test of a module can be run on, and kernels."""

import pytest

from dropblock_hooks.functional import sparse
from tests.conftest import INTERPRETED


@pytest.fixture(params=["seeds", "dense"])
def form(request, monkeypatch):
    """Masks by seeds, or dense, whatever the size of the tensor."""
    least = 0 if request.param == "seeds" else 2**62
    monkeypatch.setattr(sparse, "LEAST", dict.fromkeys(sparse.LEAST, least))
    return request.param


@pytest.fixture
def use_large_programs(monkeypatch):
    """Begin to draw blocks and elements in few programs, for tensors with many of them.

    An interpreter runs one program after another, and takes as long for a small one. The masks are
    the same. The caches of launches are left out, because their sizes are those of before.
    """

    def use():
        if not INTERPRETED:
            return
        from dropblock_hooks.functional.kernels import blocks, units

        for module, size in (
            (blocks, "_SEED_WORDS"),
            (blocks, "_WORDS"),
            (blocks, "_STRIPS"),
            (units, "_STRIPS"),
        ):
            monkeypatch.setattr(module, size, 2**14)
        for module, cached in (
            (blocks, "_drawing"),
            (blocks, "_growing"),
            (blocks, "_applying"),
            (units, "_dropping"),
        ):
            monkeypatch.setattr(module, cached, getattr(module, cached).__wrapped__)

    return use


@pytest.fixture
def large_programs(kernels, use_large_programs, monkeypatch):
    """Kernels in a whole test, in few programs and for tensors of any size."""
    monkeypatch.setattr(sparse, "LEAST", dict.fromkeys(sparse.LEAST, 2**62))
    use_large_programs()
