"""Configs: every field is checked, part of the run's name, and read from plain data."""

import json
from dataclasses import asdict, fields, replace

import pytest

from experiments.config import Config, Runtime, make_config, resolve, run_hash

OTHER = {
    "spec": {"layer4.0": {"Dropout2d": {"p": 0.25}}},
    "model": "resnet34",
    "model_args": {"output_stride": 8},
    "data": "fake",
    "image_size": 48,
    "train_images": 7,
    "validation": 0.5,
    "label_noise": 0.5,
    "augmentation": "flip",
    "mixup": 0.5,
    "label_smoothing": 0.5,
    "optimizer": "adamw",
    "optimizer_args": {"eps": 1e-5},
    "lr": 0.5,
    "lr_schedule": "cosine",
    "lr_schedule_args": {"min_lr": 1e-5},
    "clip_grad_norm": 0.5,
    "ema": 0.5,
    "precision": "bf16-mixed",
    "accelerator": "cuda",
    "warmup_epochs": 4,
    "strategy": "ddp",
    "compile": True,
    "test_epochs": True,
    "test": False,
}


def other(name):
    """A config of which one field differs from the default."""
    default = getattr(Config(), name)
    value = OTHER[name] if name in OTHER else default + default.__class__(4)
    assert value != default
    base = Config(lr_schedule="cosine") if name == "warmup_epochs" else Config()
    return replace(base, **{name: value})


@pytest.mark.parametrize("name", [field.name for field in fields(Config)])
def test_every_field_is_part_of_the_hash(name):
    default = replace(other(name), **{name: getattr(Config(), name)})
    assert run_hash(other(name), other(name).data) != run_hash(default, default.data)


def test_the_hash_knows_the_data_by_their_fingerprint_and_not_by_their_path():
    here, there = Config(data="imagefolder:/here"), Config(data="imagefolder:/there")
    assert run_hash(here, "same") == run_hash(there, "same")
    assert run_hash(here, "same") != run_hash(here, "changed")


def test_the_hash_knows_the_order_of_a_spec():
    """A later entry clears what an earlier one put on its layers."""
    one = Config({"layer[34].0": "Dropout2d(p=0.5)", "layer4.0": None})
    other = Config({"layer4.0": None, "layer[34].0": "Dropout2d(p=0.5)"})
    assert run_hash(resolve(one), "digits") != run_hash(resolve(other), "digits")


def test_the_hash_does_not_know_the_order_of_fields():
    one = Config({"layer4.0": {"DropBlock2d": {"p": 0.5, "block_size": 3}}})
    other = Config({"layer4.0": {"DropBlock2d": {"block_size": 3, "p": 0.5}}})
    assert run_hash(resolve(one), "digits") == run_hash(resolve(other), "digits")


def test_the_hash_stays():
    """Runs that were made with one version are found by the next one."""
    assert run_hash(Config(accelerator="cpu"), "digits") == "701b0e1e0f01e911"


@pytest.mark.parametrize("name", [field.name for field in fields(Config)])
def test_plain_data_and_back(name):
    config = other(name)
    assert make_config(json.loads(json.dumps(asdict(config)))) == config


def test_specs_that_say_the_same_are_one():
    short = resolve(Config({"layer4.0": "Dropout2d(p=0.25)"}))
    long = resolve(Config({"layer4.0": [{"Dropout2d": {"p": 0.25}}]}))
    assert short == long


