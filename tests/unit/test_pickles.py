"""Pickled weights: read by a process that can do nothing else, and never by torch."""

from __future__ import annotations

import copyreg
import errno
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import RunsWhenUnpickled, check_torchscript_attacks, write_torchscript
from torch import nn

from opensora_sp.checkpoint import open_weights, pickle_file
from opensora_sp.checkpoint.pickle_file import open_pickle

ROOT = Path(__file__).parents[2]
LEGACY = {"_use_new_zipfile_serialization": False}


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "before torch 1.6"])
def test_tensors_are_those_that_torch_reads(options: dict[str, Any], tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    with_attribute = torch.ones(2)
    with_attribute.note = "kept by torch"
    state = {
        **nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 3, 3).bfloat16()).state_dict(),
        "transposed": base.t(),
        "slice": base[1:, 1:3],
        "tied": base,
        "expanded": torch.ones(1).expand(3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "parameter": nn.Parameter(torch.ones(3)),
        "with attribute": with_attribute,
        "flags": torch.tensor([True, False, True]),
        "numbers": torch.tensor([-1, 1 << 40]),
        "eight bits": torch.ones(5).to(torch.float8_e4m3fn),
        "half": torch.ones(5).half(),
    }
    file = tmp_path / "a.pt"
    torch.save({"epoch": 3, "state_dict": state}, file, **options)

    tensors, notes = open_pickle(file, ema=False)
    assert notes == ("took 'state_dict' of the keys ['epoch', 'state_dict']",)
    assert list(tensors) == list(state)
    for name, wanted in state.items():
        read = tensors[name].read()
        assert (read.dtype, read.shape, tensors[name].shape) == (wanted.dtype, *[wanted.shape] * 2)
        assert torch.equal(read.double(), wanted.double()), name


def hash_bomb() -> bytes:
    """A short pickle whose key, pairs of pairs, takes 2**60 steps to hash."""
    doubled = b"".join(b"q%ch%c\x86" % (n, n) for n in range(60))
    return b"\x80\x02}K\x01" + doubled + b"K\x01s."


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "before torch 1.6"])
def test_a_pickle_runs_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    mark, file = tmp_path / "ran", tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1), "b": RunsWhenUnpickled(mark)}, file, **options)
    with pytest.raises(ValueError, match=r"holds more than tensors and plain values \(posix.mkdir"):
        open_weights(file, allow_pickle=True)
    assert not mark.exists()

    torch.load(file, weights_only=False)
    assert mark.exists()  # it would have run


def test_a_torchscript_archive_is_not_loaded(tmp_path: Path) -> None:
    mark, file = tmp_path / "written", tmp_path / "pytorch_model.bin"
    write_torchscript(file, mark)
    with pytest.raises(ValueError, match="a TorchScript archive, which holds code"):
        open_weights(file, allow_pickle=True)
    assert not mark.exists()
    check_torchscript_attacks(file, mark)


def test_a_reader_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.bin").write_bytes(hash_bomb())
    monkeypatch.setattr(pickle_file, "MAX_SECONDS", 0.5)
    with pytest.raises(ValueError, match="a.bin, whose reader ended without an answer"):
        open_weights(tmp_path / "a.bin", allow_pickle=True)


ATTEMPTS = """
import ctypes, json, os, resource, signal, socket, subprocess, sys
sys.path.append(sys.argv[1])
from opensora_sp.unpickler.confinement import confine

mark = sys.argv[2]
attempts = dict(
    read=lambda: os.open("/etc/passwd", os.O_RDONLY),
    create=lambda: os.open(mark, os.O_CREAT | os.O_WRONLY),
    folder=lambda: os.mkdir(mark),
    link=lambda: os.symlink("/", mark),
    rename=lambda: os.rename("/etc/passwd", mark),
    delete=lambda: os.unlink("/etc/passwd"),
    truncate=lambda: os.truncate("/etc/passwd", 0),
    mode=lambda: os.chmod("/etc/passwd", 0o777),
    socket=lambda: socket.socket(socket.AF_INET),
    local_socket=lambda: socket.socket(socket.AF_UNIX),
    fork=lambda: os.fork(),
    program=lambda: os.execv("/bin/true", ["true"]),
    signal=lambda: os.kill(os.getppid(), signal.SIGTERM),
    limits=lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)),
    descriptor=lambda: os.dup(0),
    pipe=lambda: os.pipe(),
    memory_file=lambda: os.memfd_create("a"),
)
confine(memory=1 << 30, seconds=1)
found = {}
for name, attempt in attempts.items():
    try:
        attempt()
        found[name] = "done"
    except OSError as error:
        found[name] = error.errno
    except ValueError:
        found[name] = "refused"
# A call that is harmless, and not needed.
found["other"] = ctypes.CDLL(None).getpid()
try:
    bytearray(2 << 30)
    found["memory"] = "done"
except MemoryError:
    found["memory"] = "MemoryError"
sys.stdout.write(json.dumps(found))
sys.stdout.flush()
while True:
    pass
"""


