"""Bounds from the norms of earlier updates, against loops written from the papers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropblock_hooks.functional import adagc, new_memory, skip_update, zclip

UPDATES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60)
COUNTS = {"adagc": 2, "zclip": 3, "skip_update": 3}


def random_norms(updates, parameters, seed=0):
    """Norms that wander, with a spike in each tenth update."""
    generator = torch.Generator().manual_seed(seed)
    steps = 0.1 * torch.randn(updates, parameters, generator=generator, dtype=torch.float64)
    norms = steps.cumsum(0).exp()
    norms[5::10] *= 20.0
    return norms


def adagc_loop(history, ratio, max_norm, decay, warmup):
    """Algorithm 1 of AdaGC, for lists of norms; the norms after clipping."""
    means = [math.inf] * len(history[0])
    result = []
    for t, norms in enumerate(history):
        clipped = []
        if t < warmup:
            common = math.sqrt(sum(norm**2 for norm in norms))
            h = min(max_norm / common, 1.0)
            for i, norm in enumerate(norms):
                clipped.append(h * norm)
                means[i] = min(means[i], h * norm)
        else:
            for i, norm in enumerate(norms):
                h = min(ratio * means[i] / norm, 1.0)
                clipped.append(h * norm)
                means[i] = decay * means[i] + (1 - decay) * h * norm
        result.append(clipped)
    return result


def zclip_loop(history, z_max, decay, warmup):
    """Algorithm 1 of ZClip for a list of norms, with the authors' 1e-6; norms after clipping."""
    result, seen, mean, variance = [], [], None, None
    for norm in history:
        if mean is None:
            seen.append(norm)
            result.append(norm)
            if len(seen) == warmup:
                mean = sum(seen) / warmup
                variance = sum((x - mean) ** 2 for x in seen) / warmup
            continue
        std = math.sqrt(variance)
        z = (norm - mean) / (std + 1e-6)
        if z > z_max:
            norm = mean + z_max**2 / z * std
        result.append(norm)
        mean = decay * mean + (1 - decay) * norm
        variance = decay * variance + (1 - decay) * (norm - mean) ** 2
    return result


@pytest.mark.parametrize("warmup", [1, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_adagc_is_the_algorithm_of_the_paper(warmup, seed):
    options = {"ratio": 1.05, "max_norm": 1.5, "decay": 0.9, "warmup": warmup}
    history = random_norms(40, 3, seed)
    wanted = adagc_loop(history.tolist(), **options)
    memory = new_memory("adagc", 3)
    found = []
    for norms in history:
        bounds, memory = adagc(norms, memory, **options)
        found.append(torch.minimum(norms, bounds).tolist())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-6, atol=0)
    assert any(a != b for a, b in zip(found[-5], history[-5].tolist(), strict=True))


@pytest.mark.parametrize("warmup", [1, 5, 25])
@pytest.mark.parametrize("z", [1.0, 2.5])
@settings(max_examples=30, deadline=None)
@given(history=UPDATES)
def test_zclip_is_the_algorithm_of_the_paper(warmup, z, history):
    wanted = zclip_loop(history, z, decay=0.9, warmup=warmup)
    memory = new_memory("zclip", 1)
    found = []
    for norm in history:
        norms = torch.tensor([norm], dtype=torch.float64)
        bounds, memory = zclip(norms, memory, z, decay=0.9, warmup=warmup)
        found.append(torch.minimum(norms, bounds).item())
    assert found == pytest.approx(wanted, rel=1e-6)


def test_zclip_has_an_upper_bound_from_the_first_update_on():
    norms = torch.tensor([8.0], dtype=torch.float64)
    bounds, memory = zclip(norms, new_memory("zclip", 1), max_norm=2.0)
    assert bounds.item() == 2.0
    assert memory.tolist() == [[8.0, 0.0, 1.0]]  # as in the code of the authors


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_skip_update_judges_by_mean_and_deviation(seed):
    history = random_norms(60, 1, seed).flatten().tolist()
    warmup, z, decay = 10, 3.0, 0.9
    memory = new_memory("skip_update", 1)
    mean = variance = 0.0
    seen = []
    for norm in history:
        norms = torch.tensor([norm], dtype=torch.float64)
        skipped, memory = skip_update(norms, memory, z=z, decay=decay, warmup=warmup)
        if len(seen) < warmup:
            seen.append(norm)
            mean = sum(seen) / len(seen)
            variance = sum((x - mean) ** 2 for x in seen) / len(seen)
            assert not skipped
            continue
        limit = mean + z * (math.sqrt(variance) + 1e-6)
        assert skipped.item() == (norm > limit)
        norm = min(norm, limit)
        mean = decay * mean + (1 - decay) * norm
        variance = decay * variance + (1 - decay) * (norm - mean) ** 2
    assert memory[0].tolist() == pytest.approx([mean, variance, len(history)], rel=1e-6)


def test_norms_that_stay_high_are_not_skipped_for_ever():
    memory = new_memory("skip_update", 1)
    history = [1.0, 1.2] * 15 + [50.0] * 100
    skipped = []
    for norm in history:
        norms = torch.tensor([norm], dtype=torch.float64)
        flag, memory = skip_update(norms, memory, z=6.0)
        skipped.append(flag.item())
    assert skipped[30]
    assert not skipped[-1]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("warmup", [2, 5])
@pytest.mark.parametrize("function", [adagc, zclip, skip_update], ids=lambda f: f.__name__)
def test_what_is_not_finite_is_not_remembered(function, warmup, bad):
    memory = new_memory(function.__name__, 2)
    for norms in random_norms(3, 2):
        _, memory = function(norms, memory, warmup=warmup)
    norms = torch.tensor([1.0, bad], dtype=torch.float64)
    result, new = function(norms, memory, warmup=warmup)
    assert torch.equal(new[1], memory[1])
    if function is skip_update:
        assert result.tolist() == [False, True]
    elif function is adagc:
        assert torch.equal(new, memory)
        if warmup == 5:  # the common norm is not finite, and bounds nothing
            assert result[0] == 1.0


def test_a_norm_of_zero_does_not_make_a_bound_of_zero():
    """The first gradient of one half of a low-rank adapter is 0."""
    memory = new_memory("adagc", 1)
    for norm in (0.0, 0.5, 0.5, 0.5):
        norms = torch.tensor([norm], dtype=torch.float64)
        bounds, memory = adagc(norms, memory, warmup=2)
    assert bounds.item() == pytest.approx(1.05 * 0.5)


@pytest.mark.parametrize("function", [adagc, zclip, skip_update], ids=lambda f: f.__name__)
def test_nothing_is_changed_in_place(function):
    norms, memory = torch.ones(2, dtype=torch.float64), new_memory(function.__name__, 2)
    before = norms.clone(), memory.clone()
    function(norms, memory)
    assert torch.equal(norms, before[0])
    assert torch.equal(memory, before[1])
    assert memory.shape == (2, COUNTS[function.__name__])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, r"decay must be in \[0, 1\), got 1.0"),
        ({"warmup": 0}, "warmup must be an integer >= 1, got 0"),
        ({"max_norm": 0.0}, "max_norm must be > 0, got 0.0"),
    ],
)
@pytest.mark.parametrize("function", [adagc, zclip, skip_update], ids=lambda f: f.__name__)
def test_arguments_are_checked(function, options, message):
    with pytest.raises(ValueError, match=message):
        function(torch.ones(1), new_memory(function.__name__, 1), **options)
