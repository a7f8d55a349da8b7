"""The callback of Transformers' Trainer, on tiny models that train for a few steps."""

import json

import pytest
import torch

import dropblock_hooks as r
from tests.cases import rest_slow

pytest.importorskip("transformers")
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DefaultFlowCallback,
    Trainer,
    TrainerCallback,
)

from dropblock_hooks.integrations.transformers import Regularize

RISING = r.Dropout(p=r.LinearSchedule(0.0, 0.3))
SPEC = {"bert.encoder.layer.*.output.dense": RISING}
STEPS, EPOCHS = 4, 2  # steps of an epoch


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    return BertForSequenceClassification(config)


def texts():
    ids = torch.randint(0, 20, (4 * STEPS, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]


class Rates(TrainerCallback):
    """Notes the rates of each step; raises in one of them."""

    def __init__(self, raise_at=None):
        self.raise_at = raise_at
        self.seen = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **given):
        if state.global_step == self.raise_at:
            raise KeyboardInterrupt
        (attached,) = r.attachments(model)
        self.seen[state.global_step] = attached.rates
        self.scaler = attached.grad_scaler


def trainer(folder, *callbacks, model=None, data=None, **options):
    options = {"num_train_epochs": EPOCHS, "save_strategy": "no", **options}
    args = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=4,
        logging_steps=2,
        dataloader_pin_memory=False,
        **options,
    )
    return Trainer(
        model if model is not None else bert(),
        args,
        train_dataset=data or texts(),
        eval_dataset=(data or texts())[:4],
        callbacks=list(callbacks),
    )


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_a_training(tmp_path, hook_count):
    callback, model = Regularize(SPEC, log_sites=True), bert()
    bare = hook_count(model)
    rates = Rates()
    made = trainer(tmp_path, callback, rates, model=model)
    assert callback.attached is None
    made.train()
    assert hook_count(model) == bare
    assert r.attachments(model) == []
    values = [next(iter(seen.values()))["p"] for seen in rates.seen.values()]
    expected = [r.LinearSchedule(0.0, 0.3, epochs=EPOCHS)(i / STEPS) for i in range(EPOCHS * STEPS)]
    assert values == expected
    assert values[0] == 0
    assert values[-1] == 0.3
    assert [site.calls for site in callback.attached.sites] == [EPOCHS * STEPS] * 2
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    key = "bert.encoder.layer.0.output.dense/Dropout"
    assert [entry[f"reg/{key}/p"] for entry in logged] == pytest.approx(values[1::2])
    assert logged[-1][f"reg/{key}/realized_rate"] == pytest.approx(0.3, abs=0.05)


class Means(TrainerCallback):
    """Notes by hand what the callback before it is to log."""

    def __init__(self, callback):
        self.callback = callback
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        sites = self.callback.attached.sites
        realized = [site.realized_rate for site in sites]
        expected = [site.expected_rate for site in sites]
        self.seen.append((sum(expected) / len(sites), sum(realized) / len(sites)))


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_means_over_the_sites_are_logged_without_being_asked_for(tmp_path, unit):
    callback = Regularize(SPEC, unit)
    means = Means(callback)
    made = trainer(tmp_path, callback, means)
    made.train()
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    ours = [{name for name in entry if "/" in name} for entry in logged]
    rates = {"dropblock_hooks/nominal_rate", "dropblock_hooks/realized_rate"}
    findings = {"dropblock_hooks/findings"}
    assert ours == [rates, rates, rates | findings, rates | findings]  # known after an epoch
    for entry, (nominal, realized) in zip(logged, means.seen, strict=False):
        assert entry["dropblock_hooks/nominal_rate"] == pytest.approx(nominal)
        assert entry["dropblock_hooks/realized_rate"] == pytest.approx(realized)
    assert logged[-1]["dropblock_hooks/findings"] == 0
    assert logged[-1]["dropblock_hooks/nominal_rate"] > 0.1


