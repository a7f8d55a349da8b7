"""Regularizers that are `linear` multiply by numbers that do not depend on the tensor.

Compiled code relies on it: the backward applies the regularizer to the gradient, with the random
numbers of the forward.
"""

import pytest
import torch

import dropblock_hooks as r
from tests.cases import rest_slow
from tests.classes import own_classes
from tests.regularizers.test_strides import FORMATS

REGULARIZERS = [
    *(r.Dropout(p) for p in (0.05, 0.5, 1.0)),
    *(r.Dropout1d(p, layout="NCL") for p in (0.05, 0.5, 1.0)),
    *(r.Dropout2d(p) for p in (0.05, 0.5, 1.0)),
    *(r.Dropout3d(p) for p in (0.05, 0.5, 1.0)),
    *(r.DropPath(p, scale_by_keep=s) for p in (0.05, 0.5, 1.0) for s in (True, False)),
    *(r.Retune(p).fitted("p", r.Dropout2d()) for p in (0.05, 0.5, 1.0)),
    *(r.GaussianDropout(p) for p in (0.05, 0.5)),
    *(r.DropBlock1d(p, 5) for p in (0.05, 0.5, 1.0)),
    *(r.DropBlock2d(p, b) for p in (0.05, 0.5, 1.0) for b in (2, (3, 30))),
    *(r.DropBlock3d(p, 2) for p in (0.05, 0.5, 1.0)),
    *(r.DropBlock2d(0.3, 3, normalize=n) for n in ("sample", "expected", None)),
    r.DropBlock2d(0.3, 3, share_channels=True),
    r.DropBlock2d(0.3, 3, calibration="paper"),
]
SHAPES = {  # the first for the dense kernels, the second for the sparse kernels
    1: [(3, 4, 40), (8, 4, 1040)],
    2: [(3, 4, 9, 11), (4, 16, 23, 23)],
    3: [(2, 3, 4, 5, 6), (2, 4, 8, 23, 23)],
}
OTHERS = ["NHWC view", "expanded", "overlapping", "strided"]
PAIRS = [("contiguous", form) for form in ["contiguous", *OTHERS]]
PAIRS += [(form, "contiguous") for form in OTHERS]


def applied(regularizer, x, seed):
    values = regularizer.values(0.0)
    layout = "" if regularizer.spatial is None else {1: "NCL", 2: "NCHW", 3: "NCDHW"}[x.ndim - 2]
    now = r.Now(input=x, layout=layout, training=True, grad_scale=1.0, **values)
    torch.manual_seed(seed)
    return regularizer.apply(x, now)[0]


def test_every_linear_class_is_tested():
    ours = {cls for cls in own_classes(r.Regularizer).values() if cls.linear}
    assert ours == {type(regularizer) for regularizer in REGULARIZERS}


@pytest.mark.parametrize(
    "dtype", rest_slow([torch.float32, torch.float64, torch.bfloat16]), ids=str
)
@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=repr)
def test_the_vector_jacobian_product_is_apply_of_the_gradient(regularizer, dtype, monkeypatch):
    least = dict.fromkeys(("blocks", "units"), 10_000)
    monkeypatch.setattr("dropblock_hooks.functional.sparse.LEAST", least)
    for shape in SHAPES[regularizer.spatial or 2]:
        for number, (of_x, of_grad) in enumerate(PAIRS):
            torch.manual_seed(number)
            x = FORMATS[of_x](torch.randn(shape, dtype=dtype)).requires_grad_()
            grad = FORMATS[of_grad](torch.randn(shape, dtype=dtype))
            y = applied(regularizer, x, number)
            (product,) = torch.autograd.grad(y, x, grad)
            assert y.stride() == torch.empty_like(x).stride(), (of_x, shape)
            torch.testing.assert_close(
                applied(regularizer, grad, number), product, rtol=1e-12, atol=0
            )


def test_a_subclass_with_another_apply_is_not_linear():
    class SquaredDropout(r.Dropout):
        def apply(self, x, now):
            y, dropped = super().apply(x, now)
            return y * y, dropped

    class RareDropout(r.Dropout):
        p: float = 0.01

    assert not SquaredDropout.linear
    assert RareDropout.linear
