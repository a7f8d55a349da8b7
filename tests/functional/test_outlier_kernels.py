"""Kernels for outliers and for residual branches, against sums in float64.

`test_launches` counts them, `test_in_graph` traces them, and `test_kernels` compiles them.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from dropblock_hooks import ActivationStats, attach
from dropblock_hooks.functional import measures, outliers, residual
from dropblock_hooks.functional.kernels import launch
from tests.conftest import INTERPRETED, KERNEL_DEVICE

pytestmark = pytest.mark.usefixtures("kernels")


def normal(*shape):
    return torch.randn(shape)


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def sliced(x):
    return torch.stack([x, x], -1)[..., 0]


def last_digits():
    """Values whose mean is not a number of float32, and whose largest one is almost an outlier."""
    digits = torch.zeros(2000)
    digits[:800] = 1.0
    digits[-1] = 3.0
    return (1 + digits * 2.0**-23).view(1, 2, 1000)


MAPS = {
    "maps": lambda: normal(2, 7, 3, 3),
    "maps with heavy tails in channels_last": lambda: channels_last(normal(4, 9, 6, 5).pow(5)),
    "one channel": lambda: normal(2, 1, 8, 8).pow(9),
    "one value": lambda: normal(1, 1),
    "equal values": lambda: torch.full((3, 4, 1000), 0.1),
    "values that differ in the last digit": last_digits,
    "rows": lambda: normal(33, 5),
    "rows of more columns than a tile has": lambda: normal(1, 1, 4100).pow(5),
    "tokens": lambda: normal(2, 5, 8).movedim(-1, 1),
    "maps of three axes that are copied first": lambda: sliced(normal(1, 3, 2, 3, 3))[..., 1:, 1:],
    "a mean far above the deviation": lambda: 100 + normal(2, 5, 9, 9),
    "channels with different means": lambda: normal(2, 3, 9) + torch.tensor([[[0.0], [1e4], [-9]]]),
    "float16": lambda: normal(2, 7, 9).half(),
    "a large mean in bfloat16": lambda: (100 + normal(1, 5, 9, 9)).bfloat16(),
    "float64": lambda: 1e6 + normal(2, 7, 9).double(),
    "powers that exceed float32": lambda: 1e30 * normal(2, 7, 9),
    "the largest values of float32": lambda: torch.eye(50) * 3.4e38,
    "powers that vanish in float32": lambda: 1e-30 * normal(2, 7, 9),
}
"""Tensors (N, C, ...)."""
ALONE = ("equal values", "values that differ in the last digit", "the largest values of float32")
"""Tensors that are tried without another call, which would hide what is special in them."""
VALUES = {"a vector": lambda: normal(50).pow(5), "a number": lambda: torch.ones(())}
"""Tensors whose channels are not known."""


def measured(calls, channels=True):
    """The state after some calls, each measured by two kernels."""
    state = outliers.new_outliers()
    state = {name: x.to(KERNEL_DEVICE) for name, x in state.items()}
    for x in calls:
        before = launch.launched
        if channels:
            outliers.add_outliers(state, x.movedim(1, -1), x)
        else:
            outliers.add_outliers(state, x, None)
        assert launch.launched == before + 2
    return state


def numbers(calls):
    """Kurtosis, the number of outliers, and the peaks, by NumPy in float64."""
    arrays = [x.double().cpu().numpy() for x in calls]
    values = np.concatenate([x.ravel() for x in arrays])
    variance = values.var()
    kurtosis = None
    if variance > 1e-26 * values.mean() ** 2:
        kurtosis = ((values - values.mean()) ** 4).mean() / variance**2
    beyond = sum((np.abs(x - x.mean()) > 6 * x.std()).sum() for x in arrays)
    peaks = []
    if arrays[0].ndim > 1:
        axes = [(0, *range(2, x.ndim)) for x in arrays]
        peaks = np.max([np.abs(x).max(axis) for x, axis in zip(arrays, axes, strict=True)], 0)
    return kurtosis, beyond, peaks


def assert_is(state, calls):
    kurtosis, beyond, peaks = numbers(calls)
    found = outliers.kurtosis(state["moments"])
    assert found == (None if kurtosis is None else pytest.approx(kurtosis, rel=1e-5))
    assert state["moments"][0] == sum(x.numel() for x in calls)
    assert state["outliers"] == beyond
    if "peaks" in state:
        assert state["peaks"].tolist() == list(peaks)


@pytest.mark.parametrize("name", [*MAPS, *VALUES])
def test_against_float64(name):
    x = {**MAPS, **VALUES}[name]()
    calls = [x]
    if name not in ALONE:
        calls.append(x[:1] * 2 if x.ndim else x * 2)
    state = measured(calls, channels=name in MAPS)
    assert ("peaks" in state) == (name in MAPS)
    assert_is(state, calls)


def test_there_are_outliers_among_these_values():
    heavy = ("maps with heavy tails in channels_last", "one channel", "a vector")
    for name in (*heavy, "rows of more columns than a tile has"):
        torch.manual_seed(0)
        x = {**MAPS, **VALUES}[name]()
        assert numbers([x])[1] > 0, name


@pytest.mark.parametrize(
    ("make", "width"), [(lambda x: x, 20), (channels_last, 2000)], ids=["contiguous", "last"]
)
def test_a_program_reads_several_tiles(make, width, monkeypatch):
    from dropblock_hooks.functional.kernels import tails

    monkeypatch.setattr(tails, "_PROGRAMS", 2)
    monkeypatch.setattr(tails, "_SIZE", 64)
    tails._tiles_of.cache_clear()
    x = make(normal(2, 70, 9).pow(5))
    read = tails._tiles_of(tuple(x.shape), x.stride(), 1)
    groups = math.ceil(70 / read.height)
    assert read.programs == 2
    assert groups > 2
    assert_is(measured([x]), [x])
    few = make(normal(3, 2, width).pow(5))  # programs share the channels
    read = tails._tiles_of(tuple(few.shape), few.stride(), 1)
    assert read.splits == 2
    assert_is(measured([few]), [few])
    tails._tiles_of.cache_clear()


def test_these_tensors_are_copied_first():
    from dropblock_hooks.functional.kernels import branch, tails

    x = MAPS["maps of three axes that are copied first"]()
    assert tails._tiles_of(tuple(x.shape), x.stride(), 1) is None
    for name in ("of two formats", "copied first"):
        y, x = PAIRS[name](normal(3, 5, 4, 3))
        assert branch._pair_of(tuple(y.shape), y.stride(), x.stride()) is None


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_call_that_is_not_finite_changes_nothing(bad):
    good = normal(5, 4)
    worse = 1e3 * normal(5, 4)
    worse[2, 1] = bad
    assert_is(measured([good, worse, good]), [good, good])
    only = measured([worse])
    assert not any(x.any() for x in only.values())


def test_a_call_without_elements_starts_nothing():
    state = measured([normal(3, 4)])
    before = {name: x.clone() for name, x in state.items()}
    launched = launch.launched
    outliers.add_outliers(state, torch.ones(0, 4), torch.ones(0, 4))
    assert launch.launched == launched
    assert all(torch.equal(x, state[name]) for name, x in before.items())


def test_another_number_of_channels_begins_their_peaks_anew():
    narrow = normal(5, 2)
    state = measured([normal(5, 4), narrow])
    assert state["peaks"].tolist() == numbers([narrow])[2].tolist()


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("on", [(0.0, 1.0), (1.0, 0.0)], ids=str)
def test_compiled_code_measures_each_second_call_where_it_is_on(on, training):
    state = torch.zeros(measures.SUMS, dtype=torch.float64)
    state[:2] = torch.tensor(on)
    sums = outliers.new_tails().to(KERNEL_DEVICE)
    without_peaks = outliers.new_tails().to(KERNEL_DEVICE)
    peaks = torch.zeros(3, dtype=torch.float64)
    branch = residual.new_branch().to(KERNEL_DEVICE)
    calls = [normal(20, 3) for _ in range(3)]
    calls[2][0, 0] = 1e3
    for i, x in enumerate(calls):
        state[measures.CALLS] = i
        outliers.add_tails(x, x, training, 2, state, sums, peaks)
        outliers.add_tails(x, None, training, 2, state, without_peaks, None)
        residual.add_branch(x, 3 * x, training, 2, state, branch)
    if not on[training]:
        assert not any(x.any() for x in (sums, without_peaks, peaks, branch))
        return
    wanted = [calls[0], calls[2]]
    assert sums[5] > 0
    assert_is({"moments": sums[:5], "outliers": sums[5], "peaks": peaks}, wanted)
    assert_is({"moments": without_peaks[:5], "outliers": without_peaks[5]}, wanted)
    assert residual.branch_ratio(branch) == pytest.approx(2 / 3, rel=1e-6)


def branch_of(*pairs):
    """The sums of squares after some calls, each measured by two kernels."""
    branch = residual.new_branch().to(KERNEL_DEVICE)
    for y, x in pairs:
        before = launch.launched
        residual.add_squares(branch, y, x)
        assert launch.launched == before + 2
    return branch.tolist()


def squares(y, x):
    """The sums of squares in float64."""
    shortcut = x.double()
    return [(y.double() - shortcut).square().sum().item(), shortcut.square().sum().item()]


PAIRS = {
    "contiguous": lambda x: (x + normal(*x.shape), x),
    "channels_last": lambda x: (channels_last(x + normal(*x.shape)), channels_last(x)),
    "rows with gaps": lambda x: ((x + normal(*x.shape))[:1, :1, :, :2], x[:1, :1, :, :2]),
    "of two formats": lambda x: (channels_last(x + normal(*x.shape)), x),
    "copied first": lambda x: (sliced(x + normal(*x.shape))[..., 1:, 1:], x[..., 1:, 1:]),
    "a small branch": lambda x: (x + 2.0**-12 * x.sign().round(), x.round(decimals=2)),
    "of two types": lambda x: ((x + normal(*x.shape)).bfloat16(), x),
    "float16": lambda x: ((x + normal(*x.shape)).half(), x.half()),
    "float64": lambda x: ((1e6 + x + normal(*x.shape)).double(), (1e6 + x).double()),
    "squares that exceed float32": lambda x: (1e30 * normal(*x.shape), 1e30 * x),
    "more columns than a tile has": lambda x: (normal(1, 4100), normal(1, 4100)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_branches_against_float64(name):
    y, x = PAIRS[name](normal(3, 5, 4, 3))
    wanted = squares(y, x)
    assert branch_of((y, x)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # of the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_branch_that_is_not_finite_is_left_out(bad):
    x = normal(4, 5)
    good = x + 1, x
    worse = x.clone()
    worse[1, 2] = bad
    found = branch_of(good, (worse, x), (x, worse), (worse, worse), good)
    assert found == pytest.approx([2 * n for n in squares(*good)], rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*can't be compiled")
def test_torch_operations_replace_kernels_that_can_not_be_compiled(monkeypatch):
    def fail(*given, **options):
        raise launch.KernelError("no compiler")

    monkeypatch.setattr(launch, "start", fail)
    x = normal(6, 4)
    state = {name: number.to(KERNEL_DEVICE) for name, number in outliers.new_outliers().items()}
    outliers.add_outliers(state, x, x)
    assert_is(state, [x])
    branch = residual.new_branch().to(KERNEL_DEVICE)
    residual.add_squares(branch, 2 * x, x)
    assert branch.tolist() == pytest.approx(squares(2 * x, x), rel=1e-6)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_results_repeat_on_a_gpu():
    x = normal(32, 256, 28, 28).pow(3)
    first = measured([x])
    for _ in range(3):
        again = measured([x])
        assert all(torch.equal(number, again[name]) for name, number in first.items())
    assert_is(first, [x])


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("make", [lambda x: x, channels_last], ids=["contiguous", "channels_last"])
def test_a_compiled_step_on_a_gpu(make):
    class Adds(nn.Module):
        def forward(self, x):
            return x + x.pow(3)

    torch._dynamo.reset()
    model = nn.Sequential(Adds(), nn.Identity())
    item = ActivationStats(every=2, outliers=True, residual=True)
    attached = attach(model, {"0": item})
    compiled = torch.compile(model, fullgraph=True)
    calls = [make(normal(4, 8, 30, 31)) for _ in range(3)]
    outputs = [compiled(x) for x in calls]
    seen = attached.report()[0].observed

    measured_outputs = [outputs[0], outputs[2]]
    kurtosis, beyond, peaks = numbers(measured_outputs)
    values = sum(x.numel() for x in measured_outputs)
    assert seen.kurtosis == pytest.approx(kurtosis, rel=1e-5)
    assert seen.outliers == beyond / values > 0
    assert seen.peak_ratio == pytest.approx(max(peaks) / np.median(peaks), rel=1e-5)
    pairs = [squares(outputs[i], calls[i]) for i in (0, 2)]
    of_branch, of_shortcut = np.sum(pairs, axis=0)
    assert seen.residual == pytest.approx(math.sqrt(of_branch / of_shortcut), rel=1e-5)
