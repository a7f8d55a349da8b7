"""What an Attachment is told of the training loop: its GradScaler, its optimizers."""

from typing import Any

from torch import nn

from ..sites.grad_scaler import checked_scaler
from ..sites.hooks import SiteHook
from ..sites.optimizers import checked_optimizers, use_optimizers
from ..sites.shared import Control


class OfTrainingLoop:
    """The part of an Attachment that holds what is of the training loop."""

    _control: Control
    _installed: list[tuple[nn.Module, SiteHook]]

    @property
    def grad_scaler(self) -> Any:
        """The GradScaler whose scale multiplies gradient bounds; set it on a loaded model.

        What wraps one can be given as well: timm's NativeScaler, Lightning's precision plugin,
        accelerate's Accelerator. False says that the loss is not scaled, and that a GradScaler
        elsewhere in the process is another model's.
        """
        return self._control.grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: Any) -> None:
        self._control.use_scaler(checked_scaler(scaler))

    @property
    def optimizer(self) -> Any:
        """The optimizer at whose steps accumulated gradients are regularized; of several, a list.

        A list can be given, too, and what wraps one: accelerate's, Lightning's, timm's Lookahead.
        The Attachment does not keep it alive, and a copy or a loaded model has none. None takes the
        hook off it.

        Example:
            >>> model = nn.Linear(2, 1)
            >>> attached = attach(model, {"param:weight": ClampGrad(-1, 1, when="accumulated")})
            >>> attached.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        Raises:
            RuntimeError: after `remove`.
            TypeError: for what is no optimizer.
            ValueError: for one that holds none of the parameters.
        """
        held = [reference() for reference, _ in self._control.optimizers]
        live = [optimizer for optimizer in held if optimizer is not None]
        return live if len(live) > 1 else next(iter(live), None)

    @optimizer.setter
    def optimizer(self, given: Any) -> None:
        if given is not None and not self._control.installed:
            raise RuntimeError("the attachment was removed, so nothing acts: attach again")
        use_optimizers(self._control, self._installed, checked_optimizers(given))
