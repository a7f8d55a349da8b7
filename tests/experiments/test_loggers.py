"""Loggers: what they are given, once, also by runs that were killed and go on."""

import json
import struct
import sys
from collections import defaultdict
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from experiments import loggers
from experiments.config import Runtime
from experiments.loggers import LOGGERS, Loggers, check_installed
from experiments.train import Stopped, train
from tests.experiments.launches import DROP, TINY, timeless

CONFIG = replace(TINY, spec=DROP, epochs=4)
RATE = "reg/layer4.0/Dropout2d/p"


class FakeRun:
    """A run of wandb."""

    def __init__(self, options):
        self.options, self.points, self.exit_code = options, [], None

    def log(self, values, step):
        assert self.exit_code is None
        self.points += [(name, step, value) for name, value in values.items()]

    def finish(self, exit_code):
        self.exit_code = exit_code


class FakeClient:
    """A client of MLflow; all of them have one server."""

    experiments, runs = {}, {}

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name):
        self.experiments[name] = SimpleNamespace(experiment_id=name)
        return name

    def create_run(self, experiment, run_name):
        run = SimpleNamespace(experiment=experiment, status="RUNNING", params={}, points=[])
        self.runs[run_name] = run
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def update_run(self, run, status):
        self.runs[run].status = status

    def log_param(self, run, name, value):
        assert self.runs[run].params.setdefault(name, value) == value

    def log_batch(self, run, metrics):
        assert len(metrics) <= 1000
        self.runs[run].points += [(m.key, m.step, m.value) for m in metrics]

    def set_terminated(self, run, status):
        self.runs[run].status = status


def module(monkeypatch, name, **contents):
    made = ModuleType(name)
    vars(made).update(contents)
    made.__spec__ = ModuleSpec(name, None, origin="fake")
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def fake_wandb(monkeypatch):
    """The runs that are made of it."""
    runs = []

    def init(**options):
        runs.append(FakeRun(options))
        return runs[-1]

    module(monkeypatch, "wandb", init=init, Settings=SimpleNamespace)
    return runs


@pytest.fixture
def fake_mlflow(monkeypatch):
    """The client's class."""
    client = type("Client", (FakeClient,), {"experiments": {}, "runs": {}})

    def metric(key, value, timestamp, step):
        return SimpleNamespace(key=key, value=value, step=step)

    module(monkeypatch, "mlflow", MlflowClient=client)
    module(monkeypatch, "mlflow.entities", Metric=metric)
    module(monkeypatch, "mlflow.exceptions", MlflowException=RuntimeError)
    return client


def killed_and_resumed(out, log, after=2):
    """Train until an error comes after an epoch was logged, but not kept; then to the end."""

    def die(epoch):
        if epoch.epoch == after:
            raise KeyError("as a kill does")

    runtime = Runtime(checkpoint_seconds=0, log=log)
    with pytest.raises(KeyError):
        train(CONFIG, runtime, out, on_epoch=die)
    return train(CONFIG, runtime, out)


def expect(points, result):
    """Each point stands there once: (name, step, value) of all processes."""
    found = defaultdict(list)
    for name, step, value in points:
        found[name].append((step, value))
    losses = [(epoch.epoch, pytest.approx(epoch.loss)) for epoch in result.epochs]
    assert sorted(found["train/loss"]) == losses
    assert sorted(found[RATE]) == [(epoch, 0.5) for epoch in range(4)]
    assert found["test/accuracy_clean"] == [(4, pytest.approx(result.scores["clean"]))]
    assert {"train/lr", "train/accuracy", "train/grad_norm", "test/accuracy_noisy"} <= set(found)


