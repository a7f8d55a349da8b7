"""The rule ``equal_inputs``: batches whose samples are all equal, and those that may be so."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dropblock_hooks import Watchdog, attach, watch
from dropblock_hooks.functional import measures
from dropblock_hooks.observers import batches
from dropblock_hooks.observers.batches import samples_differ, samples_in


class Net(nn.Module):
    """Takes the arguments of a training loop, and uses the first tensor among them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, *args, **kwargs):
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        tensors = [vars(x).get("x", x) if isinstance(x, SimpleNamespace) else x for x in leaves]
        x = next(x for x in tensors if isinstance(x, torch.Tensor))
        return self.second(self.first(x.float().reshape(-1, 4)))


def trained(batch, steps=30, rules="equal_inputs", **options):
    """The findings of a training of two epochs; `batch` returns the arguments of a step."""
    torch.manual_seed(0)
    model, found = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, rules, action=found.append, **options) as attached:
        for epoch in range(2):
            for step in range(steps):
                args, kwargs = batch(epoch * steps + step)
                optimizer.zero_grad()
                model(*args, **kwargs).square().mean().backward()
                optimizer.step()
            attached.step()
    return found


def one(*shape):
    """A batch of one random sample that is repeated."""
    return torch.randn(1, *shape[1:]).expand(shape)


EQUAL = {
    "vectors": lambda step: ([one(5, 4)], {}),
    "one vector in all batches": lambda step: ([torch.arange(4.0).repeat(3, 1)], {}),
    "zeros": lambda step: ([torch.zeros(5, 3, 8, 8)], {}),
    "integers": lambda step: ([torch.full((5, 8), step)], {}),
    "sequences": lambda step: ([one(8, 6, 4)], {}),
    "by keyword, with a mask": lambda step: (
        [],
        {"input_ids": torch.full((5, 8), step), "attention_mask": torch.ones(5, 8)},
    ),
    "with labels": lambda step: ([], {"pixels": one(5, 4), "labels": torch.arange(5)}),
    "in a dict, with a flag": lambda step: ([{"x": one(5, 4)}, True, None], {}),
    "with a table that all samples share": lambda step: ([one(5, 4), torch.randn(1, 8)], {}),
}


@pytest.mark.parametrize("batch", EQUAL.values(), ids=EQUAL)
def test_equal_samples_are_reported(batch):
    (finding,) = trained(batch)
    assert (str(finding.kind), finding.layer) == ("equal_inputs", "first")


FULL = torch.randn(6, 4)
DIFFERENT = {
    "random vectors": lambda step: ([torch.randn(5, 4)], {}),
    "the whole data in each step": lambda step: ([FULL], {}),
    "one sample": lambda step: ([torch.ones(1, 4)], {}),
    "one sample among equal ones": lambda step: ([one(5, 4).index_fill(0, torch.tensor(4), 9)], {}),
    "positions beside the inputs": lambda step: ([torch.randn(5, 4), torch.zeros(5, 4)], {}),
    "times beside equal inputs": lambda step: ([one(5, 4), torch.arange(5)], {}),
    "equal samples in three of four steps": lambda step: (
        [one(5, 4) if step % 4 else torch.randn(5, 4)],
        {},
    ),
    "a vector without a batch": lambda step: ([torch.ones(4)], {}),
    "a gray image without a batch": lambda step: ([one(3, 8, 8)], {}),
    "gray images in a list": lambda step: ([[one(3, 8, 8), one(3, 8, 8)]], {}),
    "a graph, whose nodes have no features": lambda step: ([SimpleNamespace(x=one(5, 4))], {}),
    "nodes of ones and the edges between them": lambda step: (
        [torch.ones(8, 4), torch.tensor([[0, 1, 2], [1, 2, 3]])],
        {},
    ),
}


@pytest.mark.every(plain=2)
@pytest.mark.parametrize("batch", DIFFERENT.values(), ids=DIFFERENT)
@pytest.mark.parametrize("every", [1, 5, None])
def test_other_batches_are_not_reported(batch, every):
    assert trained(batch, every=every) == []


