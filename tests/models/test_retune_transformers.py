"""What five architectures of Hugging Face drop by themselves, retuned; random weights, tiny.

Layers that are called are measured as in ``test_retune_families``.
"""

import pytest
import torch

from tests.retuned import observe

transformers = pytest.importorskip("transformers", reason="the models are Hugging Face's")

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def vit(sizes=SMALL, **options):
    config = transformers.ViTConfig(
        **sizes,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.5,
        **options,
    )
    return transformers.ViTModel(config)


def bert(sizes=SMALL, **options):
    config = transformers.BertConfig(
        **sizes,
        vocab_size=50,
        max_position_embeddings=16,
        attention_probs_dropout_prob=0.5,
        **options,
    )
    return transformers.BertModel(config)


def bart(width=16, heads=2, **options):
    sizes = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", heads), ("ffn_dim", 24))
    }
    config = transformers.BartConfig(
        vocab_size=50,
        d_model=width,
        max_position_embeddings=64,
        attention_dropout=0.5,
        activation_dropout=0.1,
        **sizes,
        **options,
    )
    return transformers.BartModel(config)


def convnext():
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, drop_path_rate=0.2
    )
    return transformers.ConvNextModel(config)


def llama(sizes=SMALL, **options):
    config = transformers.LlamaConfig(
        **sizes, vocab_size=50, attention_dropout=0.5, max_position_embeddings=64, **options
    )
    return transformers.LlamaModel(config)


def words():
    return {"input_ids": torch.randint(3, 50, (2, 7))}


CASES = {
    "vit": (
        vit,
        lambda: {"pixel_values": torch.randn(2, 3, 16, 16)},
        {("Dropout", "ours"): 3, ("ViTAttention", "attribute"): 2},
    ),
    "bert": (bert, words, {("Dropout", "ours"): 5, ("Dropout", "read"): 2}),
    "bart": (
        bart,
        lambda: {**words(), "use_cache": False},
        {
            ("BartEncoder", "attribute"): 1,
            ("BartDecoder", "attribute"): 1,
            ("BartEncoderLayer", "attribute"): 4,
            ("BartDecoderLayer", "attribute"): 4,
            ("BartAttention", "attribute"): 6,
        },
    ),
    "convnext": (
        convnext,
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
        {("ConvNextDropPath", "ours"): 3},
    ),
    "llama": (llama, lambda: {**words(), "use_cache": False}, {("LlamaAttention", "attribute"): 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_architecture(name):
    build, given, kinds = CASES[name]
    outcome = observe(build(), given())
    assert outcome.gradients_finite
    assert outcome.evaluation_equal
    assert outcome.restored
    assert outcome.told_right, outcome.told
    assert [rate for rate in outcome.rates if not rate.right] == []
    found = [(rate.type, rate.kind) for rate in outcome.rates]
    assert {kind: found.count(kind) for kind in found} == kinds
