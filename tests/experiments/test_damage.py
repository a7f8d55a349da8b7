"""No checkpoint, and no record of a run, is believed in which a bit was changed."""

import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.checkpoint import CheckpointDamaged, set_aside_if_damaged
from experiments.files import fault, sign_zip
from experiments.running.directories import Damaged, read_result, write_json
from experiments.running.records import read_runs
from experiments.train import Stopped, train

from .launches import DROP, TINY, make_study


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a checkpoint in the middle of a run."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.raises(Stopped):
        train(TINY, out=out, stop=iter([False] * 5 + [True]).__next__)
    return (out / "checkpoint.pt").read_bytes()


def structure(content: bytes) -> list[int]:
    """Where the zip file's own bytes are: headers, names, directory, end and comment."""
    found = set()
    for mark, length in ((b"PK\x03\x04", 64), (b"PK\x01\x02", 80), (b"PK\x05\x06", 200)):
        at = content.find(mark)
        while at >= 0:
            found.update(range(at, min(at + length, len(content))))
            at = content.find(mark, at + 1)
    return sorted(found)


def flips(content: bytes, count: int) -> list[tuple[int, int]]:
    """A bit of each byte of structure, each bit of the digest, and bits anywhere."""
    chance = random.Random(1)
    places = [(at, chance.randrange(8)) for at in structure(content)]
    places += [(at, bit) for at in range(len(content) - 80, len(content)) for bit in range(8)]
    places += [(chance.randrange(len(content)), chance.randrange(8)) for _ in range(count)]
    return places


def changed(content: bytes) -> dict[str, bytes]:
    """The content cut, made longer, with blocks zeroed, swapped or put in twice."""
    chance, size = random.Random(2), len(content)
    found = {"empty": b"", "a byte more": content + b"\0", "twice": content * 2}
    found["after something"] = b"\0" + content
    for length in (1, 2, 22, 71, 72, 93, 512, 4096):
        found[f"cut by {length}"] = content[:-length]
        found[f"without its first {length}"] = content[length:]
        found[f"{length} more"] = content + chance.randbytes(length)
        found[f"its end twice, {length}"] = content + content[-length:]
    for number in range(100):
        at, length = chance.randrange(size), chance.choice([1, 16, 512, 4096])
        block = content[at : at + length]
        found[f"cut at {at}"] = content[:at]
        if block.strip(b"\0"):
            found[f"zeros at {at}, {number}"] = (
                content[:at] + bytes(len(block)) + content[at + length :]
            )
            found[f"without {length} at {at}"] = content[:at] + content[at + length :]
    return found


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_no_flipped_bit_anywhere_goes_unseen(whole, tmp_path, every):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(whole)
    places = flips(whole, 1000)
    assert len(places) > 5000
    places = places[::every]
    unseen = []
    with path.open("r+b", buffering=0) as file:
        for at, bit in places:
            file.seek(at)
            file.write(bytes([whole[at] ^ (1 << bit)]))
            if fault(path) is None:
                unseen.append((at, bit))
            file.seek(at)
            file.write(whole[at : at + 1])
    assert fault(path) is None
    assert unseen == []


def test_nothing_missing_added_or_blank_goes_unseen(whole, tmp_path):
    path = tmp_path / "checkpoint.pt"
    for name, content in changed(whole).items():
        path.write_bytes(content)
        assert fault(path) is not None, name


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES = {
    "weights": lambda content: flipped(content, len(content) // 2),
    "pickle": lambda content: flipped(content, 9000),
    "padding": lambda content: content.replace(b"FB", b"FC", 1),
    "directory": lambda content: content.replace(b"PK\x01\x02", b"PK\x01\x03", 1),
    "digest": lambda content: content[:-1] + bytes([content[-1] ^ 2]),
    "cut": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"\0" * 100,
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "unsigned": lambda content: content[:-73] + b"\0\0",
}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(name, marks=() if name in ("weights", "cut") else pytest.mark.slow)
        for name in DAMAGES
    ],
)
def test_a_damaged_checkpoint_is_never_loaded(whole, tmp_path, damage):
    path = tmp_path / "checkpoint.pt"
    content = DAMAGES[damage](whole)
    assert content != whole
    path.write_bytes(content)
    with pytest.raises(
        CheckpointDamaged, match=r"checkpoint\.pt can't be read as a checkpoint: it"
    ):
        train(TINY, out=tmp_path)
    assert path.read_bytes() == content
    told = set_aside_if_damaged(path)
    aside = tmp_path / "checkpoint.pt.damaged-1"
    assert told.endswith(f"; set aside as {aside}, the run begins anew")
    assert (aside.read_bytes(), path.exists()) == (content, False)
    assert set_aside_if_damaged(path) is None


def test_a_signed_checkpoint_is_one_that_torch_and_zipfile_read(whole, tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(whole)
    assert torch.load(path, weights_only=True)["config"]["data"] == "fake"
    assert zipfile.ZipFile(path).testzip() is None
    assert set_aside_if_damaged(path) is None
    with pytest.raises(ValueError, match="must end as a zip file without a comment does"):
        sign_zip(path)
    assert path.read_bytes() == whole


@pytest.fixture(scope="module")
def home(finished, tmp_path_factory):
    """The directory of a finished run."""
    home = tmp_path_factory.mktemp("finished") / "run"
    finished(home)
    return home


RECORDS = ["config.yaml", "metrics.jsonl", "result.json", "done.json", "environment.json"]


@pytest.mark.parametrize("every", [29, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_with_a_flipped_bit_is_not_believed(home, name, every):
    run = json.loads((home / "done.json").read_text())["run"]
    assert read_result(home, run) is not None
    path, chance = Path(home / name), random.Random(3)
    content = path.read_bytes()
    believed = []
    try:
        for at in range(0, len(content), every):
            flipped = bytearray(content)
            flipped[at] ^= 1 << chance.randrange(8)
            path.write_bytes(flipped)
            try:
                read_result(home, run)
                believed.append(at)
            except Damaged:
                continue
    finally:
        path.write_bytes(content)
    assert believed == []


@pytest.mark.parametrize("every", [149, pytest.param(7, marks=pytest.mark.slow)])
def test_a_studys_record_with_a_flipped_bit_is_not_believed(tmp_path, every):
    study = make_study(drop=replace(TINY, spec=DROP), none=TINY)
    write_json(tmp_path / "study.json", study.record("python scripts/ablate.py"))
    record, runs = read_runs(tmp_path)
    content, chance = (tmp_path / "study.json").read_bytes(), random.Random(4)
    refused = 0
    for at in range(0, len(content), every):
        flipped = bytearray(content)
        flipped[at] ^= 1 << chance.randrange(8)
        (tmp_path / "study.json").write_bytes(flipped)
        try:  # a blank may become another one
            assert read_runs(tmp_path) == (record, runs), at
        except ValueError:
            refused += 1
    assert refused > len(content) / every / 2


def test_a_studys_record_without_a_digest_is_read(tmp_path):
    record = make_study().record("python scripts/ablate.py")
    del record["sha256"]
    write_json(tmp_path / "study.json", record)
    assert len(read_runs(tmp_path)[1]) == 4
    write_json(tmp_path / "study.json", {**record, "sha256": "0"})
    with pytest.raises(
        ValueError, match=r"study\.json is not .*: it was changed since it was written"
    ):
        read_runs(tmp_path)
