"""bench_overhead: its sets, its variants here and in processes of their own, and its rows."""

import itertools
import json
import math
import time
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch import nn

from dropblock_hooks import ClipGradNorm, Dropout
from experiments.overhead import (
    classes,
    gpu,
    gpu_page,
    layers,
    models,
    page,
    peers,
    resnet,
    timing,
    variants,
)
from experiments.overhead.launches import launches_in, launches_of
from experiments.overhead.machine import machine_of
from experiments.overhead.memory import saved_bytes
from experiments.overhead.peers import PEERS, nominal, realized
from experiments.overhead.replay import replayed
from experiments.overhead.sets import GROUPS, SETS, sets_of
from experiments.overhead.timing import Made, Work, measure
from scripts import bench_overhead
from tests.cases import rest_slow
from tests.experiments.conftest import ROOT
from tests.experiments.recipes import crash, fail, fail_later, sleep

CPU = torch.device("cpu")
NET = """
from torch import nn

def net(num_classes):
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
    return nn.Sequential(nn.Conv2d(3, 4, 3), *head)
"""
TINY = resnet.Case(2, "resnet10t", 80)  # torchvision needs maps with an odd edge


def columns(rows, *names):
    return [tuple(row[name] for name in names) for row in rows]


# the command


@pytest.fixture
def own_model(folder):
    (folder / "big.py").write_text(NET)
    return ["--model", "big:net", "--size", "2x3x8x8", "--rounds", 2]


@pytest.mark.slow
def test_a_case_of_ones_own(command, folder, own_model):
    spec = ["--spec", "{'0': Dropout2d(0.1)}"]
    status, out, err = command("bench_overhead.py", *own_model, *spec, "--backend", "eager")
    assert status == 0, err
    assert "first_s" in out
    rows = pd.read_csv(folder / "runs/overhead/rows.csv")
    expected = ["bare", "attached", "compiled bare", "compiled attached"]
    assert rows["variant"].tolist() == expected
    assert (rows[["first_s", "ms", "peak_mb"]] > 0).all(axis=None)
    assert rows["error"].isna().all()
    machine = json.loads((folder / "runs/overhead/machine.json").read_text())
    assert machine["torch"] in out
    assert machine["device"] == "cpu"


@pytest.mark.slow
def test_a_variant_that_fails_does_not_take_the_other_rows_with_it(command, folder, own_model):
    spec = ["--spec", "{'0': Dropout2d(0.1)}"]
    status, out, err = command("bench_overhead.py", *own_model, *spec, "--backend", "nonsense")
    assert status == 1
    assert "2 rows have no times" in err
    rows = pd.read_csv(folder / "runs/overhead/rows.csv").set_index("variant")
    assert (rows.loc[["bare", "attached"], "ms"] > 0).all()
    reasons = rows.loc[["compiled bare", "compiled attached"], "error"]
    assert reasons.str.contains("nonsense").all()
    assert rows.loc[reasons.index, "ms"].isna().all()
    assert reasons.iloc[0][:30] in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "gpu", "--clock", "cpu"], "--clock cpu does not see the time of a GPU"),
        (["--model", "big:net"], "--model and --spec go together"),
        (["--model", "big:net", "--spec", "{'9': Dropout2d(0.1)}"], "'9'"),
        (["--model", "none", "--spec", "{'9': Dropout2d(0.1)}"], "no model of timm"),
        (["--set", "gpu", "--device", "cpu"], "--set gpu measures a GPU: leave out --device cpu"),
    ],
    ids=[
        "the clock of the processor for a GPU",
        "no spec",
        "no layer",
        "no model",
        "a CPU for the set of GPUs",
    ],
)
def test_a_wrong_option_is_named(command, own_model, options, message):
    status, _, err = command("bench_overhead.py", *options)
    assert status == 2
    assert message in err


@pytest.mark.parametrize(
    "options",
    [["--set", "gpu"], ["--set", "gpu-clip"], ["--set", "kernels", "--device", "cuda"]],
    ids=" ".join,
)
def test_without_a_gpu_an_error_says_so(command, monkeypatch, options):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = command("bench_overhead.py", *options)
    assert status == 2
    assert "there is no CUDA device that torch can use" in err
    assert "kernels, blocks" in err  # what can be measured here
    assert not out


