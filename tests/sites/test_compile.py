"""torch.compile: one training and one evaluation graph, whatever the rates; statistics counted."""

import copy
import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dropblock_hooks import (
    ActivityL1,
    ActivityL2,
    ClampActivation,
    ClampGrad,
    ClipGradNorm,
    Disout,
    DropBlock1d,
    DropBlock2d,
    DropBlock3d,
    DropGrad2d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    GradNoise,
    LinearSchedule,
    ScaleGrad,
    StochasticDepth,
    ZeroGrad,
    ZLoss,
    attach,
    register,
)
from tests.cases import not_in_dynamo_of_2_9, rest_slow
from tests.classes import own_regularizers
from tests.stacks import OF_SOME_LAYERS

EPOCHS = 300


def ramp(start, stop):
    return LinearSchedule(start, stop, epochs=EPOCHS)


CASES = {
    "Dropout": Dropout(ramp(0, 0.9)),
    "Dropout1d": Dropout1d(ramp(0, 0.9)),
    "Dropout2d": Dropout2d(ramp(0, 0.9)),
    "Dropout3d": Dropout3d(ramp(0, 0.9)),
    "DropBlock1d": DropBlock1d(ramp(0, 0.9), 3),
    "DropBlock2d": DropBlock2d(ramp(0, 0.9), 3),
    "DropBlock3d": DropBlock3d(ramp(0, 0.9), 3),
    "Disout": Disout(ramp(0, 0.9), 3, ramp(0, 2)),
    "DropPath": DropPath(ramp(0, 0.9)),
    "StochasticDepth": StochasticDepth(ramp(0, 0.9)),
    "GaussianNoise": GaussianNoise(ramp(0, 0.9)),
    "GaussianDropout": GaussianDropout(ramp(0, 0.9)),
    "ClampActivation": ClampActivation(ramp(-1, -0.2), ramp(0.2, 1)),
    "ClampActivation-cap": ClampActivation(cap=ramp(0.2, 1)),
    "ClampGrad": ClampGrad(ramp(-1e-3, -1e-5), ramp(1e-5, 1e-3)),
    "ClampGrad-max": ClampGrad(max=ramp(1e-5, 1e-3)),
    "ClipGradNorm": ClipGradNorm(ramp(1e-4, 1e-2)),
    "ScaleGrad": ScaleGrad(ramp(-1, 1)),
    "ZeroGrad": ZeroGrad(),
    "GradNoise": GradNoise(ramp(0, 0.9)),
    "DropGrad2d": DropGrad2d(ramp(0, 0.9)),
    "ActivityL1": ActivityL1(ramp(0, 0.9)),
    "ActivityL2": ActivityL2(ramp(0, 0.9)),
    "ZLoss": ZLoss(ramp(0, 0.9)),
}
DROPS = [case for case in CASES if isinstance(CASES[case].rates.get("p"), LinearSchedule)]
OF_OTHER_LIBRARIES = {"Foreign"}
OF_LAYERS_THAT_DROP = {"Retune"}  # tests/sites/test_retune.py
OF_PARAMETERS = {
    "AdaptiveClipGrad",
    "CentralizeGrad",
    "L2SP",
    *("AdaGC", "ZClip", "SkipUpdate"),  # tests/sites/test_memories.py
}  # tests/regularizers/test_weight_gradients.py


class Small(nn.Module):
    """Two layers and a residual block with an in-place activation, of 1, 2 or 3 dimensions."""

    def __init__(self, spatial=2):
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial - 1]
        self.spatial = spatial
        self.stem = convolution(3, 4, 3, padding=1)
        self.block = nn.Sequential(convolution(4, 4, 3, padding=1), nn.ReLU(inplace=True))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.block(x)
        return self.head(x.flatten(2).mean(2))


def compiled(model, backend="aot_eager", fullgraph=True, **options):
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(model, backend=backend, fullgraph=fullgraph, **options)


def graphs():
    return counters["stats"]["unique_graphs"]


def train(call, x):
    y = call(x)
    y.square().mean().backward()
    return y.detach()


def images(spatial=2, n=4, edge=9):
    return torch.randn(n, 3, *[edge] * spatial)


def test_every_regularizer_is_here():
    tested = {type(regularizer).__name__ for regularizer in CASES.values()}
    elsewhere = OF_OTHER_LIBRARIES | OF_LAYERS_THAT_DROP | OF_PARAMETERS | OF_SOME_LAYERS
    assert set(own_regularizers()) - elsewhere == tested