def test_a_spec_file_is_read(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text("layer4.0: Dropout2d(p=0.25)\n", encoding="utf-8")
    assert resolve(Config(str(file))) == resolve(Config({"layer4.0": "Dropout2d(p=0.25)"}))


def test_torchrun_says_how_many_processes(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "6")
    config = resolve(Config(batch_size=12))
    assert (config.devices, config.num_nodes) == (2, 3)
    with pytest.raises(ValueError, match="batch_size must be a multiple of the 6 processes"):
        resolve(Config(batch_size=10))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", 0, "epochs must be at least 1, got 0"),
        ("threads", -1, "threads must be at least 1, got -1"),
        ("image_size", 0, "image_size must be at least 1, or null, got 0"),
        ("label_noise", 1.5, r"label_noise must be in \[0, 1\], got 1.5"),
        ("label_noise", float("nan"), "label_noise must be .* got nan"),
        ("label_smoothing", 1.0, r"label_smoothing must be in \[0, 1\), got 1.0"),
        ("validation", 1.0, r"validation must be in \[0, 1\), got 1.0"),
        ("validation", -0.1, r"validation must be in \[0, 1\), got -0.1"),
        ("lr", 0.0, "lr must be positive, got 0.0"),
        ("weight_decay", -1.0, "weight_decay must be 0 or more, got -1.0"),
        ("mixup", float("inf"), "mixup must be 0 or more, got inf"),
        ("clip_grad_norm", 0.0, "clip_grad_norm must be positive, or null, got 0.0"),
        ("ema", 1.0, r"ema must be in \[0, 1\), or null, got 1.0"),
        ("devices", 3, "batch_size must be a multiple of the 3 processes that share it, got 50"),
        ("model", "resnet81", r"unknown model 'resnet81' \(closest: resnet"),
        ("model", "torchvision:resnet81", r"unknown model 'resnet81' \(closest: resnet"),
        ("model", "zzz", "unknown model 'zzz'; known: the models of timm"),
        ("data", "cifar", r"unknown data 'cifar' \(closest: cifar10"),
        ("data", "imagefolder", "data must be one of digits, .*imagefolder:PATH"),
        ("data", "digits:here", "data must be one of"),
        ("optimizer", "adahessian", "optimizer must be one that needs first derivatives only"),
        ("model_args", {1: 2, "a": 3}, r"model_args must be text -> plain data .*, got \{1: 2"),
        ("optimizer_args", {"a": [{2: 1}]}, "optimizer_args must be text -> plain data"),
        ("lr_schedule_args", {"a": {1, 2}}, "lr_schedule_args must be text -> plain data"),
        ("spec", "", "spec must be a mapping, the path of a file, or null, got ''"),
        ("optimizer", "sdg", r"unknown optimizer 'sdg' \(closest: sgd"),
        ("lr_schedule", "cosin", r"unknown lr_schedule 'cosin' \(closest: cosine"),
        ("augmentation", "flop", r"unknown augmentation 'flop' \(closest: flip"),
        ("accelerator", "gpux", "unknown accelerator 'gpux'"),
        ("strategy", "foo", "unknown strategy 'foo'"),
        ("warmup_epochs", 2, "warmup_epochs must be 0 with the schedule onecycle.*, got 2"),
        ("precision", "bf16", r"unknown precision 'bf16' \(closest: bf16-"),
        ("spec", {"layer4.0": {"DropBlok2d": {"p": 0.1}}}, "DropBlock2d"),
    ],
)
def test_bad_values_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(Config(), **{field: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, r"unknown field 'epoch' \(closest: epochs"),
        ({"epochs": "few"}, "epochs"),
        ({"compile": "perhaps"}, "compile"),
        ({"spec": "missing.yaml"}, "missing.yaml"),
        ({"precision": "16-mixed", "accelerator": "cpu"}, "16-mixed needs a GPU"),
        ({"strategy": "fsdp", "ema": 0.5}, "ema must be null with the strategy fsdp, got 0.5"),
    ],
)
def test_bad_plain_data_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        resolve(make_config(values))


def test_bad_runtimes_are_refused():
    with pytest.raises(ValueError, match="loader_workers must be 0 or more, got -1"):
        Runtime(loader_workers=-1)
    with pytest.raises(ValueError, match="checkpoint_seconds must be 0 or more, got nan"):
        Runtime(checkpoint_seconds=float("nan"))
