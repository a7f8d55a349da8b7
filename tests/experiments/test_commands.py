"""The commands as processes: signals at any moment, and answers that need no torch."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.experiments.launches import begin, make_study

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "ablate.py": ["study.yaml", "--backend", "sequential"],
    "train.py": ["--train_images", "20", "--epochs", "1", "--out", "out"],
    "report.py": ["runs/study"],
    "families.py": ["table.md", "--only", "vision_transformer"],
    "bench_overhead.py": ["--set", "others", "--shape", "1x8x4x4", "--rounds", "2"],
}
STUDY = {
    "base": {
        "model_args": {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8]},
        "data": "fake",
        "image_size": 8,
        "train_images": 20,
        "epochs": 1,
    },
    "conditions": {"none": {}, "other": {"replica": 1}},
    "baseline": "none",
    "seeds": [1],
}
# Run by each Python with this folder on its path. MOMENT, as "import:torch:1" or "open:a.csv:2",
# says at which event the process sends itself SIGNAL; FORBIDDEN, what it must not import.
WATCHER = """
import os, signal, sys
moment, name, count = os.environ.get("MOMENT", "::0").split(":")
number, left = int(os.environ.get("SIGNAL", 0)), int(count)
forbidden = os.environ.get("FORBIDDEN", "").split()
def hook(event, args):
    global left
    if event == "import" and args[0] in forbidden:
        os.write(2, f"imports {args[0]}".encode())
        os._exit(99)
    if event == moment and left and str(args[0]).endswith(name):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)
sys.addaudithook(hook)
"""
HEAVY = (
    "torch torchvision timm lightning numpy scipy statsmodels sklearn pandas matplotlib ray "
    "dropblock_hooks"
)


@pytest.fixture
def start(tmp_path):
    """Run a command in a folder with a study, watched."""
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "sitecustomize.py").write_text(WATCHER)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    begin(make_study(), tmp_path / "runs" / "study")

    def run(script, *args, **watched):
        inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [sys.executable, str(ROOT / "scripts" / script), *map(str, args)],
            cwd=tmp_path,
            env={**inherited, "PYTHONPATH": str(tmp_path / "watch"), **watched},
            capture_output=True,
            text=True,
            timeout=300,
            preexec_fn=heed,
            check=False,
        )

    return run


def heed() -> None:
    """Undo what a shell in the background, or nohup, has its children ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


SIGNALS = {"SIGINT": 130, "SIGTERM": 75, "SIGUSR1": 75, "SIGHUP": 75}
EARLY = ["import:jsonargparse:1", "import:torch:1", "import:torch._C:1", "import:torch.nn:1"]
MOMENTS = {
    "ablate.py": [
        "open:study.yaml:1",
        "import:timm:1",
        "import:experiments.running.launch:1",
        "open:study.yaml:2",
        "import:scipy:1",
        "open:/claims:1",
        "open:report.md:1",
        "import:matplotlib.figure:1",
        "open:summary.csv:1",
    ],
    "train.py": ["import:timm:1", "import:lightning:1", "import:experiments.train:1"],
    "report.py": [
        "open:study.json:1",
        "import:matplotlib.figure:1",
        "open:report.md:1",
        "open:summary.csv:1",
    ],
    "families.py": ["import:rich.progress:1", "import:timm:1"],
    "bench_overhead.py": ["import:rich.progress:1", "import:timm:1"],
}
ALL = [
    (script, moment, name)
    for script, moments in MOMENTS.items()
    for number, moment in enumerate([*EARLY, *moments])
    for name in SIGNALS
    # each signal at the first moment, and one at each other
    if number == 0 or name == list(SIGNALS)[number % len(SIGNALS)]
]
QUICK = [
    ("ablate.py", EARLY[0], "SIGINT"),
    ("ablate.py", EARLY[0], "SIGTERM"),
    ("train.py", EARLY[0], "SIGHUP"),
    ("report.py", EARLY[0], "SIGUSR1"),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("script", "moment", "name"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case))
        for case in ALL
    ],
)
def test_a_signal_at_any_moment_is_an_exit_status(start, tmp_path, script, moment, name):
    done = start(script, *COMMANDS[script], MOMENT=moment, SIGNAL=str(getattr(signal, name).value))
    assert done.returncode == SIGNALS[name], done.stderr
    assert "Traceback" not in done.stderr
    assert "stopped" in done.stderr
    assert done.stderr.count("\n") == 1 or script == "ablate.py"
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("moment", "last"), [("open:study.yaml:2", False), ("open:summary.csv:1", True)]
)
@pytest.mark.slow
def test_what_was_stopped_at_once_goes_on(start, tmp_path, moment, last):
    done = start("ablate.py", *COMMANDS["ablate.py"], MOMENT=moment, SIGNAL="15")
    assert done.returncode == 75, done.stderr
    assert len(list(tmp_path.glob("runs/study/*/done.json"))) == (2 if last else 0)
    again = start("ablate.py", *COMMANDS["ablate.py"])
    assert again.returncode == 0, again.stderr
    report = tmp_path / "runs" / "study" / "report"
    assert "report.md" in {path.name for path in report.iterdir()}
    assert not list(report.glob(".*"))


@pytest.mark.slow
def test_a_hangup_that_nohup_has_ignored_stays_ignored(start, tmp_path):
    (tmp_path / "watch" / "sitecustomize.py").write_text(
        f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{WATCHER}"
    )
    moment = {"MOMENT": "import:torch._C:1", "SIGNAL": str(signal.SIGHUP.value)}
    assert start("report.py", "runs/study", **moment).returncode == 0
    assert start("ablate.py", *COMMANDS["ablate.py"], **moment).returncode == 0


ANSWERS = {
    **{f"{script} --help": (0, "Example: scripts/") for script in COMMANDS},
    "ablate.py missing.yaml": (2, "missing.yaml: No such file or directory"),
    "ablate.py watch": (2, "watch: Is a directory"),
    "ablate.py study.yaml --jobs 0": (2, "jobs must be at least 1, got 0"),
    "ablate.py study.yaml --shard 3/3": (2, "got 3/3"),
    "ablate.py study.yaml --backend dask": (2, "dask"),
    "ablate.py study.yaml --data imagefolder:no": (2, "no such folder: 'no/train'"),
    "ablate.py study.yaml --data cifar10 --data_dir no": (2, "no such folder: 'no'"),
    "report.py missing": (2, "missing is not a study's directory: it has no study.json"),
    "train.py --spec missing.yaml": (2, "spec: no such file: 'missing.yaml'"),
    "train.py --config missing.yaml": (2, "missing.yaml"),
    "train.py --data imagefolder:no": (2, "no such folder: 'no/train'"),
    "train.py --data cifar100 --data_dir no": (2, "no such folder: 'no'"),
    "train.py --epoch 1": (2, "epoch"),
    "train.py --print_config": (0, "epochs: 10"),
    "bench_overhead.py --model resnet18": (2, "--model and --spec go together"),
}


AT_ONCE = [f"{name}.py --help" for name in ("ablate", "train", "report")] + [
    "ablate.py missing.yaml",
    "train.py --spec missing.yaml",
]


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=() if line in AT_ONCE else pytest.mark.slow) for line in ANSWERS],
)
def test_help_and_what_is_not_there_take_no_torch(start, line):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = start(*line.split(), FORBIDDEN=HEAVY)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, text = ANSWERS[line]
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert text in " ".join((done.stdout + done.stderr).split())
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
