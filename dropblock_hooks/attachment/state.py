"""The state of an Attachment as plain numbers and text, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import as_number
from ..sites.counts import Counts
from ..sites.norms import NO_NORMS, Norms
from ..sites.shared import Control
from ..sites.site import Site

_VERSION = 3
_COUNTS = ("calls", "active_calls", "affected", "total")
_ELEMENTS = ("affected", "total", "expected")


def save(sites: Sequence[Site], control: Control) -> dict[str, Any]:
    """Epoch and statistics."""
    return {
        "version": _VERSION,
        "epoch": control.epoch,
        "stepped": control.stepped,
        "forwards": control.record.read(elements=False).life.calls,
        "sites": {site.key: site_state(site) for site in sites},
    }


def site_state(site: Site) -> dict[str, Any]:
    """The statistics of one site."""
    counted = site.record.read(norms=True)
    life, norms = counted.life, counted.norms.get("life", NO_NORMS)
    state = {
        "regularizer": repr(site.regularizer),
        "calls": life.calls,
        "active_calls": life.active,
        **{name: getattr(life, name) for name in _ELEMENTS},
        **({"norms": norms.saved()} if norms.bins else {}),
    }
    buffers = _buffers(site)
    return {**state, "buffers": buffers} if buffers else state


def _buffers(site: Site) -> dict[str, dict[str, Any]]:
    """The tensors that an observer keeps at its site, as plain numbers."""
    if site.watch is None:
        return {}
    return {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "values": tensor.detach().flatten().tolist(),
        }
        for name, tensor in site.watch.state_dict().items()
    }


def _tensors(buffers: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """The inverse of `_buffers`."""
    return {
        name: torch.tensor(
            saved["values"], dtype=getattr(torch, saved["dtype"]), device="cpu"
        ).reshape(saved["shape"])
        for name, saved in buffers.items()
    }


def load(state: Mapping[str, Any], sites: Sequence[Site], strict: bool) -> float:
    """Check a state against the sites; its epoch."""
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
    changed = [
        f"{key}: the state has {saved[key]['regularizer']}, the model has {here[key]}"
        for key in here
        if key in saved and saved[key]["regularizer"] != here[key]
    ]
    missing = [f"{key} is not in the state" for key in here if key not in saved]
    unknown = [f"{key} is in the state only" for key in saved if key not in here]
    if strict and (changed or missing or unknown):
        differences = "\n".join(f"  - {line}" for line in (*changed, *missing, *unknown))
        raise ValueError(
            f"the state is of another spec (strict=False takes what fits):\n{differences}"
        )
    return as_number("epoch", state["epoch"])


def _is_whole(site: Any) -> bool:
    if not isinstance(site, Mapping) or not isinstance(site.get("regularizer"), str):
        return False
    try:
        _norms(site)
    except (KeyError, TypeError, ValueError):
        return False
    expected = isinstance(site.get("expected"), int | float)
    return expected and all(isinstance(site.get(name), int) for name in _COUNTS)


def _norms(saved: Mapping[str, Any]) -> Norms:
    """The norms in the state of a site, where it has any."""
    return Norms.restored(saved["norms"]) if "norms" in saved else NO_NORMS


def restore(state: Mapping[str, Any], sites: Sequence[Site], control: Control) -> None:
    """Take over the statistics, and begin a new window."""
    control.stepped = bool(state.get("stepped", True))
    control.record.restore(Counts(trained=int(state.get("forwards", 0))))
    for site in sites:
        saved = state["sites"].get(site.key)
        if saved is None:
            counted = site.record.read(norms=True)
            site.record.restore(counted.life, counted.norms.get("life", NO_NORMS))
            continue
        site.record.restore(restored(saved), _norms(saved))
        if "buffers" in saved and site.watch is not None:
            site.watch.load_state_dict(_tensors(saved["buffers"]))
    control.open_window()
    control.fresh = True


def restored(saved: Mapping[str, Any]) -> Counts:
    """The counts in the state of a site."""
    elements = {name: saved[name] for name in _ELEMENTS}
    return Counts(trained=saved["calls"], active=saved["active_calls"], **elements)
