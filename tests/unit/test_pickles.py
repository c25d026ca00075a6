"""Pickled weights: read with a few operations of the unpickler, and never by ``torch.load``."""

from __future__ import annotations

import copyreg
import pickle
import struct
import time
import warnings
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from hostile import RunsWhenUnpickled, check_torchscript_attacks, write_torchscript
from torch import nn

from opensora_sp.checkpoint.pickle_file import open_pickle
from opensora_sp.checkpoint.reader import open_weights


def write_zip(file: Path, content: bytes) -> None:
    """An archive as of ``torch.save``, of a pickle and a storage of 4 bytes."""
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr("a/data.pkl", content)
        opened.writestr("a/data/0", bytes(4))


def test_tensors_are_those_that_torch_reads(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        **nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 3, 3).bfloat16()).state_dict(),
        "transposed": base.t(),
        "slice": base[1:, 1:3],
        "tied": base,
        "expanded": torch.ones(1).expand(3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "parameter": nn.Parameter(torch.ones(3)),
        "flags": torch.tensor([True, False, True]),
        "numbers": torch.tensor([-1, 1 << 40]),
        "eight bits": torch.ones(5).to(torch.float8_e4m3fn),
        "half": torch.ones(5).half(),
    }
    file = tmp_path / "a.pt"
    torch.save({"rng": torch.zeros(2), "state_dict": state}, file)

    tensors, notes = open_pickle(file, ema=False)
    assert notes == ("took 'state_dict' of the keys ['rng', 'state_dict']",)
    assert list(tensors) == list(state)
    for name, wanted in state.items():
        read = tensors[name]
        assert (read.dtype, read.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(read.double(), wanted.double()), name


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    mark, file = tmp_path / "ran", tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1), "b": RunsWhenUnpickled(mark)}, file)
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


def doubled_tuple(levels: int = 60) -> bytes:
    """Operations that make a tuple of pairs of pairs, which takes 2**levels steps to hash."""
    return b"K\x01" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(levels))


def long_number(number: int) -> bytes:
    content = number.to_bytes(40, "little")
    return b"\x8a" + bytes([len(content)]) + content


# A reference to a storage of one number, as memo 1.
STORAGE = b"\x80\x02(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x01tq\x01"

# What each would take: days to hash, hours of collisions, terabytes of memory, hours of copies.
BOMBS = {
    "a key of pairs of pairs": b"\x80\x02}" + doubled_tuple() + b"K\x01s.",
    "a set of pairs of pairs": b"\x80\x02cbuiltins\nset\n]" + doubled_tuple() + b"a\x85R.",
    "keys of the same hash": b"\x80\x02}("
    + b"".join(long_number(n * (2**61 - 1)) + b"N" for n in range(100_000))
    + b"u.",
    "operations": b"\x80\x02" + b"N" * 3_000_000 + b".",
    "bytes": b"\x80\x02X" + struct.pack("<I", 20 << 20) + b"a" * (20 << 20) + b".",
    "a text longer than the file": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"abc.",
    "nested lists": b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b".",
    "marks": b"(" * 300_000 + b"t.",
    "many arguments": b"\x80\x02]q\x00("
    + b"N" * 500_000
    + b"tq\x01"
    + b"ctorch\nSize\nh\x01R" * 100_000
    + b"N.",
    "references of many parts": b"\x80\x02("
    + b"N" * 500_000
    + b"tq\x01"
    + b"h\x01Q" * 100_000
    + b".",
    "dicts": b"\x80\x02" + b"}" * 8_000_000 + b".",
    "storages": STORAGE + b"h\x01Q" * 2_000_000 + b".",
    "a dtype that is a shape of any length": STORAGE
    + b"h\x01Qq\x02("
    + b"K\x01" * 500_000
    + b"tq\x03ctorch._utils\n_rebuild_tensor_v3\nq\x04(h\x02K\x00K\x01\x85q\x05h\x05N}h\x03tq\x06"
    + b"h\x04h\x06R" * 100_000
    + b".",
    "tensors of tensors": b"\x80\x02N"
    + b"ctorch._tensor\n_rebuild_from_type_v2\nq\x00N"
    + b"h\x00Nh\x00N)\x87q\x01" * 10
    + b"h\x01R.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_takes_little_time_and_memory(name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    write_zip(file, BOMBS[name])

    started = time.process_time()
    with pytest.raises(ValueError, match="got .*a.bin, which .*; expected ") as error:
        open_weights(file, allow_pickle=True)
    assert time.process_time() - started < 10
    assert len(str(error.value)) < 700


def test_an_archive_has_no_bombs(tmp_path: Path) -> None:
    """Neither compressed members, nor a directory of any length."""
    file, state = tmp_path / "a.bin", pickle.dumps({"a": 1}, protocol=2)
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(file, "w", method) as opened:
            opened.writestr("a/data.pkl", state + bytes(1 << 20))
        with pytest.raises(ValueError, match="a.bin, which cannot be read .*data.pkl is"):
            open_weights(file, allow_pickle=True)

    directory_size, zeros = 1 << 40, bytes(4)
    with file.open("wb") as opened:
        opened.write(b"PK\x03\x04")
        opened.truncate(directory_size)
        opened.seek(0, 2)
        end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, directory_size - 4, 4)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, directory_size, 1)
        opened.write(end + locator + b"PK\5\6" + zeros + b"\xff" * 12 + b"\0\0")
    with pytest.raises(ValueError, match=r"which is a damaged zip archive \(RefusedError\)"):
        open_weights(file, allow_pickle=True)


