"""How the axes of many layers are read: the frozen table, and how its rows are made.

The table was written by the code before its redesign, which had eight ways to find the channels. A
row is one output of one layer, in a training forward of two images, texts or sounds:

=========  =======================================================================================
model      a timm family, or a class of transformers
layer      its name
stage      "stage" where the layer ends a feature stage
shape      of the tensor
channels   how a regularizer that needs the channels alone reads it
maps       how a regularizer reads it that needs maps (volumes where there are five axes)
detached   the same two where there is no autograd graph, joined by ";"
=========  =======================================================================================

A reading is "NLC 4x6 +1": the layout, the grid of tokens, and the number of prefix tokens; or "-",
which is refused.
"""

import csv
import gzip
import re
import warnings
from pathlib import Path

import torch

from dropblock_hooks import ClipGradNorm
from dropblock_hooks.axes.facts import ModelFacts
from dropblock_hooks.axes.grids import Grids
from dropblock_hooks.axes.reader import Reader
from dropblock_hooks.selectors.index import Index
from dropblock_hooks.selectors.stages import stage_channels
from tests.families import MEMBERS

TABLE = Path(__file__).with_name("layouts.csv.gz")
MOST = 60  # layers of one model, beside the ends of its stages
_HELPS = r"layout=|grid=|needs (2 to 5 axes|a \d-D tensor)|add one of length 1"

_SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
_ATTENTION = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in (("attention_heads", 4), ("ffn_dim", 48))
}
_TEXT = {"input_ids": torch.arange(22).reshape(2, 11) % 50}
_DECODED = {"decoder_input_ids": torch.arange(14).reshape(2, 7)}
_IMAGE, _SQUARE = {"pixel_values": (2, 3, 64, 96)}, {"pixel_values": (2, 3, 64, 64)}
_SOUND = {"input_values": (2, 4000)}
_SPEECH = {
    "vocab_size": 50, "conv_dim": (16, 16, 24), "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 60, "num_mel_bins": 16,
    "max_source_positions": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
_DETR = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 6,
    "backbone_config": "ResNetConfig",
}  # fmt: skip
_SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
_STAGES = {"hidden_sizes": [16, 32, 40, 48], "depths": [1, 1, 1, 1]}
TRANSFORMERS = {
    "BertModel": ({**_SMALL, "vocab_size": 50}, _TEXT),
    "GPT2Model": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50}, _TEXT),
    "T5Model": (
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50},
        {**_TEXT, **_DECODED},
    ),
    "Wav2Vec2Model": ({**_SMALL, **_SPEECH}, _SOUND),
    "HubertModel": ({**_SMALL, **_SPEECH}, _SOUND),
    "WhisperModel": ({**_WHISPER, **_ATTENTION}, {"input_features": (2, 16, 60), **_DECODED}),
    "ViTModel": ({**_SMALL, "image_size": 64, "patch_size": 16}, _SQUARE),
    "BeitModel": ({**_SMALL, "image_size": (64, 96), "patch_size": 16}, _IMAGE),
    "SwinModel": ({**_SWIN, "window_size": 4, "image_size": 64}, _SQUARE),
    "ConvNextModel": ({"hidden_sizes": [16, 24, 32, 40], "depths": [2, 1, 1, 1]}, _IMAGE),
    "SegformerModel": (_STAGES, _IMAGE),
    "DetrModel": ({**_DETR, **_ATTENTION}, _IMAGE),
}


def build(name):
    """A model and the keywords, or the positional image, of one forward."""
    torch.manual_seed(0)
    member = next((member for member in MEMBERS if member.family == name), None)
    if member is not None:
        return member.build(), (torch.randn(2, 3, member.size, member.size),), {}
    import transformers

    options, inputs = TRANSFORMERS[name]
    if "backbone_config" in options:
        backbone = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 24], depths=[1, 1], out_features=["stage2"]
        )
        options = {**options, "backbone_config": backbone, "use_timm_backbone": False}
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**options))
    inputs = {k: torch.randn(v) if isinstance(v, tuple) else v for k, v in inputs.items()}
    return model, (), inputs


def rows_of(name):
    """The rows of one model."""
    model, args, kwargs = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        called = _called(model.train(), args, kwargs)
        index, grids = Index(model), Grids()
        facts = ModelFacts(index)
        stages = stage_channels(index).keys() & called.keys()
        layers = sorted(_spread(called, MOST) | stages, key=list(called).index)
        rows, handles = {}, []
        for layer in layers:
            known = facts.of(index.modules[layer], "output")
            hook = _probe(name, layer, layer in stages, known, grids, rows)
            handles.append(called[layer].register_forward_hook(hook))
        grids.put_on(model)  # after the probes, as `attach` does it after the hooks of its sites
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return [row for layer in layers for row in rows.get(layer, {}).values()]


def _read(x, facts, grids, spatial):
    """One reading as the table has it."""
    try:
        view = Reader(ClipGradNorm(1.0, per="channel"), facts, grids, spatial).view(x)
    except ValueError as error:
        return "-" if re.search(_HELPS, str(error)) else f"no help: {error}"
    grid = "" if view.grid is None else " " + "x".join(map(str, view.grid))
    return f"{view.layout}{grid}" + (f" +{view.prefix}" if view.prefix else "")


def _called(model, args, kwargs):
    """The modules by name, in the order in which their first call ends."""
    called, handles = {}, []
    for name, module in model.named_modules():

        def keep(module, args, output, name=name):
            called.setdefault(name, module)

        handles.append(module.register_forward_hook(keep))
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return called


def _spread(called, most):
    """At most so many of them, evenly spread."""
    names = list(called)
    step = max(len(names) / most, 1)
    return {names[int(i * step)] for i in range(min(most, len(names)))}


def _probe(model, layer, stage, facts, grids, rows):
    """A hook that writes a row for each new rank of the tensors that the layer gives."""

    def hook(module, args, output):
        for x in _tensors(output):
            if x.ndim < 3 or not x.is_floating_point() or x.ndim in rows.setdefault(layer, {}):
                continue
            spatial = 3 if x.ndim == 5 else 2
            found = [
                _read(each, facts, grids, needed)
                for each in (x, x.detach())
                for needed in (None, spatial)
            ]
            shape = "x".join(map(str, x.shape))
            row = (model, layer, "stage" * stage, shape, *found[:2], ";".join(found[2:]))
            rows[layer][x.ndim] = row

    return hook


def _tensors(output):
    if isinstance(output, torch.Tensor):
        return [output]
    values = list(output.values()) if isinstance(output, dict) else output
    if not isinstance(values, tuple | list):
        return []
    return [x for value in values for x in _tensors(value)]


def names():
    """The models of the table."""
    return [*(member.family for member in MEMBERS), *TRANSFORMERS]


def load():
    """The rows by model."""
    rows = {}
    with gzip.open(TABLE, "rt", newline="") as file:
        for row in csv.reader(file):
            rows.setdefault(row[0], []).append(tuple(row))
    return rows