def test_rows_before_an_interrupt_are_printed(command, folder, monkeypatch):
    def works(options, device):
        yield dict.fromkeys(timing.COLUMNS) | {"variant": "the first"}
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_overhead, "measured", works)
    status, out, _ = command("bench_overhead.py", "--set", "sites")
    assert status == 130
    assert "the first" in out
    assert "the first" in (folder / "runs/overhead/rows.csv").read_text()


def test_a_set_ends_at_its_limit(command, folder, monkeypatch):
    limited = SETS["sites"]._replace(seconds=0.0)
    monkeypatch.setitem(SETS, "sites", limited)
    status, _, _ = command("bench_overhead.py", "--set", "sites")
    assert status == 1
    rows = pd.read_csv(folder / "runs/overhead/rows.csv")
    assert rows["error"].eq("not measured: the limit of its set was reached").all()
    assert rows["ms"].isna().all()


# the sets


def test_each_set_is_in_one_group():
    names = [*GROUPS["all"], *GROUPS["gpu"]]
    assert sorted(names) == sorted(SETS)
    assert all(name.startswith("gpu-") for name in GROUPS["gpu"])
    assert list(sets_of("gpu")) == GROUPS["gpu"]
    assert list(sets_of("sites")) == ["sites"]


def test_the_sets_of_gpus_take_ten_minutes():
    assert sum(SETS[name].seconds for name in GROUPS["gpu"]) <= 590


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_works_whose_variants_are_named_once(name):
    works = list(SETS[name].works())
    assert works
    assert len({(work.name, tuple(work.shape)) for work in works}) == len(works)
    for work in works:
        assert len(set(work.against)) == len(work.against)


def test_the_page_names_each_set():
    text = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    for name in [*SETS, *GROUPS]:
        assert f"| `{name}` |" in text


SMALL = {
    "activations": lambda: classes.on_activations((2, 3, 8, 8)),
    "logits": lambda: classes.z_loss((8, 5)),
    "smaller blocks": lambda: layers.drop_block((2, 3, 8, 8), block_size=3),
    "normalize": lambda: layers.normalized((2, 3, 8, 8), 3),
    "norm": lambda: classes.frozen_norm((4, 3, 8, 8)),
    "embedding": lambda: classes.embedding((2, 4), (10, 6)),
    "updates": lambda: classes.updates("test_resnet"),
    "pulled": lambda: classes.pulled("test_resnet", (2, 3, 32, 32)),
    "watch": lambda: classes.watched("test_resnet", (2, 3, 32, 32)),
}


@pytest.mark.parametrize(
    "name", rest_slow(SMALL, ["activations", "normalize", "norm", "embedding"])
)
def test_works_of_classes_run(name):
    rows = measure(SMALL[name](), 2)
    assert {row["error"] for row in rows} == {None}
    assert all(math.isfinite(row["ms"]) for row in rows)
    # A difference of two variants is not a time: noise can make it negative.
    assert all(row["ms"] > 0 for row in rows if " - " not in row["variant"])


def test_an_update_is_regularized_each_time():
    update = classes.Update(nn.Linear(5, 5), ClipGradNorm(1e-3, group=True))
    for _ in range(2):
        update()
        norms = [parameter.grad.norm() for parameter in update.parameters]
        assert torch.stack(norms).norm().item() == pytest.approx(1e-3)
        update.gradients = [torch.ones_like(parameter) for parameter in update.parameters]


def test_the_numbers_of_the_pages_are_those_of_the_measurements():
    for path, text in page.pages().items():
        command = f"python -m experiments.overhead.page ({path.name})"
        assert path.read_text("utf-8") == text, command
    assert page.NOT_YET not in page.PAGE.read_text("utf-8")


def test_the_page_names_the_machine_with_a_gpu():
    machine = json.loads((gpu_page.FILES / "machine.json").read_text("utf-8"))
    text = " ".join(page.PAGE.read_text("utf-8").split())
    named = (machine["device"], f"triton {machine['triton']}", f"Python {machine['python']}")
    assert all(name in text for name in named)
    assert f"torch {machine['torch'].partition('+')[0]}" in text


