"""What measures the cost of attaching: ratios, rates of peers, bytes, files, the script."""

import csv
import io
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from experiments.memory import peak_bytes, saved_bytes
from experiments.overhead import BARS, Against, Row, Work, interleave, measure, paired_ratios
from experiments.overhead.kernels import Place, formats, kernels
from experiments.overhead.models import (
    SPECS,
    Images,
    compiled,
    evaluation_work,
    training_work,
    variants,
)
from experiments.overhead.observers import observers
from experiments.overhead.others import others
from experiments.overhead.report import epochs, plot, table, write_csv
from experiments.overhead.sites import attach_work, attaching, sites
from experiments.peers import PEERS, installed, nominal, realized

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ROW = Row(
    "drop_block2d", "functional", "floor", "2x4x8x8", "float32", "contiguous", 0.1,
    1.5, 3.0, 2.5, 3.25, 0.005, 0.1, 7,
)  # fmt: skip


class Clock:
    """Time that moves only where a step says so."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def step(self, name, seconds):
        left = list(seconds)

        def run():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("experiments.overhead.time.perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def call(call):
    return partial(call, "bench_overhead.py", "--threads", "1")


@pytest.fixture
def rough_calibration(monkeypatch):
    """Peers are calibrated in little time, to about 5 %."""
    nominal.cache_clear()
    monkeypatch.setattr("experiments.peers.ELEMENTS", 400_000)
    yield
    nominal.cache_clear()


def test_steps_take_turns_after_a_warm_up(clock):
    steps = {"a": clock.step("a", [1.0]), "b": clock.step("b", [2.0])}
    assert interleave(steps, 3, CPU) == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert "".join(clock.calls) == "aabb" + "ab" * 3


def test_quick_steps_are_repeated_within_a_timing(clock):
    steps = {"a": clock.step("a", [0.0005]), "b": clock.step("b", [0.001])}
    seconds = interleave(steps, 2, CPU)
    assert seconds["a"] == pytest.approx([0.0005] * 2)
    assert "".join(clock.calls) == "aabb" + ("aaaa" + "bbbb") * 2


def test_slow_steps_have_fewer_rounds_but_three(clock):
    assert len(interleave({"a": clock.step("a", [12.0])}, 50, CPU)["a"]) == 10
    assert len(interleave({"a": clock.step("a", [1000.0])}, 50, CPU)["a"]) == 3
    with pytest.raises(ValueError, match="rounds must be at least 2, got 1"):
        interleave({"a": clock.step("a", [1.0])}, 1, CPU)


def test_ratios_are_paired_before_the_median_is_taken():
    a, b = [2.0, 30.0, 3.0, 8.0, 5.0], [1.0, 10.0, 1.0, 2.0, 1.0]
    assert paired_ratios(a, b) == (3.0, 3.0, 4.0)  # the ratio of the medians is 5


def test_rows_of_synthetic_timings(clock):
    # two calls for the memory, two to warm up, then the rounds: each slower than the one before
    rounds = [1.0, 2.0, 4.0]
    work = Work(
        "work",
        {
            "floor": clock.step("f", [1.0] * 4 + rounds),
            "ours": clock.step("o", [1.0] * 4 + [3 * s for s in rounds]),
            "attached": clock.step("a", [1.0] * 4 + [3.5 * s for s in rounds]),
        },
        [
            Against("ours", "floor"),
            Against("attached", "floor", minus="ours"),
            Against("ours", "2 s"),
        ],
        units={"2 s": 2.0},
    )
    ours, above, absolute = measure(work, 3)
    assert (ours.q25, ours.ratio, ours.q75, ours.ms, ours.rounds) == (3, 3, 3, 6000, 3)
    assert (above.variant, above.ratio, above.ms) == ("attached - ours", 0.5, 1000)
    assert (absolute.q25, absolute.ratio, absolute.q75) == (2.25, 3, 4.5)
    assert above.name == "work: attached - ours / floor"


def test_a_row_misses_what_is_above_its_bar():
    assert ROW.name in BARS
    assert not ROW.missed
    assert replace(ROW, ratio=3.6).missed
    assert replace(ROW, saved=0.011).missed
    assert not replace(ROW, saved=0.03, p=0.25).missed
    assert replace(ROW, saved=0.033, p=0.5).missed
    assert not replace(ROW, ratio=100.0, saved=1.0, work="Dropout3d").missed


@pytest.mark.slow
def test_every_bar_is_that_of_a_row(monkeypatch, rough_calibration):
    monkeypatch.setattr("experiments.overhead.peak_bytes", lambda step, device: 0)
    monkeypatch.setattr("experiments.overhead.saved_bytes", lambda step, known: 0)
    monkeypatch.setattr(
        "experiments.overhead.interleave", lambda steps, *_: dict.fromkeys(steps, [1.0] * 2)
    )
    place = Place(shape=(2, 4, 8, 8))
    sets = [
        kernels(place), formats(place), others(place), observers(place), sites(place),
        attaching(place),
    ]  # fmt: skip
    works = chain(*sets, compiled(Images(2, 32)))
    names = {row.name for work in works for row in measure(work, 2)}
    assert set(BARS) <= names


@pytest.mark.parametrize(
    ("name", "edge", "rate"),
    [
        *((name, 14, 0.1) for name in installed()),
        pytest.param("timm", 28, 0.25, marks=pytest.mark.slow),
        pytest.param("torchvision", 14, 0.5, marks=pytest.mark.slow),
    ],
)
def test_a_peer_drops_the_rate_it_was_calibrated_to(rough_calibration, name, edge, rate):
    asked = nominal(name, (edge, edge), 7, rate)
    # other random numbers than the calibration: 10 % is 2 standard errors of the difference
    dropped = realized(PEERS[name], asked, (edge, edge), 7, seed=1)
    assert dropped == pytest.approx(rate, rel=0.1)
    assert abs(asked / rate - 1) > 0.05  # at the nominal rate it drops another


def test_equal_nominal_rates_are_not_equal(rough_calibration):
    assert realized(PEERS["timm"], 0.1, (14, 14), 7) > 0.2


def test_a_rate_out_of_reach_is_told(rough_calibration):
    with pytest.raises(ValueError, match=r"torchvision can't drop 0.999 of a \(28, 28\) map"):
        nominal("torchvision", (28, 28), 7, 0.999)


def test_saved_bytes_counts_a_storage_once_and_no_known_one():
    x = torch.randn(100, requires_grad=True)
    weight = torch.randn(100, requires_grad=True)

    def step():
        y = x.exp()  # keeps y, which the product keeps too, with the weight
        (y * weight).sum().backward()

    assert saved_bytes(step, [x, weight]) == 400
    assert saved_bytes(step, [x]) == 800
    assert saved_bytes(lambda: (x * 2.0).sum().backward()) == 0


def test_peak_bytes_is_the_most_held_at_a_time():
    x = torch.ones(1000)

    def step():
        y = x + 1
        z = y + 1
        del y
        z + 1

    assert peak_bytes(step, CPU) == pytest.approx(8000, abs=100)


def read_csv(path):
    texts = ("work", "variant", "reference", "shape", "dtype", "format")
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    rows = []
    for line in lines:
        given = {field.name: line[field.name] for field in fields(Row)}
        numbers = {n: float(v) if v else None for n, v in given.items() if n not in texts}
        rows.append(Row(**{**given, **numbers}))
    return rows


def test_a_csv_is_read_back(tmp_path):
    rows = [ROW, replace(ROW, variant="attached - functional", p=None, saved=None, ratio=0.4)]
    write_csv(rows, tmp_path / "rows.csv")
    assert read_csv(tmp_path / "rows.csv") == rows
    with (tmp_path / "rows.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["bar"] for line in lines] == ["3.5", ""]
    assert [line["missed"] for line in lines] == ["False", "False"]


def test_the_table_tells_bars_and_misses():
    console = Console(file=io.StringIO(), width=160)
    console.print(table([ROW, replace(ROW, ratio=4.0), replace(ROW, reference="timm shared")]))
    met, missed, unstated = console.file.getvalue().splitlines()[2:]
    assert met.rstrip().endswith("0.1  3.5, 1.0%")
    assert missed.rstrip().endswith("3.5, 1.0%  missed")
    assert unstated.rstrip().endswith("0.1       1.0%")


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    paths = plot([ROW, replace(ROW, variant="attached"), replace(ROW, reference="timm")], tmp_path)
    assert [path.name for path in paths] == ["against_floor.png", "against_timm.png"]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_an_epoch_is_so_many_steps():
    text = epochs([replace(ROW, work="resnet50, evaluation", peak_mb=12.0)], 1000)
    assert text == ("resnet50, evaluation, functional: 1.5 s an epoch, peak 12 MB, 3.000 of floor")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in ("resnet50", "convnext_tiny") else ())
        for n in SPECS
    ],
)
def test_attached_and_hand_edited_models_compute_the_same(name, rough_calibration):
    images = Images(2, 128)  # maps larger than blocks
    models = variants(name, images)
    x = images.batch()
    bare, attached, edited = (models[key] for key in ("bare", "attached", "hand-edited"))
    assert torch.equal(attached.eval()(x), bare.eval()(x))
    assert torch.equal(edited.eval()(x), bare(x))
    outputs, drawn = [], []
    for model in (bare, attached, edited):
        torch.manual_seed(0)
        outputs.append(model.train()(x))
        drawn.append(torch.get_rng_state())
    assert torch.equal(outputs[1], outputs[2])
    assert torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])  # the bare model draws nothing


@pytest.mark.slow
def test_timms_own_option_drops_as_much(rough_calibration):
    models = variants("resnet50", Images(2, 64))
    layers = [m for m in models["own option"].modules() if "DropBlock2d" in type(m).__name__]
    seen = []
    for layer in layers:
        layer.register_forward_hook(lambda m, args, y: seen.append((m, args[0].shape[-2:])))
    models["own option"].train()(torch.randn(2, 3, 64, 64))
    assert len(seen) == len(layers) == 9
    for layer, size in seen:
        dropped = realized(PEERS["timm shared"], layer.drop_prob, tuple(size), layer.block_size, 1)
        assert dropped == pytest.approx(0.1, rel=0.08)
        assert layer.gamma_scale == 1.0


def test_works_put_models_into_their_mode():
    models = {"bare": nn.Conv2d(3, 4, 32), "attached": nn.Conv2d(3, 4, 32)}
    models = {name: nn.Sequential(layer, nn.Flatten()) for name, layer in models.items()}
    evaluation_work("m", models, Images(2, 32))
    assert not any(model.training for model in models.values())
    training_work("m", models, Images(2, 32)).steps["attached"]()
    assert all(model.training for model in models.values())
    assert models["attached"][0].weight.grad is None  # nothing is left for the next step


def test_attaching_leaves_the_model_as_it_was(hook_count):
    work = attach_work(3, 10)
    model = work.steps["attach and remove"].args[0]
    assert len(list(model.modules())) == 10
    work.steps["attach and remove"]()
    assert hook_count(model) == 0


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("kernels", "formats", "others", "sweep")
        ),
        "sites",
    ],
)
def test_the_script_times_a_set(call, capsys, monkeypatch, rough_calibration, name):
    monkeypatch.setattr("experiments.overhead.sites.SITES", (1, 10))
    assert call("--set", name, "--shape", "2x4x8x8", "--rounds", "2", "--out", "out") == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["processor", "threads", "torch"]
    rows = read_csv(Path("out/rows.csv"))
    assert rows
    assert all(row.rounds == 2 for row in rows)
    if name == "kernels":
        assert {row.p for row in rows} == {0.1, 0.25, 0.5}
        assert {"functional", "torchvision", "timm shared"} <= {row.variant for row in rows}
        assert "missed" in out  # tensors of no size never reach the bars


def test_the_script_times_a_model_of_mine(call, capsys):
    Path("spec.yaml").write_text("layer4.*: DropBlock2d(p=0.1)\n")
    args = ["--model", "test_resnet", "--spec", "spec.yaml", "--images", 100]
    args += ["--batch_size", 2, "--image_size", 32, "--rounds", 2, "--out", "out"]
    assert call(*args) == 0
    rows = read_csv(Path("out/rows.csv"))
    works = ["test_resnet, training step", "test_resnet, evaluation"]
    assert [(row.work, row.variant) for row in rows] == [
        (work, variant) for work in works for variant in ("bare", "attached")
    ]
    last = capsys.readouterr().out.splitlines()[-4]
    assert last.startswith("test_resnet, training step, bare: ")
    assert f" {rows[0].ms * 50 / 1e3:.1f} s an epoch" in last


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "kernel"], "kernel"),
        (["--model", "resnet5000", "--spec", "{}"], "'resnet5000' is no model of timm"),
        (["--model", "test_resnet", "--spec", "{layer9: Dropout2d(p=0.1)}"], "layer9"),
        (["--model", "test_resnet", "--spec", "missing.yaml"], "there is no file 'missing.yaml'"),
        (["--model", "test_resnet", "--spec", "{layer9: ["], "--spec: line 1"),
        (["--model", "test_resnet"], "--model and --spec go together"),
        (["--shape", "2x4x8"], "shape must be four sizes such as 32x256x28x28, got '2x4x8'"),
        (["--rounds", "1", "--set", "attach"], "rounds must be at least 2, got 1"),
    ],
)
def test_bad_input_is_one_message_and_exit_status_2(call, capsys, args, message):
    assert call(*args) == 2
    assert message in capsys.readouterr().err
