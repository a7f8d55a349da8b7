"""Attachments of a model and of a module inside it, at the same time."""

import copy
import io

import pytest
import torch
from torch import nn

from dropblock_hooks import ClipGradNorm, Dropout, attach, attachments, detach_all


def make():
    inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return nn.Sequential(inside, nn.Linear(4, 4))


def attach_both(model):
    whole = attach(model, {"0.0": Dropout(0.5), "param:1.weight": ClipGradNorm(0.1)})
    part = attach(model[0], {"1": Dropout(0.2)})
    return whole, part


def run(model):
    model(torch.randn(8, 4)).sum().backward()


def keys(attached):
    return {tuple(site.key for site in each) for each in attached}


KEYS = {("0.0/Dropout", "1.weight/ClipGradNorm"), ("1/Dropout",)}
ASKED = {"model": lambda model: model, "module inside": lambda model: model[0]}


@pytest.mark.parametrize("asked", ASKED)
def test_looking_for_attachments_leaves_no_hook(asked, hook_count):
    model = make()
    whole, part = attach_both(model)
    before = hook_count(model)
    found = attachments(ASKED[asked](model))
    assert keys(found) == KEYS
    assert set(found) == {whole, part}
    assert hook_count(model) == before
    run(model)
    assert all(site.calls == 1 for attached in (whole, part) for site in attached)
    part.remove()
    whole.remove()
    assert hook_count(model) == 0


@pytest.mark.parametrize("asked", ASKED)
def test_all_are_taken_off(asked, hook_count):
    model = make()
    attach_both(model)
    assert detach_all(ASKED[asked](model)) == 2
    assert hook_count(model) == 0


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_finds_both(copied, hook_count):
    model = make()
    attach_both(model)
    other = copied(model)
    run(other)  # which hooks the parameters of a copy
    before = hook_count(other)
    found = attachments(other)
    assert keys(found) == KEYS
    assert hook_count(other) == before
    for attached in found:
        attached.step(1)
    run(other)
    assert [attached.verify() for attached in found] == [[], []]
    assert not any(site.calls for attached in attachments(model) for site in attached)
    for attached in found:
        attached.remove()
    assert hook_count(other) == 0


def test_a_copy_of_the_module_inside_has_its_own(hook_count):
    model = make()
    attach_both(model)
    inside = copy.deepcopy(model[0])
    found = attachments(inside)
    assert keys(found) == {("0.0/Dropout",), ("1/Dropout",)}
    for attached in found:
        attached.remove()
    assert hook_count(inside) == 0
