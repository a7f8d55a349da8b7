"""`Attachment.history`: a row for each epoch and site, kept in the state.

The expected rows are counted by hand, by hooks of the tests themselves.
"""

import copy
import json
import pickle
import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    ActivityL2,
    ClipGradNorm,
    Dropout,
    Dropout2d,
    GaussianNoise,
    HookWarning,
    LinearSchedule,
    Probability,
    Regularizer,
    Retune,
    StepSchedule,
    attach,
    attachments,
    register,
)

RISING = StepSchedule({0: 0.1, 1: 0.3, 2: 0.5})
SPEC = {
    "1": Dropout(p=RISING),
    "2": ActivityL2(0.5),
    "param:2.weight": ClipGradNorm(0.05),
    "0": ActivationStats(),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))


def batch():
    return torch.rand(8, 6) + 0.5


def train(model, steps=3):
    for _ in range(steps):
        model.zero_grad()
        model(batch()).square().mean().backward()


class ByHand:
    """Counts what a dropout drops, and the norms of a gradient, in the epochs of a training."""

    def __init__(self, model):
        self.dropped = {}
        self.norms = {}
        self.epoch = 0
        model[0].register_forward_hook(self.count)
        model[2].weight.register_hook(self.measure)

    def count(self, layer, args, output):
        """Before the dropout: what the ReLU lets pass, by whose zeros afterwards it is compared."""
        self.positive = output > 0

    def note(self, layer, args, output):
        zeros = (output == 0) & self.positive
        self.dropped.setdefault(self.epoch, []).append((int(zeros.sum()), int(self.positive.sum())))

    def measure(self, grad):
        self.norms.setdefault(self.epoch, []).append(float(grad.norm()))


def test_a_row_for_each_epoch_and_site():
    model = net()
    model[0].bias.data.fill_(10.0)  # the ReLU lets all pass, so zeros are those of the dropout
    by_hand = ByHand(model)
    attached = attach(model, SPEC)
    model[1].register_forward_hook(by_hand.note)
    for epoch, steps in enumerate([2, 3, 4]):
        by_hand.epoch = epoch
        attached.step(epoch)
        train(model, steps)
    rows = {(row.epoch, row.site): row for row in attached.history}
    keys = [site.key for site in attached]
    assert list(rows) == [(epoch, key) for epoch in range(3) for key in keys]
    for epoch, steps in enumerate([2, 3, 4]):
        dropout = rows[epoch, "1/Dropout"]
        dropped = sum(number for number, _ in by_hand.dropped[epoch])
        passed = sum(number for _, number in by_hand.dropped[epoch])
        assert passed == steps * 8 * 40
        assert dropout.realized_rate == pytest.approx(dropped / passed)
        assert dropout.rate == dropout.expected_rate == RISING(epoch)
        assert (dropout.calls, dropout.active_calls) == (steps, steps)

        clip = rows[epoch, "2.weight/ClipGradNorm"]
        norms = by_hand.norms[epoch]
        assert clip.mean_norm == pytest.approx(sum(norms) / len(norms), rel=1e-5)
        assert clip.largest_norm == pytest.approx(max(norms), rel=1e-5)
        assert clip.expected_rate is clip.penalty is None
        assert rows[epoch, "0/ActivationStats"].rate is None

        penalty = rows[epoch, "2/ActivityL2"]
        assert penalty.penalty > 0
        assert penalty.mean_norm is penalty.largest_norm is None
    assert rows[0, "2/ActivityL2"].penalty != rows[1, "2/ActivityL2"].penalty


def test_rates_and_numbers_are_those_of_the_site_and_of_scalars():
    model = net()
    attached = attach(model, SPEC)
    train(model)
    row = attached.history[0]
    site = attached["1/Dropout"]
    assert row.realized_rate == site.realized_rate
    assert row.expected_rate == pytest.approx(site.expected_rate)
    (clip,) = [row for row in attached.history if row.site == "2.weight/ClipGradNorm"]
    assert clip.mean_norm == pytest.approx(attached["2.weight/ClipGradNorm"].norms.mean)
    penalty = attached.scalars()["reg/2/ActivityL2/penalty"]
    assert [row.penalty for row in attached.history if row.penalty] == pytest.approx([penalty])


def test_fractions_of_an_epoch_have_their_mean_nominal_rate():
    model = net()
    attached = attach(model, {"1": Dropout(p=lambda t: t / 4)})
    for i in range(4):
        attached.step(1 + i / 4)
        train(model, 1)
    attached.step(2)
    (row,) = attached.history
    assert row.epoch == 1
    assert row.rate == 1.75 / 4
    assert row.expected_rate == pytest.approx(sum((1 + i / 4) / 4 for i in range(4)) / 4)


