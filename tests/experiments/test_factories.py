"""Factories of one's own: found, called with what they name, and told of when they fail."""

import re

import pytest

from experiments.config import Run, run_hash
from experiments.data import load_data
from experiments.factories import FactoryError, call, digest, load
from experiments.models import make_model
from experiments.study import StudyError, fit, read_study
from experiments.train import train


def make(**fields):
    return Run(
        **{"model": "mine:net", "data": "mine:stripes", "epochs": 1, "batch_size": 8, **fields}
    )


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("nothing", r"package\.module:name, or one of digits"),
        ("no_such_module:net", "no module 'no_such_module'"),
        ("mine:nett", r"mine has no function or class 'nett'"),
        ("mine:", r"package\.module:name"),
    ],
)
def test_what_is_not_there_is_told(folder, reference, told):
    with pytest.raises(FactoryError, match=told):
        load(reference)


def test_a_factory_gets_what_it_names(folder):
    assert call("mine:net", {"width": 5}, num_classes=2, in_chans=7).conv.out_channels == 5
    assert call("mine:net", {"num_classes": 4}, num_classes=2).head.out_features == 4


def line_of(folder, text):
    lines = (folder / "mine.py").read_text().splitlines()
    return next(
        f"{folder}/mine.py:{number}" for number, line in enumerate(lines, 1) if text in line
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": "mine:broken"}, "no such weights"),
        ({"model": "mine:FailingNet"}, "return self.head(x)"),
        ({"data": "mine:unreadable"}, "no such image"),
        ({"loss": "mine:failing_loss"}, "outputs.no_such_method()"),
        ({"metric": "mine:failing_metric"}, "argmin(1).no_such_method()"),
    ],
    ids=["factory", "forward", "item", "loss", "metric"],
)
def test_an_error_names_the_own_file_and_line_before_the_training(write, folder, fields, text):
    base = {"model": "mine:net", "data": "mine:stripes", **fields}
    with pytest.raises(StudyError, match=re.escape(line_of(folder, text))):
        fit(read_study(write(base=base, conditions={"none": {}})))


def test_an_error_of_an_import_names_the_own_file(folder):
    (folder / "faulty.py").write_text("x = 1\nimport no_such_package\n")
    with pytest.raises(FactoryError, match=r"no_such_package.*faulty\.py:2"):
        load("faulty:net")
    (folder / "odd.py").write_text("def f(:\n")
    with pytest.raises(FactoryError, match=r"odd\.py:1"):
        load("odd:f")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"data": "mine:one_class", "data_args": {}}, None),
        ({"data": "builtins:dict"}, r"tuple \(train, tests, validation\)"),
        ({"data_args": {"count": 0}}, "train is empty"),
        ({"data_args": {"cunt": 3}}, "unexpected keyword argument 'cunt'"),
        ({"model": "resnet1"}, "closest: .*resnet1"),
        ({"model": "resnet18", "model_args": {"depth": 3}}, "model_args do not fit resnet18"),
        ({"model": "torchvision:resnet19"}, "model_args do not fit|Unknown model"),
        ({"model": "torch.nn:Identity"}, "fails on the outputs|fails on an item"),
        ({"loss": "torch.nn:BCEWithLogitsLoss"}, "BCEWithLogitsLoss fails on the outputs"),
        ({"loss_args": {"reduction": "none"}}, "must return one number"),
    ],
)
def test_what_does_not_fit_is_told_before_the_training(folder, fields, told):
    run = make(**fields)
    if told is None:
        make_model(run, load_data(run))
        return
    with pytest.raises(FactoryError, match=told):
        make_model(run, load_data(run))


def test_one_class_is_refused(folder):
    (folder / "single.py").write_text(
        "from mine import Noisy\n"
        "class One(Noisy):\n"
        "    classes = ('rows',)\n"
        "def data(seed):\n"
        "    return One(8), {'clean': One(3)}\n"
    )
    with pytest.raises(FactoryError, match="nothing to tell apart"):
        load_data(make(data="single:data"))


def test_a_metric_must_return_a_number(write, folder):
    with pytest.raises(FactoryError, match=r"mine:text_metric.*'clean'"):
        train(make(metric="mine:text_metric"))
    base = {"model": "mine:net", "data": "mine:stripes", "metric": "mine:text_metric"}
    with pytest.raises(StudyError, match="'mine:text_metric' must return a number"):
        fit(read_study(write(base=base)))


def test_a_metric_may_refuse_the_few_items_of_the_trial(write, folder):
    base = {"model": "mine:net", "data": "mine:stripes", "metric": "mine:refusing_metric"}
    fit(read_study(write(base=base)))


def test_the_name_of_a_run_has_its_fields_and_the_files_of_its_factories(folder):
    first = run_hash(make())
    assert run_hash(make()) == first
    assert run_hash(make(seed=1)) != first
    assert run_hash(make(data_args={"count": 25})) != first
    path = folder / "mine.py"
    path.write_text(path.read_text() + "\n# changed\n")
    assert run_hash(make()) != first
    assert digest("digits") == "digits"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"epochs": 0}, "greater than or equal to 1"),
        ({"epochs": True}, "must be a number"),
        ({"lr": float("inf")}, "finite"),
        ({"lr": "fast"}, "valid number"),
        ({"schedule": "cosin"}, "'onecycle', 'cosine' or 'constant'"),
        ({"epoch": 3}, "Extra inputs"),
    ],
)
def test_fields_are_checked(fields, told):
    with pytest.raises(ValueError, match=told):
        Run(**fields)


def test_numbers_that_yaml_reads_as_text_are_numbers():
    assert Run(lr="1e-3").lr == 1e-3