# each takes seconds to compile: plain pytest compiles one or two of a kind
AT_OUTPUT = [(case, "output") for case in CASES]
AT_INPUT = [
    (case, "input")
    for case in CASES
    if not case.startswith("StochasticDepth")  # works on the output of a block
]


@pytest.mark.every(7)
@pytest.mark.parametrize(
    ("case", "at"),
    rest_slow(AT_OUTPUT + AT_INPUT, [("ClampGrad-max", "input")]),
)
def test_one_graph_for_300_rates(case, at):
    regularizer = CASES[case]
    spatial = regularizer.spatial or 2
    model = Small(spatial)
    bare = copy.deepcopy(model)
    attached = attach(model, {"block": dataclasses.replace(regularizer, at=at)})
    call, x = compiled(model), images(spatial)
    for epoch in range(EPOCHS):
        attached.step(epoch)
        assert train(call, x).isfinite().all()
        if epoch == 0:
            assert counters["aot_autograd"]["total"] == 1  # not traced anew for a Python scalar
            model.eval()
            assert torch.equal(call(x), bare.eval()(x))
            model.train()
            assert graphs() == 2
    assert graphs() == 2
    assert sum(counters["graph_break"].values()) == 0
    site = attached.sites[0]
    assert (site.calls, site.active_calls) == (EPOCHS, EPOCHS)
    assert site.map_size == (None if regularizer.spatial is None else (9,) * spatial)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "case",
    # DropGrad2d's masks are others, as those of all that drops
    rest_slow([c for c in CASES if CASES[c].acts_on == "gradient" and c not in DROPS], 0),
)
def test_gradients_equal_those_of_eager_mode(case):
    model = Small()
    x = images()
    attached = attach(model, {"block": CASES[case], "stem": CASES[case]})
    gradients, rates = [], []
    for call in (model, compiled(model)):
        for epoch in (0, 150):
            attached.step(epoch)
            model.zero_grad()
            torch.manual_seed(epoch)
            train(call, x)
            gradients.append([p.grad.clone() for p in model.parameters()])
            rates.append([site.realized_rate for site in attached.sites])
    for eager, graph in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(eager, graph)
    assert rates[0] == rates[2]
    assert rates[1] == rates[3]


def test_evaluation_is_that_of_the_bare_model():
    model = Small().eval()
    bare = copy.deepcopy(model)
    attach(model, {"block": [Dropout(0.5), DropBlock2d(0.5, 3), ClampGrad(-1, 1)]})
    x = images()
    assert torch.equal(compiled(model)(x), compiled(bare)(x))


@pytest.mark.slow
def test_paused_and_enabled_compile_nothing_anew():
    model = Small()
    bare = copy.deepcopy(model)
    attached = attach(model, {"block": Dropout(0.5), "stem": ClampGrad(-1e-6, 1e-6)})
    call, x = compiled(model), images()
    train(call, x)
    with attached.paused():
        torch.testing.assert_close(train(call, x), bare(x).detach())
        train(call, x)
    train(call, x)
    attached.enabled = False
    torch.testing.assert_close(train(call, x), bare(x).detach())
    attached.enabled = True
    train(call, x)
    assert graphs() == 1
    assert [site.active_calls for site in attached.sites] == [3, 3]


@pytest.mark.slow
def test_set_compiles_nothing_anew():
    model = Small()
    attached = attach(model, {"block*": Dropout2d(0.1), "block.*": DropBlock2d(0.1, 3)})
    call, x = compiled(model), images()
    train(call, x)
    attached.set("block/Dropout2d", p=1.0)
    train(call, x)
    assert attached["block/Dropout2d"].realized_rate > 0.4
    assert graphs() == 1


@pytest.mark.slow
def test_a_ragged_batch_and_ten_sizes():
    model = Small()
    attached = attach(
        model,
        {
            "block": [DropBlock2d(0.3, 7), ClipGradNorm(1e-3, per="channel")],
            "stem": DropBlock2d(0.3, 4, calibration="paper"),
            "block.0": [Dropout2d(0.2), GaussianNoise(0.1)],
        },
    )
    call = compiled(model)
    train(call, images(n=4))
    train(call, images(n=3))
    assert graphs() <= 2
    call = compiled(model)
    for edge in (9, 3, 4, 5, 6, 7, 12, 17, 20, 32):
        train(call, torch.randn(4, 3, edge, edge + 3))
    assert graphs() <= 3
    site = attached["block/DropBlock2d"]
    assert site.map_size == (32, 35)
    assert site.block_size == (7, 7)


