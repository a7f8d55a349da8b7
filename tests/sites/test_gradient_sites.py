"""What acts on gradients, at every kind of layer, against plain formulas in a plain identity."""

import copy
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import attach
from tests.handing_out import (
    AFTER,
    BATCH,
    CHANNELS,
    KINDS,
    LENGTH,
    MIXED,
    PAIRS,
    SINGLE,
    SOME,
    Owner,
    spec_of,
)

SITES = [(name, at) for name in KINDS for at in ("output", "input")]
SITES = [(name, at) for name, at in SITES if at == "output" or KINDS[name]().at_input]
each_site = pytest.mark.parametrize(("name", "at"), SITES, ids=str)


@functools.cache
def prototype(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        x = torch.randn(BATCH, CHANNELS, LENGTH, dtype=torch.float64)
        return Owner(KINDS[name]().double()), x


def made(name, at, names=None, after="in place"):
    """The model; with names, the reference, which does the same by hand."""
    model = copy.deepcopy(prototype(name)[0])
    model.after, model.copies = after, at == "input"
    model.reference = None if names is None else (names, at)
    return model


def example():
    return prototype("linear")[1].clone()


def gradients(model, run=None, scale=1.0):
    """Of the input and of all parameters; None where none has come."""
    x = example().requires_grad_()
    model.zero_grad()
    loss = model(x) if run is None else run(model, x)
    if loss.requires_grad:
        (loss * scale).backward()
    leaves = [("x", x), *model.named_parameters()]
    return {name: None if p.grad is None else p.grad / scale for name, p in leaves}


def same(found, wanted):
    if found.keys() != wanted.keys():
        return False
    for name, a in wanted.items():
        b = found[name]
        if (a is None) != (b is None):
            # a zero or none: both say that nothing has come
            if (a if b is None else b).abs().max() > 0:
                return False
        elif a is not None and not torch.allclose(a, b, rtol=1e-9, atol=1e-12):
            return False
    return True


def index_of(model, at):
    return model.layer.index if at == "output" else None


def put_on(model, names, at, **options):
    return attach(model, {"layer": spec_of(names, at=at, index=index_of(model, at))}, **options)


def without_samples(name, names, at):
    """An output of one number has no samples: that is told, see the tests of hooks."""
    return name == "one number" and at == "output" and "by sample" in names


def check(name, at, lists):
    wrong = []
    for names in lists:
        if without_samples(name, names, at):
            continue
        model = made(name, at)
        put_on(model, names, at)
        if not same(gradients(model), gradients(made(name, at, names))):
            wrong.append(names)
    assert not wrong


@each_site
@pytest.mark.every(11)
@pytest.mark.slow
def test_all_pairs(name, at):
    check(name, at, [*[(one,) for one in SINGLE], *PAIRS, *MIXED])


@each_site
@pytest.mark.every(11)
@pytest.mark.slow
def test_what_is_done_with_it(name, at):
    names = ("scale", "clamp")
    for after in AFTER:
        model = made(name, at, after=after)
        put_on(model, names, at)
        assert same(gradients(model), gradients(made(name, at, names, after))), after


# Modes ------------------------------------------------------------------------------------------


def checkpointed(reentrant):
    return lambda model, x: checkpoint(model, x, use_reentrant=reentrant)


def in_two_parts(model, x):
    """Gradients of two backwards add up."""
    model(x).backward()
    return model(x)


def twice_through_the_graph(model, x):
    loss = model(x)
    if loss.requires_grad:
        loss.backward(retain_graph=True)
    return loss


def of_its_gradient(model, x):
    """A double backward: through the gradients of all leaves."""
    leaves = [x, *model.parameters()]
    loss = model(x)
    found = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    return loss + sum(g.square().sum() for g in found if g is not None)


MODES = {
    "reentrant": checkpointed(reentrant=True),
    "not reentrant": checkpointed(reentrant=False),
    "accumulated": in_two_parts,
    "twice": twice_through_the_graph,
    "double": of_its_gradient,
}


def check_mode(name, at, mode, names):
    model, reference = made(name, at), made(name, at, names)
    attached = put_on(model, names, at)
    by_its_own = None if "reentrant" in mode else MODES[mode]  # a checkpoint changes nothing
    assert same(gradients(model, MODES[mode]), gradients(reference, by_its_own)), (names, mode)
    assert {site.calls for site in attached} == {2 if mode == "accumulated" else 1}


def check_scaled(name, at, names):
    model = made(name, at)
    put_on(model, names, at, grad_scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert same(gradients(model, scale=1024.0), gradients(made(name, at, names))), names


def check_without_gradients(name, at, mode):
    model, bare = made(name, at), made(name, at)
    attached = put_on(model, ("scale", "clamp"), at)
    with mode():
        assert torch.equal(model(example()), bare(example()))
    assert {(site.calls, site.active_calls) for site in attached} == {(1, 0)}


@each_site
@pytest.mark.every(plain=12)
def test_every_mode(name, at):
    check(name, at, SOME)
    for mode in MODES:
        check_mode(name, at, mode, ("clip", "double", "scale"))
    check_scaled(name, at, ("clamp", "scale"))
    for mode in (torch.no_grad, torch.inference_mode):
        check_without_gradients(name, at, mode)


COMPILED = [
    "InstanceNorm1d", "MultiheadAttention", "Flatten", "permute", "slice", "chunk", "unbind",
    "expand", "used in the layer too", "same twice", "list", "dict", "namedtuple",
    "nested", "its input", "of its list", "parameter", "no gradient inside",
]  # fmt: skip


@pytest.mark.every(9)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "at"), [s for s in SITES if s[0] in COMPILED], ids=str)
def test_compiled(name, at):
    names = ("clip", "double", "scale")
    model, reference = made(name, at), made(name, at, names)
    put_on(model, names, at)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert same(gradients(model, lambda _, x: compiled(x)), gradients(reference))
    torch._dynamo.reset()
