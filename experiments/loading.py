"""Batches whose order and augmentation do not depend on masks.

The order of an epoch follows from seed, replica and epoch. Random numbers that a data set draws
for an item follow from these and the number of the item. So two conditions with the same
seed see the same batches, and so does a resumed run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from experiments.config import Run
from experiments.seeds import derive_seed, own_generator


class Seeded(Dataset[Any]):
    """A data set whose random numbers follow from the seed, the epoch and the item.

    The generators of torch, NumPy and Python are put back after each item. Data sets with a
    method `batch` draw nothing, and are read by whole batches.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int, replica: int = 0) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch
        self.replica = replica

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        seed = derive_seed(self.seed, f"augmentation/{self.epoch}/{index}", self.replica)
        with _seeded(seed):
            return self.dataset[index]

    def batch(self, indices: list[int]) -> Any:
        """Return the items with these numbers, as one batch."""
        if hasattr(self.dataset, "batch"):
            return self.dataset.batch(indices)
        return default_collate([self[index] for index in indices])

    __getitems__ = batch


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch, Python and NumPy, and put them back at the end."""
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()

    # torch.manual_seed would also seed the GPUs, which draw the masks
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def batches(dataset: Any, run: Run, epoch: int, workers: int = 0) -> Iterable[Any]:
    """Return the training batches of an epoch, in the order of the seed."""
    generator = own_generator(run.seed, f"order/{epoch}", run.replica)
    order = torch.randperm(len(dataset), generator=generator)
    seeded = Seeded(dataset, run.seed, epoch, run.replica)
    return _loader(seeded, order.split(run.batch_size), workers)


def in_order(dataset: Any, run: Run, workers: int = 0) -> Iterable[Any]:
    """Return all items once, in batches four times as large as in training."""
    order = torch.arange(len(dataset))
    seeded = Seeded(dataset, run.seed, -1, run.replica)
    return _loader(seeded, order.split(4 * run.batch_size), workers)


def _loader(dataset: Seeded, order: Sequence[Tensor], workers: int) -> DataLoader[Any]:
    """Return batches of the items with these numbers."""
    return DataLoader(
        dataset,
        batch_sampler=[numbers.tolist() for numbers in order],
        collate_fn=_as_is,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # the global one makes the masks
    )


def _as_is(batch: Any) -> Any:
    return batch