def test_the_last_epoch_is_added_when_the_attachment_is_removed():
    model = net()
    with attach(model, SPEC) as attached:
        for epoch in range(2):
            attached.step(epoch)
            train(model)
        before = attached.history.to_dicts()
    assert attached.history.to_dicts() == before
    assert {row["epoch"] for row in before} == {0, 1}
    attached.remove()
    assert attached.history.to_dicts() == before


def test_epochs_without_calls_have_no_rows():
    model = net()
    attached = attach(model, {"1": Dropout(0.1)})
    attached.step(7)  # a training that begins there
    train(model)
    attached.step()
    assert [row.epoch for row in attached.history] == [7]
    attached.remove()
    assert [row.epoch for row in attached.history] == [7]


def test_a_new_rate_in_an_epoch_begins_the_realized_rate_but_not_the_calls():
    model = net()
    attached = attach(model, {"1": Dropout(0.1)})
    train(model, 2)
    attached.set("1", p=0.9)
    train(model, 3)
    (row,) = attached.history
    assert (row.rate, row.calls) == (0.9, 5)
    assert row.realized_rate > 0.8


def test_findings_are_in_the_row_of_their_site_and_of_the_model():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    attached = attach(model, {"1": Dropout(0.1), "0": Dropout(0.1)})
    model[1].eval()
    with pytest.warns(HookWarning, match="never active"):
        train(model)
    attached.step()
    model.eval()
    model(batch())
    with pytest.warns(HookWarning, match="training"):
        attached.step()
    rows = {(row.epoch, row.site): row.findings for row in attached.history}
    assert rows == {
        (0, "1/Dropout"): ("never_active",),
        (0, "0/Dropout"): (),
        (1, "1/Dropout"): (),
        (1, "0/Dropout"): (),
        (1, "."): ("not_trained",),
    }


def test_findings_of_a_watchdog():
    from dropblock_hooks import watch

    model = net()
    seen = []
    with watch(model, "nonfinite", action=seen.append) as attached:
        model(batch() * torch.nan).sum().backward()
        attached.step()
    (finding,) = seen
    rows = {row.site: row.findings for row in attached.history}
    assert rows[finding.sites[0]] == ("nonfinite",)
    assert len(rows) == 4


