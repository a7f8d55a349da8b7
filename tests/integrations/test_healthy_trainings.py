"""Healthy trainings by Lightning, Transformers and timm's script, with a `Watchdog`: no report."""

import warnings

import pytest
import torch
from torch import nn

from dropblock_hooks import DropBlock2d, Dropout, HookWarning, LinearSchedule, Select, Watchdog

pytestmark = pytest.mark.slow

STEPS, EPOCHS = 12, 3
DOG = Watchdog(action="raise", every=STEPS)


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", HookWarning)
        yield


def everywhere(name, layer):
    return True


def spec_with(entries):
    return {**entries, Select(where=everywhere): DOG}


def images():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, 8, 2, 6, 6, generator=generator)


def check(attached):
    """Nothing was found, and each site acted where a layer was called."""
    assert attached.alerts == []
    dropouts = [site for site in attached if "Dropout" in site.key or "DropBlock" in site.key]
    assert dropouts
    assert all(site.calls >= STEPS * EPOCHS for site in dropouts)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from dropblock_hooks.integrations.lightning import Regularize

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.model = nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(), pool, nn.Linear(16, 1))

        def training_step(self, batch, batch_idx):
            target = batch.mean((1, 2, 3)).unsqueeze(1)
            return (self.model(batch) - target).square().mean()

        def validation_step(self, batch, batch_idx):
            return self.model(batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    torch.manual_seed(0)
    rising = LinearSchedule(0.0, 0.2)
    spec = {"model.1": DropBlock2d(rising, 2), "model.3": Dropout(0.1, at="input")}
    callback = Regularize(spec_with(spec))
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=tmp_path,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=EPOCHS,
    )
    loader = torch.utils.data.DataLoader(images(), batch_size=None)
    trainer.fit(Module(), loader, loader)
    check(callback.attached)


def test_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from dropblock_hooks.integrations.transformers import Regularize

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    rows = torch.randint(0, 20, (4 * STEPS, 6), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": int(row[0]) % 2} for row in rows]
    spec = {"bert.encoder.layer.*.output.dense": Dropout(LinearSchedule(0.0, 0.2))}
    callback = Regularize(spec_with(spec))
    options = transformers.TrainingArguments(
        str(tmp_path),
        dataloader_pin_memory=False,
        disable_tqdm=True,
        eval_strategy="epoch",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    transformers.Trainer(
        transformers.BertForSequenceClassification(config),
        options,
        callbacks=[callback],
        eval_dataset=data[:4],
        train_dataset=data,
    ).train()
    check(callback.attached)


@pytest.mark.parametrize("options", [{}, {"amp": True}, {"task": True}], ids=str)
def test_the_script_of_timm(tmp_path, options, monkeypatch):
    pytest.importorskip("timm")
    from tests.integrations import test_timm as script

    generator = torch.Generator().manual_seed(1)
    data = torch.randn(STEPS, 4, 3, 64, 64, generator=generator)
    monkeypatch.setattr(script, "batches", lambda: [(x, torch.arange(4)) for x in data])
    args = script.args_of(tmp_path, epochs=EPOCHS, stop=EPOCHS, spec=spec_with(script.SPEC))
    vars(args).update(options)
    _, _, attached, _ = script.main(args)
    check(attached)
