"""`sample`: entropy and mutual information, and all passes in one batch.

References are loops in NumPy, and outputs that are computed by hand from the masks.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ActivationStats,
    Capture,
    ClampActivation,
    Disout,
    DropBlock2d,
    Dropout,
    Dropout1d,
    Dropout2d,
    DropPath,
    Foreign,
    GaussianNoise,
    Regularizer,
    Retune,
    Sampled,
    StochasticDepth,
    attach,
    sample,
)


def entropy_by_hand(probabilities):
    return -sum(p * math.log(p) for p in probabilities if p > 0)


def by_hand(samples):
    """The entropy and the mutual information of samples (n, N, C), in plain Python."""
    entropies, informations = [], []
    for row in range(samples.shape[1]):
        passes = [samples[i, row].tolist() for i in range(samples.shape[0])]
        mean = [sum(column) / len(passes) for column in zip(*passes, strict=True)]
        whole = entropy_by_hand(mean)
        entropies.append(whole)
        informations.append(whole - sum(map(entropy_by_hand, passes)) / len(passes))
    return np.array(entropies), np.array(informations)


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)).eval()


def rows(n=5):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("batched", [False, True])
def test_entropy_and_mutual_information_are_those_of_a_loop(batched):
    model = classifier()
    attach(model, {"1": Dropout(0.4, active="always")})
    sampled = sample(model, rows(), n=20, target=lambda y: y.softmax(-1), batched=batched)
    entropy, information = by_hand(sampled.samples.double().numpy())
    np.testing.assert_allclose(sampled.entropy().numpy(), entropy, rtol=1e-5)
    np.testing.assert_allclose(sampled.entropy(-1).numpy(), entropy, rtol=1e-5)
    np.testing.assert_allclose(sampled.mutual_information().numpy(), information, atol=1e-6)
    assert information.min() > 1e-4
    assert (information < entropy).all()


def of(samples):
    return Sampled(samples.float().mean(0), samples.float().std(0), samples)


def test_the_ends_of_both():
    agree = of(torch.tensor([0.5, 0.5]).expand(4, 3, 2))
    assert agree.entropy().tolist() == pytest.approx([math.log(2)] * 3)
    assert agree.mutual_information().tolist() == pytest.approx([0.0] * 3, abs=1e-7)
    sure = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # each pass is sure of another class
    assert of(sure).entropy().tolist() == pytest.approx([math.log(2)])
    assert of(sure).mutual_information().tolist() == pytest.approx([math.log(2)])


def test_classes_on_another_axis():
    torch.manual_seed(0)
    maps = torch.rand(6, 2, 4, 3, 5).softmax(2)  # as a segmentation: (n, N, C, H, W)
    entropy, information = by_hand(maps.permute(0, 1, 3, 4, 2).reshape(6, -1, 4).double().numpy())
    np.testing.assert_allclose(of(maps).entropy().flatten().numpy(), entropy, rtol=1e-5)
    np.testing.assert_allclose(
        of(maps).mutual_information(-3).flatten().numpy(), information, atol=1e-6
    )
    half = of(maps.bfloat16()).entropy()
    assert half.dtype == torch.float32
    np.testing.assert_allclose(half.flatten().numpy(), entropy, rtol=2e-2)


@pytest.mark.parametrize(
    ("samples", "axis"),
    [
        (torch.randn(4, 3, 5), 1),
        (torch.rand(4, 3, 5), 1),
        (torch.full((4, 3, 5), torch.nan), 1),
    ],
    ids=["logits", "no sum", "nan"],
)
def test_samples_that_are_no_probabilities_are_refused(samples, axis):
    for method in (of(samples).entropy, of(samples).mutual_information):
        with pytest.raises(ValueError, match=r"probabilities that add up to 1 on axis 1 .*softmax"):
            method(axis)


def test_the_axis_on_which_samples_add_up_is_named():
    sampled = of(torch.rand(4, 3, 5).softmax(-1))
    with pytest.raises(ValueError, match=r"add up to 1 on axis 0 .*on axis 1: write axis=1") as it:
        sampled.entropy(0)
    assert "softmax" not in str(it.value)


@pytest.mark.parametrize("axis", [2, -3, 1.0, True])
def test_a_bad_axis(axis):
    with pytest.raises(ValueError, match=r"axis of the outputs of shape \(3, 5\), got"):
        of(torch.rand(4, 3, 5).softmax(-1)).entropy(axis)


def test_the_samples_of_a_batch_are_those_of_their_masks():
    model = classifier()
    attach(model, {"1": Dropout(0.4, active="always")})
    seen = []
    model[1].register_forward_hook(lambda module, args, y: seen.append(y.clone()))
    calls = []
    model.register_forward_hook(lambda module, args, y: calls.append(args[0].shape))
    mean, std, samples = sample(model, rows(), n=7, batched=True)
    assert calls == [(35, 6)]
    (hidden,) = seen
    plain = nn.functional.relu(model[0](rows()))
    for i in range(7):
        for row in range(5):
            of_row = hidden[i * 5 + row]
            mask = of_row != 0
            expected = model[2](torch.where(mask, plain[row] / 0.6, 0.0))
            torch.testing.assert_close(samples[i, row], expected)
    assert samples.shape == (7, 5, 3)
    torch.testing.assert_close(mean, samples.mean(0))
    torch.testing.assert_close(std, samples.std(0))
    assert not samples.requires_grad
    assert len({tuple(row.tolist()) for row in samples[:, 0]}) == 7


def test_moments_of_a_batch():
    """As in `test_moments_of_dropout_before_a_linear_layer`, within 4.5 standard errors."""
    torch.manual_seed(0)
    n, p, units = 4000, 0.3, 50
    model = nn.Sequential(nn.Linear(units, 4, bias=False)).double().eval()
    x = torch.rand(4, units).double()
    attach(model, {"0": Dropout(p, at="input", active="always")})
    mean, std, _ = sample(model, x, n=n, batched=True)
    terms = model[0].weight.detach() * x[:, None]
    variance = terms.square().sum(-1) * p / (1 - p)
    assert ((mean - terms.sum(-1)) / (variance / n).sqrt()).abs().max() < 4.5
    torch.testing.assert_close(std.square(), variance, rtol=0.12, atol=0.0)


class Arguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x, others, scale=1.0, flag=None):
        return self.inner(x + others["y"]) * scale


def test_all_tensors_are_repeated():
    model = Arguments()
    attach(model, {"inner": Dropout(1e-12, active="always")})
    x, y = torch.rand(4, 3), torch.rand(4, 3)
    given = {"x": x, "others": {"y": y}, "scale": torch.tensor(2.0), "flag": "text"}
    _, std, samples = sample(model, given, n=3, batched=True)
    assert not std.any()
    torch.testing.assert_close(samples[1], model.eval()(**given).detach())
    with pytest.raises(ValueError, match=r"same length there, .*got shapes \[\(4, 3\), \(2, 3\)\]"):
        sample(model, (x, {"y": y[:2]}), n=3, batched=True)
    with pytest.raises(ValueError, match=r"got shapes \[\]"):
        sample(model, 3, n=3, batched=True)


class Mine(Regularizer):
    def apply(self, x, now):
        return x + torch.randn(1), None


TOGETHER = {
    "blocks": (DropBlock2d(0.3, 2, active="always"), 'normalize="batch"'),
    "whole batch": (StochasticDepth(0.3, mode="batch", active="always"), 'mode="batch"'),
    "disout": (Disout(0.3, 2, active="always"), "may treat the samples of a batch together"),
    "foreign": (Foreign(nn.Dropout, active="always"), "may treat"),
}
APART = {
    "sample": DropBlock2d(0.3, 2, normalize="sample", active="always"),
    "expected": DropBlock2d(0.3, 2, normalize="expected", active="always"),
    "rows": StochasticDepth(0.3, active="always"),
    "path": DropPath(0.3, active="always"),
    "noise": GaussianNoise(0.3, active="always"),
    "channels": [Dropout2d(0.3, active="always"), ClampActivation(-1.0, 1.0, active="always")],
    "observed": [Dropout2d(0.3, active="always"), ActivationStats(), Capture()],
}


class Map(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        torch.manual_seed(0)  # of the masks

    def forward(self, x):
        return self.layer(x)


def images():
    return torch.rand(3, 4, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", TOGETHER)
def test_sites_that_treat_rows_together_are_refused(case):
    regularizer, said = TOGETHER[case]
    model = Map(nn.Conv2d(4, 4, 1))
    attach(model, {"layer": regularizer})
    with pytest.raises(RuntimeError, match=f"^layer/.* {said}.*leave batched=True out"):
        sample(model, images(), n=3, batched=True)
    assert sample(model, images(), n=40).std.any()


def test_a_class_of_your_own_is_refused(own_registry):
    model = Map(nn.Conv2d(4, 4, 1))
    attach(model, {"layer": [Dropout(0.1, active="always"), Mine(active="always")]})
    with pytest.raises(RuntimeError, match="layer/Mine may treat the samples of a batch together"):
        sample(model, images(), n=3, batched=True)


@pytest.mark.parametrize("case", APART)
def test_sites_that_treat_rows_by_themselves(case):
    model = Map(nn.Conv2d(4, 4, 1))
    attach(model, {"layer": APART[case]})
    samples = sample(model, images(), n=24, batched=True).samples
    for row in range(3):
        assert len({tuple(x.flatten().tolist()) for x in samples[:, row]}) > 1
    assert samples.shape == (24, 3, 4, 6, 6)


def test_a_retuned_dropout():
    model = Map(nn.Dropout(0.5))
    attached = attach(model, {"layer": Retune(0.3)})
    with attached.always():
        samples = sample(model, images(), n=6, batched=True).samples
    assert 0.2 < float((samples == 0).float().mean()) < 0.4


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.BatchNorm2d(4, track_running_stats=False), "BatchNorm2d 'layer' normalizes over"),
        (nn.LSTM(4, 4), "LSTM 'layer' has batch_first=False"),
        (nn.MultiheadAttention(4, 2), "MultiheadAttention 'layer' has batch_first=False"),
    ],
)
def test_modules_that_mix_rows_are_refused(layer, said):
    model = nn.ModuleDict({"layer": layer, "out": nn.Linear(4, 4)})
    attach(model, {"out": Dropout(0.3, active="always")})
    with pytest.raises(RuntimeError, match=f"{said}.*leave batched=True out"):
        sample(model, images(), n=3, batched=True)


class Stubborn(nn.BatchNorm2d):
    """Stays in training mode."""

    def train(self, mode=True):
        return super().train(True)


def test_a_norm_in_training_mode_is_refused_and_others_are_not():
    for layer, refused in [(Stubborn(4), True), (nn.BatchNorm2d(4), False)]:
        model = Map(layer)
        attach(model, {"layer": Dropout(0.3, active="always")})
        if refused:
            with pytest.raises(RuntimeError, match="normalizes over the batch"):
                sample(model, images(), n=3, batched=True)
        else:
            assert sample(model, images(), n=3, batched=True).std.any()


class Position(nn.Module):
    """Drops at an embedding without a batch."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Identity()
        self.embedding = nn.Parameter(torch.rand(1, 6))

    def forward(self, x):
        return x + self.drop(self.embedding)


