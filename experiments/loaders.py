"""Loaders that make batches of the images of a run.

The order of an epoch follows from seed, replica and epoch, the augmentation of an image from these
and its index, and nothing is drawn from global generators. So two conditions of one seed see the
same batches, however many masks are drawn in between, and an epoch can be taken up at any batch.

    >>> from pathlib import Path
    >>> from experiments.data import load_data
    >>> config = Config(train_images=100)
    >>> loader = train_loader(load_data(config, Path("data")), config, Runtime())
    >>> loader.begin(epoch=0, first_batch=1)
    >>> [images.shape for images, labels in loader]
    [torch.Size([50, 1, 32, 32])]
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from experiments.config import Config, Runtime
from experiments.data import Data
from experiments.datasets.images import Draw, Images
from experiments.seeds import own_generator


class Batches:
    """The order of the training images: for each batch of an epoch, the draws of one process.

    Each process has its slice of a batch. A last batch that can't be shared evenly is filled up
    with the first images of the epoch.
    """

    def __init__(self, images: int, config: Config, rank: int, processes: int) -> None:
        self.images, self.config = images, config
        self.rank, self.processes = rank, processes
        self.epoch = self.first_batch = 0

    def __len__(self) -> int:
        return math.ceil(self.images / self.config.batch_size)

    def __iter__(self) -> Iterator[list[Draw]]:
        purpose = f"order/{self.epoch}"
        generator = own_generator(self.config.seed, purpose, self.config.replica)
        order = torch.randperm(self.images, generator=generator)
        batches = order.split(self.config.batch_size)[self.first_batch :]
        return iter([self._share(batch, order) for batch in batches])

    def _share(self, batch: Tensor, order: Tensor) -> list[Draw]:
        each = math.ceil(len(batch) / self.processes)
        fill = order.repeat(self.processes)[: each * self.processes - len(batch)]
        mine = torch.cat([batch, fill])[self.rank * each : (self.rank + 1) * each]
        return [(self.epoch, index) for index in mine.tolist()]


def share_sizes(config: Config, images: int) -> tuple[int, int]:
    """How many images one process has of a batch, and of an epoch's last one."""
    whole = min(config.batch_size, images)
    last = images % whole or whole
    return math.ceil(whole / config.processes), math.ceil(last / config.processes)


class Loader:
    """Training batches of one epoch after another: `begin`, then iterate.

    The length is the number of batches in a whole epoch.
    """

    def __init__(self, images: Images, batches: Batches, config: Config, runtime: Runtime) -> None:
        self._batches = batches
        persistent = runtime.loader_workers > 0
        self._loader = _data_loader(images, batches, config, runtime, persistent_workers=persistent)

    def begin(self, epoch: int, first_batch: int = 0) -> None:
        """Go to a batch of an epoch; those before it are not loaded.

        Raises:
            ValueError: if the epoch has no such batch (one past the last is allowed).
        """
        if not 0 <= first_batch <= len(self):
            raise ValueError(f"first_batch must be between 0 and {len(self)}, got {first_batch}")
        self._batches.epoch, self._batches.first_batch = epoch, first_batch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._loader)


def train_loader(
    data: Data, config: Config, runtime: Runtime, rank: int = 0, processes: int = 1
) -> Loader:
    """The training batches, or one process's slices of them; it stands at epoch 0, batch 0."""
    batches = Batches(len(data.train), config, rank, processes)
    return Loader(data.train, batches, config, runtime)


def scoring_loader(
    images: Images, config: Config, runtime: Runtime, rank: int = 0, processes: int = 1
) -> Iterable[tuple[Tensor, Tensor]]:
    """Every image once, in their order; of several processes, each has every n-th.

    The batches are four times as large as in training: there are no gradients to hold.
    """
    draws = [(0, index) for index in range(rank, len(images), processes)]
    size = 4 * max(1, config.batch_size // processes)
    batches = [draws[first : first + size] for first in range(0, len(draws), size)]
    return _data_loader(images, batches, config, runtime)


def _data_loader(
    images: Any, batches: Any, config: Config, runtime: Runtime, **options: Any
) -> DataLoader[Any]:
    return DataLoader(
        images,
        batch_sampler=batches,
        collate_fn=_as_is,
        num_workers=runtime.loader_workers,
        pin_memory=config.accelerator != "cpu" and torch.cuda.is_available(),
        worker_init_fn=_leave_signals,
        generator=torch.Generator(),  # else it draws from the global one, which makes masks
        **options,
    )


def _as_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def _leave_signals(worker: int) -> None:
    """Keep a stop from killing the loading processes before the training one has heeded it.

    Signals to a whole process group (Ctrl-C, `timeout`) do not reach them in a group of their
    own, and those that schedulers send to every process are ignored. SIGTERM itself must go on
    working: by it Python ends its workers; when the training process is gone, they end too.
    """
    os.setpgrp()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
