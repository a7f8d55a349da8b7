"""Training stacks: a small model under any of them, one function that trains it, every regularizer.

A `Stack` names how a model is trained. `train` builds a model, attaches, trains some steps and
returns what there is to compare; the tests of precision, of checkpointing, of several processes
and the matrix of their pairs all call it.
"""

import dataclasses
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import Foreign, Retune, SpecError, attach
from tests.classes import own_regularizers

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

OF_SOME_LAYERS = {"FreezeNorm", "NEFTune"}  # which have files of their own in tests/regularizers
# what a constructor needs that is not a rate; all else is filled in
ARGUMENTS = {
    "ClampActivation": {"min": -0.3, "max": 0.3},
    "ClampGrad": {"min": -1e-3, "max": 1e-3},
    "ClipGradNorm": {"max_norm": 1e-2},
    "ScaleGrad": {"scale": -0.5},
    "GradNoise": {"std": 1e-2},
    "Disout": {"p": 0.4, "block_size": 3},
    "DropBlock1d": {"p": 0.4, "block_size": 3},
    "DropBlock2d": {"p": 0.4, "block_size": 3},
    "DropBlock3d": {"p": 0.4, "block_size": 3},
}


def regularizers():
    """A strong instance of every regularizer of the package, by name, of new ones too.

    Observers have tests of their own, and so have regularizers that judge the update of an
    optimizer: `tests/sites/test_memories.py`.
    """
    found = {"Foreign": Foreign(nn.Dropout2d, p=0.4)}
    for name, cls in own_regularizers().items():
        if name in OF_SOME_LAYERS or hasattr(cls, "judge"):
            continue
        found[name] = cls(**ARGUMENTS.get(name, _rates(cls)))
    return dict(sorted(found.items()))


def _rates(cls):
    """A strong chance, and a number for whatever has no default."""
    missing = dataclasses.MISSING
    return {
        field.name: 0.4
        for field in dataclasses.fields(cls)
        if field.name == "p" or field.default is field.default_factory is missing
    }


ACTIVATIONS = {n: r for n, r in regularizers().items() if r.acts_on == "activation"}
# those whose realized rate follows from the masks alone, whatever the precision
MASKED = [name for name in ACTIVATIONS if name != "ClampActivation"]
GRADIENTS = {n: r for n, r in regularizers().items() if r.acts_on == "gradient"}


class Block(nn.Module):
    """A residual block that keeps its shape, with an in-place ReLU."""

    def __init__(self, spatial, channels):
        super().__init__()
        self.conv = CONVOLUTIONS[spatial](channels, channels, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.act(self.conv(x))


class DroppingBlock(Block):
    """With a layer that drops by itself, for what takes nothing else."""

    def __init__(self, spatial, channels):
        super().__init__(spatial, channels)
        self.drop = nn.Dropout2d(0.0)

    def forward(self, x):
        return x + self.drop(self.act(self.conv(x)))


class Net(nn.Module):
    """Stem, two blocks that can be checkpointed, head; `spatial` axes of 6."""

    def __init__(self, spatial=2, classes=3):
        super().__init__()
        self.spatial = spatial
        self.stem = CONVOLUTIONS[spatial](2, 4, 3, padding=1)
        self.body = nn.Sequential(Block(spatial, 4), Block(spatial, 4))
        self.head = nn.Linear(4, classes)
        self.checkpointing = None

    def forward(self, x):
        x = self.stem(x)
        for block in self.body:
            x = (
                block(x)
                if self.checkpointing is None
                else checkpoint(block, x, **self.checkpointing)
            )
        return self.head(x.flatten(2).mean(2))

    def example(self, batch=4, seed=7):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, 2, *[6] * self.spatial, generator=generator)


