"""A loop that is written by hand: the order of wrapping, and resuming in the middle of an epoch."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from dropblock_hooks import ClipGradNorm, DropBlock2d, Dropout, LinearSchedule, attach

SPEC = {
    "layer2.*": DropBlock2d(p=LinearSchedule(0.0, 0.3), block_size=3),
    "param:fc.weight": ClipGradNorm(0.05),
}
EPOCHS, STEPS = 3, 4


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 16, 16, generator=generator), torch.arange(4)) for _ in range(STEPS)]


def fit(model, batches, path, *, stop=None, resume=False):
    """Train up to a step of all, writing a checkpoint there, or on from there."""
    attached = attach(model, SPEC, epochs=EPOCHS)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    attached.grad_scaler = scaler
    parts = {"model": model, "ema": ema, "optimizer": optimizer, "scaler": scaler, "reg": attached}
    done, rates = 0, []
    torch.manual_seed(0)
    if resume:
        saved = torch.load(path)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["rng"])
        done = saved["done"]
    for step in range(done, EPOCHS * STEPS):
        if step == stop:
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**saved, "rng": torch.get_rng_state(), "done": step}, path)
            break
        epoch, i = divmod(step, STEPS)
        attached.step(epoch + i / STEPS)
        rates.append(attached.rates)
        x, y = batches[i]
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ema.update_parameters(model)
    return attached, ema, rates


@pytest.mark.parametrize("stop", [STEPS, STEPS + 1, 2 * STEPS + 3])
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, net, batches, stop):
    path = tmp_path / "checkpoint.pt"
    start = copy.deepcopy(net)
    whole, ema, rates = fit(net, batches, path)
    _, _, before = fit(start, batches, path, stop=stop)
    other = type(net)()
    resumed, other_ema, after = fit(other, batches, path, resume=True)
    assert before + after == rates
    for done, again in ((net, other), (ema, other_ema)):
        ours, theirs = done.state_dict(), again.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for site, one in zip(resumed.sites, whole.sites, strict=True):
        assert (site.calls, site.active_calls) == (one.calls, one.active_calls)
        assert site.total_realized_rate == one.total_realized_rate
    assert resumed.verify() == []


def drawn_by(p, generator):
    """The order of the data, an augmentation, and the model's own dropout in two epochs."""
    torch.manual_seed(0)
    loader = DataLoader(range(12), batch_size=4, shuffle=True, generator=generator)
    own_dropout = nn.Dropout(0.5)
    attached = attach(own_dropout, {".": Dropout(p, at="input")})
    order, noise, masks = [], [], []
    for epoch in range(2):
        attached.step(epoch)
        for batch in loader:
            order += batch.tolist()
            noise.append(torch.rand(()).item())
            masks.append((own_dropout(torch.ones(64)) == 0).sum().item())
    return order, noise, masks


@pytest.mark.filterwarnings("ignore:.*drop the same values")
def test_a_generator_of_the_loader_keeps_the_order_of_the_data():
    def generator():
        return torch.Generator().manual_seed(1)

    bare, regularized = drawn_by(0.0, generator()), drawn_by(0.5, generator())
    assert bare[0] == regularized[0]
    assert bare[1] != regularized[1]
    assert bare[2] != regularized[2]
    assert drawn_by(0.0, None)[0] != drawn_by(0.5, None)[0]
