"""attach: all or nothing, the model untouched, errors that name everything that is wrong."""

import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    AdaptiveClipGrad,
    CentralizeGrad,
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    Dropout2d,
    DropPath,
    GradNoise,
    HookWarning,
    LinearSchedule,
    ScaleGrad,
    Schedule,
    Select,
    SiteError,
    Spec,
    SpecError,
    StochasticDepth,
    WeightStats,
    ZeroGrad,
    attach,
    attachments,
    detach_all,
    plan,
    register,
)


def step(model, seed=0):
    """Loss and gradients of one training step."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(torch.randn(4, 3, 16, 16)).square().sum()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def same(a, b):
    return torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1]))


SPEC = {
    "layer1.*": DropBlock2d(p=0.3, block_size=3),
    "layer2.*": [Dropout2d(p=0.2), ClipGradNorm(1e-3)],
    "param:fc.bias": ClampGrad(-1e-4, 1e-4),
}


def test_installs_acts_and_leaves_nothing(net, hook_count):
    keys, bare = list(net.state_dict()), step(net)
    modules = [name for name, _ in net.named_modules()]
    attached = attach(net, SPEC)
    assert list(net.state_dict()) == keys
    assert [name for name, _ in net.named_modules()] == modules
    assert "forward" not in vars(net)
    assert not same(step(net), bare)
    assert attached.verify() == []
    attached.remove()
    attached.remove()
    assert hook_count(net) == 0
    assert same(step(net), bare)


def test_evaluation_is_the_bare_model_to_the_bit(net):
    x = torch.randn(4, 3, 16, 16)
    net.eval()
    bare, state = net(x), torch.get_rng_state()
    with attach(net, SPEC) as attached:
        assert torch.equal(net(x), bare)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(site.active_calls == 0 for site in attached.sites)
        assert all(site.calls == 1 for site in attached.sites)


def test_keys_and_order(net):
    spec = {"layer1.*": [Dropout(0.1), Dropout(0.2)], ".": Dropout2d(0.3)}
    attached = attach(net, spec)
    assert [site.key for site in attached.sites] == [
        "layer1.0/Dropout",
        "layer1.1/Dropout",
        "layer1.0/Dropout#2",
        "layer1.1/Dropout#2",
        "./Dropout2d",
    ]


def test_regularizers_of_one_layer_run_in_their_order():
    class Plus(nn.Module):
        def forward(self, x):
            return x + 1

    seen = []
    model = nn.Sequential(nn.Identity())
    first, second = (lambda x: seen.append(1) or x + 1), (lambda x: seen.append(2) or x * 10)
    attach(model, {"0": [first, Plus(), second]})
    assert model(torch.zeros(1)).item() == 20
    assert seen == [1, 2]


@pytest.mark.parametrize("wrap", [dict, lambda d: list(d.items()), Spec])
def test_all_forms_of_a_spec(net, wrap):
    assert len(attach(net, wrap(SPEC)).sites) == 7


@pytest.mark.parametrize("name", ["spec.yaml", "spec.json"])
def test_a_path(net, tmp_path, name):
    Spec(SPEC).save(tmp_path / name)
    assert len(attach(net, tmp_path / name)) == 7
    detach_all(net)
    assert len(attach(net, str(tmp_path / name))) == 7


def refused(net, hook_count, spec, *parts, error=SpecError, **options):
    """`attach` raises an error with all parts in its message, and installs nothing."""
    before = hook_count(net)
    with pytest.raises(error) as caught:
        attach(net, spec, **options)
    for part in parts:
        assert part in str(caught.value)
    assert hook_count(net) == before
    return caught.value


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ({"layer1.0.convv": Dropout()}, ["layer1.0.convv", "layer1.0.conv"]),
        ({"layr1.*": Dropout()}, ["layr1.*", "nothing", "layer1"]),
        ({"re:layer[": Dropout()}, ["not a pattern"]),
        ({"types:Conv2d": Dropout()}, ["types:", "type", "prefixes"]),
        ({"fc.weight": Dropout()}, ["param:fc.weight"]),
        (
            [("layer1.0", "Dropuot"), 5, ("layer1.1", "Nope")],
            ["3 problems", "Dropuot", "an entry of a list", "Nope"],
        ),
        ({"": Dropout()}, ["matches nothing"]),
        ({Select("layer1.*", exclude="layer1.*"): Dropout()}, ["all 2", "excluded"]),
        ({Select("layer1.*", expect=3): Dropout()}, ["expected 3", "got 2", "layer1.0"]),
        ({"layer1.*": Dropout(), "layer1.0": Dropout()}, ["layer1.*", "layer1.0", "compose=True"]),
        ({"param:fc.bias": Dropout()}, ["gradients"]),
        ({"param:fc.weight": ClipGradNorm(1.0, per="sample")}, ["sample"]),
        ({"param:fc.weight": ClampGrad(-1, at="input")}, ["at="]),
        ({}, ["empty"]),
        (3, ["mapping", "3"]),
        ("no_such_file.yaml", ["no_such_file.yaml", "No such file"]),
        ("layer1.0", ["'layer1.0' selects layers of this model", "{'layer1.0': Dropout(p=0.1)}"]),
        ("type:Conv2d", ["is no file: write {'type:Conv2d': "]),
        ("param:fc.*", ["selects layers of this model and is no file"]),
        ("re:(", ["No such file"]),
        ({"layer1.0": Dropout}, ["expected a regularizer object", "got Dropout (type)"]),
        ({"layer1.0": nn.BatchNorm2d(8)}, ["parameters"]),
        ({"layer1.0": []}, ["None"]),
        ({3: Dropout()}, ["selector", "3"]),
    ],
)
def test_bad_specs(net, hook_count, spec, parts):
    refused(net, hook_count, spec, *parts)


OPTIONS = {"at": "input", "index": 0, "layout": "NCHW"}
ON_PARAMETERS = [
    ClampGrad(-1), ClipGradNorm(1.0), ClipGradNorm(1.0, per="channel"), CentralizeGrad(),
    AdaptiveClipGrad(), ScaleGrad(0.5), ZeroGrad(), GradNoise(0.1),
]  # fmt: skip


@pytest.mark.parametrize("option", ["at", "index", "layout"])
@pytest.mark.parametrize("regularizer", ON_PARAMETERS, ids=repr)
def test_options_about_tensors_are_refused_for_parameters(net, hook_count, regularizer, option):
    changed = replace(regularizer, **{option: OPTIONS[option]})
    reason = f"can't work on fc.weight: {option}= means nothing for a parameter: leave it out"
    refused(net, hook_count, {"param:fc.weight": changed}, reason)


def test_all_options_that_mean_nothing_are_named(net, hook_count):
    regularizer = CentralizeGrad(at="input", layout="NHWC", index=1)
    reason = "at= and index= and layout= mean nothing for a parameter: leave them out"
    refused(net, hook_count, {"param:fc.weight": regularizer}, reason)
    with attach(net, {"param:fc.weight": CentralizeGrad(active="always")}) as attached:
        assert attached[0].at == "parameter"


@pytest.mark.parametrize("option", ["at", "index", "layout"])
def test_an_observer_of_parameters_takes_no_options_about_tensors(option):
    with pytest.raises(ValueError, match="WeightStats reads parameters: it takes no at, index or"):
        WeightStats(**{option: OPTIONS[option]})


def test_all_problems_at_once(net, hook_count):
    spec = {
        "layr1.*": Dropout(),
        "layer1.0": Dropout2d(),
        "layer1.*": Dropout2d(),
        "param:fc.bais": ClampGrad(-1.0),
    }
    error = refused(net, hook_count, spec, "layr1.*", "compose", "fc.bais", "3 problems")
    assert len(error.problems) == 3


def test_live_attachment_of_the_same_class(net, hook_count):
    attached = attach(net, {"layer1.*": Dropout2d(0.1)})
    refused(
        net, hook_count, {"layer1.0": Dropout2d(0.2)}, "layer1.0:", "earlier attach", "compose=True"
    )
    attach(net, {"layer1.0": DropPath(0.1)})
    again = attach(net, {Select("layer1.0", compose=True): Dropout2d(0.2)})
    assert len(attachments(net)) == 3
    attached.remove()
    again.remove()
    attach(net, {"layer1.0": Dropout2d(0.2)})


def test_the_later_entry_allows_a_second_regularizer(net, hook_count):
    first = (Select("layer1.0", compose=True), Dropout2d(0.1))
    second = ("layer1.0", Dropout2d(0.2))
    refused(net, hook_count, [first, second], "allow it", "compose=True) in the later entry")
    attached = attach(net, [second, first])
    assert [site.rate for site in attached] == [0.2, 0.1]
    refused(net, hook_count, [second], "an earlier attach", "compose=True) in this entry")


@register
class NoLength(Schedule):
    """Has no length, and says so by an error."""

    @property
    def length(self):
        raise RuntimeError("no length here")

    def __call__(self, t):
        return 0.1

    def span(self):
        return 0.1, 0.1


def test_a_schedule_that_fails_is_one_of_the_problems(net, hook_count):
    spec = {"layr1.*": Dropout(), "layer1.0": Dropout2d(NoLength())}
    refused(net, hook_count, spec, "layr1.*", "no length here", "2 problems", epochs=3)


CELL = """
from dropblock_hooks import Dropout2d, attach
attached = attach(model, {"layer1.*": Dropout2d(0.1)})
"""


def test_a_cell_that_is_run_twice_names_the_line_that_cures(net, hook_count):
    names = {"model": net}
    exec(CELL, names)
    hooks = hook_count(net)
    with pytest.raises(
        SpecError, match="an earlier attach has put Dropout2d on layer1.0"
    ) as caught:
        exec(CELL, names)
    assert hook_count(net) == hooks
    (line,) = re.findall("`(.*?)`", str(caught.value))
    exec(line, names)  # as it stands there, in a cell of its own
    assert hook_count(net) == 0


def test_none_clears_earlier_entries(net):
    attached = attach(net, {"layer1.*": Dropout(0.1), "layer1.0": None, "layer2.0": Dropout(0.2)})
    assert [site.name for site in attached.sites] == ["layer1.1", "layer2.0"]
    detach_all(net)
    attached = attach(
        net, [("layer1.*", Dropout(0.1)), ("layer1.0", None), ("layer1.0", Dropout(0.5))]
    )
    assert attached.rates["layer1.0/Dropout"] == {"p": 0.5}


def test_none_that_clears_nothing_is_told(net):
    with pytest.warns(HookWarning, match="has no effect"):
        attach(net, {"layer1.*": Dropout(0.1), "layer2.0": None})


def test_nested_sites_are_told(net):
    with pytest.warns(
        HookWarning, match="Dropout is also on layers inside its layers .* applies again in each"
    ):
        attach(net, {"layer1.**": Dropout(0.1)})


def test_a_warning_made_an_error_leaves_nothing(net, hook_count):
    spec = {"layer1.*": Dropout(0.1), "layer2.0": None}
    refused(net, hook_count, spec, "has no effect", error=HookWarning)


def test_a_failing_install_takes_out_what_is_in(net, hook_count, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no more hooks")

    monkeypatch.setattr(net.layer2[1], "register_forward_hook", fail)
    refused(net, hook_count, {"layer*.*": Dropout()}, "no more hooks", error=RuntimeError)


@pytest.mark.parametrize(
    "compile_it",
    [torch.compile, lambda m: m.compile() or m, lambda m: m.layer1.compile() or m],
    ids=["wrapper", "in_place", "submodule"],
)
def test_a_compiled_model(net, hook_count, compile_it):
    model = compile_it(net)
    before = hook_count(net)
    attached = attach(model, {"layer1.*": Dropout()})
    assert [site.key for site in attached] == ["layer1.0/Dropout", "layer1.1/Dropout"]
    assert attachments(model) == attachments(net) == [attached]
    attached.remove()
    assert hook_count(net) == before


def test_a_scripted_layer(hook_count):
    with warnings.catch_warnings(action="ignore"):  # newer torch deprecates it
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    refused(nn.Sequential(scripted), hook_count, {"0.0": Dropout()}, "ScriptModule")


def test_a_parameter_that_is_not_initialized(hook_count):
    lazy = nn.Sequential(nn.LazyConv2d(2, 3))
    refused(lazy, hook_count, {"param:0.weight": ClampGrad(-1)}, "not initialized")


def test_root_and_what_is_below_it(net, hook_count):
    wrapped = nn.ModuleDict({"model": net})
    meant = "matches nothing (closest: **.layer1"
    refused(wrapped, hook_count, {"layer1.*": Dropout()}, meant)
    refused(
        wrapped,
        hook_count,
        {"layer1.*": Dropout()},
        "modle",
        "model",
        root="modle",
        error=ValueError,
    )
    attached = attach(wrapped, {"layer1.*": Dropout()}, root="model")
    assert [site.name for site in attached.sites] == ["layer1.0", "layer1.1"]
    assert attachments(wrapped) == [attached]
    assert attached.verify()[0].kind == "not_run"


def test_a_container_that_is_never_called(hook_count):
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)])})
    refused(model, hook_count, {"blocks": Dropout()}, "ModuleList", "blocks.*")
    refused(model, hook_count, {".": Dropout()}, "ModuleDict", "did you mean '*'?")
    assert [s.name for s in attach(model, {"**": Dropout()}).sites] == ["blocks.0"]


def test_a_shared_module_is_hooked_once():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    attached = attach(model, {"type:ReLU": Dropout(0.5)})
    (site,) = attached.sites
    assert (site.name, site.aliases) == ("1", ("3",))
    model(torch.ones(1, 2))
    assert site.calls == 2
    assert "3" in str(attached)
    attached.remove()
    assert attach(model, {"3": Dropout(0.5)}).sites[0].name == "1"


def test_tied_parameters_are_hooked_once():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    attached = attach(model, {"param:**.weight": ClampGrad(-1.0, 1.0)})
    assert [site.name for site in attached.sites] == ["0.weight"]


@pytest.mark.parametrize(
    ("regularizer", "shape"),
    [(DropBlock2d(), "(4, 5)"), (Dropout2d(layout="NHWC"), "(4, 5)")],
)
def test_a_wrong_rank_is_told_at_the_first_forward(net, regularizer, shape):
    attached = attach(net, {"fc": regularizer})
    with pytest.raises(SiteError, match="fc/.*Linear.*4-D") as caught:
        net(torch.ones(4, 3, 16, 16))
    assert shape in str(caught.value)
    net.eval()(torch.ones(4, 3, 16, 16))
    attached.remove()
    net.train()(torch.ones(4, 3, 16, 16))


def test_stochastic_depth_on_a_block_that_changes_shape(net):
    attach(net, {"stem": StochasticDepth(0.5)})
    with pytest.raises(SiteError, match=r"stem/.*\(4, 3, 16, 16\).*\(4, 8, 8, 8\).*DropPath"):
        net(torch.ones(4, 3, 16, 16))


def test_names_that_only_look_like_a_wrappers():
    """Wrappers are told by their type: an attribute of such a name is a name."""
    model = nn.ModuleDict({"module": nn.Sequential(nn.Linear(2, 2)), "_orig_mod": nn.Linear(2, 2)})
    model.forward = lambda x: model["_orig_mod"](model["module"](x))
    attached = attach(model, {"module.0": Dropout(0.5), "_orig_mod": Dropout(0.5)})
    assert [site.key for site in attached] == ["module.0/Dropout", "_orig_mod/Dropout"]


@pytest.mark.parametrize("put", [attach, plan], ids=["attach", "plan"])
@pytest.mark.parametrize("given", [None, "spec.yaml", nn.Linear], ids=["none", "text", "class"])
def test_what_is_no_model_is_told(net, put, given):
    kind = type(given).__name__
    with pytest.raises(TypeError, match=rf"model must be a torch.nn.Module, got .* \({kind}\)"):
        put(given, net)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: attach(m, {"fc": Dropout()}, epoch=3),
            r"attach .*'epoch'. Did you mean epochs\?",
        ),
        (lambda m: attach(m, {"fc": Dropout()}, scaler=3), r"Did you mean grad_scaler\?"),
        (
            lambda m: attach(m, "fc", Dropout()),
            r"write attach\(model, {.conv2.: DropBlock2d\(p=0.1",
        ),
        (
            lambda m: plan(m, {"fc": Dropout()}, epoch=3),
            r"plan has no argument 'epoch'. .*epochs\?",
        ),
        (lambda m: plan(m, "fc", Dropout(), 3), r"write plan\(model, {"),
    ],
)
def test_a_wrong_call_is_answered_with_what_to_write(net, call, message):
    with pytest.raises(TypeError, match=message):
        call(net)
    assert not attachments(net)


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        (Dropout(0.1), 'a spec is a mapping, such as {"conv2": DropBlock2d(p=0.1)}'),
        ("fc", "'fc' selects layers of this model and is no file: write {'fc': Dropout(p=0.1)}"),
        (
            {"fc": {"type": "Dropout", "p": 0.1}},
            "class comes first: write {'Dropout': {'p'",
        ),
        ({"fc": [{"name": "Dropout"}]}, "fc → 0: the name of the class comes first"),
        (
            {"param:layer1.*": ClipGradNorm(1.0)},
            "matches nothing: write 'param:layer1.**'",
        ),
        ({"param:layer1": ClipGradNorm(1.0)}, "matches nothing: write 'param:layer1.**'"),
        ({"param:*": ClipGradNorm(1.0)}, "write 'param:**', because ** takes"),
        ({}, 'it is empty: a spec is a mapping, such as {"conv2": DropBlock2d(p=0.1)}'),
        ({"fc": 0.1}, "got 0.1 (float): write the class of the rate, such as Dropout(p=0.1)"),
        (
            {"fc": LinearSchedule(0, 0.1, epochs=2)},
            "such as Dropout(p=LinearSchedule(start=0.0, stop=0.1, epochs=2))",
        ),
        ({"fc": {"p": 0.1}}, "the name of the class is missing: write Dropout(p=0.1)"),
        (["fc", Dropout(0.1)], "write {'fc': Dropout(p=0.1)}"),
        ([{"fc": Dropout(0.1)}], "write {'fc': Dropout(p=0.1)} without the list around it"),
        (
            {("layer1", "fc"): Dropout(0.1)},
            "write Select(names=('layer1', 'fc')), or a pattern such as 'layer[34]'",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(net, spec, hint):
    with pytest.raises(SpecError) as caught:
        attach(net, spec)
    assert hint in str(caught.value)
    assert len(caught.value.problems) == 1
