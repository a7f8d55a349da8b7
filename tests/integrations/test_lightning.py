"""The callback of Lightning: real trainers, under both names of the package, on tiny models."""

import contextlib
import csv
import importlib
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    FreezeNorm,
    HookWarning,
    LinearSchedule,
    SkipUpdate,
    SpecError,
)
from tests.conftest import hook_count

lightning = pytest.importorskip("lightning.pytorch", reason="the trainer is Lightning's")
from dropblock_hooks.integrations.lightning import Regularize  # noqa: E402

# what Lightning says of tiny runs, and of its own insides
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "The '.*_dataloader' does not have many workers",
        "The number of training batches",
        "`isinstance.treespec, LeafSpec.` is deprecated",
        "Checkpoint directory .* exists",
        "You defined a `validation_step` but have no `val_dataloader`",
        "The dirpath has changed from",
    )
]


@pytest.fixture(
    params=["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.slow)]
)
def pl(request):
    """The package, under each of its names."""
    return importlib.import_module(request.param)


class Batches:
    """Batches in an order drawn anew each epoch, which goes on in the middle of one."""

    def __init__(self, n=4, resumable=True):
        generator = torch.Generator().manual_seed(1)
        self.data = torch.randn(n, 8, 2, 6, 6, generator=generator)
        self.order, self.at, self.loaded = [], 0, False

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        fresh = torch.randperm(len(self)).tolist()  # torch's loaders draw here too
        if not self.loaded:
            self.order, self.at = fresh, 0
        self.loaded = False
        return self._rest()

    def _rest(self):
        while self.at < len(self):
            self.at += 1
            yield self.data[self.order[self.at - 1]]

    def state_dict(self):
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state):
        self.order, self.at = state["order"], state["at"]
        self.loaded = self.at < len(self)  # else the next epoch has its own order


def in_order():
    """The same batches, always in one order."""
    return DataLoader(Batches().data, batch_size=None)


def layers():
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 1)
    )


class Steps:
    """The methods of the LightningModules below; notes rates, masks' traces and modes."""

    def training_step(self, batch, batch_idx):
        return (self.model(batch) - 1).square().mean()

    def validation_step(self, batch, batch_idx):
        self.seen = getattr(self, "seen", [])
        self.seen.append(self.model(batch))
        return self.seen[-1]

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def module(pl, *mixins):
    class Module(*mixins, Steps, pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = None if mixins else layers()

    torch.manual_seed(0)
    return Module()


class ByConfigureModel:
    def configure_model(self):
        self.model = self.model or layers()


def rates_seen(pl):
    """A callback that notes the rate of each batch."""

    class Notes(pl.Callback):
        def __init__(self):
            self.rates = []

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            (callback,) = [c for c in trainer.callbacks if isinstance(c, Regularize)]
            self.rates.append(callback.attached.rates)
            self.scaler = callback.attached.grad_scaler

    return Notes()


def trainer(pl, *callbacks, **options):
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
        "max_epochs": 2,
    }
    return pl.Trainer(**{**defaults, **options}, callbacks=list(callbacks))


RISING = LinearSchedule(0.0, 0.4)


def drop(p=RISING):
    return {"model.1": DropBlock2d(p=p, block_size=2)}


KEY = "model.1/DropBlock2d"


def fitted(pl, spec, *callbacks, data=None, net=None, ckpt_path=None, options=None, **arguments):
    callback, net = Regularize(spec, **arguments), module(pl) if net is None else net
    runner = trainer(pl, callback, *callbacks, **(options or {}))
    runner.fit(net, data or Batches(), ckpt_path=ckpt_path)
    return callback, net, runner


def ps(notes):
    return [rates[KEY]["p"] for rates in notes.rates]


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ({}, {"max_epochs": 3}, [0.05 * i for i in range(8)] + [0.4] * 4),
        ({"fractions": False}, {"max_epochs": 3}, [0.0] * 4 + [0.2] * 4 + [0.4] * 4),
        ({"unit": "step"}, {"max_epochs": 1}, [0.4 / 3 * i for i in range(4)]),
        ({"unit": "step"}, {"max_epochs": -1, "max_steps": 3}, [0.0, 0.2, 0.4]),
        ({"unit": "step", "epochs": 2}, {"max_epochs": 1}, [0.0, 0.4, 0.4, 0.4]),
        ({"unit": "step"}, {"max_epochs": 1, "accumulate_grad_batches": 2}, [0.0, 0.4]),
    ],
    ids=["epoch", "whole epochs", "step", "max_steps", "own length", "accumulated"],
)
def test_time_comes_from_the_trainer(pl, arguments, options, expected):
    notes = rates_seen(pl)
    callback, net, _ = fitted(pl, drop(), notes, options=options, **arguments)
    assert ps(notes) == pytest.approx(expected)
    assert hook_count(net) == 0
    assert callback.attached[KEY].calls == callback.attached[KEY].active_calls > 0
    assert "removed" in repr(callback.attached)