def test_the_page_names_the_machine():
    machine = json.loads((page.FILES / "machine.json").read_text("utf-8"))
    text = " ".join(page.PAGE.read_text("utf-8").split())
    for package in ("torch", "torchvision", "timm"):
        assert f"{package} {machine[package]}" in text
    assert f"Python {machine['python']}" in text
    assert f"`--threads {machine['threads']}`" in text


def test_each_line_of_the_page_has_a_work():
    """The work has the variant and the reference."""
    for line in [*page.LINES, *page.DROP_BLOCK, *page.OTHERS, *page.OBSERVERS]:
        works = [work for work in SETS[line.file].works() if work.name == line.work]
        assert works, line
        assert all((line.variant, line.reference) in work.against for work in works), line
    small = [work for work in SETS["blocks"].works() if work.name.startswith("drop_block2d")]
    assert all(set(page.SMALL.values()) <= set(work.against) for work in small)


def test_a_line_has_the_median_and_the_quartiles():
    line = page.LINES[0]
    measured = {"work": line.work, "variant": line.variant, "reference": line.reference}
    numbers = {"shape": "2x3", "q25": 0.91, "ratio": 1.234, "q75": 12.0}
    frame = pd.DataFrame([{**measured, **numbers}])
    assert page._class_rows(line, frame) == ["| `ActivityL1` | floor | 1.2 (0.91 to 12) | 2×3 |"]
    missing = page._class_rows(page.LINES[1], frame)
    assert missing == ["| `ActivityL2` | floor | not measured yet | |"]


def test_shares_are_written_in_percent():
    shares = [1e-5, 0.0022, 0.0172, 0.25]
    assert [page._percent(share) for share in shares] == ["0.001 %", "0.22 %", "1.7 %", "25 %"]


# works for GPUs, on a CPU and with small tensors


def test_gpu_kernels_run(monkeypatch):
    monkeypatch.setattr(peers, "ELEMENTS", 10_000)
    work = gpu.kernel((2, 3, 8, 8), torch.bfloat16, torch.channels_last)
    rows = measure(work, 2)
    assert {row["error"] for row in rows} == {None}
    assert set(columns(rows, "variant")) >= {("drop_block2d",), ("attached",), ("timm shared",)}
    assert ("drop_block2d", "torchvision") in columns(rows, "variant", "reference")
    assert rows[0]["work"] == "GPU time, block 7 bfloat16 channels_last"
    assert all(row["kept"] is not None for row in rows)


def test_a_step_is_replayed_on_a_gpu_only():
    def step():
        pass

    assert replayed(step, CPU) == (step, 1)


def test_replays_are_timed_in_place_of_calls(monkeypatch):
    calls = []
    replays = []
    graph = (lambda: replays.append(1) or time.sleep(0.002)), 10
    monkeypatch.setattr("experiments.overhead.variants.replayed", lambda step, device: graph)
    work = Work(
        "w", lambda device: Made({"a": lambda: calls.append(1)}), [("a", "a")], replays=True
    )
    (row,) = measure(work, 2)
    assert len(calls) <= 4  # the first call, and those that look at the memory
    assert len(replays) >= 4
    assert 0.2 <= row["ms"] < 1  # of one of ten runs in a graph


def test_launches_of_sites_are_counted_and_have_budgets():
    item = Dropout(0.1)
    work = gpu.site("sites", "0", {item: 4}, {"hook": layers.floor})
    rows = {row["variant"]: row for row in measure(work, 2)}
    dropped = rows["Dropout(p=0.1) - bare"]
    hooked = rows["hook - bare"]
    assert hooked["launches"] == 2  # a product, and that of the backward
    assert hooked["budget"] is None
    assert dropped["launches"] > 2
    assert dropped["budget"] == 4
    assert dropped["reference"] == "1 µs"
    assert dropped["ratio"] == pytest.approx(1e3 * dropped["ms"])


def test_every_item_of_the_launches_can_be_attached():
    for work in gpu.launches():
        made = work.make(CPU)
        assert set(made.steps) == set(work.variants)
        assert set(work.budgets) <= set(work.variants)
        for step in made.steps.values():
            step()


