"""The state of an Attachment as plain numbers and text, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .control import Control
from .schedules import as_number
from .site import Site
from .tallies import Tally

_VERSION = 1
_TALLIES = ("window", "closed", "before")


def save(sites: Sequence[Site], control: Control) -> dict[str, Any]:
    """Epoch and statistics."""
    return {
        "version": _VERSION,
        "epoch": control.epoch,
        "stepped": control.stepped,
        "forwards": control.forwards,
        "sites": {site.key: site_state(site) for site in sites},
    }


def site_state(site: Site) -> dict[str, Any]:
    """The statistics of one site."""
    state: dict[str, Any] = {
        "regularizer": repr(site.regularizer),
        "calls": site.calls,
        "active_calls": site.active_calls,
    }
    record = site.record
    for name, tally in zip(
        _TALLIES, (record.open_window(), record.closed, record.before), strict=True
    ):
        state[name] = [int(tally.affected), tally.total, tally.expected]
    buffers = _buffers(site)
    if buffers:
        state["buffers"] = buffers
    return state


def _buffers(site: Site) -> dict[str, dict[str, Any]]:
    """The tensors that a regularizer keeps at its site, as plain numbers."""
    if not hasattr(site.bound, "state_dict"):
        return {}
    return {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "values": tensor.detach().flatten().tolist(),
        }
        for name, tensor in site.bound.state_dict().items()
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
    for site in sites:
        misfit = _misfit(site, saved.get(site.key, {}))
        if strict and misfit is not None:
            raise ValueError(f"the buffers in the state of {site.key} don't fit: {misfit}")
    return as_number("epoch", state["epoch"])


def _misfit(site: Site, saved: Mapping[str, Any]) -> Exception | None:
    """Why this site can't take its buffers over, tried on a copy; None where it can."""
    try:
        if "buffers" in saved:
            copy.deepcopy(site.bound).load_state_dict(_tensors(saved["buffers"]))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return error
    return None


def _is_whole(site: Any) -> bool:
    if not isinstance(site, Mapping) or not isinstance(site.get("regularizer"), str):
        return False
    counts = [site.get("calls"), site.get("active_calls")]
    tallies = [site.get(name) for name in _TALLIES]
    return all(isinstance(count, int) for count in counts) and all(
        isinstance(tally, list | tuple)
        and len(tally) == 3
        and all(isinstance(number, int | float) for number in tally)
        for tally in tallies
    )


def restore(state: Mapping[str, Any], sites: Sequence[Site], control: Control) -> None:
    """Take over the statistics."""
    control.stepped = bool(state.get("stepped", True))
    control.forwards = int(state.get("forwards", 0))
    for site in sites:
        saved = state["sites"].get(site.key)
        if saved is not None:
            window, closed, before = (Tally(*saved[name]) for name in _TALLIES)
            site.record.restore(saved["calls"], saved["active_calls"], window, closed, before)
            if "buffers" in saved and _misfit(site, saved) is None:
                site.bound.load_state_dict(_tensors(saved["buffers"]))