@pytest.mark.parametrize("every", [1, 5, 10, 100, None])
def test_each_plan_of_measured_forwards_finds_it(every):
    (finding,) = trained(EQUAL["vectors"], every=every)
    assert "all 5 samples" in finding.text


def test_too_few_forwards_are_not_judged():
    assert trained(EQUAL["vectors"], steps=1, min_calls=4) == []
    assert trained(EQUAL["vectors"], steps=2) == []
    assert len(trained(EQUAL["vectors"], steps=2, min_calls=4)) == 1


def test_a_loader_that_breaks_later_is_found_and_clears():
    model, found = Net(), []
    attached = watch(model, action=found.append, every=20)
    for first, is_equal in ((0, False), (1, True), (2, True), (3, False)):
        for _ in range(20):
            model(one(5, 4) if is_equal else torch.randn(5, 4)).square().mean().backward()
        kinds = [str(alert.kind) for alert in attached.alerts]
        assert ("equal_inputs" in kinds) == is_equal, first
    assert [str(finding.kind) for finding in found].count("equal_inputs") == 1
    attached.remove()


def test_the_effects_are_listed():
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), []
    model[1].bias.data.fill_(-1.0)
    with watch(model, action=found.append):
        for _ in range(20):
            model(one(5, 4)).square().mean().backward()
    assert str(found[0].kind) == "equal_inputs"
    assert "Likely effects of it: dead at 2" in found[0].text


def test_samples_are_compared_once_until_the_next_look_at_statistics(monkeypatch):
    compared = []

    def compare(x):
        compared.append(x.shape)
        return samples_differ(x)

    monkeypatch.setattr(batches, "samples_differ", compare)
    assert trained(DIFFERENT["random vectors"], steps=100, every=50) == []
    assert len(compared) == 4  # in the first forward, and after the looks at 50, 100 and 150
    compared.clear()
    assert trained(DIFFERENT["random vectors"], rules="dead") == []
    assert compared == []


def test_on_other_devices_numbers_are_read_by_looks_alone(monkeypatch):
    monkeypatch.setattr(measures, "READ", set())
    monkeypatch.setattr(batches, "READ", set())
    assert trained(DIFFERENT["random vectors"]) == []
    (finding,) = trained(EQUAL["vectors"])
    assert finding.layer == "first"


def test_samples_are_compared_as_a_loop_does():
    generator = random.Random(0)
    for _ in range(200):
        shape = [generator.randint(2, 4), *(generator.randint(1, 2) for _ in range(2))]
        x = torch.randint(generator.randint(1, 2), shape)
        different = {tuple(sample.flatten().tolist()) for sample in x}
        assert bool(samples_differ(x)) == (len(different) > 1)
    assert samples_differ(torch.full((2, 2), torch.nan))


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_tensors_that_cannot_be_compared_are_not_judged():
    x = torch.zeros(4, 3)
    assert samples_in([x]) == [x]
    assert samples_in([x, 2, "text", None, torch.zeros(())]) == [x]
    assert samples_in([x, x.to_sparse()]) == []
    assert samples_in([x.to("meta")]) == []
    assert samples_in([torch.zeros(4, 0)]) == []
    assert samples_in([torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(3, 2)])]) == []
    assert samples_in([]) == []


def test_a_copy_judges_its_own_batches():
    model, found = Net(), []
    attached = watch(model, "equal_inputs", action=found.append)
    for _ in range(9):
        model(torch.randn(5, 4)).sum().backward()
    twin = copy.deepcopy(model)
    assert twin(torch.ones(5, 4)).shape == (5, 2)
    attached.remove()
    assert found == []


def test_the_rule_of_one_layer_judges_the_whole_model():
    model, found = Net(), []
    dog = Watchdog("equal_inputs", action=found.append)
    with attach(model, {"second": dog}) as attached:
        for _ in range(20):
            model(one(5, 4)).sum().backward()
        attached.step()
    assert [finding.layer for finding in found] == ["second"]
