"""The smallest member of every timm family, regularized at its last two feature stages.

``tests/models/test_families.py`` asserts what ``python -m tests.write_tables families`` writes to
``docs/models/families.csv``.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from dropblock_hooks import Attachment, DropBlock2d, Dropout1d, Regularizer, Site, attach

P, BLOCK, BATCH, REPEATS = 0.2, 3, 2, 40
STAGES = ("stage:-2", "stage:-1")


@dataclass(frozen=True)
class Member:
    """A model, and what its stages need.

    Attributes:
        family: the module of ``timm.models``.
        model: its smallest model by parameters.
        size: edge of the input.
        sized: whether the model is built for this size (``img_size=``).
        options: of the regularizers at the stages -2 and -1.
        channels: of what is regularized there, where that is not the ``num_chs`` of the stage.
    """

    family: str
    model: str
    size: int
    sized: bool = False
    options: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    channels: tuple[int, int] | None = None

    def build(self, **options: Any) -> nn.Module:
        """The model with random weights."""
        import timm

        if self.sized:
            options["img_size"] = self.size
        built: nn.Module = timm.create_model(self.model, **options)
        return built

    def spec(self) -> dict[str, Any]:
        """DropBlock at the last two stages, which may be two outputs of one layer."""
        blocks: list[Any] = [DropBlock2d(P, BLOCK, **options) for options in self.options]
        if self.family == "hiera":  # its tokens are in the order of rows in the last stage only
            blocks[0] = Dropout1d(P)
        if self.model == "coat_tiny":  # its last stages are scales of the same blocks
            return {"stage:-1": blocks}
        return dict(zip(STAGES, blocks, strict=True))

    def shown(self) -> str:
        """The options of the spec by selector, and the classes other than DropBlock.

        ``+`` stands between the regularizers of a list.
        """
        by_selector = {}
        for selector, blocks in self.spec().items():
            if isinstance(blocks, list):
                by_selector[selector] = " + ".join(map(_shown, blocks))
            else:
                by_selector[selector] = _shown(blocks)
        texts = list(dict.fromkeys(by_selector.values()))
        if len(by_selector) == 2 and len(texts) == 1:
            return texts[0]
        return "; ".join(f"{selector} {text}" for selector, text in by_selector.items())


def _shown(block: Regularizer) -> str:
    """The options of a regularizer, after its class if it is not DropBlock."""
    options = [f"{name}={getattr(block, name)}" for name in ("index", "grid")]
    options = [option for option in options if not option.endswith("=None")]
    if not isinstance(block, DropBlock2d):
        options.insert(0, type(block).__name__)
    return ", ".join(options) or "none"


def both(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same options at both stages."""
    return options, options


