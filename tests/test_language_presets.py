"""Presets for language models, on small random models of Transformers."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="the language models are theirs")

from dropblock_hooks import ByDepth, LinearSchedule, Spec, attach, presets  # noqa: E402

LAYERS = 3
IDS = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(1))
COMMON = {"vocab_size": 20}
SIZES = {**COMMON, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def llama():
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=LAYERS, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def gpt2():
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        **COMMON, n_embd=16, n_layer=LAYERS, n_head=2, bos_token_id=0, eos_token_id=0, **rates
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**SIZES, num_hidden_layers=LAYERS, **rates)
    return transformers.BertForMaskedLM(config)


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": LAYERS, "num_heads": 2}
    config = transformers.T5Config(
        **COMMON, **sizes, dropout_rate=0.0, decoder_start_token_id=0, eos_token_id=1
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "llama": (llama, "model.layers", ("self_attn.o_proj", "mlp.down_proj")),
    "gpt2": (gpt2, "transformer.h", ("attn.c_proj", "mlp.c_proj")),
    "bert": (bert, "bert.encoder.layer", ("attention.output.dense", "output.dense")),
}
PRESETS = {"layers": presets.layer_drop, "residual": presets.residual_dropout}
# Transformers 5 has another name for it, and warns of its own uses of the old one
QUIET = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@pytest.fixture(params=MODELS)
def name(request):
    torch.manual_seed(0)
    return request.param


def gradients(model):
    """The gradients of a training step from a fixed random state."""
    model.zero_grad()
    torch.manual_seed(2)
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_placements(name):
    make, layers, projections = MODELS[name]
    model = make()
    spec = presets.layer_drop(model, ByDepth(0.0, LinearSchedule(0.0, 0.4, epochs=2)))
    with attach(model, spec) as attached:
        attached.step(1)
        assert [site.name for site in attached] == [f"{layers}.{i}" for i in range(LAYERS)]
        assert [site.rate for site in attached] == pytest.approx([0.0, 0.2, 0.4])
        gradients(model)
        assert attached.verify() == []
    dropout = presets.residual_dropout(model, 0.2)
    with attach(model, dropout) as attached:
        wanted = {f"{layers}.{i}.{each}" for i in range(LAYERS) for each in projections}
        assert {site.name for site in attached} == wanted
        gradients(model)
        assert attached.verify() == []
    assert Spec.from_yaml(spec.to_yaml()) == spec
    assert Spec.from_yaml(dropout.to_yaml()) == dropout


def test_a_dropped_layer_is_not_there(name):
    make, layers, _ = MODELS[name]
    model = make().train()
    attached = attach(model, presets.layer_drop(model, p=1.0))
    dropped = model(input_ids=IDS).logits
    attached.remove()
    stack = model.get_submodule(layers)
    while len(stack):
        del stack[0]
    if hasattr(model.config, "num_hidden_layers"):
        model.config.num_hidden_layers = 0
    assert torch.equal(model(input_ids=IDS).logits, dropped)


def test_one_decision_for_the_batch():
    assert "mode='batch'" in repr(presets.layer_drop(llama(), 0.5))


@QUIET
@pytest.mark.parametrize("preset", PRESETS)
def test_checkpointing_changes_neither_gradients_nor_counts(name, preset):
    model = MODELS[name][0]()
    attached = attach(model, PRESETS[preset](model, 0.5))
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    assert all(map(torch.equal, gradients(model), expected))
    assert {(site.calls, site.active_calls) for site in attached} == {(2, 2)}


def test_layers_that_return_a_tuple():
    model = t5()
    with attach(model, presets.layer_drop(model, 0.3, index=0)) as attached:
        gradients(model)
        assert len(attached) == 2 * LAYERS
        assert attached.verify() == []
    assert len(list(attach(model, presets.residual_dropout(model)))) == 5 * LAYERS


def test_models_without_such_layers(net):
    for preset in PRESETS.values():
        with pytest.raises(ValueError, match=r"Net has no .* called .*: use stochastic_depth"):
            preset(net)


def test_layers_inside_a_layer_are_not_taken():
    stack = nn.Module()
    stack.block = nn.ModuleList([nn.Module()])
    stack.block[0].layer = nn.ModuleList([nn.Linear(4, 4)])
    assert "block.0.layer" not in repr(presets.layer_drop(stack))