def test_a_length_in_steps_only_asks_for_the_unit(pl):
    with pytest.raises(SpecError, match="no length.*the number of its steps, pass unit='step'"):
        fitted(pl, drop(), options={"max_epochs": -1, "max_steps": 3})


class Interrupted(Exception):
    pass


def interrupt(pl, at):
    """A callback that ends the training behind a batch, as a crash does."""

    class Interrupt(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == at:
                raise Interrupted

    return Interrupt()


@pytest.mark.pairwise
@pytest.mark.parametrize("mixins", [(), (ByConfigureModel,)], ids=["made", "late"])
@pytest.mark.parametrize("unit", ["epoch", "step"])
@pytest.mark.parametrize("at", [3, 4, 6], ids=["middle", "end", "second"])
def test_a_resumed_run_is_that_without_a_break(pl, tmp_path, at, unit, mixins):
    def saver(folder):
        return pl.callbacks.ModelCheckpoint(
            tmp_path / folder, every_n_train_steps=1, save_top_k=-1, filename="{step}"
        )

    def run(folder, *callbacks, ckpt_path=None):
        notes = rates_seen(pl)
        torch.manual_seed(5 if ckpt_path is None else 6)
        callback, net = Regularize(drop(), unit=unit), module(pl, *mixins)
        torch.manual_seed(5 if ckpt_path is None else 6)
        runner = trainer(pl, callback, notes, saver(folder), *callbacks, max_epochs=3)
        with contextlib.suppress(Interrupted):
            runner.fit(net, Batches(), ckpt_path=ckpt_path)
        return callback, net, ps(notes)

    whole, net, rates = run("whole")
    run("first", interrupt(pl, at))
    resumed, other, later = run("then", ckpt_path=tmp_path / "first" / f"step={at}.ckpt")
    assert later == rates[at:]
    assert resumed.attached[KEY].calls == whole.attached[KEY].calls
    if at == 4:
        return  # saved between the last batch and the end of its epoch: the loader's order is new
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert counts(resumed) == counts(whole)
    assert hook_count(other) == 0


class WithNorm:
    def configure_model(self):
        if self.model is None:
            first, *rest = layers()
            self.model = nn.Sequential(first, nn.BatchNorm2d(5), *rest)


def test_a_resumed_run_of_a_strategy_that_restores_after_setup(pl, tmp_path):
    """As FSDP and DeepSpeed do: they load the state of the callback after `on_fit_start`."""
    strategies = importlib.import_module(f"{pl.__name__}.strategies")

    class AfterSetup(strategies.SingleDeviceStrategy):
        restore_checkpoint_after_setup = True

    def run(seed, ckpt_path=None):
        net = module(pl)
        torch.manual_seed(seed)
        saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        options = {"strategy": AfterSetup(device="cpu"), "max_epochs": 2}
        runner = trainer(pl, Regularize(drop(0.5)), saver, **options)
        batches = DataLoader(Batches().data, batch_size=None, shuffle=True)
        runner.fit(net, batches, ckpt_path=ckpt_path)
        return net.state_dict()

    whole = run(5)
    resumed = run(6, tmp_path / "epoch=0.ckpt")
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_a_resumed_run_with_frozen_norms(pl, tmp_path):
    """Frozen from the second epoch on, although Lightning calls ``train()`` in each."""

    def run(folder, *callbacks, ckpt_path=None):
        saver = pl.callbacks.ModelCheckpoint(
            tmp_path / folder, every_n_train_steps=1, save_top_k=-1, filename="{step}"
        )
        net = module(pl, WithNorm)
        torch.manual_seed(5)
        callback = Regularize({"model.1": FreezeNorm(parameters=True, begin=1)})
        runner = trainer(pl, callback, saver, *callbacks, max_epochs=3)
        with contextlib.suppress(Interrupted):
            runner.fit(net, Batches(), ckpt_path=ckpt_path)
        return net

    whole = run("whole")
    assert whole.model[1].num_batches_tracked == 4
    assert whole.model[1].weight.requires_grad
    run("first", interrupt(pl, 6))
    resumed = run("then", ckpt_path=tmp_path / "first" / "step=6.ckpt")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


class Spikes(Batches):
    """Two of the batches are outliers."""

    def __init__(self):
        super().__init__(8)
        self.data[5] *= 1e4
        self.data[6] = torch.nan


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("frozen", [False, True], ids=["alone", "with a frozen norm"])
def test_updates_that_are_left_out_are_resumed(pl, tmp_path, frozen):
    spec = {"param:**": SkipUpdate(z=6.0, warmup=3)}
    mixins = ()
    if frozen:  # a batch of NaN must not reach the running statistics either
        spec["model.1"] = FreezeNorm(parameters=True)
        mixins = (WithNorm,)

    def run(folder, *callbacks, ckpt_path=None):
        torch.manual_seed(5 if ckpt_path is None else 6)
        callback, net = Regularize(spec), module(pl, *mixins)
        saver = pl.callbacks.ModelCheckpoint(
            tmp_path / folder, every_n_train_steps=1, save_top_k=-1, filename="{step}"
        )
        torch.manual_seed(5 if ckpt_path is None else 6)
        runner = trainer(pl, callback, saver, *callbacks, max_epochs=2)
        with contextlib.suppress(Interrupted):
            runner.fit(net, Spikes(), ckpt_path=ckpt_path)
        return callback, net

    whole, net = run("whole")
    site = whole.attached["model.0.weight/SkipUpdate"]
    assert site.active_calls == 16
    assert site.total_realized_rate == 4 / 16
    assert all(x.isfinite().all() for x in net.state_dict().values())
    if frozen:
        assert net.model[1].num_batches_tracked == 0
        assert whole.attached["model.1/FreezeNorm"].active_calls == 16
    run("first", interrupt(pl, 11))
    resumed, other = run("then", ckpt_path=tmp_path / "first" / "step=11.ckpt")
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    states = [each.attached.state_dict()["sites"] for each in (resumed, whole)]
    assert states[0] == states[1]


def counts(callback):
    """What was counted; sums of fractions differ in their last digits."""
    site = callback.attached.state_dict()["sites"][KEY]
    return {**site, "expected": pytest.approx(site["expected"])}


def saved(pl, tmp_path):
    """The path of a checkpoint of one epoch."""
    _, _, runner = fitted(pl, drop(0.2), options={"max_epochs": 1})
    runner.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_a_checkpoint_of_another_spec(pl, tmp_path):
    path, net = saved(pl, tmp_path), module(pl)
    with pytest.raises(ValueError, match="another model or spec") as caught:
        fitted(pl, drop(0.3), net=net, ckpt_path=path)
    assert "DropBlock2d(p=0.2" in str(caught.value)
    assert hook_count(net) == 0
    callback, _, _ = fitted(pl, drop(0.3), ckpt_path=path, strict=False)
    assert callback.attached[KEY].calls == 8


def test_a_checkpoint_without_the_callback(pl, tmp_path):
    runner = trainer(pl, max_epochs=1)
    runner.fit(module(pl), Batches())
    runner.save_checkpoint(tmp_path / "a.ckpt")
    notes = rates_seen(pl)
    with pytest.warns(HookWarning, match="no state of Regularize"):
        callback, _, _ = fitted(pl, drop(), notes, ckpt_path=tmp_path / "a.ckpt")
    assert callback.attached[KEY].calls == 4
    assert ps(notes) == pytest.approx([0.4] * 4)


def test_evaluation_is_that_of_the_model(pl, tmp_path):
    path, net = saved(pl, tmp_path), module(pl)
    with torch.no_grad():
        expected = [net.model(batch) for batch in Batches().data]
    for stage in ("validate", "test", "predict"):
        callback = Regularize(drop(0.5))
        net.seen = []
        getattr(trainer(pl, callback), stage)(
            net, in_order(), **({"verbose": False} if stage != "predict" else {})
        )
        assert callback.attached is None
        assert all(map(torch.equal, net.seen, expected))
    callback, net, runner = fitted(pl, drop(0.2))
    runner.validate(net, in_order(), ckpt_path=path, verbose=False, weights_only=True)
    assert callback.attached[KEY].calls == 8  # the report remains that of the training


@pytest.mark.parametrize("pl", ["lightning.pytorch", "pytorch_lightning"], indirect=True)
def test_hooks_go_when_training_fails(pl):
    net = module(pl)
    callback = Regularize(drop())
    with pytest.raises(Interrupted):
        trainer(pl, callback, interrupt(pl, 2)).fit(net, Batches())
    assert hook_count(net) == 0
    assert callback.attached[KEY].calls == 2


def logged(folder, tag):
    """Steps and values that were written."""
    with open(next(folder.rglob("metrics.csv"))) as file:
        return [(int(row["step"]), float(row[tag])) for row in csv.DictReader(file) if row[tag]]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, {3: 0.3, 7: 0.4}),
        # by Lightning, at each step the last that was logged, and at the end of an epoch its own
        (2, {1: 0.1, 2: 0.1, 3: 0.3, 5: 0.4, 6: 0.4, 7: 0.4}),
    ],
    ids=["epochs", "every 2 steps"],
)
def test_the_logger_gets_the_rates(pl, tmp_path, every, expected):
    options = {"logger": pl.loggers.CSVLogger(tmp_path), "log_every_n_steps": 1}
    arguments = {"log_every_n_steps": every, "log_sites": True}
    _, _, runner = fitted(pl, drop(), options=options, **arguments)
    assert dict(logged(tmp_path, "reg/model.1/DropBlock2d/p")) == pytest.approx(expected)
    assert "reg/model.1/DropBlock2d/realized_rate" in runner.logged_metrics