MEMBERS = (
    Member("beit", "beit_base_patch16_224", 64, sized=True),
    Member("byoanet", "halonet_h1", 256),
    Member("byobnet", "test_byobnet", 96),
    Member("cait", "cait_xxs24_224", 96, sized=True),
    Member("coat", "coat_tiny", 96, sized=True, options=({"index": 2}, {"index": 3})),
    Member("convit", "convit_tiny", 96, sized=True),
    Member("convmixer", "convmixer_768_32", 96),
    Member("convnext", "test_convnext", 96),
    Member("cpubone", "cpubone_nano", 96),
    Member(
        "crossvit",
        "crossvit_tiny_240",
        96,
        options=({"index": 0}, {"index": 1}),
        channels=(96, 192),  # one of two branches, num_chs is the wider
    ),
    Member("csatv2", "csatv2", 128),
    Member("cspnet", "cs3darknet_focus_s", 96),
    Member("cspnext", "cspnext_tiny", 96),
    Member("davit", "davit_tiny", 96),
    Member("deepseek_vit", "deepseek_vit_412m", 126),
    Member("deit", "deit_tiny_patch16_224", 96, sized=True),
    Member("densenet", "densenet121", 96),
    Member("dla", "dla46x_c", 96),
    Member("dpn", "dpn48b", 96),
    Member("edgenext", "edgenext_xx_small", 96),
    Member("efficientformer", "efficientformer_l1", 224),
    Member("efficientformer_v2", "efficientformerv2_s0", 96, sized=True),
    Member("efficientnet", "test_efficientnet", 96),
    Member("efficientvim", "efficientvim_m1", 96, options=both(index=0)),
    Member("efficientvit_mit", "efficientvit_b0", 96),
    Member("efficientvit_msra", "efficientvit_m0", 96),
    Member("eva", "vit_tiny_patch16_dinov3_qkvb", 96),
    Member("fasternet", "fasternet_t0", 96),
    Member("fastvit", "fastvit_t8", 96),
    Member("focalnet", "focalnet_tiny_srf", 96),
    Member("gcvit", "gcvit_xxtiny", 96, sized=True),
    Member("gemma4_vit", "gemma4_vit_167m", 64, options=both(grid=(4, 4))),
    Member("ghostnet", "ghostnet_050", 96),
    Member("hardcorenas", "hardcorenas_b", 96),
    Member("hgnet", "hgnetv2_b0", 96),
    Member("hiera", "hiera_tiny_224", 96, sized=True, options=({}, {"grid": (3, 3)})),
    Member("hieradet_sam2", "sam2_hiera_tiny", 96),
    Member(
        "hrnet",
        "hrnet_w18_small",
        96,
        options=({"index": 2}, {"index": 3}),
        channels=(64, 128),  # of the branches; num_chs counts what the head makes of them
    ),
    Member("iformer", "iformer_t", 96),
    Member("inception_next", "inception_next_atto", 96),
    Member("inception_resnet_v2", "inception_resnet_v2", 126),
    Member("inception_v3", "inception_v3", 126),
    Member("inception_v4", "inception_v4", 126),
    Member("lcnetv2", "lcnetv2_small", 96),
    Member("levit", "levit_128s", 128, sized=True, options=({"grid": (4, 4)}, {"grid": (2, 2)})),
    Member("lowformer", "lowformer_b0", 96),
    Member("mambaout", "test_mambaout", 96),
    Member("maxxvit", "test_coatnet", 96, sized=True),
    Member("metaformer", "poolformerv2_s12", 96),
    Member("mlp_mixer", "gmlp_ti16_224", 96, sized=True),
    Member("mobilenetv3", "mobilenetv3_small_050", 96),
    Member("mobilenetv5", "mobilenetv5_base", 64),
    Member("mobilevit", "mobilevit_xxs", 96),
    Member("mvitv2", "mvitv2_tiny", 96, options=both(index=0)),
    Member("naflexvit", "naflexvit_base_patch16_parfac_gap", 64),
    Member("nasnet", "nasnetalarge", 64),
    Member("nest", "nest_tiny", 96, sized=True),
    Member("nextvit", "nextvit_small", 96),
    Member("nfnet", "test_nfnet", 96),
    Member("pit", "pit_ti_224", 128, sized=True, options=both(index=0)),
    Member("pnasnet", "pnasnet5large", 64),
    Member("pvt_v2", "pvt_v2_b0", 96),
    Member("qwen3_vit", "qwen3_vit_88m", 64),
    Member("rdnet", "rdnet_tiny", 96),
    Member("regnet", "regnetx_002", 96),
    Member("repghost", "repghostnet_050", 96),
    Member("repvit", "repvit_m1", 96),
    Member("res2net", "res2next50", 96),
    Member("resnest", "resnest14d", 96),
    Member("resnet", "test_resnet", 96),
    Member("resnetv2", "resnetv2_18", 96),
    Member("rexnet", "rexnet_100", 96),
    Member("selecsls", "selecsls42", 96),
    Member("senet", "legacy_seresnet18", 96),
    Member("sequencer", "sequencer2d_s", 96),
    Member("shvit", "shvit_s1", 96),
    Member("sknet", "skresnet18", 96),
    Member("starnet", "starnet_s050", 96),
    Member("swiftformer", "swiftformer_xs", 96),
    Member("swin_transformer", "swin_tiny_patch4_window7_224", 96, sized=True),
    Member("swin_transformer_v2", "swinv2_tiny_window16_256", 96, sized=True),
    Member("swin_transformer_v2_cr", "swinv2_cr_tiny_224", 96, sized=True),
    Member("tiny_vit", "tiny_vit_5m_224", 96),
    Member("tnt", "tnt_s_legacy_patch16_224", 96, sized=True, options=both(index=1, grid=(6, 6))),
    Member("tresnet", "tresnet_m", 96),
    Member("twins", "twins_svt_small", 96),
    Member("vgg", "vgg11", 64),
    Member("visformer", "visformer_tiny", 96, sized=True),
    Member("vision_transformer", "test_vit", 96),
    Member("vision_transformer_hybrid", "vit_tiny_r_s16_p8_224", 96, sized=True),
    Member("vision_transformer_relpos", "test_vit_relpos", 96, sized=True),
    Member("vision_transformer_sam", "samvit_base_patch16_224", 64),
    Member("vitamin", "vitamin_small_224", 96, sized=True),
    Member("volo", "volo_d1_224", 96, sized=True),
    Member("vovnet", "ese_vovnet19b_slim_dw", 96),
    Member("xception", "legacy_xception", 96),
    Member("xception_aligned", "xception41p", 96),
    Member("xcit", "xcit_nano_12_p8_224", 96),
)


