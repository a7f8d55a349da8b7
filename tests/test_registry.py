"""Names of classes, and a regularizer of one's own in one file."""

import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import dropblock_hooks as r


@r.register
class Fade(r.Regularizer):
    """Multiplies by 1 - p."""

    p: r.Probability = 0.5
    bias: r.Rate | None = None

    def apply(self, x, now):
        return x * (1 - now.p) + (0.0 if self.bias is None else now.bias), None


@r.register
class Saw(r.Schedule):
    """The fraction of the epoch."""

    top: float = 1.0

    def __call__(self, t):
        return self.top * (t % 1)


def test_one_class_is_all_it_takes():
    spec = r.Spec.from_yaml("'0': {Fade: {p: {Saw: {top: 0.5}}, bias: 1.0}}")
    assert spec == r.Spec({"0": Fade(Saw(0.5), 1.0)})
    model = nn.Sequential(nn.Identity())
    attached = r.attach(model, spec)
    attached.step(3.5)
    assert attached.rates == {"0/Fade": {"p": 0.25, "bias": 1.0}}
    assert (model(torch.ones(2)) == 1.75).all()
    assert pickle.loads(pickle.dumps(Fade(0.1))) == Fade(0.1)
    assert repr(Fade(Saw())) == "Fade(p=Saw(top=1.0))"


@r.register
class Narrow(r.Regularizer):
    """Works on three features alone, and drops with a count."""

    p: r.Probability = 0.5
    idle_at_zero = True

    def apply(self, x, now):
        dropped = torch.rand(len(x), 3) < now.p
        return x * ~dropped, dropped.sum()


@r.register
class Ratio(r.Observer):
    """One over the sum of the third feature."""

    def start(self):
        return {"sum": torch.zeros(())}

    def update(self, state, seen):
        state["sum"] += seen.tensor[0, 2]

    def compute(self, state):
        return {"ratio": 1 / int(state["sum"])}


def test_errors_of_own_classes_name_their_site():
    model = nn.Sequential(nn.Flatten())
    attached = r.attach(model, {"0": Narrow(0.1)})
    with pytest.raises(RuntimeError, match="The size of tensor") as caught:
        model(torch.ones(2, 5))
    assert caught.value.__notes__ == ["0/Narrow on Flatten '0': the error comes from this site"]
    attached.remove()
    assert "comes from this site" in str(r.plan(model, {"0": Narrow(0.1)}, torch.ones(2, 5)))
    attached = r.attach(model, {"0": Ratio()})
    with pytest.raises(IndexError) as caught:
        model(torch.ones(2, 1))
    assert caught.value.__notes__ == ["0/Ratio on Flatten '0': the error comes from this site"]
    model(torch.zeros(2, 3))
    for read in (attached.report, attached.scalars):
        with pytest.raises(r.SiteError, match="0/Ratio on Flatten .*compute raised ZeroDivision"):
            read()


def test_a_rate_of_0_is_realized_in_own_classes():
    model = nn.Sequential(nn.Flatten())
    attached = r.attach(model, {"0": Narrow(r.StepSchedule({0: 0.5, 1: 0.0}))})
    seen = []
    for epoch in range(3):
        attached.step(epoch)
        model(torch.ones(100, 3))
        seen.append(attached.sites[0].realized_rate)
    assert 0.3 < seen[0] < 0.7
    assert seen[1:] == [0.0, 0.0]


def test_a_decorator_that_was_forgotten():
    class Plain(r.Regularizer):
        q: r.Rate = 0.1

    with pytest.raises(TypeError, match="Plain has fields .q.: put @register above it"):
        Plain()


def test_a_decorator_that_was_forgotten_at_a_class_that_is_extended():
    class Plain(r.Regularizer):
        q: r.Rate = 0.1

        def apply(self, x, now):
            return x * now.q, None

    @r.register
    class Extended(Plain):
        pass

    with pytest.raises(TypeError, match="Plain has fields .q.: put @register above it"):
        Extended()

    @r.register
    class States(Plain):
        q: r.Rate = 0.3

    assert States(0.2).values(0.0) == {"q": 0.2}  # its own field, so nothing is lost


