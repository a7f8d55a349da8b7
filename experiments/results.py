"""What came of a run: an `Epoch` for each that it trained, and the `Result` in the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Epoch:
    """What happened in one epoch; all numbers are means over its batches.

    Args:
        epoch: its number, from 0.
        loss: training loss, with noisy labels, smoothing and mixup.
        accuracy: share of training images classified as their (noisy) label says, while
            training; None with mixup.
        lr: learning rate.
        grad_norm: L2 norm of the gradient of all parameters, before it is clipped; None where
            one was not finite.
        grad_norm_clipped: the same, after it.
        nominal: site -> the probability asked for; None where the regularizer has none.
        realized: site -> the share that was dropped or changed; None where that means nothing.
        seconds: duration of its training.
        validation: share of the validation images classified as their (noisy) label says, in
            evaluation, after the epoch, by the average of the weights where there is one; None
            without such images.
        validation_loss: mean cross-entropy on them, in nats; None where it is not finite, too.
        test: share of the clean test images classified right, likewise; None unless asked for.
    """

    epoch: int
    loss: float
    accuracy: float | None
    lr: float
    grad_norm: float | None
    grad_norm_clipped: float | None
    nominal: dict[str, float | None]
    realized: dict[str, float | None]
    seconds: float
    validation: float | None = None
    validation_loss: float | None = None
    test: float | None = None


@dataclass(frozen=True)
class Best:
    """The epoch with the highest accuracy on the validation images; the first of equal ones.

    Args:
        epoch: its number, from 0.
        validation: that accuracy.
        scores: test split -> share of its images that the weights after this epoch classify right.
    """

    epoch: int
    validation: float
    scores: dict[str, float]


@dataclass(frozen=True)
class Result:
    """What came of a run that ended.

    Args:
        status: finished, or diverged: the loss was no longer finite.
        scores: test split (clean, occluded, noisy) -> share of its images classified right after
            the last epoch; empty if diverged.
        test_loss: mean cross-entropy on the clean test images, in nats; None if diverged.
        epochs: one for each epoch; those before it diverged.
        seconds: duration of training and test, resumed parts included.
        memory: most bytes that the process held at a time, all it had loaded included; on a GPU,
            that torch allocated there.
        best: the best epoch by validation; None without validation images, or if diverged.
    """

    status: Literal["finished", "diverged"]
    scores: dict[str, float]
    test_loss: float | None
    epochs: list[Epoch]
    seconds: float
    memory: int
    best: Best | None = None
