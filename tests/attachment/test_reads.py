"""How often a look at an Attachment waits for a device: once, whatever the number of sites."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dropblock_hooks import ClipGradNorm, Dropout, Dropout2d, LinearSchedule, attach


class Reads(TorchDispatchMode):
    """Counts what waits for a device: numbers that become Python's, and copies to another one."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.n = 0
        for name in ("tolist", "numpy", "cpu"):  # which never reach the dispatcher on the CPU
            monkeypatch.setattr(torch.Tensor, name, self.counted(getattr(torch.Tensor, name)))

    def counted(self, method):
        def call(tensor, *args, **kwargs):
            self.n += 1
            return method(tensor, *args, **kwargs)

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        moves = func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None
        self.n += moves or func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.equal.default,
        )
        return func(*args, **kwargs)


LOOKS = {
    "report": lambda attached: attached.report(),
    "table": str,
    "verify": lambda attached: attached.verify(),
    "scalars": lambda attached: attached.scalars(),
    "state": lambda attached: attached.state_dict(),
    "step": lambda attached: attached.step(),
    "set": lambda attached: attached.set(Dropout, p=0.3),
}
RATES = [Dropout(LinearSchedule(0.1, 0.5, 9)), ClipGradNorm(0.1), Dropout2d(0.5)]


def trained(layers, mode, spec):
    model = nn.Sequential(*(nn.Conv2d(2, 2, 1) for _ in range(layers)))
    attached = attach(model, spec)
    call = torch.compile(model, backend="eager") if mode == "compiled" else model

    def train():
        call(torch.ones(4, 2, 3, 3)).sum().backward()

    train()
    return attached, train


@pytest.mark.parametrize(
    ("mode", "layers"),
    [
        ("eager", 10),
        ("compiled", 2),
    ],
)
def test_a_look_reads_once(mode, layers, monkeypatch):
    torch._dynamo.reset()
    attached, train = trained(layers, mode, {"*": RATES})
    assert len(attached) == 3 * layers
    found = {}
    for name, look in LOOKS.items():
        train()
        with monkeypatch.context() as patched, Reads(patched) as reads:
            look(attached)
        found[name] = reads.n
    assert max(found.values()) == 1, found
    assert [site.active_calls for site in attached] == [8] * 3 * layers
