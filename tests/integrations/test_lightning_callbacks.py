"""The callback of Lightning together with callbacks that change the trainer."""

import pytest
from torch import nn

pytest.importorskip("lightning.pytorch", reason="the trainer is Lightning's")
from dropblock_hooks import ClampGrad, HookWarning
from dropblock_hooks.integrations.lightning import Regularize
from tests.conftest import hook_count
from tests.integrations import test_lightning
from tests.integrations.test_lightning import (
    KEY,
    drop,
    fitted,
    in_order,
    module,
    pl,  # noqa: F401
    ps,
    rates_seen,
    trainer,
)

pytestmark = [
    *test_lightning.pytestmark,
    pytest.mark.filterwarnings("ignore:`weights_only` was not set"),
]


def normed(pl):  # noqa: F811
    """A module with a BatchNorm, for which the weight averaging adds an epoch."""
    net = module(pl)
    net.model.append(nn.Unflatten(1, (1, 1)))
    net.model.append(nn.BatchNorm1d(1))
    return net


def test_the_epoch_that_weight_averaging_adds(pl):  # noqa: F811
    notes, options = rates_seen(pl), {"max_epochs": 3}
    averaging = pl.callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=1)
    spec = {**drop(), "model.0": ClampGrad(-1.0, 1.0)}
    callback, net, runner = fitted(
        pl, spec, notes, averaging, net=normed(pl), data=in_order(), options=options
    )
    assert runner.current_epoch == 4
    assert ps(notes)[:12] == pytest.approx([0.05 * i for i in range(8)] + [0.4] * 4)
    assert callback.attached.rates[KEY]["p"] == 0.4
    assert callback.attached[KEY].calls == 16
    assert callback.attached["model.0/ClampGrad"].active_calls == 12
    assert hook_count(net) == 0


def test_the_search_for_a_learning_rate_is_named(pl, tmp_path):  # noqa: F811
    net, callback = module(pl), Regularize(drop())
    net.lr = 0.1
    finder = pl.callbacks.LearningRateFinder(num_training_steps=4)
    runner = trainer(pl, callback, finder, default_root_dir=tmp_path)
    with pytest.warns(HookWarning) as caught:
        runner.fit(net, in_order())
    (message,) = [str(each.message) for each in caught if each.category is HookWarning]
    assert message.startswith("LearningRateFinder searches without other callbacks")
    assert callback.attached[KEY].calls == 8
    assert hook_count(net) == 0


def test_two_callbacks(pl):  # noqa: F811
    class Own(Regularize):
        """Another class has another state."""

    clamp = {"model.0": ClampGrad(-1.0, 1.0)}
    with pytest.raises(ValueError, match=r"2 Regularize .*put all entries into the spec of a "):
        trainer(pl, Regularize(drop()), Regularize(clamp)).fit(module(pl), in_order())
    trainer(pl, Regularize(drop()), Own(clamp)).fit(module(pl), in_order())
    first = Regularize({"1": drop()["model.1"]}, root="model")
    second = Regularize({"model.0": ClampGrad(-1.0, 1.0)})
    trainer(pl, first, second).fit(module(pl), in_order())
    assert [each.attached.sites[0].calls for each in (first, second)] == [8, 8]