def test_nothing_is_read_from_the_device_in_a_step(monkeypatch):
    """Counts stay tensors until the history is read."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    attached = attach(model, {"1": Dropout2d(0.3), "param:**": ClipGradNorm(0.1)})
    read = []
    for name in ("item", "tolist", "__int__", "__float__", "__bool__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def noted(self, *args, original=original, name=name):
            read.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, noted)
    for epoch in range(3):
        attached.step(epoch)
        model(torch.ones(2, 1, 8, 8)).sum().backward()
    during = list(read)
    assert len(attached.history) == 15
    assert read[len(during) :]
    bare = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    attached = attach(bare, {"1": Dropout2d(0.3), "param:**": ClipGradNorm(0.1)})
    monkeypatch.setattr(type(attached._run.history), "close", lambda *given: None)
    read.clear()
    for epoch in range(3):
        attached.step(epoch)
        bare(torch.ones(2, 1, 8, 8)).sum().backward()
    assert during == read, "as many as without a history"


def run(attached, model, epochs, steps=4, begin=0):
    """Train; each epoch has its own random state, so that it may begin in any of them."""
    for epoch in epochs:
        for step in range(begin, steps):
            torch.manual_seed(100 * epoch + step)
            attached.step(epoch + step / steps)
            train(model, 1)
        begin = 0


def rounded(rows):
    """Norms that are added up in another order differ in the last digit."""
    return [
        {name: round(x, 6) if isinstance(x, float) else x for name, x in row.items()}
        for row in rows
    ]


@pytest.mark.parametrize("way", ["state_dict", "json", "pickle", "deepcopy"])
@pytest.mark.parametrize("begin", [0, 2])
def test_a_resumed_training_continues_it(way, begin):
    spec = {**SPEC, "1": Dropout(p=LinearSchedule(0.0, 0.5))}
    whole = net()
    attached = attach(whole, spec, epochs=4)
    run(attached, whole, range(4))
    expected = attached.history.to_dicts()

    model = net()
    first = attach(model, spec, epochs=4)
    run(first, model, range(2))
    if begin:
        for step in range(begin):
            torch.manual_seed(200 + step)
            first.step(2 + step / 4)
            train(model, 1)
    if way in ("state_dict", "json"):
        state = first.state_dict()
        state = json.loads(json.dumps(state)) if way == "json" else copy.deepcopy(state)
        model = net()
        resumed = attach(model, spec, epochs=4)
        resumed.load_state_dict(state)
    else:
        copied = pickle.loads(pickle.dumps(model)) if way == "pickle" else copy.deepcopy(model)
        model = copied
        (resumed,) = attachments(copied)
    run(resumed, model, range(2, 4), begin=begin)
    seen = resumed.history.to_dicts()
    assert rounded(seen) == rounded(expected)
    assert len(seen) == 16


@pytest.mark.parametrize("removed", [False, True])
def test_a_loaded_state_has_its_last_epoch_before_any_call(removed):
    model = net()
    attached = attach(model, SPEC)
    run(attached, model, range(3))
    other = attach(net(), SPEC)
    other.load_state_dict(attached.state_dict())
    expected = attached.history.to_dicts()
    if removed:
        other.remove()
    assert {row["epoch"] for row in expected} == {0, 1, 2}
    assert other.history.to_dicts() == expected


@pytest.mark.parametrize("set_after", [False, True], ids=["only a break", "set after the break"])
def test_norms_of_an_epoch_with_a_break_are_rounded_once(set_after):
    def clipped():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
        return model, attach(model, {"param:**": ClipGradNorm(1.0)})

    def steps(model, numbers):
        for number in numbers:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            model.zero_grad()
            model(x).square().mean().backward()

    model, whole = clipped()
    steps(model, range(3))
    if set_after:
        whole.set(ClipGradNorm, max_norm=2.0)
    steps(model, range(3, 6))
    first, interrupted = clipped()
    steps(first, range(3))
    second, resumed = clipped()
    resumed.load_state_dict(interrupted.state_dict())
    if set_after:
        resumed.set(ClipGradNorm, max_norm=2.0)
    steps(second, range(3, 6))
    assert len(whole.history) == 40
    assert resumed.history.to_dicts() == whole.history.to_dicts()


def test_a_state_in_the_first_epoch_keeps_its_calls():
    model = net()
    attached = attach(model, SPEC)
    train(model, 2)
    again = attach(resumed := net(), SPEC)
    again.load_state_dict(attached.state_dict())
    train(resumed, 3)
    assert [row.calls for row in again.history] == [5] * 4


def test_a_state_without_a_history_is_read():
    model = net()
    attached = attach(model, SPEC)
    train(model, 2)
    attached.step()
    train(model, 2)
    state = attached.state_dict()
    del state["history"]
    again = attach(resumed := net(), SPEC)
    again.load_state_dict(state)
    train(resumed, 3)
    assert [(row.epoch, row.calls) for row in again.history] == [(1, 3)] * 4


def test_a_damaged_history_changes_nothing():
    model = net()
    attached = attach(model, SPEC)
    train(model)
    attached.step()
    state = attached.state_dict()
    state["history"]["rows"][0] = [1, 2]
    before = attached.history.to_dicts()
    with pytest.raises(ValueError, match="damaged"):
        attached.load_state_dict(state)
    assert attached.history.to_dicts() == before


def test_an_epoch_that_comes_again_replaces_the_first_one():
    model = net()
    attached = attach(model, {"1": Dropout(0.1)})
    for epoch, steps in [(0, 1), (1, 2), (0, 3), (1, 4)]:
        attached.step(epoch)
        train(model, steps)
    assert sorted((row.epoch, row.calls) for row in attached.history.rows[:-1]) == [(0, 3), (1, 2)]
    assert attached.history[-1].calls == 4
    attached.step(2)
    assert [(row.epoch, row.calls) for row in attached.history] == [(0, 3), (1, 4)]


def test_an_epoch_that_comes_again_in_a_turn_that_is_left_out_replaces_the_first_one(monkeypatch):
    monkeypatch.setattr("dropblock_hooks.sites.history.MOST_ROWS", 2)
    monkeypatch.setattr("dropblock_hooks.sites.history.FEWEST_EPOCHS", 2)
    model = net()
    attached = attach(model, {"1": Dropout(0.1)})
    for epoch, steps in [(0, 1), (1, 1), (2, 1), (0, 5)]:  # the fourth turn is left out
        attached.step(epoch)
        train(model, steps)
    attached.remove()
    assert sorted((row.epoch, row.calls) for row in attached.history) == [(0, 5), (2, 1)]


def test_an_epoch_without_calls_of_a_layer_has_no_penalty():
    model = net()
    attached = attach(model, {"0": GaussianNoise(0.1), "2": ActivityL2(0.5)})
    attached.step(0)
    train(model)
    attached.step(1)
    model[0](batch()).sum().backward()
    with pytest.warns(HookWarning, match="never called"):
        attached.remove()
    penalties = [row.penalty for row in attached.history if row.site == "2/ActivityL2"]
    assert penalties[0] > 0
    assert penalties[1:] == [None]


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("dropblock_hooks.sites.history.MOST_ROWS", 16)
    monkeypatch.setattr("dropblock_hooks.sites.history.FEWEST_EPOCHS", 4)
    model = net()
    attached = attach(model, {"1": Dropout(0.1), "0": GaussianNoise(0.1)})
    kept = []
    for epoch in range(40):
        attached.step(epoch)
        train(model, 1)
        kept.append(sorted({row.epoch for row in attached.history}))
    assert all(len(epochs) <= 9 for epochs in kept)  # 8 and the open one
    assert kept[7] == list(range(8))
    assert kept[9] == [0, 2, 4, 6, 8, 9]
    assert kept[39] == [0, 8, 16, 24, 32, 39]

    again = attach(resumed := net(), {"1": Dropout(0.1), "0": GaussianNoise(0.1)})
    again.load_state_dict(attached.state_dict())
    train(resumed, 1)
    for epoch in range(40, 50):
        again.step(epoch)
        train(resumed, 1)
    assert sorted({row.epoch for row in again.history}) == [0, 8, 16, 24, 32, 40, 48, 49]


def test_counts_of_several_dtypes(own_registry):
    @register
    class CountsInFloats(Regularizer):
        unit = "elements"
        p: Probability = 0.5

        def apply(self, x, now):
            return x * 1.0, torch.tensor(x.numel() / 4)

    class CountsALot(Regularizer):
        """Its numbers are none that float32 can hold."""

        def apply(self, x, now):
            return x * 1.0, torch.tensor(2**40 + 1)

    model = net()
    attached = attach(model, {"0": CountsInFloats(), "1": CountsALot(), "2": Dropout(0.5)})
    train(model, 3)
    attached.step()
    first, second, _ = attached.history
    assert (first.realized_rate, first.expected_rate) == (0.25, 0.5)
    assert second.realized_rate == (2**40 + 1) / (8 * 40)


def test_rates_that_the_model_holds_have_rows_without_a_share():
    model = nn.ModuleDict({"rnn": nn.LSTM(3, 3, 2, dropout=0.2)})
    attached = attach(model, {"attr:rnn.dropout": Retune(0.4)})
    model["rnn"](torch.rand(2, 1, 3))
    rows = attached.history
    assert all(row.expected_rate is row.realized_rate is None for row in rows)


def test_it_prints_and_converts():
    pandas = pytest.importorskip("pandas")
    model = net()
    attached = attach(model, SPEC)
    assert len(attached.history) == 0
    assert str(attached.history).startswith("history of 0 epochs")
    train(model)
    attached.step()
    lines = str(attached.history).splitlines()
    assert lines[0] == "history of 1 epoch"
    assert lines[1].split()[:4] == ["epoch", "site", "rate", "expected"]
    frame = attached.history.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert (
        frame[frame.site == "1/Dropout"].realized_rate.item() == attached.history[0].realized_rate
    )
    with pytest.raises(AttributeError):
        attached.history[0].epoch = 3


@pytest.mark.slow
def test_compiled_code():
    torch._dynamo.reset()
    model = net()
    attached = attach(model, {"1": Dropout(p=RISING), "param:2.weight": ClipGradNorm(0.05)})
    call = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", HookWarning)
        for epoch in range(3):
            attached.step(epoch)
            for _ in range(4):
                call(batch()).square().mean().backward()
    rows = [row for row in attached.history if row.site == "1/Dropout"]
    assert [(row.epoch, row.active_calls) for row in rows] == [(0, 4), (1, 4), (2, 4)]
    for row in rows:
        assert row.expected_rate == pytest.approx(RISING(row.epoch))
        assert row.realized_rate == pytest.approx(RISING(row.epoch), abs=0.06)
    norms = [row.mean_norm for row in attached.history if row.site != "1/Dropout"]
    assert all(norms)
