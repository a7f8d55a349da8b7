"""Selectors, against a matcher written another way, and on a real model."""

import fnmatch
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dropblock_hooks import Select
from dropblock_hooks.selectors.index import Index, NoMatchError
from dropblock_hooks.selectors.select import match, matching


def names(model, selector):
    return [target.name for target in match(selector, Index(model))]


def by_components(pattern, name):
    """The glob of the design, by recursion over components."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(by_components(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return (
        bool(name)
        and fnmatch.fnmatchcase(name[0], pattern[0])
        and by_components(pattern[1:], name[1:])
    )


component = st.sampled_from(["a", "b", "a1", "a2", "conv1", "0", "1"])
wild = st.one_of(
    component, st.sampled_from(["*", "**", "a*", "a?", "[ab]", "a[12]", "[!a]*", "conv[0-9]"])
)


paths = st.lists(component, min_size=1, max_size=4).map(".".join)


@given(st.lists(wild, min_size=1, max_size=5), st.lists(paths, unique=True, max_size=12))
def test_globs_on_a_tree_of_names(pattern, tree):
    found = matching(".".join(pattern), ["", *tree])
    assert sorted(found) == sorted(n for n in tree if by_components(pattern, n.split(".")))


def test_forms(net):
    assert names(net, ".") == [""]
    assert names(net, "layer1.0.conv") == ["layer1.0.conv"]
    assert names(net, "layer[2].*") == ["layer2.0", "layer2.1"]
    assert names(net, "**.conv") == [f"layer{i}.{j}.conv" for i in (1, 2) for j in (0, 1)]
    assert names(net, "layer1.**") == [
        "layer1",
        *(f"layer1.{j}{end}" for j in (0, 1) for end in ("", ".conv", ".act")),
    ]
    convolutions = names(net, "layer*.**.conv")
    for glob in ("layer**.**.conv", "**.**.conv", "layer*.**.**.**.conv", "**.co**"):
        assert names(net, glob) == convolutions
    assert names(net, r"re:layer\d\.1") == ["layer1.1", "layer2.1"]
    assert names(net, "type:Conv2d")[0] == "stem"
    assert names(net, "type:_ConvNd") == names(net, "type:Conv2d"), "base classes count"
    assert names(net, "param:fc.*") == ["fc.weight", "fc.bias"]
    assert len(names(net, "param:**.bias")) == 6
    for selector in ("**", "*", "re:.*"):
        assert "" not in names(net, selector), "the root is '.' alone"


def test_select(net):
    assert names(net, Select(["fc", "stem"])) == ["stem", "fc"], "model order"
    assert names(net, Select("layer1.**", types="Conv2d")) == ["layer1.0.conv", "layer1.1.conv"]
    assert names(net, Select(types=(nn.Linear, "ReLU"), exclude="layer2.**")) == [
        "layer1.0.act",
        "layer1.1.act",
        "fc",
    ]
    assert names(net, Select(where=lambda name, module: hasattr(module, "in_features"))) == ["fc"]


def test_an_exclude_by_type_by_stage_and_by_parameter(net, resnet):
    block = type(net.layer1[0])
    assert names(net, Select(types="Conv2d", exclude=f"type:{block.__name__}")) == ["stem"]
    assert names(net, Select("param:fc.*", exclude="param:**.bias")) == ["fc.weight"]
    kept = names(net, Select("param:**.conv.bias", exclude="layer[2]"))
    assert kept == ["layer1.0.conv.bias", "layer1.1.conv.bias"]
    for stage in ("stage:-1", "stride:32"):
        kept = names(resnet, Select(types="Conv2d", exclude=stage))
        assert kept == [n for n in names(resnet, "type:Conv2d") if not n.startswith("layer4.")]


def test_an_exclude_by_another_name_of_a_shared_module():
    shared = nn.Sequential(nn.Conv2d(3, 3, 1))
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Conv2d(3, 3, 1)})
    for exclude in ("a", "b", "b.0"):
        assert names(model, Select(types="Conv2d", exclude=exclude)) == ["c"]
        assert names(model, Select("param:**.weight", exclude=exclude)) == ["c.weight"]


@pytest.mark.parametrize(
    ("select", "exclude", "text"),
    [
        ({"types": "Conv2d"}, "conv", "**.conv"),
        ({"names": "param:**.bias"}, "param:bias", "param:**.bias"),
        ({"types": "Conv2d"}, "type:Conv3d", "(closest: type:Conv2d"),
        ({"types": "Conv2d"}, ("layer1", "fc"), "exclude='fc' leaves out none"),
    ],
)
def test_an_exclude_that_leaves_out_nothing_is_an_error(net, select, exclude, text):
    with pytest.raises(NoMatchError, match=re.escape(text)):
        names(net, Select(**select, exclude=exclude))


@pytest.mark.parametrize(
    ("text", "listing"),
    [
        ("77", "'77' matches nothing: layers(model) lists the names"),
        ("type:QQQQQQQQ", "'type:QQQQQQQQ' matches nothing: layers(model) lists the names"),
        (
            "param:777777777",
            "'param:777777777' matches nothing: model.named_parameters() lists the names",
        ),
    ],
)
def test_without_a_close_name_the_error_says_where_names_are(net, text, listing):
    with pytest.raises(NoMatchError, match=f"^{re.escape(listing)}$"):
        names(net, text)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, ValueError),
        ({"names": 3}, TypeError),
        ({"names": "a", "expect": 0}, ValueError),
        ({"where": 3}, TypeError),
    ],
)
def test_select_refuses(options, error):
    with pytest.raises(error, match="Select"):
        Select(**options)


def test_a_glob_of_many_stars_is_fast():
    deep = nn.Identity()
    for _ in range(30):
        deep = nn.Sequential(deep)
    with pytest.raises(NoMatchError):
        names(deep, "**." * 8 + "zz")


@pytest.fixture(scope="module")
def resnet():
    timm = pytest.importorskip("timm", reason="stages come from timm's feature_info")
    with torch.device("meta"):
        return timm.create_model("resnet26")


def test_stages(resnet):
    assert names(resnet, "stage:-1") == ["layer4.1"]
    assert names(resnet, "stride:16") == ["layer3.1"]
    assert names(resnet, Select(stages=(1, -1))) == ["layer1.1", "layer4.1"]
    inside = names(resnet, Select(types="Conv2d", stages=-1))
    assert len(inside) == 7
    assert all(name.startswith("layer4.") for name in inside)


@pytest.mark.parametrize(
    ("selector", "meant"),
    [
        ("fc.weight", "closest: .*param:fc.weight"),
        ("Conv2d", "closest: type:Conv2d"),
        ("1.conv", "closest: .*layer1.1.conv"),
        ("layr1.*", "closest: .*layer1"),
        ("layer(1|2)", r"write 're:layer\(1\|2\)'; without re:"),
        ("layer{1,2}.*", r"write 're:layer\(1\|2\)\[.\]\[\^.\]\*'; without re:"),
        ("param:layer(1|2).**", r"write 'param:re:layer\(1\|2\)\[.\].\+'"),
        ("layer(7|8)", r"closest: .*layer1"),
        ("type:DropPath", "no such layer. timm .*drop_path_rate=0.1, or attach presets.drop_path"),
        ("type:timm.layers.DropPath", "no such layer. timm makes drop paths only"),
        ("re:(", "is not a pattern"),
    ],
)
def test_what_was_probably_meant_is_named(net, selector, meant):
    with pytest.raises(NoMatchError, match=meant):
        names(net, selector)


def test_a_container_that_is_never_called_excludes_what_is_inside(net):
    net.layer2 = nn.ModuleList(net.layer2)
    for exclude in ("layer2", ("layer2.0", "layer2.1")):
        assert names(net, Select("**.conv", exclude=exclude)) == ["layer1.0.conv", "layer1.1.conv"]


@given(
    st.lists(paths, unique=True, min_size=1, max_size=12),
    st.lists(wild, min_size=1, max_size=4).map(".".join),
)
def test_excludes_against_a_plain_search(tree, pattern):
    """Whatever an exclude matches goes, and all names below it."""
    model = nn.Module()
    for path in tree:
        parent = model
        for part in path.split("."):
            if part not in parent._modules:
                parent.add_module(part, nn.Identity())
            parent = parent._modules[part]
    every = [name for name, _ in model.named_modules() if name]
    out = {n for n in every if by_components(pattern.split("."), n.split("."))}
    left = [n for n in every if not any(n == o or n.startswith(f"{o}.") for o in out)]
    selected = Select(names="**", exclude=pattern)
    if left and len(left) < len(every):
        assert names(model, selected) == left
    else:
        with pytest.raises(NoMatchError):
            names(model, selected)