@pytest.mark.slow
def test_several_forwards_before_their_backward():
    """Each backward has the mask and the rates of its own forward."""
    model, x = Small(), images()
    attached = attach(model, {"block": [DropBlock2d(0.3, 3), ClampGrad(-1e-4, 1e-4)]})
    call, gradients = compiled(model), []
    for together in (False, True):
        torch.manual_seed(0)
        model.zero_grad()
        losses = []
        for _ in range(3):
            loss = call(x).square().mean()
            losses.append(loss) if together else loss.backward()
        if together:
            sum(losses).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients)
    assert [site.active_calls for site in attached] == [6, 6]


def in_a_checkpoint(regularizer):
    """A compiled function with a checkpoint, whose backward needs the result of the site again."""
    block = nn.Sequential(nn.Identity())
    attached = attach(block, {"0": regularizer})

    def squared(x):
        return block(x * 1.0).square()

    def call(x):
        return torch.utils.checkpoint.checkpoint(squared, x, use_reentrant=False)

    return call, attached


DROPPED_TWICE = [DropBlock2d(0.3, 3), DropBlock2d(0.3, 3, normalize="sample"), Dropout2d(0.3)]


@pytest.mark.parametrize("regularizer", rest_slow(DROPPED_TWICE), ids=str)
def test_several_forwards_of_a_checkpoint_before_their_backward(regularizer):
    """The forward, the recomputation and the backward of each call have the same mask."""
    checkpointed, attached = in_a_checkpoint(regularizer)
    call = compiled(checkpointed)
    several = [(torch.rand(4, 4, 9, 9) + 0.5).requires_grad_() for _ in range(3)]
    results = [call(x) for x in several]
    with torch.no_grad():
        call(several[0])
    for x, y in zip(several, results, strict=True):
        y.sum().backward()
        torch.testing.assert_close(x.grad, 2 * y.detach() / x.detach())
    (site,) = attached.sites
    assert (site.calls, site.active_calls) == (4, 4)
    assert site.map_size == (9, 9)


MAKE_LAYER = {"Conv2d": lambda: nn.Conv2d(3, 3, 1), "Identity": nn.Identity}
TWICE = [*itertools.product(MAKE_LAYER, [DropBlock2d(0.3, 3), Dropout(0.3)])]
TWICE_SOON = [("Conv2d", DropBlock2d(0.3, 3)), ("Identity", Dropout(0.3))]


@pytest.mark.parametrize(("layer", "regularizer"), rest_slow(TWICE, TWICE_SOON), ids=str)
def test_two_calls_in_one_graph_have_different_masks(layer, regularizer):
    """As in R-Drop, which compares two passes of one batch."""
    model = nn.Sequential(MAKE_LAYER[layer]())
    attached = attach(model, {"0": regularizer})
    both = compiled(lambda x: (model(x), model(x)))
    first, second = both(torch.randn(4, 3, 16, 16, requires_grad=True))
    assert not torch.equal(first == 0, second == 0)
    (site,) = attached.sites
    assert (site.calls, site.active_calls) == (2, 2)


def test_blocks_of_gradients_do_not_drop_activations(own_registry):
    @register
    @dataclass(frozen=True, repr=False)
    class GradBlock2d(DropBlock2d):
        acts_on: ClassVar[str] = "gradient"

    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    attach(model, {"0": GradBlock2d(0.3, 3)})
    x = torch.randn(4, 3, 16, 16, requires_grad=True)
    y = compiled(model)(x)
    assert (y != 0).all()
    y.sum().backward()
    assert (model[0].bias.grad < 4 * 16 * 16 * 2).all()
    assert (x.grad == 0).any()


def test_apply_of_a_mixin_runs_in_compiled_code(own_registry):
    class Fives:
        def apply(self, x, now):
            return x * 0 + 5, None

    @register
    @dataclass(frozen=True, repr=False)
    class FivesIn2d(Fives, DropBlock2d):
        pass

    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    attach(model, {"0": FivesIn2d(0.3, 3)})
    x = torch.randn(4, 3, 16, 16)
    assert (model(x) == 5).all()
    assert (compiled(model)(x) == 5).all()