def test_wandb_goes_on_without_double_points(fake_wandb, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    result = killed_and_resumed(tmp_path / "study" / "one", "wandb")
    expect([point for run in fake_wandb for point in run.points], result)
    first, second = (run.options for run in fake_wandb)
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"
    names = (first["project"], first["group"], first["name"])
    assert names == ("dropblock-hooks", "study", "one")
    assert first["config"]["epochs"] == 4
    assert [run.exit_code for run in fake_wandb] == [1, 0]


def test_mlflow_goes_on_without_double_points(fake_mlflow, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    ends = []
    original = fake_mlflow.set_terminated
    fake_mlflow.set_terminated = lambda self, run, status: (
        ends.append(status), original(self, run, status))  # fmt: skip
    result = killed_and_resumed(tmp_path / "study" / "one", "mlflow")
    [run] = fake_mlflow.runs.values()
    expect(run.points, result)
    assert run.experiment == "study"
    assert run.params["epochs"] == "4"
    assert ends == ["KILLED", "FINISHED"]


def test_several_loggers_beside_one_another_change_no_digit(fake_wandb, fake_mlflow, tmp_path):
    result = train(CONFIG, Runtime(log="wandb,mlflow, tensorboard"), tmp_path / "all")
    assert timeless(result) == timeless(train(CONFIG))
    assert timeless(killed_and_resumed(tmp_path / "dead", "wandb,mlflow")) == timeless(result)
    [run] = [run for name, run in fake_mlflow.runs.items() if name == "all"]
    expect(run.points, result)
    expect(fake_wandb[0].points, result)
    expect(tensorboard_points(tmp_path / "all"), result)


def tensorboard_points(out):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard")).Reload()
    return [
        (tag, event.step, event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    ]


def test_tensorboard_goes_on_without_double_points(tmp_path):
    result = killed_and_resumed(tmp_path, "tensorboard")
    expect(tensorboard_points(tmp_path), result)


def test_a_run_that_is_stopped_has_not_ended(fake_wandb, tmp_path):
    with pytest.raises(Stopped):
        train(CONFIG, Runtime(log="wandb"), tmp_path, stop=lambda: True)
    assert [run.exit_code for run in fake_wandb] == [1]


def test_the_second_of_two_that_make_an_experiment_takes_the_first_ones(fake_mlflow, tmp_path):
    original = fake_mlflow.create_experiment

    def late(self, name):
        original(self, name)
        raise RuntimeError("it exists")

    fake_mlflow.create_experiment = late
    Loggers(["mlflow"], tmp_path, {}, 0)
    [run] = fake_mlflow.runs.values()
    assert run.experiment == tmp_path.parent.name


def test_one_that_cannot_be_made_closes_the_others(fake_wandb, fake_mlflow, tmp_path):
    def fail(self, *args, **options):
        raise OSError("no server")

    fake_mlflow.create_run = fail
    with pytest.raises(OSError, match="no server"):
        Loggers(["wandb", "mlflow"], tmp_path, {}, 0)
    assert [run.exit_code for run in fake_wandb] == [1]


def test_all_are_closed_where_one_fails(fake_wandb, fake_mlflow, tmp_path):
    def fail(self, *args, **options):
        raise OSError("no server")

    opened = Loggers(["wandb", "mlflow"], tmp_path, {}, 0)
    fake_mlflow.set_terminated = fail
    with pytest.raises(OSError, match="no server"):
        opened.close(has_ended=True)
    assert [run.exit_code for run in fake_wandb] == [0]


def test_many_metrics_go_to_mlflow_in_parts(fake_mlflow, tmp_path):
    opened = Loggers(["mlflow"], tmp_path, {}, 0)
    opened.log(0, {str(number): 0.0 for number in range(2100)})
    [run] = fake_mlflow.runs.values()
    assert len(run.points) == 2100


def test_a_missing_package_is_refused_at_once(monkeypatch, tmp_path, call, capsys):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    for names in (["wandb"], ["wandb", "mlflow"]):
        with pytest.raises(ValueError, match=f"pip install {' '.join(names)}$"):
            check_installed(names)
    study = tmp_path / "study.yaml"
    study.write_text("question: none", encoding="utf-8")
    assert call("ablate.py", study, "--log", "mlflow") == 2
    assert "pip install mlflow" in capsys.readouterr().err
    assert call("train.py", "--out", tmp_path / "out", "--log", "wandb") == 2
    assert "pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "out").exists()


def test_a_folder_of_the_name_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "w_and_b").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(LOGGERS, "wandb", ("w_and_b", None))
    with pytest.raises(ValueError, match="pip install w_and_b"):
        check_installed(["wandb"])


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("tensorbord", r"unknown logger 'tensorbord' \(closest: tensorboard\)"),
        ("tensorboard,comet", "unknown logger 'comet'; known: tensorboard, wandb, mlflow"),
    ],
)
def test_an_unknown_logger_is_refused(log, error):
    with pytest.raises(ValueError, match=error):
        Runtime(log=log)


def test_a_log_needs_a_folder():
    with pytest.raises(ValueError, match="log='tensorboard' needs a folder"):
        train(CONFIG, Runtime(log="tensorboard"))


def test_a_damaged_record_of_logs_is_told(fake_wandb, tmp_path):
    (tmp_path / "loggers.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"loggers\.json can't be read"):
        Loggers(["wandb"], tmp_path, {}, 0)


def wandb_points(path):
    """The history in a run's file: records of protobuf, in blocks as LevelDB's logs have them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (rest := 2**15 - at % 2**15) < 7:
            at += rest
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # the whole of a record, or its last part
            continue
        record, parts = Record.FromString(parts), b""
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                yield name, record.history.step.num, json.loads(item.value_json)


@pytest.mark.filterwarnings("default")  # of the libraries that they import
def test_wandb_itself_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="an option of the user's")
    monkeypatch.setenv("WANDB_MODE", "offline")
    result = killed_and_resumed(tmp_path / "one", "wandb")
    assert wandb.run is None
    files = sorted((tmp_path / "one" / "wandb").glob("offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1
    assert len(files) == 2
    expect([point for path in files for point in wandb_points(path)], result)


@pytest.mark.filterwarnings("default")  # of the libraries that they import
def test_mlflow_itself(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="an option of the user's")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    result = killed_and_resumed(tmp_path / "study" / "one", "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("study")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    assert run.data.params["epochs"] == "4"
    points = [
        (name, each.step, each.value)
        for name in run.data.metrics
        for each in client.get_metric_history(run.info.run_id, name)
    ]
    expect(points, result)
