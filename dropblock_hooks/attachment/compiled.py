"""What torch has compiled: it would use that again, and not see hooks that have come since."""

import math
import sys
import types
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from ..quoting import listed
from ..regularizers.base import Regularizer
from ..schedules import length_of
from ..sites.hooks import SiteHook
from ..sites.retune import OwnRateHook
from ..sites.shared import Control
from ..tables import counted
from ..warn import warn

_MOST_TIMES = 1_000  # that are looked at: torch's limit is far below


def has_compiled() -> bool:
    """Whether torch holds compiled code at all."""
    return bool(_compiled_codes())


def forget_compiled() -> None:
    """Have everything compiled anew, so that it sees new hooks.

    Which code runs a model is not known: a function may have taken it as an argument. What was
    built for a pending backward stays, and so does what ``torch.compiler.reset()`` would end
    besides: CUDA graphs, callbacks, compiled autograd.
    """
    codes = _compiled_codes()
    if codes:
        from torch._C._dynamo.eval_frame import reset_code

        for code in codes:
            reset_code(code)


def as_written() -> AbstractContextManager[object]:
    """Within it, code that torch has compiled is not used."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing is compiled, and importing it takes a second
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def _compiled_codes() -> list[types.CodeType]:
    """All code that compiled code is held for; none after ``torch._dynamo.reset()``."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return []  # nothing has ever been compiled
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.convert_frame import input_codes

    codes = [reference() for reference in list(input_codes.seen)]
    return [code for code in codes if code is not None and _debug_get_cache_entry_list(code)]


def tell_recompiling(control: Control, hooks: Iterable[SiteHook]) -> None:
    """Warn, once, of rates that compiled code holds as constants, and that will change.

    Which code runs a layer that is only read is not known: any that was compiled may.
    """
    if (".", "recompiles") in control.told:
        return
    held = [h for h in hooks if isinstance(h, OwnRateHook) and h.is_constant_in_code]
    held = [h for h in held if h.site.regularizer.moving]
    if not held or not has_compiled():  # which goes through all that was compiled, at each step
        return
    values = [values_to_come(h.site.regularizer, control.epoch) for h in held]
    if not any(more is None or more > 0 for more in values):
        return
    control.told.add((".", "recompiles"))
    most = None if None in values else max(more or 0 for more in values)
    limit = torch._dynamo.config.recompile_limit
    coming = "which are not known" if most is None else f"{counted(most, 'value')} to come"
    if control.epoch != math.floor(control.epoch):
        coming = "one at each step, since time moves by fractions of an epoch"
    warn(
        f"{listed((h.site.key for h in held), 3)}: if torch.compile runs this model, it holds the "
        f"rate of each as a constant and compiles again for each new value, {coming}; after "
        f"torch._dynamo.config.recompile_limit ({limit}) it runs the code without compiling. A "
        "StepSchedule takes few values"
    )


def values_to_come(regularizer: Regularizer, t: float) -> int | None:
    """How many other values its rates will have, epoch by epoch; None where that is not known.

    Of very many epochs, or steps, at least so many.
    """
    length = max((length_of(rate) or 0.0 for rate in regularizer.rates.values()), default=0.0)
    if regularizer.moving and not length:
        return None
    times = [t + i for i in range(min(max(math.ceil(length - t), 0), _MOST_TIMES) + 1)]
    return len({tuple(regularizer.values(time).values()) for time in times}) - 1
