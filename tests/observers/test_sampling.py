"""Calls that are not measured start no operator of torch, and are counted like others."""

import copy
import itertools
import math
import random
import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    ActivationStats,
    GradientStats,
    Observer,
    Rate,
    Watchdog,
    attach,
    attachments,
    register,
    watch,
)
from dropblock_hooks.diagnosis import sights
from dropblock_hooks.functional.kernels import launch
from dropblock_hooks.functional.measures import DISTANCE
from dropblock_hooks.observers import watchdog
from dropblock_hooks.observers.updates import Updates
from dropblock_hooks.observers.watchdog import Clock
from tests.cases import rest_slow


class Operators(TorchDispatchMode):
    """Notes the operators of a block of code."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


class Net(nn.Module):
    """Its layers return views, a leaf, and what works in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.flat = nn.Flatten()
        self.head = nn.Linear(64, 2)
        self.leaf = nn.Parameter(torch.ones(3, 2))
        self.same = nn.Identity()

    def forward(self, x):
        y = self.head(self.flat(self.act(self.norm(self.conv(x)))))
        return y + self.same(self.leaf).sum(0)


def images():
    return torch.randn(4, 3, 6, 6)


def operators_of(model, x=None):
    """The number of operators in a forward and a backward."""
    x = images() if x is None else x
    model.zero_grad()
    with Operators() as operators:
        model(x).square().sum().backward()
    return len(operators.names)


STATISTICS = {
    "activations": {"**": ActivationStats(every=3)},
    "gradients": {"**": GradientStats(every=3)},
    "gradients of parameters": {"param:**": GradientStats(every=3)},
    "both": {"**": [ActivationStats(every=3), GradientStats(every=3)]},
}


@pytest.mark.parametrize("which", STATISTICS)
def test_statistics_start_operators_in_each_nth_call_only(which):
    bare = operators_of(Net())
    model = Net()
    attached = attach(model, STATISTICS[which])
    more = [operators_of(model) > bare for _ in range(7)]
    assert more == [True, False, False] * 2 + [True]
    attached.step()
    assert operators_of(model) > bare, "the first call of an epoch is measured"
    assert operators_of(model) == bare
    assert not attached.verify()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_follows_its_forward(reentrant):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    attached = attach(model, {"0": [ActivationStats(every=2), GradientStats(every=2)]})
    for factor in (1.0, 10.0, 100.0):
        x = torch.ones(2, 4, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=reentrant)
        model[0].bias.data.fill_(factor)
        (y.sum() * factor).backward()
    values, gradients = (row.observed for row in attached.report())
    assert (values.calls, gradients.calls) == (2, 2)
    assert gradients.largest == 100.0


def test_code_that_is_compiled_without_being_traced_measures_as_often():
    class Scaler:
        def get_scale(self):
            return 2.0

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    spec = {"*": [ActivationStats(every=2), GradientStats(every=2)]}
    attached = attach(model, spec, grad_scaler=Scaler())
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        run(torch.ones(2, 4)).sum().backward()
    assert not all(site._live.traced for site in attached)
    assert [row.observed.calls for row in attached.report()] == [2] * 4


def measured_forwards(attached, model, number):
    """The numbers, from 1, of the forwards that a Watchdog measures in a training."""
    bare = operators_of(Net())
    return [i for i in range(1, number + 1) if operators_of(model) > bare]


def test_a_watchdog_starts_operators_in_the_steps_that_it_looks_at_only():
    model = Net()
    attached = watch(model, every=50)
    assert measured_forwards(attached, model, 70) == [1, 2, 4, 8, 16, 32, 50, 60, 64]
    attached.step()
    assert measured_forwards(attached, model, 20) == [1, 20], "an epoch begins"
    attached.remove()