def make_net(regularizer, seed=0):
    """A model with maps of as many axes as the regularizer needs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Net(getattr(regularizer, "spatial", None) or 2)
        if isinstance(regularizer, Retune):
            net.body[0] = DroppingBlock(net.spatial, 4)
        return net


def put_on(net, regularizer, **options):
    """Attached to the first block; where layers are refused, to a parameter in it."""
    if isinstance(regularizer, Retune):
        return attach(net, {"body.0.drop": regularizer}, **options)
    try:
        return attach(net, {"body.0": regularizer}, **options)
    except SpecError:
        return attach(net, {"param:body.0.conv.weight": regularizer}, **options)


# those whose draws are the same in eager mode and compiled
SAME_COMPILED = [name for name in GRADIENTS if name != "DropGrad2d"]


def _takes(regularizer, selector):
    try:
        attach(make_net(regularizer), {selector: regularizer})
    except SpecError:
        return False
    return True


GRADIENT_SITES = [
    (name, selector)
    for name, regularizer in GRADIENTS.items()
    for selector in ("body.0", "param:body.0.conv.weight")
    if _takes(regularizer, selector)
]


@dataclasses.dataclass(frozen=True)
class Stack:
    """How a model is trained."""

    compiler: str = "eager"  # or a backend of torch.compile
    precision: str = "fp32"  # or "bf16" (autocast), "fp16" (autocast and GradScaler)
    memory: str = "plain"  # or "checkpointing", "accumulation"
    parallel: str = "single"  # or "ddp", "fsdp2"; then a process group is there

    def __str__(self):
        return "-".join((self.compiler, self.precision, self.memory, self.parallel))


@dataclasses.dataclass
class Outcome:
    """What a training run leaves: by step the loss, and at the end the gradients."""

    losses: list
    gradients: dict
    counts: list  # of each site: calls, active calls, realized rate
    attached: object
    net: nn.Module


def train(regularizer, stack, steps=2, seed=0, checkpointing=None, parallel_options=None):
    """Train a new model for some steps, and tell what came out; masks follow `seed`."""
    net = make_net(regularizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if stack.precision == "fp16" else None
    attached = put_on(net, regularizer, grad_scaler=scaler)
    if stack.memory == "checkpointing":
        net.checkpointing = checkpointing or {"use_reentrant": False}
        for block in net.body:  # a tensor that a policy keeps must not be changed in place
            block.act.inplace = "context_fn" not in net.checkpointing
    model = parallelized(compiled(net, stack), stack, **(parallel_options or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(seed)
    losses = []
    for step in range(steps):
        attached.step(step)
        optimizer.zero_grad()
        losses.append(backward(model, net.example(seed=seed + step), stack, scaler))
        if scaler is None:
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return Outcome(losses, gradients_of(net), counts_of(attached), attached, net)


def backward(model, x, stack, scaler=None):
    """Forward and backward of one step: two micro-batches where gradients are accumulated."""
    parts = x.chunk(2) if stack.memory == "accumulation" else [x]
    total = 0.0
    for i, part in enumerate(parts):
        with autocast(stack), _unsynchronized(model, stack, last=i == len(parts) - 1):
            loss = model(part).float().square().sum() / len(x)
            (loss if scaler is None else scaler.scale(loss)).backward()
        total += loss.item()
    return total


def autocast(stack):
    if stack.precision == "fp32":
        return nullcontext()
    return torch.autocast("cpu", DTYPES[stack.precision])


def _unsynchronized(model, stack, last):
    if stack.parallel == "ddp" and not last:
        return model.no_sync()
    if stack.parallel == "fsdp2":
        model.set_requires_gradient_sync(last)
    return nullcontext()


def compiled(net, stack):
    """The model compiled; in place, block by block, where it will be sharded."""
    if stack.compiler == "eager":
        return net
    if stack.parallel == "fsdp2":
        for block in net.body:
            block.compile(backend=stack.compiler)
        return net
    return torch.compile(net, backend=stack.compiler)


def parallelized(model, stack, **options):
    if stack.parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model, **options)
    if stack.parallel == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.body:
            fully_shard(block)
        return fully_shard(model)
    return model


def gradients_of(net):
    """The gradients by name, whole where they are sharded."""
    whole = {}
    for name, p in net.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        whole[name] = grad.clone()
    return whole


def counts_of(attached):
    return [(s.calls, s.active_calls, s.realized_rate) for s in attached.sites]