def test_a_schedule_for_what_is_no_rate():
    @r.register
    class Typed(r.Regularizer):
        q: float = 0.1

    with pytest.raises(TypeError, match="q takes no schedule.*Rate"):
        Typed(r.LinearSchedule(0, 1, epochs=2))


def test_register_refuses():
    with pytest.raises(ValueError, match="Dropout.*taken"):

        @r.register(name="Dropout")
        class Other(r.Regularizer):
            pass

    with pytest.raises(TypeError, match="frozen"):

        @r.register
        @dataclass
        class Thawed(r.Schedule):
            pass

    with pytest.raises(TypeError, match="subclass of Regularizer or Schedule"):
        r.register(dict)

    assert r.Spec({"a": "Dropout"}) == r.Spec({"a": r.Dropout()})


def test_a_cell_that_is_run_again_registers_again():
    for default in (0.1, 0.2):

        @r.register
        class Cell(r.Dropout):
            p: r.Probability = default

    assert r.Spec({"a": "Cell"}).entries[0].regularizers[0].p == 0.2


def test_a_reserved_name():
    @r.register
    class Bad(r.Regularizer):
        grad_scale: r.Rate = 0.1

    with pytest.raises(TypeError, match="'grad_scale'"):
        Bad()


def test_an_argument_without_an_annotation_is_explained(own_registry):
    @r.register
    class Bare(r.Regularizer):
        p = 0.1
        spatial = 2

        def apply(self, x, now):
            return x * (1 - self.p), None

    @r.register
    class Flat(r.Schedule):
        start = 0.3

        def __call__(self, t):
            return self.start

    assert Bare(at="input").at == "input"
    with pytest.raises(TypeError, match=r"no annotation.*write `p: Probability = 0.1`"):
        Bare(p=0.2)
    with pytest.raises(TypeError, match=r"write `p: Probability = 0.1`"):
        Bare(0.2)
    with pytest.raises(TypeError, match=r"write `start: float = 0.3`"):
        Flat(start=0.5)
    with pytest.raises(TypeError, match=r"write `start: float = 0.3`"):
        Flat(0.5)
    with pytest.raises(TypeError, match="Bare has no argument 'q'"):
        Bare(q=0.2)
    with pytest.raises(TypeError, match="Bare has no argument 'spatial'"):
        Bare(spatial=1)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (
            lambda: r.DropBlock2d(drop_prob=0.1),
            r"'drop_prob'. Did you mean p\? Arguments: p,",
        ),
        (lambda: r.DropBlock2d(rate=0.1), r"'rate'. Did you mean p\?"),
        (lambda: r.DropBlock2d(keep_prob=0.9), "mean p.* the share that is dropped: 1 - keep_prob"),
        (lambda: r.DropBlock2d(blok_size=3), r"mean block_size\?"),
        (lambda: r.DropBlock2d(qqqq=3), "no argument 'qqqq'. Arguments: p, block_size"),
        (lambda: r.ClipGradNorm(1.0, keep_prob=1), "'keep_prob'. Arguments: max_norm, norm_type"),
        (lambda: r.Watchdog(evry=3), r"Watchdog has no argument 'evry'. Did you mean every\?"),
        (lambda: r.LinearSchedule(0.0, end=0.1), r"LinearSchedule .*'end'. Did you mean stop\?"),
        (lambda: Fade(q=0.1), "Fade has no argument 'q'. Arguments: p, bias, at"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_closest_one(make, hint):
    with pytest.raises(TypeError, match=hint):
        make()


def test_a_spec_answers_with_the_name_of_this_package():
    with pytest.raises(r.SpecError, match=r"no field 'drop_prob' \(closest: p\)"):
        r.Spec({"a": {"Dropout": {"drop_prob": 0.1}}})


def test_a_class_with_arguments_of_its_own_takes_them():
    class Own(r.Regularizer):
        def __init__(self, strength=1.0, **options):
            r.registry.store(self, strength=strength, **options)

    assert Own(strength=2.0, anything=3).strength == 2.0
    assert r.Foreign(nn.Dropout, p=0.1, inplace=True).kwargs == (("p", 0.1), ("inplace", True))