def test_the_logger_gets_means_without_being_asked(pl, tmp_path):
    options = {"logger": pl.loggers.CSVLogger(tmp_path), "log_every_n_steps": 1}
    spec = {**drop(), "model.2": Dropout(0.5), "param:model.4.*": ClipGradNorm(1.0)}
    callback, _, runner = fitted(pl, spec, options=options)
    assert not [name for name in runner.logged_metrics if name.startswith("reg/")]
    rows = [row for row in callback.attached.history if row.expected_rate is not None]
    for name in ("expected_rate", "realized_rate"):
        tag = f"dropblock_hooks/{name.replace('expected', 'nominal')}"
        values = [[getattr(row, name) for row in rows if row.epoch == epoch] for epoch in (0, 1)]
        assert [len(of_epoch) for of_epoch in values] == [2, 2]
        means = [sum(of_epoch) / 2 for of_epoch in values]
        assert [value for _, value in logged(tmp_path, tag)] == pytest.approx(means)
    assert [value for _, value in logged(tmp_path, "dropblock_hooks/findings")] == [0, 0]


def test_the_number_of_findings_is_logged(pl, tmp_path):
    options = {"logger": pl.loggers.CSVLogger(tmp_path), "log_every_n_steps": 1}
    with pytest.warns(HookWarning, match="the rate was 0"):
        fitted(pl, drop(0.0), options=options)
    seen = [value for _, value in logged(tmp_path, "dropblock_hooks/findings")]
    assert len(seen) == 2
    assert seen[-1] >= 1


def test_the_scaler_of_the_precision_plugin(pl):
    notes = rates_seen(pl)
    fitted(pl, {"model.4": ClampGrad(-1.0, 1.0)}, notes)
    assert notes.scaler is False
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        options = {"plugins": plugin, "max_epochs": 1}
        fitted(pl, {"model.4": ClampGrad(-1e-8, 1e-8)}, notes, options=options)
    assert notes.scaler is scaler


def test_gradients_that_accumulate_are_clipped_once(pl):
    class Norms(pl.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            norms = [p.grad.norm().item() for p in module.parameters() if p.grad is not None]
            assert not norms or max(norms) == pytest.approx(1e-3, rel=1e-2)

    options = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    spec = {"param:model.**": ClipGradNorm(1e-3, when="accumulated")}
    callback, _, runner = fitted(pl, spec, Norms(), options=options)
    assert {(site.calls, site.active_calls) for site in callback.attached} == {(8, 4)}
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in runner.optimizers)


@pytest.mark.parametrize(
    "arguments",
    [{"unit": "epochs"}, {"log_every_n_steps": 0}, {"log_every_n_steps": 2.5}, {"epochs": -1}],
    ids=str,
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} must be"):
        Regularize(drop(), **arguments)
