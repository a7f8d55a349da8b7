"""Results have the strides of ``torch.empty_like(x)``: operators in compiled code promise them."""

import pytest
import torch

import dropblock_hooks as r
from dropblock_hooks import functional as f

FORMATS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "NHWC view": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand(x.shape),
    "overlapping": lambda x: x[..., :1].expand(x.shape),
    "strided": lambda x: torch.stack((x, x), -1)[..., 0],
}
SHAPES = {"dense": (3, 4, 9, 11), "sparse": (4, 16, 23, 23)}
REGULARIZERS = [
    *(r.Dropout(0.5), r.Dropout2d(0.5), r.DropPath(0.5), r.DropPath(0.5, scale_by_keep=False)),
    *(r.StochasticDepth(0.5), r.StochasticDepth(0.5, mode="batch")),
    *(r.DropBlock2d(0.3, 3, normalize=n) for n in ("batch", "sample", "expected", None)),
    *(r.Disout(0.3, 3), r.GaussianNoise(0.5), r.GaussianDropout(0.3)),
    *(r.ClampGrad(-0.1, 0.1), r.ClipGradNorm(0.1), r.ClipGradNorm(0.1, per="sample")),
    *(r.ClipGradNorm(0.1, per="channel"), r.ScaleGrad(0.5), r.ZeroGrad(), r.GradNoise(0.1)),
    *(r.DropGrad2d(0.5), r.CentralizeGrad(), r.AdaptiveClipGrad(0.1)),
]


def applied(regularizer, x):
    given = {"input": x.detach().contiguous(), "parameter": torch.ones_like(x), "layout": "NCHW"}
    now = r.Now(**given, **regularizer.values(0.0))
    return regularizer.apply(x, now)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=repr)
def test_strides(regularizer, size, dtype, monkeypatch):
    monkeypatch.setattr(f.sparse, "LEAST", dict.fromkeys(f.sparse.LEAST, 10_000))
    for form, lay in FORMATS.items():
        x = lay(torch.randn(SHAPES[size]).to(dtype))
        y = applied(regularizer, x)
        assert y.stride() == torch.empty_like(x).stride(), form
        assert (y.shape, y.dtype) == (x.shape, dtype), form
