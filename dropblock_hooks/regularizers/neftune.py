"""Noise on the embeddings of a language model."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from .. import functional
from ..functional.embeddings import add_embedding_noise
from ..quoting import with_article
from ..registry import register
from .base import Applied, NonNegative, Now, Regularizer


@register
class NEFTune(Regularizer):
    """Adds uniform noise to the embeddings of tokens; see `functional.neftune`.
    Use it on the input embedding while you tune a language model on instructions.

    The noise is that of ``neftune_noise_alpha`` in Transformers. `presets.neftune` finds the input
    embedding of a model. The paper uses an `alpha` of 5, 10 or 15.

    Example:
        >>> spec = {"model.embed_tokens": NEFTune(alpha=5.0)}

    Args:
        alpha: scale of the noise, a number >= 0 or a schedule.
        at: ``"output"``; no other value is allowed.
        index: None; no other value is allowed.
        layout: ``"auto"``; no other value is allowed.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (in evaluation
            mode, too).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``y = x + alpha / sqrt(L * d) * u`` with u uniform in [-1, 1], for L tokens of d channels.

    Reference:
        Jain et al., 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning"
        (https://arxiv.org/abs/2310.05914).
    """

    alpha: NonNegative

    function = staticmethod(functional.neftune)
    unit: ClassVar[None] = None
    idle_at_zero: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"alpha": 0.0}

    def check(self, values: Mapping[str, float]) -> None:
        if (self.at, self.index, self.layout) != ("output", None, "auto"):
            raise ValueError(
                "NEFTune adds noise to the output of an embedding: it takes no at, index or layout"
            )

    def refusal(self, module: nn.Module, parameter: nn.Parameter | None) -> str | None:
        if is_embedding(module):
            return None
        return (
            f"{with_article(type(module).__name__)} is no embedding of tokens (nn.Embedding): "
            "presets.neftune(model) finds the input embedding of a language model"
        )

    def apply(self, x: Tensor, now: Now) -> Applied:
        # x keeps its axes (N, L, d), because the class needs no channels
        return add_embedding_noise(x, now.alpha), None


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.Embedding``, or its class name ends with Embedding."""
    return isinstance(module, nn.Embedding) or type(module).__name__.endswith("Embedding")