@dataclass(frozen=True)
class StageResult:
    """One stage: what was read of its output, and what was dropped."""

    name: str
    layout: str
    map_size: tuple[int, ...]
    prefix: int
    calls: int
    realized: float
    z: float
    channels_right: bool


@dataclass(frozen=True)
class Outcome:
    """What one training step and one evaluation have shown."""

    stages: tuple[StageResult, ...]
    gradients_finite: bool
    evaluation_equal: bool
    removed_clean: bool


class _Measured:
    """Forward hook of a layer with a site: has the site regularize the layer's output many times.

    The layer is called again, with a forward that returns the output as it was. This happens within
    the forward of the model, because the site may look up the grid of this image.
    """

    def __init__(self, attached: Attachment, site: Site) -> None:
        self.attached, self.site = attached, site
        self.shares: list[float] = []
        self.output: Any = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.output is not None:
            return  # one of the calls below, or a recomputation
        self.output = output = _detached(output)
        module.forward = lambda *args, **kwargs: output
        try:
            with torch.no_grad():
                for _ in range(REPEATS):
                    self.attached.set(self.site.key, p=P)  # begins a window
                    module(*_detached(args), **_detached(kwargs))
                    self.shares.append(self.site.realized_rate or 0.0)
        finally:
            del module.forward


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_detached(item) for item in value)
    return value


def observe(member: Member, checkpointing: bool = False) -> Outcome:
    """A training step and an evaluation of a model with DropBlock at its last two stages.

    Raises:
        AssertionError: by timm, where the family has no checkpointing.
    """
    torch.manual_seed(0)
    model, x = member.build(), torch.randn(BATCH, 3, member.size, member.size)
    if checkpointing:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    keys, hooks = list(model.state_dict()), hook_count(model)
    with torch.no_grad():
        bare = tensors_of(model.eval()(x))
    attached = attach(model, member.spec())
    with torch.no_grad():
        equal = all(map(torch.equal, bare, tensors_of(model.eval()(x))))
    calls = [site.calls for site in attached.sites]
    sum(y.square().mean() for y in tensors_of(model.train()(x))).backward()
    calls = [site.calls - before for site, before in zip(attached.sites, calls, strict=True)]
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    if checkpointing:
        model.set_grad_checkpointing(False)  # type: ignore[operator]
    widths = member.channels or _stage_widths(model)
    measured = [_measured(model, attached, site, x) for site in attached.sites]
    stages = tuple(map(_result, measured, calls, widths))
    attached.remove()
    clean = list(model.state_dict()) == keys and hook_count(model) == hooks
    return Outcome(stages, finite, equal, clean)


def _measured(model: nn.Module, attached: Attachment, site: Site, x: Tensor) -> _Measured:
    """The shares that a site drops, in one more forward."""
    measured, layer = _Measured(attached, site), model.get_submodule(site.name)
    with layer.register_forward_hook(measured, with_kwargs=True, prepend=True):
        model(x)
    return measured


def _result(measured: _Measured, calls: int, width: int) -> StageResult:
    """The share dropped, and its distance from the nominal one in standard errors of the mean."""
    site, shares = measured.site, measured.shares
    error = stdev(shares) / math.sqrt(len(shares))
    layout, index = site.layout or "", site.regularizer.index
    x = measured.output if index is None else measured.output[index]
    size = tuple(edge for edge in site.map_size or () if isinstance(edge, int))
    tokens = layout in ("NLC", "NCL")
    return StageResult(
        site.name,
        layout,
        size,
        x[0].numel() // width - math.prod(size) if tokens else 0,
        calls,
        fmean(shares),
        (fmean(shares) - P) / error if error else math.inf,
        x.shape[-1 if layout.endswith("C") else 1] == width,
    )


def _stage_widths(model: nn.Module) -> tuple[int, int]:
    info: Any = model.feature_info
    entries = getattr(info, "info", info)
    return entries[-2]["num_chs"], entries[-1]["num_chs"]


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        return tensors_of(tuple(output.values()))
    items = output if isinstance(output, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def has_checkpointing(member: Member) -> bool:
    """Whether the family can recompute activations in the backward."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = member.build()
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AssertionError, AttributeError):  # how timm says no
        return False
    return True
