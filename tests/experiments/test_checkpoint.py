"""Checkpoints: a run that was stopped, anywhere, ends as one that was not."""

import errno
import itertools
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from experiments import checkpoint
from experiments.checkpoint import AnotherRun
from experiments.config import Config, Runtime
from experiments.files import write_atomically
from experiments.log import read_metrics
from experiments.train import Stopped, train

from .test_train import SPECS, TINY, timeless


def in_parts(config, out, batches, runtime=None):
    """Train, stopped after every few batches; the result, and how often it was stopped."""
    for stops in range(30):
        left = batches

        def stop():
            nonlocal left
            left -= 1
            return left == 0

        try:
            return train(config, runtime or Runtime(), out, stop=stop), stops
        except Stopped:
            continue
    return pytest.fail("it gets nowhere")


def tensors(state, prefix=""):
    """All tensors of a checkpoint, by their path."""
    if isinstance(state, torch.Tensor):
        yield prefix, state
    elif isinstance(state, dict | list | tuple):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from tensors(value, f"{prefix}/{key}")


RUNS = {
    "dropblock": {"spec": SPECS["dropblock"]},
    "mixup, average": {
        "spec": SPECS["dropout"],
        "ema": 0.9,
        "mixup": 0.4,
        "clip_grad_norm": 0.1,
    },
    "augmentation, adamw": {
        "augmentation": "crop-flip",
        "optimizer": "adamw",
        "lr_schedule": "cosine",
        "lr": 1e-3,
    },
    "gradients": {"spec": {"layer4.0": ["GaussianNoise(std=0.1)", "ClipGradNorm(max_norm=0.01)"]}},
    "drop path": {
        "model_args": {**TINY.model_args, "drop_path_rate": 0.3},
        "label_smoothing": 0.1,
    },
    "half": {"precision": "bf16-true", "ema": 0.9, "train_images": 50},
}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id=name, marks=() if name == "dropblock" else pytest.mark.slow)
        for name, fields in RUNS.items()
    ],
)
def test_resumed_anywhere_in_an_epoch_equals_uninterrupted(tmp_path, fields):
    config = replace(TINY, **fields)
    whole = train(config, out=tmp_path / "whole")
    parts, stops = in_parts(config, tmp_path / "parts", 2)  # of three: after each of them once
    assert stops == 4
    assert timeless(parts) == timeless(whole)
    files = [tmp_path / name / "checkpoint.pt" for name in ("whole", "parts")]
    one, other = (dict(tensors(torch.load(file, weights_only=True))) for file in files)
    assert one.keys() == other.keys()
    assert len(one) > 30
    assert all(torch.equal(one[name], other[name]) for name in one)
    strip = [
        [replace(e, seconds=0) for e in read_metrics(f.with_name("metrics.jsonl"))] for f in files
    ]
    assert strip[0] == strip[1] == timeless(whole).epochs


@pytest.mark.slow
def test_resumed_with_loader_processes_equals_uninterrupted(tmp_path):
    config = replace(TINY, augmentation="resized-crop-flip", spec=SPECS["dropout"])
    parts, _ = in_parts(config, tmp_path, 4, Runtime(loader_workers=1))
    assert timeless(parts) == timeless(train(config))


def test_a_process_that_was_killed_goes_on_from_its_last_checkpoint(tmp_path, monkeypatch):
    """As after SIGKILL: no checkpoint at the end, metrics ahead of it, the last line torn."""
    config = replace(TINY, spec=SPECS["dropblock"])
    with pytest.raises(Stopped):
        train(config, out=tmp_path, stop=iter([False, False, False, True]).__next__)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1, "loss": 2.0}\n{"epoch": 2, "lo')
    (tmp_path / ".checkpoint.pt.part").write_bytes(b"half")
    assert timeless(train(config, out=tmp_path)) == timeless(train(config))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert not (tmp_path / ".checkpoint.pt.part").exists()


@pytest.mark.slow
def test_checkpoints_are_written_as_often_as_asked(tmp_path, monkeypatch):
    import experiments.checkpoint

    written = []
    save = experiments.checkpoint.save
    monkeypatch.setattr(
        experiments.checkpoint,
        "save",
        lambda t, p: (written.append((t.epoch, t.batch)), save(t, p)),
    )
    train(TINY, Runtime(checkpoint_seconds=0), tmp_path / "all")
    steps = [(e, b) for e in range(3) for b in (1, 2)]
    assert written == [*sorted([*steps, (1, 0), (2, 0), (3, 0)]), (3, 0)]
    written.clear()
    train(TINY, Runtime(checkpoint_seconds=1000), tmp_path / "one")
    assert written == [(3, 0)]
    written.clear()
    monkeypatch.setattr("experiments.train.monotonic", itertools.count().__next__)
    train(TINY, Runtime(checkpoint_seconds=3), tmp_path / "some")  # a look at the clock a batch
    assert written == [(1, 0), (2, 0), (3, 0), (3, 0)]


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(tmp_path):
    first = train(TINY, out=tmp_path)
    heard = []
    assert timeless(train(TINY, out=tmp_path, on_epoch=heard.append)) == timeless(first)
    assert heard == []


def test_the_checkpoint_of_another_run_is_refused_and_kept(tmp_path):
    train(TINY, out=tmp_path)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(
        AnotherRun, match="lr is 0.1 there, and 0.2 here; seed is 5 there, and 6 here"
    ):
        train(replace(TINY, seed=6, lr=0.2), out=tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("content", [{"config": {}}, [1, 2], {"config": None, "epoch": 0}])
def test_a_file_that_is_no_checkpoint_is_told(tmp_path, content):
    torch.save(content, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint\.pt"):
        train(TINY, out=tmp_path)


@pytest.mark.slow
def test_a_full_disk_leaves_the_former_checkpoint(tmp_path, monkeypatch):
    with pytest.raises(Stopped):
        train(TINY, out=tmp_path, stop=iter([False, True]).__next__)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    fsync = os.fsync

    def full(descriptor):
        if "checkpoint" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            train(TINY, Runtime(checkpoint_seconds=0), tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "metrics.jsonl"]
    assert timeless(train(TINY, out=tmp_path)) == timeless(train(TINY))


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        train(TINY, out=tmp_path / "file")


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "note"

    def half(part):
        part.write_text("ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, half)
    assert list(tmp_path.iterdir()) == []
    write_atomically(path, lambda part: part.write_text("one"))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, half)
    assert path.read_text() == "one"


def test_images_that_were_moved_are_the_same():
    saved, config = asdict(Config(data="imagefolder:/there")), Config(data="imagefolder:/here")
    checkpoint._check_same(Path("checkpoint.pt"), saved, config)
    with pytest.raises(AnotherRun, match="data is 'imagefolder:/there' there, and 'fake' here"):
        checkpoint._check_same(Path("checkpoint.pt"), saved, replace(config, data="fake"))


@pytest.mark.slow
def test_a_run_killed_after_its_last_checkpoint_tests_with_the_same_masks(tmp_path):
    config = replace(TINY, spec={"layer4.0": "Dropout2d(p=0.5, active='always')"})
    whole = train(config, out=tmp_path)
    assert timeless(train(config, out=tmp_path)) == timeless(whole)


def test_a_spec_in_another_order_is_another_run(tmp_path):
    one = {"layer3.0": "Dropout2d(p=0.5)", "layer4.0": "Dropout2d(p=0.5)"}
    train(replace(TINY, spec=one), out=tmp_path)
    with pytest.raises(AnotherRun, match="spec is"):
        train(replace(TINY, spec=dict(reversed(one.items()))), out=tmp_path)
