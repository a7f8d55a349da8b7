"""A layer whose calls have different layouts is refused: generated, and in single cases."""

import pytest
import torch
from torch import nn

from dropblock_hooks import ClipGradNorm, Dropout1d, Dropout2d, SiteError, attach

ORDERS = {"NCL": (0, 1, 2), "NLC": (0, 2, 1), "NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1)}


class Shared(nn.Module):
    """One ReLU behind several convolutions, whose results are permuted as `orders` say."""

    def __init__(self, orders):
        super().__init__()
        convs = {3: nn.Conv1d, 4: nn.Conv2d}
        self.orders = orders
        self.convs = nn.ModuleList([convs[len(order)](5, 5, 1) for order in orders])
        self.act = nn.ReLU()

    def forward(self, *inputs):
        for conv, order, x in zip(self.convs, self.orders, inputs, strict=True):
            x = self.act(conv(x).permute(ORDERS[order]))
        return x


def inputs(orders, generator):
    """Inputs (N, 5, ...) with edges from 3 to 7: some are as long as there are channels."""
    sizes = [torch.randint(3, 8, (len(order) - 2,), generator=generator) for order in orders]
    return [torch.randn(2, 5, *size.tolist()) for size in sizes]


def call(orders, *, regularizer, generator):
    """The layouts that the calls were read with; "refused" for the first call that is not."""
    model = Shared(orders)
    site = attach(model.train(), {"act": regularizer}).sites[0]
    seen = []
    model.act.register_forward_hook(lambda *_: seen.append(site.layout))
    try:
        model(*inputs(orders, generator))
    except SiteError as error:
        helps = "different layouts" in str(error) and "say layout=" in str(error)
        seen.append("refused" if helps else str(error))
    return seen


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("layouts", "kind"), [("NCL NLC", Dropout1d), ("NCHW NHWC", Dropout2d)])
def test_calls_are_read_rightly_or_refused(layouts, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    number = int(torch.randint(1, 4, (), generator=generator))
    picks = torch.randint(0, 2, (number,), generator=generator).tolist()
    orders = [layouts.split()[pick] for pick in picks]
    alike = orders[: next((i for i, o in enumerate(orders) if o != orders[0]), number)]
    expected = alike if len(alike) == number else [*alike, "refused"]
    assert call(orders, regularizer=kind(0.5), generator=generator) == expected


def test_tensors_of_different_ranks_may_have_different_layouts():
    generator = torch.Generator().manual_seed(0)

    orders = ["NCHW", "NLC", "NCHW", "NLC"]
    model = Shared(orders)
    site = attach(model.train(), {"act": ClipGradNorm(1.0, per="channel")}).sites[0]
    seen = []
    model.act.register_forward_hook(lambda *_: seen.append(site.layout))
    model(*inputs(orders, generator))
    assert seen == orders
