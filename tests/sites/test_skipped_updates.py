"""Windows without a step of the optimizer: a GradScaler skips it, or gradients are accumulated.

The generator crosses regularizers with training loops whose windows are single batches. Wrong
optimizers are still told.
"""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

from dropblock_hooks import AdaGC, ClipGradNorm, HookWarning, attach
from tests.told import ids, told

ONCE = {
    "group": ClipGradNorm(1.0, group=True),
    "each": ClipGradNorm(1.0, when="accumulated"),
    "memory": AdaGC(),
}
OVERFLOWS = 2.0**127  # a scale at which gradients of float32 are Inf at first
SITES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def make(regularizer, optimizer=SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = optimizer(model.parameters(), lr=1e-3)
    attached = attach(model, {"param:**": regularizer}, optimizer=optimizer, **options)
    return model, optimizer, attached


def loss_of(model):
    return 10 * model(torch.ones(5, 3)).square().sum()


def scaled(model, optimizer, attached, scaler, batches=20):
    """Train with a window for each batch; return whether each update was skipped."""
    skipped = []
    for batch in range(batches):
        attached.step(batch)
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        before = model[0].weight.clone()
        scaler.step(optimizer)
        skipped.append(bool((model[0].weight == before).all()))
        scaler.update()
    return skipped


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_skipped_update_is_no_fault(name, is_known):
    scaler = GradScaler("cpu", init_scale=OVERFLOWS)
    options = {"grad_scaler": scaler} if is_known else {}
    model, optimizer, attached = make(ONCE[name], **options)
    skipped = scaled(model, optimizer, attached, scaler)
    assert skipped[0]
    assert not skipped[-1]
    assert attached.verify() == []
    attached.remove()


def test_verify_notes_that_there_was_no_update_yet():
    scaler = GradScaler("cpu", init_scale=OVERFLOWS)
    model, optimizer, attached = make(ONCE["group"], grad_scaler=scaler)
    scaled(model, optimizer, attached, scaler, batches=1)
    (finding,) = attached.verify()
    assert finding.severity == "note"
    assert "A GradScaler may have skipped the step" in finding.text
    attached.step(1)
    assert [found.text for found in attached.verify()] == [finding.text]  # of the closed window


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ONCE)
def test_windows_of_accumulated_batches(name, dtype):
    model, optimizer, attached = make(ONCE[name])
    for batch in range(12):
        attached.step(batch)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = loss_of(model)
        loss.backward()
        if batch % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert attached.verify() == []


def test_two_optimizers_of_which_one_is_skipped():
    scaler = GradScaler("cpu", init_scale=1.0)
    model, _, attached = make(ONCE["each"], grad_scaler=scaler)
    first, second = (SGD(model[i].parameters(), lr=1e-3) for i in (0, 2))
    attached.optimizer = [first, second]
    for batch in range(3):
        attached.step(batch)
        scaler.scale(loss_of(model)).backward()
        model[0].weight.grad.fill_(torch.inf)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert [site.active_calls for site in attached] == [0, 0, 3, 3]


def test_accelerate_skips_the_update():
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)  # makes the state that the optimizer reads
    model, optimizer, attached = make(ONCE["group"])
    scaler = GradScaler("cpu", init_scale=OVERFLOWS)
    attached.grad_scaler = scaler
    wrapped = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)
    scaled(model, wrapped, attached, _AsInAccelerate(scaler))
    assert attached.verify() == []


class _AsInAccelerate:
    """A scaler whose step is that of the wrapped optimizer, which calls ``scaler.step`` itself."""

    def __init__(self, scaler):
        self.scale = scaler.scale

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass


# faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["group", "each"])
def test_another_optimizer_that_makes_the_steps_is_told(name):
    scaler = GradScaler("cpu", init_scale=1.0)
    model, stale, attached = make(ONCE[name], grad_scaler=scaler)
    optimizer = SGD(model.parameters(), lr=1e-3)
    with pytest.warns(HookWarning, match="no known optimizer with the parameter made") as caught:
        scaled(model, optimizer, attached, scaler)
    (expected,) = {tuple(told([warning])) for warning in caught}
    assert [site.rpartition("/")[0] for site, _ in expected] == SITES
    assert attached.optimizer is stale


@pytest.mark.parametrize("name", ["group", "each"])
def test_one_text_about_several_sites_without_an_optimizer(name):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    attached = attach(model, {"param:**": ONCE[name]})
    with pytest.warns(HookWarning) as caught:
        loss_of(model).backward()
    attached.step(1)
    texts = [str(warning.message) for warning in caught] + list(map(str, attached.verify()))
    assert len(texts) == 2
    for text in texts:
        assert "Pass optimizer=optimizer to attach" in text
        assert not {"it", "its", "Its"} & set(text.split())


def test_a_parameter_without_a_gradient_is_told():
    model, optimizer, attached = make(ONCE["group"])
    model[2].bias.requires_grad_(False)
    attached.remove()
    model[2].bias.requires_grad_(True)
    attached = attach(model, {"param:2.bias": ONCE["group"]}, optimizer=optimizer)
    attached.step(0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model(torch.ones(5, 3))
    model[2].bias.grad = None
    optimizer.step()
    with pytest.warns(HookWarning, match="or it had no gradient"):
        attached.step(1)


def test_updates_that_are_all_skipped_are_told():
    scaler = GradScaler("cpu", init_scale=1.0)
    model, optimizer, attached = make(ONCE["group"], grad_scaler=scaler)
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    with pytest.warns(HookWarning, match=r"skipped all steps, look for NaN") as caught:
        scaled(model, optimizer, attached, scaler, batches=102)
    assert len(caught) == 1
    assert {kind for _, kind in ids(attached.verify())} == {"never_active"}


def test_each_site_does_not_ask_the_optimizer_again():
    """The time of a step without an update is not the square of the number of parameters."""
    asked = 0

    class Optimizer(SGD):
        def __getattribute__(self, name):
            nonlocal asked
            asked += name == "param_groups"
            return super().__getattribute__(name)

    numbers = []
    for layers in (1, 20):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        optimizer = Optimizer(model.parameters(), lr=1e-3)
        attached = attach(model, {"param:**": ONCE["group"]}, optimizer=optimizer)
        attached.step(0)
        loss_of(model).backward()
        asked = 0
        attached.step(1)
        numbers.append(asked)
    assert 1 <= numbers[0] == numbers[1]
