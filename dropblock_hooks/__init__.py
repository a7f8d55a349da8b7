"""Add DropBlock, dropout or gradient clipping to the layers of almost any PyTorch model, by name.

The most important names:

- `attach`: put a spec on a model. It returns an `Attachment`, the list of its sites.
- `DropBlock2d`, `ClampGrad`, ...: regularizers, in ``regularizers``.
- `Foreign`: a module or function of another library as a regularizer.
- `LinearSchedule`, ...: schedules, which are functions of the epoch for rates and bounds.
- `Select`, `Spec`: selectors of layers, and the spec that maps them to regularizers.
- `sample`: Monte-Carlo dropout, mean and spread of many forwards in evaluation.
- `gradcam`: the positions of an image that a class score depends on.
- `plan`: a dry run of a spec before training, with sites, shapes and faults.
- `layers`: the layers of a model, with their names and shapes.
- `builtin`, `Retune`: the model's own dropouts, and other rates for them.
- `capture`, `Capture`: activations and gradients of a single call or of a training.
- `watch`, `Watchdog`: finds the first fault of a training, and the layer that made it.
- `Observer`: measures a layer and changes nothing, in ``observers``.
- ``plots``: pictures, by matplotlib.
- ``functional``: the equations, as pure functions of tensors.
- `Regularizer`, `register`: the base and the decorator for a regularizer of your own.

The ``__init__`` of each folder has a map of its modules. All folders use these modules:

- ``findings``: findings with their kind, severity, text and cure, and how they are reported.
- ``messages``: the texts and cures of all findings, in one table.
- ``tables``: tables of text, with shortened names and equal rows in one line.
- ``warn``: warnings at the line of the user's code.
- ``quoting``: short texts of names and values for messages.
- ``pickling``: pickles of schedules and regularizers, with a clear error for a lambda.
- ``checks``: checks of the types and ranges of arguments, and the closest known names.
- ``registry``: the names of classes in specs.
- ``compiling``: tools for torch.compile: operators, their handles, and compiling anew.
- ``_torch``: private names of torch, with their replacements.
"""

from . import functional, plots, presets
from .attach import attach, attachments, detach_all
from .attachment.attachment import Attachment
from .calls.capture import capture
from .calls.gradcam import CAM, gradcam
from .calls.sample import Sampled, sample
from .calls.watch import watch
from .checks import Range
from .findings import Finding, Kind, Severity, WatchdogError
from .observers.base import Observer, Seen, Watch
from .observers.capture import Capture, Record
from .observers.stats import ActivationStats, GradientStats, WeightStats
from .observers.watchdog import Watchdog
from .planning.builtin import builtin
from .planning.plan import Plan, plan
from .planning.recording import layers
from .registry import register
from .regularizers.activity import ActivityL1, ActivityL2
from .regularizers.adagc import AdaGC
from .regularizers.base import Applied, NonNegative, Now, Positive, Probability, Rate, Regularizer
from .regularizers.clamp_activation import ClampActivation
from .regularizers.dropout import (
    Disout,
    DropBlock1d,
    DropBlock2d,
    DropBlock3d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    StochasticDepth,
)
from .regularizers.foreign import Foreign, Retune
from .regularizers.freeze_norm import FreezeNorm
from .regularizers.gradients import (
    AdaptiveClipGrad,
    CentralizeGrad,
    ClampGrad,
    ClipGradNorm,
    DropGrad2d,
    GradNoise,
    OnGradients,
    ScaleGrad,
    ZeroGrad,
)
from .regularizers.l2sp import L2SP
from .regularizers.neftune import NEFTune
from .regularizers.skip_update import SkipUpdate
from .regularizers.z_loss import ZLoss
from .regularizers.zclip import ZClip
from .schedules import (
    ByDepth,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    Schedule,
    StepSchedule,
    WindowSchedule,
)
from .selectors.select import Select
from .sites.public import Site
from .sites.site import SiteError
from .specs.spec import Spec, SpecError
from .warn import HookWarning

__version__ = "0.1.0"

__all__ = [
    "CAM",
    "L2SP",
    "ActivationStats",
    "ActivityL1",
    "ActivityL2",
    "AdaGC",
    "AdaptiveClipGrad",
    "Applied",
    "Attachment",
    "ByDepth",
    "Capture",
    "CentralizeGrad",
    "ClampActivation",
    "ClampGrad",
    "ClipGradNorm",
    "ConstantSchedule",
    "CosineSchedule",
    "Disout",
    "DropBlock1d",
    "DropBlock2d",
    "DropBlock3d",
    "DropGrad2d",
    "DropPath",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "Finding",
    "Foreign",
    "FreezeNorm",
    "GaussianDropout",
    "GaussianNoise",
    "GradNoise",
    "GradientStats",
    "HookWarning",
    "Kind",
    "LinearSchedule",
    "NEFTune",
    "NonNegative",
    "Now",
    "Observer",
    "OnGradients",
    "Plan",
    "Positive",
    "Probability",
    "Range",
    "Rate",
    "Record",
    "Regularizer",
    "Retune",
    "Sampled",
    "ScaleGrad",
    "Schedule",
    "Seen",
    "Select",
    "Severity",
    "Site",
    "SiteError",
    "SkipUpdate",
    "Spec",
    "SpecError",
    "StepSchedule",
    "StochasticDepth",
    "Watch",
    "Watchdog",
    "WatchdogError",
    "WeightStats",
    "WindowSchedule",
    "ZClip",
    "ZLoss",
    "ZeroGrad",
    "attach",
    "attachments",
    "builtin",
    "capture",
    "detach_all",
    "functional",
    "gradcam",
    "layers",
    "plan",
    "plots",
    "presets",
    "register",
    "sample",
    "watch",
]