def test_launches_are_those_of_the_runtime_and_the_driver():
    keys = ("cudaLaunchKernelExC", "cuLaunchKernel", "cudaMemcpyAsync", "aten::add", "cudaMalloc")
    events = [SimpleNamespace(key=key, count=2) for key in keys]
    assert launches_in(events) == 6


def test_operators_count_as_launches_on_a_cpu():
    x = torch.ones(3, 4)
    assert launches_of(lambda: (x.t() * 2).exp(), CPU) == 2  # a view starts nothing


@pytest.mark.slow
def test_eager_training_steps_run():
    work = resnet.eager(TINY)
    made = work.make(CPU)
    assert set(made.steps) == set(work.variants)
    for step in made.steps.values():
        before = [parameter.clone() for parameter in step.model.parameters()]
        step()
        after = step.model.parameters()
        assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    drops = made.steps["attached"].model
    hooked = made.steps["torchvision"].model
    assert layers_with_hooks(drops) == layers_with_hooks(hooked) != []
    assert layers_with_hooks(made.steps["bare"].model) == []


def layers_with_hooks(model):
    return [name for name, layer in model.named_modules() if name and layer._forward_hooks]


@pytest.mark.slow
def test_clipped_training_steps_run():
    work = resnet.clipped(resnet.Case(2, "resnet10t", 32))
    made = work.make(CPU)
    assert set(made.steps) == set(work.variants)
    for name, step in made.steps.items():
        step()
        norms = [p.grad.norm() for p in step.model.parameters()]
        total = torch.stack(norms).norm()
        bounded = {"group": total, "clip_grad_norm_": total, "each parameter": max(norms)}
        if name == "bare":
            assert total > 1.1
        if name in bounded:
            assert bounded[name] <= 1.01


@pytest.mark.slow
def test_compiled_training_steps_are_made_in_processes_of_their_own():
    work = resnet.compiled_steps(TINY, "eager", {"backend": "eager"})
    assert set(work.apart) == set(work.variants)
    assert work.make(CPU).steps == {}
    step = work.apart["bare"](CPU)  # as its process does
    step()
    assert step.model._compiled_call_impl is not None


# processes


@pytest.mark.slow
def test_variants_in_processes_are_timed_in_turns():
    apart = {"a": partial(sleep, seconds=0.004), "b": partial(sleep, seconds=0.001)}
    apart |= {"fails": fail, "crashes": crash, "fails later": fail_later}
    against = [("a", "b"), ("b", "b"), ("fails", "b"), ("crashes", "b"), ("fails later", "b")]
    against.append(("b", "fails"))
    work = Work("processes", against=against, apart=apart, at_once=len(apart))
    rows = measure(work, 3)
    assert rows[0]["ratio"] > 1.5
    assert rows[0]["first_s"] >= 0.004
    assert rows[0]["rounds"] == 3
    assert [row["error"] for row in rows] == [
        None,
        None,
        "ValueError: no such model in this process",
        "its process ended with the exit code 3",
        "ValueError: worn out",
        "fails failed: ValueError: no such model in this process",
    ]


def test_a_process_that_is_not_ready_in_time_is_ended():
    slow = partial(sleep, seconds=60)
    work = Work("slow", against=[("a", "a")], apart={"a": slow})
    began = time.monotonic()
    (row,) = measure(work, 2, deadline=began + 0.5)
    assert row["error"] == "not ready in time: the limit of its set was reached"
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_the_compiled_model_with_sites_does_not_run_the_code_of_the_bare_one():
    work = models.own_case("resnet18", {"layer4.1": "ZeroGrad()"}, (2, 3, 32, 32), "eager")
    steps = {**work.make(CPU).steps}
    steps |= {name: recipe(CPU) for name, recipe in work.apart.items()}
    for name in [*steps, *steps]:
        steps[name]()
        model = steps[name].args[0]
        assert (model.conv1.weight.grad.abs().sum() == 0) == ("attached" in name), name


# timings and rows


def test_the_clock_of_the_processor_leaves_out_waiting(monkeypatch):
    monkeypatch.setattr(variants, "_clock", time.perf_counter)  # which puts it back at the end
    wait = partial(time.sleep, 0.05)
    assert variants.seconds_of(wait, 1, CPU) >= 0.05
    variants.set_up(CPU, torch.get_num_threads(), time.process_time)
    assert variants.seconds_of(wait, 1, CPU) < 0.04