def planned_forwards(clock, every, number, enough=4):
    """The numbers of the next forwards that a `Clock` plans to measure."""
    numbers = []
    for _ in range(number):
        if clock.measures:
            numbers.append(clock.forwards + 1)
        clock.count()
        if clock.forwards % every == 0:
            clock.begin()
        clock.plan(every, enough)
    return numbers


def test_few_of_the_first_forwards_are_measured():
    numbers = planned_forwards(Clock(), 100, 1000)
    for first in range(4, 16):
        assert len([i for i in numbers if first <= i < first + 25]) <= 4
    for look in range(100, 1001, 100):
        # the gradients of the forward of a look come after it
        assert 4 <= len([i for i in numbers if look - 100 <= i < look]) <= 8
    assert len(numbers) < 60


@pytest.mark.parametrize("length", [1, 3, 5, 12, 40, 90, 300])
def test_each_epoch_has_enough_measured_forwards(length):
    clock = Clock()
    planned_forwards(clock, 100, length)
    for _ in range(5):
        clock.end_epoch()
        clock.begin()
        first = clock.forwards + 1
        numbers = planned_forwards(clock, 100, length)
        assert numbers[0] == first
        assert len(numbers) >= min(length, 4)
        assert len(numbers) <= 9 + length // 12


@pytest.mark.parametrize("options", [{"every": None}, {"every": 1}, {"every": 5}])
def test_a_watchdog_that_measures_each_step(options):
    model = Net()
    with watch(model, **options) as attached:
        assert measured_forwards(attached, model, 40) == [*range(1, 41)]


