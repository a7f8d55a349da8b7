"""Blocks in which each site draws one mask.

`Attachment.same_masks` returns such a block.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.compiler import is_compiling

from ..compiling import as_written
from ..quoting import listed
from ..regularizers.foreign import Retune
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.seeds import Seeds


@contextmanager
def same_masks(run: Run, hooks: Sequence[SiteHook]) -> Iterator[None]:
    """Let each site draw one mask within a ``with`` block.

    Raises:
        RuntimeError: if a layer itself drops, or in a compiled function.
    """
    if is_compiling():
        raise RuntimeError("same_masks() can't be used in a function that torch.compile compiles")

    retuned = [hook for hook in hooks if isinstance(hook.site.regularizer, Retune)]
    keys = [hook.site.key for hook in retuned if hook.holds_rate]
    if keys:
        raise RuntimeError(
            f"same_masks() has no influence on {listed(keys, 3)}: the layer itself drops. Put a "
            "dropout of this package on the layer before or after it"
        )

    if run.seeds is None:
        run.seeds = Seeds()
    with as_written(), run.seeds.block():
        yield
