"""Exports of an attached model: in evaluation, the graph of the bare model, node by node."""

import dataclasses
import re
import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    Dropout2d,
    Foreign,
    SiteError,
    attach,
)
from tests.cases import not_in_dynamo_of_2_9, rest_slow
from tests.stacks import ACTIVATIONS, make_net, put_on

# torch's own use of what it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:", "ignore::FutureWarning")

SPEC = {
    "body.0": [DropBlock2d(0.4, 3), Dropout2d(0.3), ClipGradNorm(0.1)],
    "body.0.conv": Dropout(0.1, at="input"),
    "body.1.act": ClampGrad(-1, 1, at="input"),
    "param:head.weight": ClampGrad(-1, 1),
}


def exported(net, strict):
    return torch.export.export(net, (net.example(),), strict=strict)


def strict(net):
    return _nodes(exported(net, strict=True).graph)


def not_strict(net):
    return _nodes(exported(net, strict=False).graph)


def symbolic(net):
    return _nodes(torch.fx.symbolic_trace(net).graph)


def jit_trace(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: deprecated; and of the model's own sizes
        graph = torch.jit.trace(net, (net.example(),), check_trace=False).inlined_graph
    return re.sub(r"___torch_mangle_\d+\.", "", str(graph)).splitlines()


def onnx(net):
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own dependencies
        program = torch.onnx.export(net, (net.example(),), dynamo=True, verbose=False)
    graph = program.model.graph
    return [(n.op_type, [i.name for i in n.inputs], [o.name for o in n.outputs]) for n in graph]


def _nodes(graph):
    return [(n.op, str(n.target), str(n.args), str(n.kwargs)) for n in graph.nodes]


EXPORTS = [not_strict, symbolic, jit_trace, strict, onnx]


@pytest.fixture(autouse=True)
def _forget_graphs():
    yield
    torch._dynamo.reset()


@not_in_dynamo_of_2_9("hooks of the whole model in a strict export")
@pytest.mark.parametrize("export", rest_slow(EXPORTS, plain=3))
def test_in_evaluation_it_is_the_graph_of_the_bare_model(export):
    bare = export(make_net(Dropout2d()).eval())
    assert len(bare) > 5
    net = make_net(Dropout2d()).eval()
    attached = attach(net, SPEC)
    assert export(net) == bare
    assert [site.active_calls for site in attached] == [0] * 6


REFUSED = [
    ({"body.0": DropBlock2d(0.4, 3)}, True),
    ({"body.0": ClipGradNorm(0.1)}, True),
    ({"body.0": Dropout(0.3, at="input")}, True),
    ({"body.0": Dropout2d(0.3, active="always")}, False),
]


@pytest.mark.parametrize(("spec", "training"), REFUSED, ids=["block", "norm", "input", "always"])
@pytest.mark.parametrize(
    ("export", "text"),
    [(symbolic, r"torch.fx.Proxy.*eval\(\)"), (jit_trace, r"jit.trace.*eval\(\)")],
)
def test_what_acts_is_not_traced(export, text, spec, training):
    net = make_net(Dropout2d()).train(training)
    attach(net, spec)
    with pytest.raises(SiteError, match=text):
        export(net)


@pytest.mark.every(3, plain=9)
@pytest.mark.parametrize("strictly", rest_slow([False, True]))
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_exported_program_keeps_what_acts(name, training, strictly):
    """At the rate of now, with another mask at each call, and without counting."""
    net = make_net(ACTIVATIONS[name]).train(training)
    if name == "Foreign":
        regularizer = ACTIVATIONS[name] if training else Foreign(nn.Dropout2d, p=0.4)
    else:
        mode = "train" if training else "always"
        regularizer = dataclasses.replace(ACTIVATIONS[name], active=mode)
    attached = put_on(net, regularizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: of a module exported in training mode
        program = exported(net, strict=strictly).module()
    counts = [(s.calls, s.active_calls) for s in attached]
    x = net.example()
    torch.manual_seed(0)
    outputs = [program(x) for _ in range(6)]
    if name == "Foreign" and not training:
        assert all(torch.equal(outputs[0], y) for y in outputs)
        assert torch.equal(outputs[0], net(x))
    else:
        is_random = attached.sites[0].regularizer.random
        assert all(torch.equal(outputs[0], y) for y in outputs) is not is_random
        assert counts == [(s.calls, s.active_calls) for s in attached]
    site = attached.sites[0]
    calls, active_calls = site.calls, site.active_calls
    net(x).sum().backward()  # calls in eager mode are counted as before the export
    acts = training or name != "Foreign"
    assert (site.calls, site.active_calls) == (calls + 1, active_calls + acts)


@pytest.mark.parametrize("selector", ["body.0", "param:head.weight"])
def test_gradients_are_not_exported(selector):
    net = make_net(Dropout2d())
    attach(net, {selector: ClipGradNorm(0.1)})
    with pytest.raises(SiteError, match=r"gradients can't be used in torch.export.*eval\(\)"):
        exported(net, strict=False)
    with pytest.raises(Exception, match=r"Observed exception|torch.export"):
        exported(net, strict=True)
