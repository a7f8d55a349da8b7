"""A loop with Accelerate: attach, then prepare; the state by register_for_checkpointing."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.utils import set_seed

from dropblock_hooks import ClipGradNorm, DropBlock2d, HookWarning, LinearSchedule, attach

SPEC = {"layer2.*": DropBlock2d(p=LinearSchedule(0.0, 0.3), block_size=3)}
EPOCHS, STEPS = 3, 4


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4 * STEPS, 3, 16, 16, generator=generator)
    return TensorDataset(images, torch.arange(4 * STEPS) % 5)


def fit(model, data, folder, *, stop=None, resume=None):
    """Train from the start or from a folder, up to a step of all; what came of it."""
    accelerator = Accelerator(cpu=True)
    set_seed(0, device_specific=True)
    attached = attach(model, SPEC, epochs=EPOCHS, grad_scaler=accelerator.scaler or False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    order = torch.Generator()  # of the loader: the global one is of the masks
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=order)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(attached)
    done, rates = 0, []
    if resume is not None:
        accelerator.load_state(resume)
        done = round(attached.epoch * STEPS) + 1
    for epoch in range(done // STEPS, EPOCHS):
        wrapped.train()
        order.manual_seed(epoch)
        skipped = done % STEPS if epoch == done // STEPS else 0
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for i, (x, y) in enumerate(batches, skipped):
            if epoch * STEPS + i == stop:
                return attached, rates
            attached.step(epoch + i / STEPS)
            rates.append(attached.rates)
            accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if epoch * STEPS + i + 1 == stop:
                accelerator.save_state(folder)
    return attached, rates


@pytest.mark.parametrize("stop", [STEPS, STEPS + 2])
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, net, data, stop):
    first = net.state_dict()
    start = {name: tensor.clone() for name, tensor in first.items()}
    whole, rates = fit(net, data, tmp_path)
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    counted = whole.state_dict()
    whole.remove()

    net.load_state_dict(start)
    broken, before = fit(net, data, tmp_path, stop=stop)
    broken.remove()
    other = type(net)()
    resumed, after = fit(other, data, tmp_path, resume=tmp_path)
    assert before + after == rates
    assert all(torch.equal(other.state_dict()[name], weights[name]) for name in weights)
    assert resumed.state_dict() == counted


def test_the_scaler(net, data):
    """Accelerate makes it with mixed precision on a GPU; here both are put in their place."""
    accelerator = Accelerator(cpu=True)
    net.forward = torch.autocast("cpu", torch.float16)(net.forward)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    attached = attach(net, {"param:fc.weight": ClipGradNorm(1e-3)})
    net = accelerator.prepare(net)
    x, y = data.tensors[0][:4], data.tensors[1][:4]
    with pytest.warns(HookWarning, match="knows no GradScaler"):
        net(x)
    attached.grad_scaler = accelerator
    net.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(net(x), y))
    assert net.fc.weight.grad.norm() / 1024 == pytest.approx(1e-3, rel=1e-4)


def test_gradients_that_accumulate_are_clipped_once(net, data):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    attached = attach(net, {"param:**": ClipGradNorm(1e-3, group=True)})
    bare = torch.optim.SGD(net.parameters(), 0.1)
    wrapped, optimizer, loader = accelerator.prepare(net, bare, DataLoader(data, batch_size=4))
    attached.optimizer = optimizer
    assert attached.optimizer is bare
    for x, y in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
            optimizer.step()
            if accelerator.sync_gradients:
                norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
                assert norm.item() == pytest.approx(1e-3, rel=1e-4)
            optimizer.zero_grad()
    assert {(site.calls, site.active_calls) for site in attached} == {(STEPS, STEPS // 2)}
    assert attached.verify() == []