@pytest.mark.parametrize("length", [1, 2])
def test_wrappers_that_hold_each_other_end_at_once(length: int, tmp_path: Path) -> None:
    wrappers: list[dict[str, Any]] = [{} for _ in range(length)]
    for number, wrapper in enumerate(wrappers):
        wrapper["model"] = wrappers[(number + 1) % length]
    torch.save(wrappers[0], tmp_path / "a.bin")
    with pytest.raises(ValueError, match="which holds dict under 'model'; expected a state dict"):
        open_weights(tmp_path / "a.bin", allow_pickle=True)


@dataclass(frozen=True)
class Bytes:
    """A storage that a file claims to have; ``kind`` is the class of torch."""

    num_items: Any = 2
    key: Any = "0"
    kind: Any = torch.FloatStorage


@dataclass(frozen=True)
class Claim:
    """A tensor that a file claims to have."""

    offset: Any = 0
    shape: Any = (2,)
    stride: Any = (1,)
    storage: Any = Bytes()

    def __reduce__(self) -> tuple[Any, ...]:
        view = (self.storage, self.offset, self.shape, self.stride, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, view


class ClaimPickler(pickle.Pickler):
    def persistent_id(self, claimed: Any) -> Any:
        if not isinstance(claimed, Bytes):
            return None
        return "storage", claimed.kind, claimed.key, "cpu", claimed.num_items


def write_claims(file: IO[bytes], claims: Any) -> None:
    with zipfile.ZipFile(file, "w") as opened:
        with opened.open("a/data.pkl", "w") as member:
            ClaimPickler(member, protocol=2).dump(claims)
        opened.writestr("a/data/0", bytes(8))
        opened.writestr("a/data/1", bytes(1 << 12))


@pytest.mark.parametrize(
    "claim",
    [
        Claim(offset=1 << 40),
        Claim(offset=-8),
        Claim(offset=1),
        Claim(offset=0.0),
        Claim(shape=(3,)),
        Claim(shape=(1 << 40,)),
        Claim(shape=(1 << 40,), stride=(0,)),
        Claim(shape=(1 << 62,)),
        Claim(stride=(-1,)),
        Claim(stride=(1 << 62,)),
        Claim(stride=()),
        Claim(shape=(1,) * 65, stride=(1,) * 65),
        Claim(shape=(0, 1 << 70), stride=(1, 1)),
        Claim(shape=("2",)),
        Claim(shape=(None,)),
        Claim(storage=Bytes(key="2")),
        Claim(storage=Bytes(kind=torch.DoubleStorage)),
        Claim(shape=[2]),
        Claim(stride=None),
        Claim(storage=None),
        Claim(storage=Bytes(key=3)),
        Claim(storage=Bytes(num_items="2")),
        Claim(storage=Bytes(kind="FloatStorage")),
        Claim(storage=Bytes(num_items=1 << 40)),
        # Torch itself accepts both: 4 * 2**62 overflows to 0.
        Claim(storage=Bytes(num_items=1 << 62)),
        Claim(storage=Bytes(num_items=-1)),
    ],
    ids=range(26),
)
def test_a_tensor_outside_of_its_storage_is_refused(claim: Claim, tmp_path: Path) -> None:
    with (tmp_path / "a.bin").open("wb") as opened:
        write_claims(opened, {"a": Claim(), "b": claim})
    with pytest.raises(ValueError, match="which (cannot be read|lists 2 tensors of) .*; expected"):
        open_weights(tmp_path / "a.bin", allow_pickle=True)


def test_tied_weights_have_many_names_but_not_any_number(tmp_path: Path) -> None:
    shared, file = torch.arange(1000.0), tmp_path / "a.bin"
    torch.save({str(n): shared for n in range(6)}, file)
    tensors, _ = open_pickle(file, ema=False)
    assert all(torch.equal(tensor, shared) for tensor in tensors.values())

    torch.save({str(n): shared for n in range(20)}, file)
    with pytest.raises(ValueError, match="lists 20 tensors of 80000 bytes; expected .* at most 8"):
        open_pickle(file, ema=False)


def test_a_file_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    """A mapping that could be written would be charged in full: 1 TiB of a file without blocks."""
    file, num_items = tmp_path / "a.bin", 1 << 38
    last = Claim(offset=num_items - 2, storage=Bytes(num_items))
    storage = zipfile.ZipInfo("a/data/0")
    storage.CRC, storage.file_size = 0, 4 * num_items
    storage.compress_size = storage.file_size
    with file.open("wb") as raw, zipfile.ZipFile(raw, "w") as opened:
        with opened.open("a/data.pkl", "w") as member:
            ClaimPickler(member, protocol=2).dump({"a": last})
        storage.header_offset = raw.tell()
        raw.write(storage.FileHeader(zip64=True))
        opened.start_dir = raw.seek(4 * num_items, 1)
        opened.filelist.append(storage)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors, _ = open_pickle(file, ema=False)
    assert tensors["a"].tolist() == [0, 0]


def test_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.bin")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no address space")

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(ValueError, match="a.bin, which cannot be mapped into memory .*; expected"):
        open_pickle(tmp_path / "a.bin", ema=False)


