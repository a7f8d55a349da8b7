"""Each regularizer and observer while the user, or torch.compile, replays CUDA graphs."""

import pytest
import torch

from dropblock_hooks import ActivationStats, Capture, GradientStats, Watchdog, attach
from tests.stacks import make_net, regularizers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OBSERVERS = [ActivationStats(every=1), GradientStats(every=1), Watchdog(), Capture()]
ITEMS = [*regularizers().values(), *OBSERVERS]
OF_PARAMETERS = {"AdaptiveClipGrad", "CentralizeGrad", "L2SP"}


def hosted(item):
    """A model with the item on its blocks, the attachment, and an input; all on a GPU."""
    name = type(item).__name__
    place = {"Foreign": "body.*.act", "Retune": "type:Dropout2d"}.get(name, "body.*.conv")
    if name in OF_PARAMETERS:
        place = "param:body.**.weight"
    net = make_net(item).cuda().train()
    attached = attach(net, {place: item})
    return net, attached, net.example(batch=16).cuda()


@pytest.mark.parametrize("item", ITEMS, ids=repr)
def test_a_graph_that_the_user_captures(item):
    net, attached, x = hosted(item)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            net(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        net(x).square().mean().backward()

    norms = []
    for _ in range(3):
        for parameter in net.parameters():
            parameter.grad.zero_()
        graph.replay()
        norms.append(torch.stack([p.grad.norm() for p in net.parameters()]))
    assert all(norm.isfinite().all() for norm in norms)
    if getattr(item, "random", False):
        assert not torch.equal(norms[0], norms[1]), "each replay draws another mask"
    attached.report()


@pytest.mark.slow
@pytest.mark.parametrize("item", ITEMS, ids=repr)
def test_a_model_that_torch_compiles_with_graphs(item):
    torch._dynamo.reset()
    net, attached, x = hosted(item)
    net.compile(mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        for parameter in net.parameters():
            parameter.grad = None
        loss = net(x).square().mean()
        loss.backward()
        assert loss.isfinite()
    assert all(site.calls == 4 for site in attached)
