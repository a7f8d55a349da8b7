"""NEFTune: the noise of Transformers' ``neftune_noise_alpha``, on the embedding that it takes."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    HookWarning,
    LinearSchedule,
    NEFTune,
    SiteError,
    SpecError,
    attach,
    functional,
    presets,
)
from tests.cases import rest_slow
from tests.pair import one_process
from tests.sites.test_graph import calls_of_the_package

N, L, D = 64, 10, 24


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, D)
        self.mix = nn.Linear(D, D)
        self.head = nn.Linear(D, 5)
        self.use_reentrant = None

    def body(self, x):
        return torch.tanh(self.mix(x))

    def forward(self, ids):
        x = self.embed(ids)
        if self.use_reentrant is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def make(dtype=torch.float32):
    torch.manual_seed(1)
    return Net().to(dtype)


def tokens(n=N, length=L, seed=0):
    return torch.randint(50, (n, length), generator=torch.Generator().manual_seed(seed))


def theirs(alpha, x):
    """The hook of Transformers, from its source."""
    dims = torch.tensor(x.size(1) * x.size(2))
    mag_norm = alpha / torch.sqrt(dims)
    return x + torch.zeros_like(x).uniform_(-mag_norm, mag_norm)


def noise_of(embedding, ids):
    with torch.no_grad():
        return (embedding(ids) - nn.functional.embedding(ids, embedding.weight)).double()


def assert_uniform(noise, bound):
    """Mean, variance and shape of uniform noise, with z of at most 4 and p of at least 1e-4."""
    n = noise.size
    assert np.abs(noise).max() <= bound * (1 + 1e-5)
    assert abs(noise.mean()) / (bound / math.sqrt(3) / math.sqrt(n)) < 4
    # the variance of u**2 is 4/45 for u uniform in [-1, 1]
    z = (np.square(noise / bound).mean() - 1 / 3) / math.sqrt(4 / 45 / n)
    assert abs(z) < 4
    assert stats.kstest(noise / bound, "uniform", args=(-1, 2)).pvalue > 1e-4
    # independent of the elements beside it
    assert abs(stats.pearsonr(noise[1:], noise[:-1]).statistic) * math.sqrt(n) < 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_noise_is_uniform(dtype):
    x = torch.zeros(N, L, D, dtype=dtype)
    y = functional.neftune(x, 5.0, generator=torch.Generator().manual_seed(0))
    assert y.dtype == dtype
    bound = 5.0 / math.sqrt(L * D)
    noise = y.double().numpy().ravel()
    if dtype is torch.bfloat16:  # which rounds
        assert abs(noise.std() / (bound / math.sqrt(3)) - 1) < 0.02
        return
    assert_uniform(noise, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_seeds_draw_the_noise_of_transformers(dtype):
    x = torch.randn(N, L, D, dtype=dtype)
    torch.manual_seed(3)
    wanted = theirs(5.0, x)
    torch.manual_seed(3)
    torch.testing.assert_close(functional.neftune(x, 5.0), wanted, rtol=1e-6, atol=1e-6)


def test_the_hook_of_transformers_itself():
    integrations = pytest.importorskip("transformers.integrations.neftune")
    reference = make()
    reference.embed.neftune_noise_alpha = 5.0
    reference.embed.register_forward_hook(integrations.neftune_post_forward_hook)
    ours = make()
    attach(ours, presets.neftune(ours, alpha=5.0))
    results = []
    for net in (ours, reference):
        torch.manual_seed(4)
        net(tokens()).square().mean().backward()
        results.append({name: p.grad for name, p in net.named_parameters()})
    for name, gradient in results[1].items():
        torch.testing.assert_close(results[0][name], gradient, rtol=1e-6, atol=1e-6)


def test_of_the_class():
    net = make()
    attached = attach(net, {"embed": NEFTune(LinearSchedule(0.0, 6.0, epochs=3))})
    assert noise_of(net.embed, tokens()).abs().max() == 0.0
    attached.step(2)
    assert_uniform(noise_of(net.embed, tokens()).numpy().ravel(), 6.0 / math.sqrt(L * D))
    assert (attached.sites[0].calls, attached.sites[0].active_calls) == (2, 2)
    net.eval()
    assert noise_of(net.embed, tokens()).abs().max() == 0.0
    with attached.always():
        assert noise_of(net.embed, tokens()).abs().max() > 0.1


def train(call, steps=1, parts=1, scaler=None):
    for step in range(steps):
        for part in range(parts):
            with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                loss = call(tokens(seed=step * parts + part)).float().square().mean() / parts
            (loss if scaler is None else scaler.scale(loss)).backward()


def gradients(net):
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("stack", ["plain", "accumulation", "fp16", "ddp"])
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=str)
def test_stacks(stack, use_reentrant):
    """Against the formula as a plain hook, with the same random numbers."""
    results = []
    for ours in (True, False):
        net = make()
        net.use_reentrant = use_reentrant
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if stack == "fp16" else None
        if ours:
            attach(net, {"embed": NEFTune(5.0)}, grad_scaler=scaler)
        else:
            net.embed.register_forward_hook(lambda module, args, y: theirs(5.0, y))
        torch.manual_seed(5)
        parts = 4 if stack == "accumulation" else 1
        if stack == "ddp":
            with one_process():
                train(nn.parallel.DistributedDataParallel(net))
        else:
            train(net, parts=parts, scaler=scaler)
        results.append(gradients(net))
    for name, gradient in results[1].items():
        torch.testing.assert_close(results[0][name], gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dynamic", rest_slow([False, True]), ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend, dynamic):
    net = make()
    attached = attach(net, {"embed": NEFTune(LinearSchedule(2.0, 6.0, epochs=5))})
    torch._dynamo.reset()
    counters.clear()
    embed = torch.compile(net.embed, backend=backend, fullgraph=True, dynamic=dynamic)
    call = torch.compile(net, backend=backend, fullgraph=True, dynamic=dynamic)
    for epoch in range(5):
        attached.step(epoch)
        train(call)
    assert counters["stats"]["unique_graphs"] == 1
    assert not calls_of_the_package(lambda: train(call))

    for length in (L, L + 3) if dynamic else (L,):
        ids = tokens(length=length)
        noise = embed(ids).detach() - nn.functional.embedding(ids, net.embed.weight).detach()
        assert_uniform(noise.double().numpy().ravel(), 6.0 / math.sqrt(length * D))
    with attached.paused():
        plain = nn.functional.embedding(tokens(), net.embed.weight)
        assert torch.equal(embed(tokens()), plain)
    torch._dynamo.reset()


REFUSED = {
    "no embedding": (lambda: attach(make(), {"mix": NEFTune(5.0)}), "a Linear is no embedding"),
    "parameter": (
        lambda: attach(make(), {"param:embed.weight": NEFTune(5.0)}),
        "a parameter takes",
    ),
    "bag": (
        lambda: attach(nn.Sequential(nn.EmbeddingBag(5, 4)), {"0": NEFTune(5.0)}),
        "an EmbeddingBag is no embedding of tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, error = REFUSED[case]
    with pytest.raises(SpecError, match=error) as caught:
        call()
    assert len(caught.value.problems) == 1


def test_bad_arguments():
    with pytest.raises(ValueError, match="alpha must be >= 0, got -1"):
        NEFTune(-1.0)
    for option in ({"at": "input"}, {"index": 0}, {"layout": "NHWC"}):
        with pytest.raises(ValueError, match="of an embedding: it takes no at, index or layout"):
            NEFTune(5.0, **option)
    with pytest.raises(TypeError, match="must be a floating-point tensor, got torch.int64"):
        functional.neftune(tokens().unsqueeze(2), 5.0)
    with pytest.raises(ValueError, match=r"embeddings of the shape \(N, L, d\), got shape \(3, 4"):
        functional.neftune(torch.zeros(3, 4), 5.0)


class IntegerEmbedding(nn.Module):
    def forward(self, ids):
        return ids.unsqueeze(2)


def test_integers_and_other_shapes_name_the_site():
    net = nn.Sequential(IntegerEmbedding())
    attach(net, {"0": NEFTune(5.0)})
    with pytest.raises(SiteError, match=r"0/NEFTune on IntegerEmbedding '0'.*floating-point"):
        net(tokens())
    net = make()
    attach(net, {"embed": NEFTune(5.0)})
    with pytest.raises(SiteError, match=r"embed/NEFTune.*shape \(N, L, d\), got shape \(10, 24\)"):
        net(tokens()[0])


def test_off_returns_the_same_object_and_draws_nothing():
    x = torch.zeros(2, 3, 4)
    state = torch.get_rng_state()
    assert functional.neftune(x, 0.0) is x
    assert functional.neftune(x, 5.0, training=False) is x
    assert torch.equal(torch.get_rng_state(), state)


# The preset ---------------------------------------------------------------------------------------


def of_transformers(name):
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    heads = {"num_key_value_heads": 1, "head_dim": 8}
    if name == "Llama":
        config = transformers.LlamaConfig(**small, num_key_value_heads=1)
        return transformers.LlamaForCausalLM(config)
    if name == "GPT2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)
        return transformers.GPT2LMHeadModel(config)
    if name == "Gemma3":
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**small, **heads))
    if name == "Granite":
        config = transformers.GraniteConfig(**small, num_key_value_heads=1, embedding_multiplier=12)
        return transformers.GraniteForCausalLM(config)
    if name == "Llava":
        text = transformers.LlamaConfig(**small, num_key_value_heads=1)
        vision = transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        config = transformers.LlavaConfig(text_config=text, vision_config=vision)
        return transformers.LlavaForConditionalGeneration(config)
    if name == "T5":
        config = transformers.T5Config(
            d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, vocab_size=32
        )
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.ViTModel(config)


FOUND = {
    "Llama": "model.embed_tokens",
    "GPT2": "transformer.wte",
    "Llava": "model.language_model.embed_tokens",
    "T5": "shared",
}


@pytest.mark.parametrize("name", FOUND)
def test_the_preset_names_the_embedding(name):
    model = of_transformers(name)
    spec = presets.neftune(model)
    assert repr(spec) == f"Spec({{'{FOUND[name]}': NEFTune(alpha=5.0)}})"
    attached = attach(model, spec)
    assert model.get_submodule(attached.sites[0].name) is model.get_input_embeddings()


SCALED = {
    "Gemma3": "NEFTune on model.embed_tokens: embed_scale of model.embed_tokens multiplies the "
    "embeddings by 4, and the noise is added after that",
    "Granite": "NEFTune on model.embed_tokens: embedding_multiplier of model multiplies the "
    "embeddings by 12, and the noise is added before that",
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_embeddings_are_named(name):
    model = of_transformers(name)
    with pytest.warns(HookWarning, match=SCALED[name]):
        spec = presets.neftune(model)
    attached = attach(model, spec)
    model(torch.randint(32, (2, 6))).logits.sum().backward()
    assert attached.sites[0].active_calls == 1


class ScaledEmbedding(nn.Embedding):
    embed_scale = 2.0

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


def test_a_scaled_embedding_that_is_the_model_itself():
    text = "NEFTune on the model: embed_scale of the model multiplies the embeddings by 2, and the "
    with pytest.warns(HookWarning, match=text + "noise is added after that"):
        presets.neftune(ScaledEmbedding(3, 4))


def test_the_preset_of_other_models():
    assert presets.neftune(make(), alpha=10.0).to_plain() == {"embed": {"NEFTune": {"alpha": 10.0}}}
    with pytest.raises(ValueError, match=r"Linear has no embedding of tokens \(nn.Embedding\)"):
        presets.neftune(nn.Linear(3, 3))
    several = nn.Sequential(nn.Embedding(3, 4), nn.Embedding(5, 4))
    with pytest.raises(ValueError, match="several embeddings: put NEFTune on one of 0, 1"):
        presets.neftune(several)
    with pytest.raises(ValueError, match="embedding of ViTModel is a ViTPatchEmbeddings, no embed"):
        presets.neftune(of_transformers("ViT"))
