"""Other implementations of DropBlock as a regularizer: what is said of one that is not there."""

import pytest

from experiments import peers
from experiments.peers import PeerDropBlock2d


def test_a_peer_that_is_not_installed_is_not_unknown(monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda: ["torchvision", "timm"])
    message = r"^peer 'dropblock shared' is not installed: pip install dropblock$"
    with pytest.raises(ValueError, match=message):
        PeerDropBlock2d("dropblock shared", p=0.1)


def test_a_peer_that_is_unknown_is_told_the_closest():
    with pytest.raises(ValueError, match=r"unknown peer 'tim' \(closest: timm"):
        PeerDropBlock2d("tim", p=0.1)