def test_a_confined_process_can_do_nothing(tmp_path: Path) -> None:
    """Code that an attacker runs there, if the unpickler itself had a hole."""
    command = [sys.executable, "-c", ATTEMPTS, str(ROOT), str(tmp_path / "mark")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = json.loads(done.stdout)

    assert found.pop("memory") == "MemoryError", done.stderr
    assert found.pop("limits") in (errno.EPERM, "refused")
    assert found.pop("other") == -1
    assert len(found) == 16 and set(found.values()) == {errno.EPERM}, found
    assert not list(tmp_path.iterdir())
    # Its second of CPU time is over.
    assert done.returncode in (-9, -24)


INSPECT = """
import json, os, sys
found = dict(os.environ), sorted(os.listdir("/proc/self/fd")), os.getcwd(), sys.path
print(json.dumps({"refused": " ".join(map(str, ["got {file},", *found]))}))
"""


def test_the_process_gets_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment, no descriptors, no folder from which it would import."""
    (tmp_path / "a.bin").write_bytes(b"\x80\x02")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    inherited = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    monkeypatch.setattr(pickle_file, "CHILD", INSPECT)

    with pytest.raises(ValueError) as error:
        open_weights(tmp_path / "a.bin", allow_pickle=True)
    os.close(inherited)
    environment, _, rest = str(error.value).partition("} ")
    # LC_CTYPE is Python's own.
    assert environment.removeprefix(f"got {tmp_path}/a.bin, ") in ("{", "{'LC_CTYPE': 'C.UTF-8'")
    # Descriptor 3 is that of the listing itself.
    assert (
        rest.startswith("['0', '1', '2', '3'] / [")
        and "site-packages" not in rest
        and str(ROOT) not in rest
    )


def test_a_machine_that_cannot_confine_reads_no_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.bin")
    other = "import platform; platform.machine = lambda: 'riscv64'; "
    monkeypatch.setattr(pickle_file, "CHILD", other + pickle_file.CHILD)
    with pytest.raises(ValueError, match=r"cannot confine .*riscv64\); expected Linux on x86_64"):
        open_weights(tmp_path / "a.bin", allow_pickle=True)


ROW = {"dtype": "float32", "shape": [2], "stride": [1], "start": 64}


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": {**ROW, "start": 1 << 40}},
        {"a": {**ROW, "start": -8}},
        {"a": {**ROW, "start": 64.0}},
        {"a": {**ROW, "shape": [1 << 40]}},
        {"a": {**ROW, "shape": [1 << 40], "stride": [0]}},
        {"a": {**ROW, "stride": [-1]}},
        {"a": {**ROW, "stride": [1 << 62]}},
        {"a": {**ROW, "stride": []}},
        {"a": {**ROW, "shape": [1] * 65, "stride": [1] * 65}},
        {"a": {**ROW, "shape": [0, 1 << 70], "stride": [1, 1]}},
        {"a": {**ROW, "dtype": "object"}},
        {"a": {**ROW, "shape": None}},
        {"a": {}},
        {"a": []},
        [1],
        {},
    ],
    ids=range(16),
)
def test_a_false_table_is_refused(
    tensors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is not trusted: it has read the foreign bytes."""
    torch.save({"a": torch.ones(2)}, tmp_path / "a.bin")
    answer = {"tensors": tensors, "notes": []} if tensors else {"tensors": {}}
    monkeypatch.setattr(pickle_file, "_ask_child", lambda *_, **__: answer)
    with pytest.raises(ValueError, match="which lists tensors that are not in it"):
        open_weights(tmp_path / "a.bin", allow_pickle=True)


def test_tied_weights_have_many_names_but_not_any_number(tmp_path: Path) -> None:
    shared, file = torch.arange(1000.0), tmp_path / "a.bin"
    torch.save({str(n): shared for n in range(6)}, file)
    tensors, _ = open_pickle(file, ema=False)
    assert all(torch.equal(tensor.read(), shared) for tensor in tensors.values())

    torch.save({str(n): shared for n in range(20)}, file)
    with pytest.raises(ValueError, match="lists 20 tensors of 80000 bytes; expected .* at most 8"):
        open_pickle(file, ema=False)


def test_a_file_larger_than_memory_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping that could be written would be charged in full: 1 TiB of a file without blocks."""
    file, size = tmp_path / "a.bin", 1 << 40
    with file.open("wb") as opened:
        opened.truncate(size)
    answer = {"tensors": {"a": {**ROW, "start": size - 8}}, "notes": []}
    monkeypatch.setattr(pickle_file, "_ask_child", lambda *_, **__: answer)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors, _ = open_pickle(file, ema=False)
    assert tensors["a"].read().tolist() == [0, 0]

    file.write_bytes(b"")
    with pytest.raises(ValueError, match="a.bin, which cannot be mapped into memory .*; expected"):
        open_pickle(file, ema=False)


def test_limits_of_a_batch_system_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hard limits below ours are kept; with too little memory, the error says so."""
    torch.save({"a": torch.ones(1)}, tmp_path / "a.bin")
    child = pickle_file.CHILD
    lower = "import resource; resource.setrlimit(resource.RLIMIT_AS, [512 << 20] * 2); "
    monkeypatch.setattr(pickle_file, "CHILD", lower + child)
    assert open_pickle(tmp_path / "a.bin", ema=False)[0]["a"].read().item() == 1

    monkeypatch.setattr(pickle_file, "CHILD", "raise MemoryError('no \x1b[2J more')")
    with pytest.raises(ValueError, match=r"\(exit status 1: MemoryError: no \?\[2J more\); exp"):
        open_pickle(tmp_path / "a.bin", ema=False)

    refused = "import resource; resource.setrlimit = lambda *_: int('no limits'); "
    monkeypatch.setattr(pickle_file, "CHILD", refused + child)
    with pytest.raises(ValueError, match="cannot confine the process .*no limits"):
        open_pickle(tmp_path / "a.bin", ema=False)


def test_a_message_cannot_control_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x80\x02c\x1b[2Jos\nsystem\n.")
    with pytest.raises(ValueError, match=r"plain values \(\?\[2Jos.system\)"):
        open_weights(tmp_path / "a.bin", allow_pickle=True)


@pytest.mark.parametrize("printed", ["", "[" * 100_000, "[1]", "3", "{"])
def test_an_answer_that_is_none_is_refused(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x80\x02")
    monkeypatch.setattr(pickle_file, "CHILD", f"print({printed!r})")
    with pytest.raises(ValueError, match="whose reader ended without an answer"):
        open_weights(tmp_path / "a.bin", allow_pickle=True)


def nested(levels: int) -> Any:
    """Lists within lists, whose whole text has 2**levels parts."""
    content: Any = [1]
    for _ in range(levels):
        content = [content, content]
    return content


@pytest.mark.parametrize(
    "content",
    [
        nested(200),
        {"state_dict": nested(200)},
        {"a": torch.ones(2), "b": nested(200)},
        {"a": torch.sparse_coo_tensor([[0]], [1.0], (3,))},
        {"a": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)},
        {"a": torch.ones(2, dtype=torch.complex64)},
        {"a": copyreg},
        {"x" * 10_000: 1},
    ],
    ids=range(8),
)
def test_other_content_is_one_sentence(content: Any, tmp_path: Path) -> None:
    if isinstance(content, dict) and content.get("a") is copyreg:
        # A reference to a module's function by the opcode of protocol 4.
        (tmp_path / "a.bin").write_bytes(pickle.dumps(copyreg.pickle, protocol=4))
    else:
        torch.save(content, tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"got .*a.bin, which .*; expected ") as error:
        open_weights(tmp_path / "a.bin", allow_pickle=True)
    assert len(str(error.value)) < 700