def test_a_message_cannot_control_the_terminal(tmp_path: Path) -> None:
    write_zip(tmp_path / "a.bin", b"\x80\x02c\x1b[2Jos\nsystem\n.")
    with pytest.raises(ValueError, match=r"plain values \(\?\[2Jos.system\)"):
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
        {"a": torch.ones(1), "step": 7},
        {"\x1b[2J": torch.ones(1)},
        [1, 2],
    ],
    ids=range(11),
)
def test_other_content_is_one_sentence(content: Any, tmp_path: Path) -> None:
    if isinstance(content, dict) and content.get("a") is copyreg:
        # A reference to a module's function by the opcode of protocol 4.
        write_zip(tmp_path / "a.bin", pickle.dumps(copyreg.pickle, protocol=4))
    else:
        torch.save(content, tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"got .*a.bin, which .*; expected ") as error:
        open_weights(tmp_path / "a.bin", allow_pickle=True)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"", "empty"),
        (b"import os\n" * 90, "data of another format that begins with b'import os"),
        (b"\0\0\0 ftypisom\0\0\2\0" + bytes(range(256)), "data of another format .*ftypisom"),
        (b"PK\3\4" + bytes(99), "a damaged zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (pickle.dumps({"a": 1}), "a bare pickle"),
    ],
    ids=["empty", "python", "mp4", "zip", "lfs", "pickle"],
)
def test_a_file_without_weights_is_described_by_its_content(
    content: bytes, name: str, tmp_path: Path
) -> None:
    """And no option that would allow more is advised."""
    (tmp_path / "a.bin").write_bytes(content)
    for allowed in (False, True):
        with pytest.raises(ValueError, match=rf"a.bin, which is {name}.*; expected weights") as e:
            open_weights(tmp_path / "a.bin", allow_pickle=allowed)
        assert "allow" not in str(e.value)