@pytest.mark.parametrize("length", [1, 5])
def test_a_mask_that_passes_would_share_is_refused(length):
    model = Position()
    attached = attach(model, {"drop": Dropout(0.3, active="always")})
    with pytest.raises(RuntimeError, match=r"drop/Dropout acts on a tensor of 1 rows .* for \d+ s"):
        sample(model, rows(length), n=4, batched=True)
    assert sample(model, rows(length), n=4).std.any()
    with attached.same_masks():
        assert torch.equal(model(rows(3)), model(rows(3)))


class LengthFirst(nn.Module):
    """Its layer works on (length, samples, channels), as modules of old transformers do."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Identity()

    def forward(self, x):
        return self.drop(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    "regularizer",
    [
        DropPath(0.5, active="always"),
        StochasticDepth(0.5, active="always"),
        Dropout1d(0.5, layout="NLC", active="always"),
    ],
    ids=["DropPath", "StochasticDepth", "tokens"],
)
def test_a_mask_of_positions_is_refused_if_the_length_is_a_multiple(regularizer):
    model = LengthFirst()
    attach(model, {"drop": regularizer})
    with pytest.raises(RuntimeError, match="acts on a tensor of 8 rows .* for 4 samples"):
        sample(model, torch.ones(1, 8, 3), n=4, batched=True)


def test_single_elements_are_dropped_on_each_axis():
    model = LengthFirst()
    attach(model, {"drop": Dropout(0.5, active="always")})
    samples = sample(model, torch.ones(1, 8, 3), n=4, batched=True).samples
    assert len({tuple(x.flatten().tolist()) for x in samples}) == 4


class Frames(nn.Module):
    """Its layer gets each frame of a video as a row."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def test_a_sample_may_have_several_maps():
    model = Frames()
    attach(model, {"layer": Dropout2d(0.5, active="always")})
    samples = sample(model, torch.rand(2, 3, 4, 5, 5), n=6, batched=True).samples
    assert len({tuple(x.flatten().tolist()) for x in samples[:, 0]}) == 6


class Twice(Position):
    """Drops again at a tensor with all rows."""

    def forward(self, x):
        return self.drop(super().forward(x))


def test_the_first_of_several_calls_may_be_the_one_that_shares_a_mask():
    model = Twice()
    attach(model, {"drop": Dropout(0.5, active="always")})
    with pytest.raises(RuntimeError, match="acts on a tensor of 1 rows"):
        sample(model, rows(2), n=4, batched=True)


def test_an_output_of_another_length_is_refused():
    model = classifier()
    attach(model, {"1": Dropout(0.4, active="always")})
    with pytest.raises(ValueError, match=r"must have 4 x 5 rows on axis 0, got shape \(3,\)"):
        sample(model, rows(), n=4, batched=True, target=lambda y: y.mean(0))


@pytest.mark.slow
def test_a_compiled_model_runs_in_eager_mode():
    torch._dynamo.reset()
    model = classifier()
    attach(model, {"1": Dropout(0.4, active="always")})
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    call(rows())
    samples = sample(call, rows(), n=4, batched=True).samples
    assert samples.shape == (4, 5, 3)
    assert len({tuple(row.tolist()) for row in samples[:, 0]}) == 4