def test_a_captured_step_starts_and_reads_nothing(monkeypatch):
    model = Net()
    bare = operators_of(model)
    attached = attach(model, {"**": Watchdog(every=1)})
    assert operators_of(model) > bare
    monkeypatch.setattr(launch, "is_captured", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(watchdog, "read_together", lambda sites: pytest.fail("nothing can be read"))
        patch.setattr(sights, "read_together", watchdog.read_together)
        assert operators_of(model) == bare
        model.conv.weight.data.fill_(math.nan)
        assert operators_of(model) == bare
    monkeypatch.setattr(launch, "is_captured", lambda: False)
    with pytest.warns(match="nan|NaN"):
        model(images())
    assert [alert.layer for alert in attached.alerts] == ["conv"]


def test_a_look_reads_once_for_all_sites(monkeypatch):
    monkeypatch.setattr(
        watchdog, "extremes", lambda *args, **options: (torch.zeros(()), torch.zeros(()))
    )
    model = Net()
    attached = watch(model, every=None)
    for _ in range(3):
        model(images()).square().sum().backward()
    reads = []
    together = watchdog.together
    monkeypatch.setattr(
        watchdog, "together", lambda numbers: reads.append(len(numbers)) or together(numbers)
    )
    attached.step()
    assert reads[-1] > 3 * len(attached.sites), "calls and gradients"
    assert len([number for number in reads if number > 3]) == 1
    attached.remove()


def test_in_evaluation_each_call_is_measured_where_the_watchdog_is_always_active():
    bare = operators_of(Net().eval())
    model = Net()
    attach(model, {"*": [Watchdog(active="always")]})
    for _ in range(40):
        operators_of(model)
    assert operators_of(model.eval()) > bare


class Spoiled(nn.Module):
    """Four layers, and an update of one of them that is not finite."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)

    def spoil(self, value):
        self.layers[2].weight.data.fill_(value)


def train(model, steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()


def test_after_nan_between_two_looks_each_step_is_measured():
    model, found = Spoiled(), []
    attached = watch(model, "nonfinite", every=20, action=found.append)
    train(model, 52)
    model.spoil(math.nan)
    train(model, 3)
    assert found == []
    train(model, 1)
    assert "came between forward 52 and forward 56," in found[0].text
    assert "parameter 'weight' of layers.2" in found[0].cure
    model.spoil(0.1)  # as from a checkpoint
    train(model, 30)
    bare = operators_of(Spoiled(), torch.ones(2, 4))
    assert operators_of(model, torch.ones(2, 4)) > bare
    model.layers[1].bias.data.fill_(math.inf)
    train(model, 13)
    assert [each.layer for each in found] == ["layers.2", "layers.1"]
    assert "between" not in found[1].text
    attached.remove()


def test_a_layer_that_makes_nan_in_the_first_step_after_others_is_named():
    """Parameters that are finite tell that nothing came before."""

    class Log(nn.Module):
        def forward(self, x):
            return x.log() if self.fails else x

    model, found = nn.Sequential(nn.Linear(4, 4), Log(), nn.Linear(4, 4)), []
    model[1].fails = False
    attached = watch(model, "nonfinite", every=20, action=found.append)
    train(model, 59)
    model[0].bias.data.fill_(-100.0)
    model[1].fails = True
    train(model, 1)
    assert [each.layer for each in found] == ["1"]
    assert "its input was finite" in found[0].text
    attached.remove()


def test_nan_in_a_measured_step_is_named_by_a_look_after_others():
    model, found = Spoiled(), []
    attached = watch(model, "nonfinite", every=5, action=found.append)  # measures each forward
    train(model, 5)
    handle = model.layers[2].register_forward_pre_hook(lambda module, args: args[0] * math.nan)
    train(model, 1)
    handle.remove()
    assert found == []
    model.spoil(math.nan)
    train(model, 2)
    assert [each.layer for each in found] == ["layers"], "the block around the pre-hook"
    assert "between" not in found[0].text
    attached.remove()


def test_an_epoch_that_begins_with_nan_is_told_in_its_first_step():
    model, found = Spoiled(), []
    attached = watch(model, "nonfinite", action=found.append)
    train(model, 50)
    attached.step()
    model.spoil(math.nan)
    train(model, 1)
    assert "came between forward 32 and forward 51," in found[0].text
    attached.remove()


def test_the_end_of_an_epoch_tells_of_nan_in_steps_that_were_not_measured():
    model, found = Spoiled(), []
    with watch(model, "nonfinite", action=found.append) as attached:
        train(model, 50)
        attached.step()
        train(model, 13)  # the first one of an epoch is measured
        model.spoil(math.nan)
        assert [each.layer for each in attached.alerts] == ["layers.2"]
        assert found == []
    assert [each.layer for each in found] == ["layers.2"]
    assert "came after forward 51," in found[0].text


def test_a_layer_that_no_measured_forward_calls_is_not_told_to_be_never_called():
    class Rare(nn.Module):
        def __init__(self):
            super().__init__()
            self.often, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)
            self.forwards = 0

        def forward(self, x):
            self.forwards += 1
            x = self.often(x)
            return self.rare(x) if self.forwards in (85, 185) else x

    model, found = Rare(), []
    attached = watch(model, action=found.append)
    for epoch in range(3):
        for _ in range(95):
            model.zero_grad()
            model(torch.eye(2, 4)).sum().backward()
        attached.step()
        assert [each.layer for each in found] == (["rare"] if epoch == 2 else [])
    attached.remove()


def test_forwards_without_gradients_do_not_use_up_the_measured_ones():
    found = []
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model.requires_grad_(True)
    attached = watch(model, "exploding", every=100, max_ratio=1.5, action=found.append)
    for step in range(200):
        if step == 100:
            model[0].weight.data.fill_(1.0)
            model[3].weight.data.fill_(100.0)
        with torch.no_grad():
            model(torch.ones(2, 4))
        if step % 2:
            train(model, 1)
    assert [each.layer for each in found] == ["0"]
    attached.remove()


def test_after_the_loss_scale_has_fallen_each_step_is_measured():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    attached = watch(model, every=50, grad_scaler=scaler)

    def operators_in_a_step(bad):
        optimizer.zero_grad()
        with Operators() as operators:
            loss = scaler.scale(model(torch.eye(2, 4)).square().sum() * bad)
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        return len(operators.names)

    numbers = [operators_in_a_step(math.inf if i in (45, 46) else 1.0) for i in range(1, 101)]
    measured = [i for i, number in enumerate(numbers, 1) if number > min(numbers)]
    # the look at 50 finds that the scale fell, and the one at 64 that it did not fall again
    assert measured == [1, 2, 4, 8, 16, 32, *range(50, 65), 100]
    attached.remove()


def test_beside_compiled_code_each_forward_is_measured():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    attached = watch(model, action="raise")
    train(model, 40)
    model[1].compile(backend="aot_eager")
    train(model, 20)
    attached.alerts  # takes the counts of compiled code  # noqa: B018
    eager, compiled = (attached[f"{name}/Watchdog"]._live.watch.open["watched"] for name in "01")
    assert eager.measured == 6 + 19, "from the second forward on with compiled code"
    own = [1, 2, 4, 8, 16, 20]
    assert compiled.measured == 6 + len(own), "the forwards that it measures itself"
    attached.remove()


@pytest.mark.slow
def test_compiled_code_measures_some_forwards_and_tells_between_which_nan_came():
    torch._dynamo.reset()
    model, found = Spoiled(), []
    attached = watch(model, "nonfinite", every=50, action=found.append)
    model.compile(backend="aot_eager")
    train(model, 50)
    run = attached._run
    run.take_counts()
    watched = attached["layers.2/Watchdog"]._live.watch.open["watched"]
    observed = attached["layers.2/Watchdog"]._live.observed
    before = watched.measured
    train(model, 2)
    model.spoil(math.nan)
    train(model, 12)
    assert "came between forward 50 and forward 60," in found[0].text
    assert "parameter 'weight' of layers.2" in found[0].cure
    assert watched.measured - before == len([60, 64])
    assert observed.state[DISTANCE] == observed.gradients[DISTANCE] == 1
    model.spoil(0.1)
    train(model, 35)
    run.take_counts()
    assert watched.measured - before == 2 + 35, "each forward is measured"
    attached.remove()


@pytest.mark.slow
def test_compiled_code_tells_of_nan_after_the_last_measured_forward():
    torch._dynamo.reset()
    model, found = Spoiled(), []
    attached = watch(model, "nonfinite", every=100, action=found.append)
    model.compile(backend="aot_eager")
    train(model, 64)
    model.spoil(math.nan)
    train(model, 3)
    attached.step()
    assert [each.layer for each in found] == ["layers.2"]
    assert "after training forward 67." in found[0].text
    assert "came after forward 64," in found[0].text
    attached.remove()


def test_a_measured_step_of_a_watchdog_has_one_norm_for_each_tensor():
    """Of the output and of the gradient; a CPU, which does not wait, reads if they are finite."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    lists = []
    for watched in (False, True):
        attached = attach(model, {"1": Watchdog()}) if watched else None
        model(torch.eye(2, 4))  # the first forward after a look also reads the parameters
        model.zero_grad()
        with Operators() as operators:
            model(torch.eye(2, 4)).square().sum().backward()
        lists.append(Counter(operators.names))
    attached.remove()
    more = lists[1] - lists[0]
    for without_a_kernel in ("detach", "lt", "_local_scalar_dense"):
        del more[without_a_kernel]
    assert more == {"linalg_vector_norm": 2}


class Fails(nn.Module):
    """A linear layer whose output is NaN in one forward."""

    def __init__(self, at):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.at, self.forwards = at, 0

    def forward(self, x):
        self.forwards += 1
        y = self.linear(x)
        return y * math.nan if self.forwards == self.at else y


NUMBERS = re.compile(r"came (?:between forward (\d+) and|after) forward (\d+),")


@pytest.mark.parametrize(
    ("every", "epoch"),
    rest_slow(
        [*itertools.product([None, 1, 7, 50, 100], [30, 1000])], [(None, 30), (7, 30), (100, 1000)]
    ),
)
def test_nan_at_any_step_is_named_or_told_to_be_in_steps_that_were_not_measured(every, epoch):
    generator = random.Random(f"{every} {epoch}")
    for _ in range(6):
        at = generator.randint(1, min(2 * epoch, 150))
        place = generator.randrange(3)
        found = alerts_of_nan_at(at, place, every, epoch)
        where = f"step {at}, layer {place}: {found}"
        assert len(found) == 1, where
        measured, finding = found[0]
        numbers = NUMBERS.search(finding.text)
        assert measured == (numbers is None), where
        if measured:
            assert finding.layer == str(place), where
        else:
            before, last = numbers.groups()
            assert int(before or last) < at, where
            assert before is None or at < int(last), where


def alerts_of_nan_at(at, place, every, epoch, steps=160):
    """The alerts of a training with NaN in one step of a layer, and whether that was measured."""
    model = nn.Sequential(*(Fails(at if i == place else None) for i in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    found = []
    with watch(model, "nonfinite", every=every, action=found.append) as attached:
        for step in range(1, steps + 1):
            if step == at:
                measured = attached._run.shared["Watchdog"].measures
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            if step % epoch == 0:
                attached.step()
            if found:
                break
    return [(measured, each) for each in found]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_reading_numbers_does_not_change_which_calls_are_measured(compiled, read):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    spec = {"0": ActivationStats(every=10), "1": GradientStats(every=10)}
    attached = attach(model, spec, grad_scaler=False)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for epoch in range(2):
        attached.step(epoch)
        for i in range(25):
            y = run(torch.full((2, 4), float(i)))
            if read:
                attached.report()
            y.sum().backward()
            if read:
                attached.report()
        rows = attached.report()
        assert [row.observed.calls for row in rows] == [3, 3]
        assert [row.observed.values for row in rows] == [24, 24]
        inputs = torch.tensor([0.0, 10.0, 20.0])[:, None].expand(3, 4)
        expected = nn.functional.linear(inputs, model[0].weight, model[0].bias).mean().item()
        assert rows[0].observed.mean == pytest.approx(expected, rel=1e-5)
        assert rows[0].active_calls == 25 * (epoch + 1)


def test_a_frozen_layer_has_no_update_after_a_new_beginning():
    layer = nn.Linear(2, 2)
    updates = Updates()
    updates.after_measured_forward(layer)
    updates.forget()
    layer.requires_grad_(False)
    updates.after_measured_forward(layer)
    assert updates.updates == 0


class Repeats(nn.Module):
    """Calls one of its layers three times, and two layers in a checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
        self.reentrant = reentrant

    def forward(self, x):
        x = self.act(self.norm(self.act(self.first(x))))
        return self.act(checkpoint(self.inner, x, use_reentrant=self.reentrant))


class Usage:
    """A training in which everything happens that decides how a call is counted."""

    def __init__(self, active, reentrant):
        torch.manual_seed(0)
        self.model, self.found, self.seen = Repeats(reentrant), [], []
        dog = Watchdog(every=25, keep=2, min_calls=4, active=active, action=self.found.append)
        statistics = [ActivationStats(every=3, active=active), GradientStats(every=4)]
        self.attached = attach(self.model, {"**": [dog, *statistics]})
        self.waiting = None

    def step(self):
        self.model(torch.randn(3, 4)).square().mean().backward()

    def forward(self):
        self.waiting = self.model(torch.randn(3, 4))

    def backward(self):
        """The backward of a forward that others may have followed."""
        if self.waiting is not None:
            self.waiting.sum().backward()
        self.waiting = None

    def without_gradients(self):
        with torch.no_grad():
            self.model(torch.randn(3, 4))

    def evaluate(self):
        self.model.eval()
        self.without_gradients()
        self.model.train()

    def evaluate_always(self):
        with self.attached.always():
            self.evaluate()

    def pause(self):
        with self.attached.paused():
            self.step()

    def part(self):
        """A call that no forward of the model makes."""
        self.model.first(torch.randn(3, 4))

    def read(self):
        self.seen += [[site.calls, site.active_calls] for site in self.attached]

    def report(self):
        self.seen.append(repr(self.attached.report()))

    def save(self):
        self.seen.append(repr(self.attached.state_dict()["sites"]))

    def copy(self):
        self.model = copy.deepcopy(self.model)
        (self.attached,) = attachments(self.model)
        self.found = self.attached.sites[0].regularizer.action.__self__

    def epoch(self):
        self.attached.step()
        self.seen.append(repr(self.attached.history))

    def end(self):
        self.report()
        self.seen.append(repr(self.attached.history))
        for site in self.attached:
            watch = site._live.watch
            self.seen.append([site.calls, watch.turn, watch.was_due, repr(watch.open)])
        return self.seen, [finding.text for finding in self.found]


COMMON = ["step"] * 12 + ["forward", "backward", "evaluate"] * 2
RARE = ["without_gradients", "evaluate_always", "pause", "part", "read", "report", "save", "copy"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the misuse that some orders are
@pytest.mark.parametrize("reentrant", rest_slow([False, True]))
@pytest.mark.parametrize("active", rest_slow(["train", "always"]))
def test_a_call_that_is_only_counted_makes_no_difference(active, reentrant, monkeypatch):
    generator = random.Random(f"{active} {reentrant}")
    for _ in range(4):
        names = generator.choices([*COMMON, *RARE, "epoch"], k=60)
        results = []
        for pauses in (True, False):
            if not pauses:
                for observer in Watchdog, ActivationStats, GradientStats:
                    monkeypatch.setattr(observer, "pause_at", Observer.pause_at)
            usage = Usage(active, reentrant)
            for name in names:
                getattr(usage, name)()
            results.append(usage.end())
            usage.attached.remove()
        monkeypatch.undo()
        for counted, ran in zip(*map(flat, results), strict=True):
            assert counted == ran, names


def flat(result):
    seen, texts = result
    return [*seen, *texts]


def test_an_own_plan_of_measurements_is_asked_for_each_call():
    @register
    class Irregular(ActivationStats):
        def is_due(self, state, turn, training, shared):
            return turn in (0, 1, 4)

    model = nn.Sequential(nn.Linear(4, 4))
    attached = attach(model, {"0": Irregular()})
    train(model, 7)
    assert attached.report()[0].observed.calls == 3
    assert attached.sites[0].calls == attached.sites[0].active_calls == 7


class EachCall:
    """A mixin for observers that measure each call."""

    def is_due(self, state, turn, training, shared):
        return True


@pytest.mark.parametrize("bases", [(ActivationStats,), (EachCall, ActivationStats)])
def test_a_pause_is_that_of_the_class_that_decides(bases):
    """Whether the class itself or a mixin of it decides."""
    methods = {} if EachCall in bases else {"is_due": EachCall.is_due}
    own = register(type("Own", bases, {"__doc__": "Measures each call.", **methods}))
    model = nn.Sequential(nn.Linear(4, 4))
    attached = attach(model, {"0": own(every=5)})
    for _ in range(10):
        model(torch.randn(3, 4))
    assert attached.report()[0].observed.calls == 10


def test_set_keeps_the_calls_that_were_not_measured():
    @register
    class Levelled(ActivationStats):
        """Has a rate."""

        level: Rate = 1.0

    model = nn.Sequential(nn.Linear(4, 4))
    attached = attach(model, {"0": Levelled(every=5)})
    for _ in range(9):
        model(torch.randn(3, 4))
    attached.set("0", level=2.0)
    (row,) = attached.report()
    assert row.calls == row.active_calls == 9