class Reporter(TrainerCallback):
    """Keeps the logs that it gets, as TensorBoard does."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def callbacks_of(made):
    return made.callback_handler.callbacks


@pytest.mark.parametrize("is_passed", [True, False], ids=["passed", "not passed"])
def test_reporters_get_the_scalars_after_add_to(tmp_path, is_passed):
    reporter = Reporter()
    callback = Regularize(SPEC, log_sites=True)
    given = [reporter, callback] if is_passed else [reporter]
    made = trainer(tmp_path, *given)
    callback.add_to(made)
    made.train()

    reported = [logs for logs in reporter.logs if "loss" in logs]
    history = [entry for entry in made.state.log_history if "loss" in entry]
    assert len(reported) == EPOCHS * STEPS / 2
    for logs, entry in zip(reported, history, strict=True):
        assert logs == {name: value for name, value in entry.items() if name != "step"}
    assert {"dropblock_hooks/nominal_rate", "dropblock_hooks/realized_rate"} <= reported[0].keys()
    assert reported[-1]["dropblock_hooks/nominal_rate"] > 0.1
    assert reported[-1]["dropblock_hooks/realized_rate"] > 0.1
    assert reported[-1]["dropblock_hooks/findings"] == 0
    assert reported[-1]["reg/bert.encoder.layer.0.output.dense/Dropout/p"] == 0.3


@pytest.mark.parametrize("is_passed", [True, False], ids=["passed", "not passed"])
def test_add_to_keeps_the_order_of_the_other_callbacks(tmp_path, is_passed):
    callback = Regularize(SPEC)
    given = [Reporter(), callback, Rates()] if is_passed else [Reporter(), Rates()]
    made = trainer(tmp_path, *given)
    before = [other for other in callbacks_of(made) if other is not callback]
    assert [type(other) for other in before[:3]] == [DefaultFlowCallback, Reporter, Rates]

    assert callback.add_to(made) is None
    after = callbacks_of(made)[:]
    assert after == [before[0], callback, *before[1:]]
    callback.add_to(made)
    assert callbacks_of(made) == after


def test_add_to_goes_behind_the_first_flow_callback_or_to_the_front(tmp_path):
    callback, reporter = Regularize(SPEC), Reporter()
    first, second = DefaultFlowCallback(), DefaultFlowCallback()
    made = trainer(tmp_path)
    made.callback_handler.callbacks = [reporter, first, second]
    callback.add_to(made)
    assert callbacks_of(made) == [reporter, first, callback, second]
    made.callback_handler.callbacks = [reporter]
    callback.add_to(made)
    assert callbacks_of(made) == [callback, reporter]


def test_add_to_refuses_a_second_callback(tmp_path):
    made = trainer(tmp_path, Regularize(SPEC))
    before = list(made.callback_handler.callbacks)
    with pytest.raises(RuntimeError, match="takes one Regularize callback"):
        Regularize(SPEC).add_to(made)
    assert made.callback_handler.callbacks == before


def test_add_to_is_refused_during_a_training(tmp_path):
    class Late(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            callback.add_to(made)

    callback = Regularize(SPEC)
    made = trainer(tmp_path, Late())
    before = callbacks_of(made)[:]
    with pytest.raises(RuntimeError, match=r"during a training: call it before trainer.train\(\)"):
        made.train()
    assert callbacks_of(made) == before


@pytest.mark.pairwise
@pytest.mark.parametrize("unit", ["epoch", "step"])
@pytest.mark.parametrize("at", [3, STEPS])
@pytest.mark.parametrize("adds", [False, True], ids=["callbacks", "add_to"])
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, unit, at, adds):
    options = {
        "save_strategy": "steps",
        "save_steps": at,
        "gradient_accumulation_steps": 1,
    }
    whole = Regularize(SPEC, unit)
    seen = Rates()
    model = bert()
    trainer(tmp_path / "whole", whole, seen, model=model, **options).train()

    broken = Regularize(SPEC, unit)
    made = trainer(tmp_path / "broken", broken, Rates(at + 1), **options)
    if adds:
        broken.add_to(made)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert r.attachments(made.model) == [broken.attached]  # a Trainer tells nothing of exceptions

    resumed, again = Regularize(SPEC, unit), Rates()
    if adds:
        made = trainer(tmp_path / "broken", again, **options)
        resumed.add_to(made)
    else:
        made = trainer(tmp_path / "broken", resumed, again, **options)
    made.train(resume_from_checkpoint=str(tmp_path / "broken" / f"checkpoint-{at}"))
    rest = {step: rates for step, rates in seen.seen.items() if step >= at}
    assert again.seen == rest
    assert len(rest) == EPOCHS * STEPS - at
    assert same(weights(made.model), weights(model))
    assert [site.calls for site in resumed.attached.sites] == [EPOCHS * STEPS] * 2
    realized = [[s.total_realized_rate for s in c.attached.sites] for c in (resumed, whole)]
    assert realized[0] == realized[1]
    assert resumed.attached.history.to_dicts() == whole.attached.history.to_dicts()
    assert r.attachments(made.model) == []


def test_a_clipping_with_a_memory_is_resumed(tmp_path):
    """The state goes through the JSON of a checkpoint, and continues to the bit."""
    spec = {"param:**": r.AdaGC(1.0, 0.5, decay=0.5, warmup=2)}
    options = {"save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0}
    whole = Regularize(spec)
    model = bert()
    trainer(tmp_path / "whole", whole, model=model, **options).train()
    sites = whole.attached.sites
    assert [site.active_calls for site in sites] == [EPOCHS * STEPS] * len(sites)
    assert sum(site.total_realized_rate for site in sites) > 1
    bare = bert()
    trainer(tmp_path / "bare", model=bare, **options).train()
    assert not same(weights(bare), weights(model))

    broken = trainer(tmp_path / "broken", Regularize(spec), Rates(4), **options)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = Regularize(spec)
    made = trainer(tmp_path / "broken", resumed, **options)
    made.train(resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-3"))
    assert same(weights(made.model), weights(model))
    states = [each.attached.state_dict()["sites"] for each in (resumed, whole)]
    memories = [[site["memory"] for site in state.values()] for state in states]
    assert memories[0] == memories[1]


def test_the_length_of_training(tmp_path):
    for unit, options, last in (
        ("epoch", {"num_train_epochs": 1.5}, 1.25),
        ("epoch", {"max_steps": 6}, 1.25),
        ("step", {"max_steps": 6}, 5),
        ("step", {"num_train_epochs": 1}, 3),
    ):
        callback, rates = Regularize(SPEC, unit), Rates()
        trainer(tmp_path, callback, rates, **options).train()
        length = 2 if unit == "epoch" else last + 1
        value = next(iter(rates.seen[max(rates.seen)].values()))["p"]
        assert value == r.LinearSchedule(0.0, 0.3, epochs=length)(last), (unit, options)


def test_gradients_of_a_scaled_loss(tmp_path):
    """Bounds are of the unscaled loss: the Trainer's scaler is found in its optimizer."""
    trained = []
    for scale in (None, 1024.0):
        callback = Regularize({"param:classifier.weight": r.ClipGradNorm(1e-3)})
        options = {"num_train_epochs": 1, "max_grad_norm": 0.0, "optim": "sgd"}
        notes = Rates()
        made = trainer(tmp_path, callback, notes, learning_rate=1.0, **options)
        if scale is not None:
            made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        made.train()
        trained.append((notes.scaler, made.model.classifier.weight.detach()))
    (none, plain), (scaler, scaled) = trained
    assert none is False
    assert scaler.get_scale() == 1024.0
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-6)
    moved = (plain - bert().classifier.weight).norm()
    assert 0 < moved <= STEPS * 1e-3


