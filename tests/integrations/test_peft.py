"""PEFT: hooks on a model that is wrapped before or after attach."""

import pytest
import torch

peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from dropblock_hooks import ClipGradNorm, Dropout, HookWarning, Retune, attach  # noqa: E402
from tests.conftest import hook_count  # noqa: E402
from tests.told import told  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # to import
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
IDS = torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(1))
NAME = "model.layers.0.self_attn.q_proj"


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def wrapped(model):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    return peft.get_peft_model(model, config)


def train(model):
    model(input_ids=IDS, labels=IDS).loss.backward()


def test_names_are_those_of_the_model():
    model = wrapped(llama())
    spec = {NAME: Dropout(0.5), "**.lora_dropout.default": Retune(p=0.3)}
    attached = attach(model, spec)
    train(model)
    assert attached.verify() == []
    assert attached.sites[0].name == NAME
    assert attached[f"{NAME}/Dropout"].active_calls == 1
    assert [site.rate for site in attached.select("**.lora_dropout.default")] == [0.3, 0.3]
    attached.remove()
    assert hook_count(model) == 0
    dropouts = [m for n, m in model.named_modules() if n.endswith("lora_dropout.default")]
    assert [layer.p for layer in dropouts] == [0.1, 0.1]


def test_a_model_that_is_wrapped_after_attach():
    model = llama()
    keys = {NAME: Dropout(0.5), f"param:{NAME}.weight": ClipGradNorm(1.0)}
    attached = attach(model, keys)
    outer = wrapped(model).train()
    attached.step(0)
    train(outer)
    with pytest.warns(HookWarning, match="attach after that") as caught:
        attached.step(1)
    assert told(caught) == [(f"{NAME}.weight/ClipGradNorm", "lost")]
    train(outer)
    attached.step(2)
    assert attached[f"{NAME}/Dropout"].active_calls == 2
    attached.remove()
    assert hook_count(outer) == 0