@pytest.mark.parametrize(
    "setting", [{"activation_memory_budget": 0.5}, {"aggressive_recomputation": True}], ids=str
)
def test_torch_may_recompute_more_to_save_memory(setting):
    """The recomputation and the backward have the mask of the forward."""
    block = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False))
    nn.init.dirac_(block[0].weight)  # the identity, whose result takes memory
    attach(block, {"0": DropBlock2d(0.3, 3)})
    x = (torch.rand(4, 4, 9, 9) + 0.5).requires_grad_()
    with torch._functorch.config.patch(**setting):
        y = compiled(lambda x: block(x).square())(x)
        y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * y.detach() / x.detach())


@pytest.mark.parametrize(
    ("regularizer", "message"),
    [
        (DropBlock2d(0.3, 3), "a recomputation drops other blocks than its forward"),
        (Dropout(0.3), "modified by an inplace operation"),
    ],
    ids=["DropBlock2d", "Dropout"],
)
def test_a_checkpoint_with_the_eager_backend_is_right_or_refused(regularizer, message):
    """In torch 2.14, its recomputation does not restore the random generator."""
    checkpointed, _ = in_a_checkpoint(regularizer)
    call = compiled(checkpointed, backend="eager")
    x = (torch.rand(4, 4, 9, 9) + 0.5).requires_grad_()
    y = call(x)
    refusal = None
    try:
        y.sum().backward()
    except RuntimeError as error:
        refusal = str(error)

    if refusal is None:
        torch.testing.assert_close(x.grad, 2 * y.detach() / x.detach())
    else:
        assert message in refusal


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_300_rates_in_a_checkpoint(backend):
    """The backward has the mask that the forward had, and the recomputation too."""
    block = nn.Sequential(nn.Identity())
    attached = attach(block, {"0": DropBlock2d(ramp(0, 0.9), 3)})
    checkpoint = torch.utils.checkpoint.checkpoint
    call = compiled(lambda x: checkpoint(block, x * 1.0, use_reentrant=False), backend)
    for epoch in range(EPOCHS):
        attached.step(epoch)
        x = (torch.rand(4, 4, 9, 9) + 0.5).requires_grad_()
        y = call(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y.detach() / x.detach())
    assert graphs() <= 2
    (site,) = attached.sites
    assert (site.calls, site.active_calls) == (EPOCHS, EPOCHS)


@not_in_dynamo_of_2_9("an exception with a cause")
def test_what_a_layer_returns_wrongly_is_told(net):
    """Dynamo gives the frame up and takes those below it one by one: no warning of its own."""
    attach(net, {"layer1.0": ScaleGrad(0.5), "fc": DropBlock2d(0.5)})
    call = compiled(net, fullgraph=False)
    with pytest.raises(ValueError, match="fc/DropBlock2d on Linear 'fc'.*: .*needs a 4-D tensor"):
        call(torch.randn(2, 3, 16, 16))


def module(net, compiler):
    return compiler(net)


def in_place(net, compiler):
    net.compile(**compiler.keywords)
    return net


def regions(net, compiler):
    for block in net.layer1:
        block.compile(**compiler.keywords)
    return net


WAYS = [(module, "eager"), (in_place, "eager"), (regions, "eager"), (module, "inductor")]


@pytest.mark.parametrize(("make", "backend"), rest_slow(WAYS))
def test_what_is_compiled_sees_later_hooks(net, make, backend):
    torch._dynamo.reset()
    if backend == "inductor":  # compiles equal blocks each for itself, which takes long
        net.layer1, net.layer2 = net.layer1[:1], net.layer2[:1]
    bare, eager = copy.deepcopy(net), copy.deepcopy(net)
    spec = {"layer1.*": Dropout(1.0), "layer2.*": ScaleGrad(3.0)}
    attach(eager, spec)
    call = make(net, functools.partial(torch.compile, backend=backend))
    x = torch.randn(2, 3, 16, 16)

    def outcome(call, model):
        model.zero_grad()
        y = call(x)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters())]

    torch.testing.assert_close(outcome(call, net), outcome(bare, bare))
    for _ in range(2):  # first, and again
        attached = attach(net, spec)
        torch.testing.assert_close(outcome(call, net), outcome(eager, eager))
        assert [site.active_calls for site in attached] == [1] * 2 * len(net.layer1)
        assert attached.verify() == []
        attached.remove()
        torch.testing.assert_close(outcome(call, net), outcome(bare, bare))
