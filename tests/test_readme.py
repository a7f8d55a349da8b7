"""The README's code runs, prints what the README shows, and names what exists."""

import csv
import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import torch

import dropblock_hooks
from dropblock_hooks import DropBlock2d, SpecError, attach
from tests import supported
from tests.families import MEMBERS

ROOT = Path(__file__).parents[1]
# the smallest model of this family has no place for DropBlock, and others have
WITH_DROPBLOCK = {"byoanet": "halonet26t"}
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def words(text):
    """The words and numbers of an output, without the rules of tables."""
    found = re.findall(r"\d*\.\d+|\w+|[^\s\w]", re.sub(r"-{3,}", "", text))
    return [float(word) if re.fullmatch(r"\d*\.\d+", word) else word for word in found]


def same(printed, shown):
    """Equal, but for measured numbers with decimals, which may be off by a tenth."""
    printed, shown = words(printed), words(shown)
    return len(printed) == len(shown) and all(
        a == (pytest.approx(b, rel=0.1) if isinstance(b, float) else b)
        for a, b in zip(printed, shown, strict=True)
    )


def test_the_code_runs_and_prints_what_is_shown(capsys, tmp_path, monkeypatch):
    pytest.importorskip("timm", reason="the models of the README are from timm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "104")
    names: dict[str, object] = {}
    outputs = 0
    for (language, text), (following, shown) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if language != "python":
            continue
        exec(compile(text, "README.md", "exec"), names)
        printed = capsys.readouterr().out
        assert same(printed, shown if following == "text" else ""), printed
        outputs += following == "text"
    assert outputs == sum(language == "text" for language, _ in BLOCKS) == 1


def test_every_block_of_code_is_tested():
    # those without a language are commands, which `test_commands_and_links` reads
    assert [language for language, _ in BLOCKS] == ["", "python", "text", "bibtex", ""]


def test_the_text_is_short():
    prose = re.sub(r"^```.*?^```$|^\|.*?$|<!--.*?-->|<[^>]+>", "", README, flags=re.S | re.M)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    assert len(prose.split()) <= 650


def test_the_names_exist():
    for name in re.findall(r"`([A-Z]\w+)(?:\(|`)", README):
        assert hasattr(dropblock_hooks, name), name
    for name in re.findall(r"attached\.(\w+)", README):
        assert hasattr(dropblock_hooks.Attachment, name), name


def test_every_regularizer_and_observer_is_in_the_table():
    section = README.partition("## What can be attached")[2].partition("\n## ")[0]
    bases = (dropblock_hooks.Regularizer, dropblock_hooks.Observer)
    public = {name: getattr(dropblock_hooks, name) for name in dropblock_hooks.__all__}
    attachable = {
        name
        for name, cls in public.items()
        if isinstance(cls, type) and issubclass(cls, bases) and cls not in bases
    } - {"OnGradients"}  # a base class
    assert attachable == set(re.findall(r"`([A-Z]\w+)`", section))


def row_of(start):
    """The cells of the row of a table that begins with these words."""
    (row,) = [line for line in README.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def dropped(drop, shape):
    """The percentage of values that a function drops of ones of this shape."""
    torch.manual_seed(0)
    return 100 * (drop(torch.ones(shape)) == 0).float().mean().item()


def numbers(cell):
    return [float(number) for number in re.findall(r"\d+\.?\d*", cell)]


def test_the_dropped_shares_are_those_of_the_table():
    timm_layers = pytest.importorskip("timm.layers", reason="the README compares with timm")
    ops = pytest.importorskip("torchvision.ops", reason="the README compares with torchvision")
    drops = [
        lambda x: timm_layers.drop_block_2d(x, 0.1, 7, couple_channels=False),
        lambda x: ops.drop_block2d(x, 0.1, 7),
        lambda x: dropblock_hooks.functional.drop_block2d(x, 0.1, 7),
    ]
    row = row_of("maps of 14×14, blocks of 7×7, set to 10 %")
    others = re.fullmatch(
        r"With blocks of 7×7 set to 10 %, on maps of 28×28: timm drops (\d+) %, "
        r"torchvision (\d+) %, ours (\d+) %. On maps of 7×7: timm drops (\d+) %, "
        r"torchvision (\d+) %, ours (\d+) %",
        row_of("other maps")[1],
    )
    of_others = list(map(float, others.groups()))
    for i, drop in enumerate(drops):
        (medium,) = numbers(row[1 + i])
        large = of_others[i]
        small = of_others[len(drops) + i]
        # a small map is dropped as a whole or not at all, so more of them are needed
        shapes = [(128, channels, size, size) for channels, size in ((8, 28), (32, 14), (128, 7))]
        measured = [dropped(drop, shape) for shape in shapes]
        assert measured == [pytest.approx(value, abs=1) for value in (large, medium, small)]


def rates_of_stage(stage):
    """The rate that is set in a stage, and what timm and this package drop there."""
    title, of_timm, _, ours = row_of(f"stage {stage} of timm's ResNets")
    (set_rate,) = numbers(title.partition("set to")[2])
    (real_rate,) = numbers(of_timm)
    (our_rate,) = numbers(ours)
    return set_rate, real_rate, our_rate


def test_the_dropped_shares_of_the_resnets_of_timm():
    timm = pytest.importorskip("timm", reason="the README compares with timm")
    model = timm.create_model("resnet18", drop_block_rate=0.1, num_classes=2)
    places = [model.layer3[0].drop_block, model.layer4[0].drop_block]
    assert [(drop.block_size, drop.gamma_scale) for drop in places] == [(5, 0.25), (3, 1.0)]
    set_third, real_third, _ = rates_of_stage(3)
    set_fourth, real_fourth, _ = rates_of_stage(4)
    measured = [
        dropped(drop.train(), (4000, 4, size, size))
        for drop, size in zip(places, (14, 7), strict=True)
    ]
    assert (set_third, set_fourth) == (2.5, 10)
    assert measured == [pytest.approx(real_third, abs=0.4), pytest.approx(real_fourth, abs=0.6)]

    migrating = (ROOT / "docs/guide/migrating.md").read_text(encoding="utf-8")
    rates = re.findall(r'"layer[34]\.\*\.drop_block": DropBlock2d\(p=([\d.]+)', migrating)
    assert [100 * float(rate) for rate in rates] == [
        pytest.approx(real_third),
        pytest.approx(real_fourth),
    ]


def test_the_dropped_shares_of_this_package_in_the_resnets_of_timm():
    timm = pytest.importorskip("timm", reason="the README compares with timm")
    set_third, _, third = rates_of_stage(3)
    set_fourth, _, fourth = rates_of_stage(4)
    assert (third, fourth) == (set_third, set_fourth)
    model = timm.create_model("resnet18", num_classes=2)
    spec = {
        "layer3.*.drop_block": DropBlock2d(third / 100, 5),
        "layer4.*.drop_block": DropBlock2d(fourth / 100, 3),
    }
    torch.manual_seed(0)
    with attach(model, spec) as attached:
        model(torch.randn(16, 3, 224, 224))
        realized = [100 * site.realized_rate for site in attached.sites]
        edges = [site.map_size for site in attached.sites]
    assert edges == [(14, 14), (14, 14), (7, 7), (7, 7)]
    assert realized[:2] == [pytest.approx(third, abs=0.2)] * 2
    assert realized[2:] == [pytest.approx(fourth, abs=0.5)] * 2


def graphs_of_rates(model, set_rate, rates):
    """How many graphs a training step at each of these rates compiles."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for rate in rates:
        set_rate(rate)
        compiled(torch.randn(2, 4, 8, 8)).sum().backward()
    return len(graphs)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["timm.layers", "torchvision.ops"])
def test_other_drop_blocks_compile_again_for_each_rate(library):
    peer = pytest.importorskip(library, reason="the README compares with it").DropBlock2d(0.1, 3)
    name = "drop_prob" if library == "timm.layers" else "p"
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1), peer)

    def set_rate(rate):
        setattr(peer, name, rate)

    rates = [0.01 * number for number in range(1, 10)]
    assert graphs_of_rates(model, set_rate, rates[:8]) == 8
    default_limit = torch._dynamo.config.patch(recompile_limit=8)  # other tests may change it
    with default_limit, pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        graphs_of_rates(model, set_rate, rates)
    with torch._dynamo.config.patch(recompile_limit=9):
        assert graphs_of_rates(model, set_rate, rates) == 9
    column = 1 if library == "timm.layers" else 2
    row = row_of("schedule with `fullgraph=True`")
    assert row[column] == "compiles once for each rate; error at the 9th, or earlier"


@pytest.mark.slow
def test_a_schedule_of_this_package_compiles_one_graph():
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1))
    with attach(model, {"0": DropBlock2d(0.1, 3)}) as attached:
        rates = [0.01 * number for number in range(1, 10)]
        graphs = graphs_of_rates(model, lambda rate: attached.set("0", p=rate), rates)
    assert row_of("schedule with `fullgraph=True`")[3] == "compiles once"
    assert graphs == 1


@pytest.mark.slow
def test_the_families_of_timm_are_counted():
    timm = pytest.importorskip("timm", reason="the README counts the families of timm")
    text = " ".join(README.split())
    found = re.search(r"Of timm's (\d+) model families, (\d+) have no argument", text)
    families, without = found.groups()
    members = {member.family: has_drop_block_rate(member) for member in MEMBERS}
    (with_paths,) = re.findall(rf"Of the {without}, (\d+) have `drop_path_rate`", text)
    others = [member for member in MEMBERS if not members[member.family]]
    assert sum(map(has_drop_path_rate, others)) == int(with_paths)
    assert len(members) == int(families)
    if f"with timm {timm.__version__}," in text:  # a later version may have more
        assert set(members) == set(timm.list_modules())
    assert sum(not has_it for has_it in members.values()) == int(without)
    assert f"in {sum(members.values())} of {families} families" in row_of("models")[1]

    both_stages, last_stage = re.findall(r"\*\*(\d+)\*\*", supported.timm_table())[:2]
    assert (
        f"DropBlock worked in the last two stages of {both_stages} families, "
        "and in the last stage of Hiera" in text
    )
    assert int(both_stages) + int(last_stage) == len(members)


def has_drop_block_rate(member):
    """Whether timm's argument for DropBlock puts DropBlock into the model."""
    from timm.layers import DropBlock2d as DropBlockOfTimm

    name = WITH_DROPBLOCK.get(member.family, member.model)
    try:
        with torch.device("meta"):
            model = dataclasses.replace(member, model=name).build(drop_block_rate=0.1)
    except TypeError as error:
        if "drop_block_rate" not in str(error):
            raise
        return False
    assert any(isinstance(module, DropBlockOfTimm) for module in model.modules()), name
    return True


def has_drop_path_rate(member):
    """Whether the model takes timm's argument for stochastic depth, and has it then."""
    from timm.layers import DropPath

    try:
        with torch.device("meta"):
            model = member.build(drop_path_rate=0.1)
    except TypeError as error:
        if "drop_path_rate" not in str(error):
            raise
        return False
    return any(isinstance(module, DropPath) for module in model.modules())


def times_by_tensor():
    """The recorded ratios of DropBlock at a rate of 0.1, for each size of blocks and tensor."""
    ratios = {}
    for name in ("kernels", "blocks"):
        path = ROOT / f"docs/benchmarks/{name}.csv"
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["work"].startswith("drop_block2d p=0.1"):
                    of_tensor = ratios.setdefault((row["work"], row["shape"]), {})
                    of_tensor[row["variant"], row["reference"]] = float(row["ratio"])
    return list(ratios.values())


def test_the_times_are_those_of_the_benchmarks():
    recorded = times_by_tensor()

    def assert_range(cell, times):
        smallest, largest = numbers(cell)
        assert smallest == pytest.approx(min(times), abs=0.05)
        assert largest == pytest.approx(max(times), abs=0.05 if largest < 10 else 0.5)

    separate = row_of("time on a CPU, one mask per channel")
    assert_range(separate[1], [1 / of["functional", "timm"] for of in recorded])
    assert_range(separate[2], [1 / of["functional", "torchvision"] for of in recorded])
    shared = row_of("time on a CPU, one mask for all channels")
    assert_range(shared[1], [1 / of["share_channels", "timm shared"] for of in recorded])
    default = row_of("time on a CPU, the default of each library")
    ratios = [of["timm shared", "floor"] / of["functional", "floor"] for of in recorded]
    assert_range(default[1], ratios)


def test_each_tick_has_a_tested_row():
    matrix = (ROOT / "docs/matrix.md").read_text(encoding="utf-8")
    rows = [line for line in matrix.splitlines() if "difference" not in line]
    for name in ("DropBlock2d", "Retune", "ClipGradNorm"):
        tested = " ".join(row for row in rows if f"| {name} |" in row)
        for setting in ("aot_eager", "16", "accumulation", "checkpointing", "ddp", "fsdp2"):
            assert setting in tested, (name, setting)


def test_commands_and_links():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    links += re.findall(r'(?:src|srcset)="([^"]+)"', README)
    for path in links:
        assert (ROOT / path).exists() or not (ROOT / ".git").exists(), path
    for anchor in re.findall(r"\]\(#([\w-]+)\)", README):
        assert f"## {anchor}" in README.lower()
    commands = [line for line in README.splitlines() if line.startswith("pip install -e")]
    assert [shlex.split(line, comments=True)[3] for line in commands] == [
        ".[experiments]",
        ".[test]",
    ]


def test_typical_mistakes_are_answered_with_what_to_write(net):
    for spec, hint in [
        ({"layer1.0.cnov": dropblock_hooks.Dropout()}, "layer1.0.conv"),
        ({"layer1": "DropBlok2d"}, "DropBlock2d"),
        ({"layer1": dropblock_hooks.DropBlock2d}, "DropBlock2d(...)"),
    ]:
        with pytest.raises(SpecError) as caught:
            attach(net, spec)
        assert hint in str(caught.value)
