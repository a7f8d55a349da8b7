"""The state of an attachment as plain numbers and text, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import as_number
from ..sites.counter import Snapshot, Totals, read
from ..sites.norms import Norms
from ..sites.run import Run
from ..sites.site import Site

_VERSION = 3
_COUNTS = ("calls", "active_calls", "affected", "total")
_ELEMENTS = ("affected", "total", "expected")


def save(sites: Sequence[Site], run: Run) -> dict[str, Any]:
    """Epoch and statistics."""
    totals = read([site.counter for site in sites])
    return {
        "version": _VERSION,
        "epoch": run.epoch,
        "stepped": run.stepped,
        "forwards": run.counter.snapshot().calls,
        "sites": {
            site.key: _saved(site, counted) for site, counted in zip(sites, totals, strict=True)
        },
    }


def _saved(site: Site, counted: Totals) -> dict[str, Any]:
    life, norms = counted.life, counted.life.norms
    state: dict[str, Any] = {
        "regularizer": repr(site.regularizer),
        "calls": life.calls,
        "active_calls": life.active,
        **{name: getattr(life, name) for name in _ELEMENTS},
    }
    if norms.bins:
        state["norms"] = norms.saved()
    if site.watch is not None and (kept := site.watch.state_dict()):  # what an observer has seen
        state["buffers"] = {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "values": tensor.detach().flatten().tolist(),
            }
            for name, tensor in kept.items()
        }
    return state


def load(state: Mapping[str, Any], sites: Sequence[Site], strict: bool) -> float:
    """Check a state against the sites, and return its epoch.

    Raises:
        ValueError: for a state that is damaged or, where `strict`, of another spec.
    """
    whole = isinstance(state, Mapping) and {"version", "epoch", "sites"} <= set(state)
    if not whole or not isinstance(state["sites"], Mapping):
        raise ValueError("this is not the state_dict of an Attachment")
    if state["version"] != _VERSION:
        raise ValueError(f"the state has version {state['version']}, this code reads {_VERSION}")
    saved = state["sites"]
    damaged = [key for key, site in saved.items() if not _is_whole(site)]
    if damaged:
        raise ValueError(f"the state of {damaged[0]} is damaged: {saved[damaged[0]]!r}")
    here = {site.key: repr(site.regularizer) for site in sites}
    there = {key: site["regularizer"] for key, site in saved.items()}
    different = [
        f"  - {key}: the state has {there.get(key, 'none')}, the model has {here.get(key, 'none')}"
        for key in here | there
        if here.get(key) != there.get(key)
    ]
    if strict and different:
        lines = "\n".join(different)
        raise ValueError(f"the state is of another spec (strict=False takes what fits):\n{lines}")
    return as_number("epoch", state["epoch"])


def _is_whole(site: Any) -> bool:
    if not isinstance(site, Mapping) or not isinstance(site.get("regularizer"), str):
        return False
    try:
        _cells(site)
    except (KeyError, TypeError, ValueError):
        return False
    expected = isinstance(site.get("expected"), int | float)
    return expected and all(isinstance(site.get(name), int) for name in _COUNTS)


def _cells(saved: Mapping[str, Any]) -> list[float] | None:
    return Norms.restored(saved["norms"]) if "norms" in saved else None


def restore(state: Mapping[str, Any], sites: Sequence[Site], run: Run) -> None:
    """Take over the statistics of a checked state, and begin a new window."""
    run.stepped = bool(state.get("stepped", True))
    run.counter.restore(Snapshot(trained=int(state.get("forwards", 0))))
    for site in sites:
        saved = state["sites"].get(site.key)
        if saved is None:
            site.counter.restore(site.counter.read().life)
            continue
        counts = {name: saved[name] for name in _ELEMENTS}
        counts |= {"trained": saved["calls"], "active": saved["active_calls"]}
        site.counter.restore(Snapshot(**counts, cells=_cells(saved)))
        if "buffers" in saved and site.watch is not None:
            kept = saved["buffers"].items()
            site.watch.load_state_dict({name: _tensor(each) for name, each in kept})
    run.open_window()
    run.fresh = True


def _tensor(saved: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, saved["dtype"])
    return torch.tensor(saved["values"], dtype=dtype, device="cpu").reshape(saved["shape"])
