"""A bound on a parameter whose gradient comes in parts, from several reentrant checkpoints."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import ClampGrad, ClipGradNorm, HookWarning, ScaleGrad, attach


def step(layer, calls=2, use_reentrant=True, times=1):
    for _ in range(times):
        x = torch.randn(8, 4, requires_grad=True)
        for _ in range(calls):
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        x.square().sum().backward()


@pytest.mark.parametrize("regularizer", [ClipGradNorm(1.0), ClampGrad(-1, 1)], ids=str)
def test_a_bound_that_gets_parts_is_reported_once(regularizer):
    layer = nn.Linear(4, 4)
    attached = attach(layer, {"param:weight": regularizer})
    with pytest.warns(HookWarning, match=r'use_reentrant=False\), or when="accumulated"') as seen:
        step(layer, times=2)
    (warning,) = seen
    (finding,) = warning.message.findings
    assert (finding.kind, finding.sites) == ("in_parts", (attached.sites[0].key,))


@pytest.mark.parametrize(
    ("regularizer", "options"),
    [
        (ClipGradNorm(1.0), {"use_reentrant": False}),
        (ClipGradNorm(1.0), {"calls": 1}),
        (ScaleGrad(0.5), {}),
        (ClipGradNorm(1.0, when="accumulated"), {}),
    ],
    ids=["not reentrant", "one call", "no bound", "accumulated"],
)
def test_no_report_where_the_gradient_is_whole_or_parts_do_not_matter(regularizer, options):
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    attach(layer, {"param:weight": regularizer}, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            step(layer, **options)
            optimizer.step()
            optimizer.zero_grad()
