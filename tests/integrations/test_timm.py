"""The main steps of timm's ``train.py``, with the lines that attach, through timm's public API."""

import argparse

import pytest
import torch
from torch import nn

pytest.importorskip("timm")
import timm
from timm import utils
from timm.models import load_checkpoint, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask

from dropblock_hooks import L2SP, ClipGradNorm, DropBlock2d, HookWarning, LinearSchedule, attach
from dropblock_hooks.integrations.timm import keep_in_checkpoints
from tests.cases import rest_slow

SPEC = {
    "layer[34].*": DropBlock2d(p=LinearSchedule(0.0, 0.2), block_size=2),
    "param:fc.weight": ClipGradNorm(0.01),
}
EPOCHS = 4


def args_of(folder, **given):
    """The arguments of the script that matter here."""
    options = {"model": "resnet10t", "seed": 42, "epochs": EPOCHS, "resume": "", "spec": SPEC}
    options |= {"amp": False, "stop": EPOCHS, "task": False}
    return argparse.Namespace(output=str(folder), **{**options, **given})


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 64, 64, generator=generator), torch.arange(4)) for _ in range(2)]


def main(args):
    """As the script goes: model, EMA, scaler, resume, saver, epochs."""
    utils.random_seed(args.seed, 0)
    model = timm.create_model(args.model, num_classes=4, stem_width=8, channels=(8, 8, 16, 16))
    attached = attach(model, args.spec, epochs=args.epochs)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9)
    loss_scaler = utils.NativeScaler(device="cpu") if args.amp else None
    resume_epoch = None
    if args.resume:
        resume_epoch = resume_checkpoint(model, args.resume, optimizer, loss_scaler)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False) if args.task else None
    model_ema = task.setup_ema(decay=0.9) if task else utils.ModelEmaV3(model, decay=0.9)
    if args.resume:
        load_checkpoint(model_ema.module, args.resume, use_ema=True)
    lr_scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=args.epochs)
    if resume_epoch:
        lr_scheduler.step(resume_epoch)
    saver = utils.CheckpointSaver(
        model=model,
        optimizer=optimizer,
        args=argparse.Namespace(model=args.model),
        model_ema=model_ema,
        amp_scaler=loss_scaler,
        checkpoint_dir=args.output,
        recovery_dir=args.output,
        task=task,
    )
    keep_in_checkpoints(attached, saver, resume=args.resume, loss_scaler=loss_scaler)
    rates = {}
    for epoch in range(resume_epoch or 0, args.stop):
        utils.random_seed(args.seed + epoch, 0)  # else a resumed run draws other masks
        attached.step(epoch)
        rates[epoch] = attached.rates
        train_one_epoch(model, optimizer, loss_scaler, model_ema)
        assert attached.verify() == []
        lr_scheduler.step(epoch + 1)
        saver.save_checkpoint(epoch, metric=evaluate(model))
    return model, model_ema, attached, rates


def train_one_epoch(model, optimizer, loss_scaler, model_ema):
    model.train()
    for x, y in batches():
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer)
        else:
            loss.backward()
            optimizer.step()
        model_ema.update(model)


def evaluate(model):
    model.eval()
    with torch.no_grad():
        return float(sum((model(x).argmax(1) == y).float().mean() for x, y in batches()))


def same(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("options", rest_slow([{"amp": True}, {}, {"task": True}]))
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, options):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    model, ema, attached, rates = main(args_of(tmp_path / "whole", **options))
    main(args_of(tmp_path / "broken", stop=2, **options))
    last = str(tmp_path / "broken" / "last.pth.tar")
    again = main(args_of(tmp_path / "broken", resume=last, **options))
    assert again[3] == {epoch: rates[epoch] for epoch in (2, 3)}
    values = [next(iter(seen.values()))["p"] for seen in rates.values()]
    assert values == [LinearSchedule(0.0, 0.2, epochs=EPOCHS)(t) for t in range(EPOCHS)]
    assert same(again[0], model)
    assert same(again[1], ema)
    assert again[2].state_dict() == attached.state_dict()  # all that was counted, too
    scaler = attached.grad_scaler
    assert scaler.is_enabled() if options.get("amp") else scaler is None


def test_a_resumed_training_with_l2sp(tmp_path):
    """The resumed run begins with other weights, so it needs those at the start from the file."""
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    options = {"spec": {"param:**.weight": L2SP(0.5)}}
    model, _, attached, _ = main(args_of(tmp_path / "whole", **options))
    unbounded = {"param:fc.weight": ClipGradNorm(1e6)}
    bare, _, _, _ = main(args_of(tmp_path, spec=unbounded))
    assert not same(bare, model)
    main(args_of(tmp_path / "broken", stop=2, **options))
    last = str(tmp_path / "broken" / "last.pth.tar")
    again = main(args_of(tmp_path / "broken", resume=last, seed=7, **options))
    assert same(again[0], model)
    for site, other in zip(attached, again[2], strict=True):
        assert torch.equal(site._live.anchor, other._live.anchor)


def test_a_training_may_become_longer(tmp_path):
    main(args_of(tmp_path, stop=2))
    last = str(tmp_path / "last.pth.tar")
    _, _, attached, rates = main(args_of(tmp_path, resume=last, epochs=8, stop=3))
    assert next(iter(rates[2].values()))["p"] == LinearSchedule(0.0, 0.2, epochs=8)(2)
    assert attached.sites[0].calls == 3 * 4
    other = {"layer3": DropBlock2d(p=0.3, block_size=2), "param:fc.weight": ClipGradNorm(0.01)}
    with pytest.raises(ValueError, match="another model or spec"):
        main(args_of(tmp_path, resume=last, spec=other))
    model = timm.create_model("resnet10t", num_classes=4, stem_width=8, channels=(8, 8, 16, 16))
    attached = attach(model, other)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05)
    keep_in_checkpoints(attached, None, resume=last, strict=False, optimizer=optimizer)
    assert attached.optimizer is optimizer
    assert [site.calls for site in attached] == [0, 12]


def test_files_stay_files_of_timm(tmp_path):
    model, ema, _, _ = main(args_of(tmp_path, stop=1))
    for name, is_ema in (("last", False), ("checkpoint-0", False), ("model_best", True)):
        other = timm.create_model("resnet10t", num_classes=4, stem_width=8, channels=(8, 8, 16, 16))
        load_checkpoint(other, str(tmp_path / f"{name}.pth.tar"), use_ema=is_ema)
        assert same(other, ema.module if is_ema else model)
    saver = utils.CheckpointSaver(model, None, checkpoint_dir=str(tmp_path))
    assert saver.load_state_dict_from_checkpoint(str(tmp_path / "last.pth.tar"))
    assert saver.best_epoch == 0


def test_a_file_without_an_attachment(tmp_path, net):
    optimizer = torch.optim.SGD(net.parameters())
    utils.CheckpointSaver(net, optimizer, checkpoint_dir=str(tmp_path)).save_checkpoint(0)
    attached = attach(net, {"layer1": DropBlock2d(p=0.1)})
    with pytest.warns(HookWarning, match="has no state of an Attachment"):
        keep_in_checkpoints(attached, None, resume=tmp_path / "last.pth.tar")