def test_the_clock_is_in_the_file_of_the_machine(command, folder, monkeypatch):
    monkeypatch.setattr(variants, "_clock", time.perf_counter)
    monkeypatch.setitem(SETS, "sites", SETS["sites"]._replace(seconds=0.0))
    command("bench_overhead.py", "--set", "sites", "--clock", "cpu")
    assert json.loads((folder / "runs/overhead/machine.json").read_text())["clock"] == "cpu"
    assert variants._clock is time.process_time


def test_timings_are_in_turn(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)
    steps = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    work = Work("turns", lambda device: Made(steps), [("a", "b"), ("b", "b")])
    rows = measure(work, 3)
    assert [row["rounds"] for row in rows] == [3, 3]
    assert order[-6:] == ["a", "b"] * 3
    with pytest.raises(ValueError, match="at least 2"):
        measure(work, 1)


def test_few_rounds_are_left_near_a_deadline():
    work = Work("w", lambda device: Made({"a": lambda: time.sleep(0.01)}), [("a", "a")])
    (row,) = measure(work, 50, deadline=time.monotonic() + 0.2)
    assert 3 <= row["rounds"] < 20


def test_a_difference_and_a_unit_are_compared(monkeypatch):
    seconds = {"a": [3.0, 30.0, 6.0], "b": [1.0, 10.0, 4.0]}

    def interleave(measured, *limits):
        measured.seconds = seconds

    monkeypatch.setattr(timing, "interleave", interleave)
    against = [("a - b", "1 s"), ("a", "b")]
    steps = dict.fromkeys("ab", lambda: None)
    work = Work("sums", lambda device: Made(steps), against, units={"1 s": 0.5})
    assert work.variants == ["a", "b"]
    above, ratio = measure(work, 3)
    assert (above["ms"], above["ratio"]) == (2000, 4)  # 2, 20 and 2 seconds in units of 0.5
    assert (ratio["ms"], ratio["ratio"]) == (6000, 3)  # 3, 3 and 1.5


def test_a_row_says_why_a_variant_of_this_process_failed():
    def broken():
        raise RuntimeError("out of\n  luck")

    steps = {"good": lambda: None, "bad": broken}
    against = [("good", "good"), ("bad", "good"), ("good", "bad"), ("good - bad", "good")]
    rows = measure(Work("w", lambda device: Made(steps), against), 2)
    assert rows[0]["ms"] > 0
    expected = [None, "out of luck", "bad failed: out of luck", "bad failed: out of luck"]
    assert [row["error"] for row in rows] == expected


def test_the_machine_has_names_and_versions(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    facts = machine_of(torch.device("cuda"))
    assert facts["device"] == "NVIDIA H100"
    assert facts["torch"] == torch.__version__.partition("+")[0]
    assert {"triton", "timm", "torchvision", "python"} <= set(facts)


# peers and works on a CPU


@pytest.mark.parametrize("name", rest_slow(PEERS))
def test_peers_are_asked_for_what_drops_the_same_share(name, monkeypatch):
    monkeypatch.setattr(peers, "ELEMENTS", 400_000)
    p = nominal(name, (14, 14), 5, 0.1)
    assert realized(name, p, (14, 14), 5) == pytest.approx(0.1, abs=0.003)


def test_the_works_do_what_they_say(monkeypatch):
    monkeypatch.setattr(peers, "ELEMENTS", 10_000)
    monkeypatch.setattr(layers, "SHAPES", [(2, 3, 14, 14)])
    works = itertools.islice(layers.sites(), 3), layers.kernels(), layers.observers()
    for work in [*itertools.chain(*works), *layers.formats(), *layers.others()]:
        made = work.make(CPU)
        assert set(made.steps) == set(work.variants)
        for step in made.steps.values():
            step()
    x = torch.ones(8, requires_grad=True)
    assert saved_bytes(lambda: x.exp().sum().backward()) == 32
    assert isinstance(layers.attached(layers.Dropout2d(0.1)), nn.Module)