def test_what_a_broken_training_leaves_is_told(tmp_path):
    made = trainer(tmp_path, Regularize(SPEC), Rates(raise_at=1))
    with pytest.raises(KeyboardInterrupt):
        made.train()
    with pytest.raises(r.SpecError, match="detach_all"):
        trainer(tmp_path, Regularize(SPEC), model=made.model).train()
    r.detach_all(made.model)
    trainer(tmp_path, Regularize(SPEC), model=made.model).train()


def test_dataparallel_is_refused(tmp_path):
    args = trainer(tmp_path).args
    args._n_gpu = 2
    with pytest.raises(RuntimeError, match="nn.DataParallel on 2 GPUs"):
        Regularize(SPEC).on_train_begin(args, None, None, model=bert())


def test_a_checkpoint_of_another_spec(tmp_path, hook_count):
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 4}
    trainer(tmp_path, Regularize(SPEC), **options).train()
    checkpoint = str(tmp_path / "checkpoint-3")
    other = {"bert.encoder.layer.*.output.dense": r.Dropout(p=0.2)}
    made = trainer(tmp_path, Regularize(other), **options)
    with pytest.raises(ValueError, match="state is of another model or spec"):
        made.train(resume_from_checkpoint=checkpoint)
    assert hook_count(made.model) == 0
    callback = Regularize(other, strict=False)
    trainer(tmp_path, callback, **options).train(resume_from_checkpoint=checkpoint)
    assert callback.attached.sites[0].calls == 4


def test_a_checkpoint_without_it(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    trainer(tmp_path, **options).train()
    callback = Regularize(SPEC)
    made = trainer(tmp_path, callback, **options)
    with pytest.warns(r.HookWarning, match="the checkpoint has no state of Regularize"):
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert callback.attached.sites[0].calls == 2
    kept = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert kept["stateful_callbacks"]["Regularize"]["attributes"]["saved"]["epoch"] == 0.75


def test_what_keeps_parameters_is_refused():
    with pytest.raises(ValueError, match="as JSON, which can't hold the parameters that L2SP"):
        Regularize({"param:**": r.L2SP(0.1)})


@pytest.mark.parametrize("accumulation", rest_slow([1, 2]))
def test_a_resumed_training_with_neftune_z_loss_and_adagc(tmp_path, accumulation):
    spec = {
        "bert.embeddings.word_embeddings": r.NEFTune(5.0),
        "classifier": r.ZLoss(0.1),
        "param:**": r.AdaGC(1.0, 0.5, decay=0.5, warmup=1),
    }
    options = {
        "save_strategy": "steps",
        "save_steps": 2,
        "max_grad_norm": 0.0,
        "gradient_accumulation_steps": accumulation,
    }
    whole = bert()
    callback = Regularize(spec)
    trainer(tmp_path / "whole", callback, model=whole, **options).train()
    plain = bert()
    trainer(tmp_path / "plain", model=plain, **options).train()
    assert not same(weights(whole), weights(plain))
    updates = EPOCHS * STEPS // accumulation
    clippings = callback.attached.select(r.AdaGC)
    assert [site.active_calls for site in clippings] == [updates] * len(clippings)
    assert sum(site.total_realized_rate for site in clippings) > 1

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "broken", Regularize(spec), Rates(3), **options).train()
    made = trainer(tmp_path / "broken", Regularize(spec, log_sites=True), **options)
    made.train(resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-2"))
    assert same(weights(made.model), weights(whole))
    assert made.state.log_history[-2]["reg/classifier/ZLoss/penalty"] > 0
