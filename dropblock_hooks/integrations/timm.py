"""An Attachment in the checkpoints of timm's ``train.py``."""

import os
from typing import Any

from timm.utils.checkpoint_saver import load_checkpoint_metadata

from .. import messages
from ..attachment.attachment import Attachment
from ..warn import warn

_KEY = "dropblock_hooks"


def keep_in_checkpoints(
    attached: Attachment,
    saver: Any,
    *,
    resume: str | os.PathLike[str] | None = None,
    loss_scaler: Any = None,
    optimizer: Any = None,
    strict: bool = True,
) -> None:
    """Save the state of an Attachment with each file of a CheckpointSaver, and load it on resume.

    Call it before the first epoch, on every rank. The state is in each file as
    ``file["saver"]["dropblock_hooks"]``.

    Example:
        >>> keep_in_checkpoints(attached, saver, resume=args.resume)  # doctest: +SKIP

    Args:
        attached: the Attachment of the model.
        saver: ``CheckpointSaver`` of timm 1.0.31 or later; None on the ranks that write no files.
        resume: the file of ``--resume``; None or an empty string loads nothing.
        loss_scaler: timm's ``NativeScaler``; None keeps the scaler of the Attachment.
        optimizer: the optimizer, for ``when="accumulated"``; None keeps the present one.
        strict: False loads the sites whose key is the same, as in `Attachment.load_state_dict`.

    Raises:
        ValueError: for a file of another spec, with the differences; nothing is changed.
    """
    if resume:
        metadata = load_checkpoint_metadata(os.fspath(resume))
        saved = metadata.get("saver") or {}
        if _KEY in saved:
            attached.load_state_dict(saved[_KEY], strict)
        else:
            warn(messages.NO_STATE_IN_FILE.format(file=resume))

    if loss_scaler is not None:
        attached.grad_scaler = loss_scaler
    if optimizer is not None:
        attached.optimizer = optimizer

    if saver is not None:
        state_of_saver = saver.state_dict
        saver.state_dict = lambda *args: {**state_of_saver(*args), _KEY: attached.state_dict()}
