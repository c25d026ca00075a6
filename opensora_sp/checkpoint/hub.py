"""Weights and adapters by their names on the hub: ``owner/repository[/path][@revision]``.

Files come into the cache of huggingface_hub. One process of a node downloads a repository, while
the other ranks wait for it. Safetensors are preferred; pickles are downloaded only where they
may be read.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

logger = logging.getLogger(__name__)

_NAME = re.compile(r"([\w.-]+/[\w.-]+)/?([\w./-]*)(?:@([\w./-]+))?", re.ASCII)
# Fetched with the weights.
_ABOUT = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class Kind:
    """Kind of files to fetch from a repository.

    Attributes:
        noun, content: of the source and of what it holds, for messages.
        safetensors: patterns of the files of a folder: the first group whose first pattern it has.
        pickles: patterns where there are no safetensors.
        advice: what to do with pickles; may name the source and a ``{target}`` folder for it.
    """

    noun: str
    content: str
    safetensors: tuple[tuple[str, ...], ...]
    pickles: tuple[str, ...]
    advice: str


WEIGHTS = Kind(
    "checkpoint",
    "weights",
    # Shards go with their index. Without a known name, all safetensors of the folder.
    (
        ("model.safetensors",),
        ("model.safetensors.index.json", "model-*.safetensors"),
        ("diffusion_pytorch_model.safetensors",),
        ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model-*.safetensors"),
        ("*.safetensors", "*.safetensors.index*.json"),
    ),
    ("*.bin", "*.bin.index*.json", "*.pt", "*.pth"),
    "convert them once: opensora-sp convert {name} {target} --allow-pickle, or pass "
    "allow_pickle=True (--allow-pickle)",
)
ADAPTERS = Kind(
    "adapters",
    "LoRA adapters",
    (("adapter_model.safetensors",),),
    ("adapter_model.bin",),
    "save them with peft's save_pretrained(..., safe_serialization=True)",
)


@dataclass(frozen=True)
class HubName:
    """A repository of models on the hub, a file or folder in it, and a branch, tag or commit."""

    repository: str
    path: str = ""
    revision: str | None = None

    @classmethod
    def parse(cls, source: str) -> HubName | None:
        """The parts of a name; None for what cannot be one."""
        match = _NAME.fullmatch(source)
        return None if match is None else cls(match[1], match[2].strip("/"), match[3])

    @classmethod
    def of_missing(cls, source: str) -> HubName | None:
        """The name that a path which is not on disk may be; None for a path into a folder here."""
        in_folder = Path(source.partition("/")[0]).is_dir()
        is_path = in_folder or source.startswith((".", "~", "/"))
        return None if is_path else cls.parse(source)

    def within(self, subfolder: str) -> HubName:
        """The name of a folder inside this one."""
        path = PurePosixPath(self.path, subfolder)
        return replace(self, path="" if path == PurePosixPath() else str(path))

    def __str__(self) -> str:
        path = f"/{self.path}" if self.path else ""
        return f"{self.repository}{path}" + (f"@{self.revision}" if self.revision else "")


def describe_missing(path: str | Path) -> str:
    """The first part of a path that is no folder, with the names there that are most like it."""
    folder, name = Path(path).parent, Path(path).name
    while not folder.is_dir():
        folder, name = folder.parent, folder.name
    if (folder / name).exists():
        return f"{folder.absolute() / name} is a file"

    names: list[str] = []
    with suppress(OSError):
        names = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    # In a folder that was named, any may have been meant; the working directory has all sorts.
    cutoff = 0.6 if folder == Path() else 0.0
    nearest = difflib.get_close_matches(name, names, n=4, cutoff=cutoff)
    there = f", nearest: {', '.join(nearest)}" if nearest else ""
    return f"{folder.absolute()} has no {name!r}{there}"


def answers() -> bool:
    """True if the hub can be reached; the libraries themselves try for a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    # Errors depend on the HTTP library.
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:
        return False
    return True


def snapshot(name: HubName, patterns: Sequence[str], *, is_online: bool) -> Path:
    """The folder in the hub's cache of a repository, of which files like ``patterns`` are fetched.

    Raises:
        OSError, ValueError: if there is no such repository, or neither hub nor cache has it.
    """
    from huggingface_hub import snapshot_download

    with _only_process(name.repository) if is_online else nullcontext():
        folder = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=list(patterns),
            local_files_only=not is_online,
        )
    return Path(folder)


@contextmanager
def _only_process(repository: str) -> Iterator[None]:
    """Inside, no other process of the node downloads a repository.

    huggingface_hub's own lock, of a file, let the next process link the file again: it is missing
    for a moment, in which the process before may open it.
    """
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, ".locks")
    with ExitStack() as stack:
        # Nobody downloads into a cache that cannot be written; what it has is read.
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            name = f"opensora_sp--{repository.replace('/', '--')}.lock"
            stack.enter_context(FileLock(folder / name))
        yield


def local_path(source: str | Path, subfolder: str = "", **options: Any) -> Path:
    """A path on this machine: ``source`` itself, or what the hub has by this name.

    Args:
        subfolder: a folder inside of it.
        options: see ``fetch``.

    Raises:
        ValueError: if it is a name on the hub that cannot be downloaded.
    """
    name = None if Path(source).exists() else HubName.of_missing(str(source))
    return Path(source, subfolder) if name is None else fetch(name.within(subfolder), **options)


# A run opens its weights more than once: each time the same commit.
@lru_cache(maxsize=16)
def fetch(
    name: HubName, *, kind: Kind = WEIGHTS, allow_pickle: bool = False, more: tuple[str, ...] = ()
) -> Path:
    """The path in the cache of weights on the hub: a file, or a folder with ``config.json``.

    Args:
        kind: fetch adapters instead.
        allow_pickle: also fetch pickled weights, where there are no others.
        more: patterns of further files in the same folder.

    Raises:
        ValueError: if hub or cache do not have it, or it holds no weights that may be read.
    """
    from huggingface_hub import list_repo_files

    try:
        is_online = answers()
        if is_online:
            listed = list_repo_files(name.repository, revision=name.revision)
        else:
            folder = snapshot(name, (), is_online=False)
            files = [path for path in folder.rglob("*") if path.is_file()]
            listed = [path.relative_to(folder).as_posix() for path in files]

        wanted = chosen_files(name, listed, kind, allow_pickle=allow_pickle, more=more)
        if is_online:
            folder = snapshot(name, wanted, is_online=True)
    except NoWeightsError:
        raise
    # Errors of huggingface_hub depend on its version and its HTTP library.
    except Exception as error:
        raise _not_fetched(name, kind, error) from error

    logger.info("%s: %s of the hub is commit %s, in %s", kind.content, name, folder.name, folder)
    return folder / name.path


class NoWeightsError(ValueError):
    """A repository holds no weights, or no adapters, that may be read."""


def chosen_files(
    name: HubName,
    listed: Sequence[str],
    kind: Kind = WEIGHTS,
    *,
    allow_pickle: bool,
    more: Sequence[str] = (),
) -> list[str]:
    """The files of a repository that are needed to read the weights at a name.

    Raises:
        NoWeightsError: if there are none, with the files that there are.
    """
    if name.path in listed:
        weights, folder = [name.path], PurePosixPath(name.path).parent
    else:
        folder = PurePosixPath(name.path)
        here = [file for file in listed if PurePosixPath(file).parent == folder]
        weights = _weights_among(here, kind, allow_pickle=allow_pickle)

    if not weights:
        raise _no_weights(name, kind, listed, folder)
    about = {str(folder / pattern) for pattern in (*_ABOUT, *more)}
    return [*weights, *(file for file in listed if any(fnmatchcase(file, p) for p in about))]


def _weights_among(files: Sequence[str], kind: Kind, *, allow_pickle: bool) -> list[str]:
    """The weights among the files of one folder: safetensors, or else pickles."""
    for patterns in kind.safetensors:
        if any(_is_like(file, patterns[:1]) for file in files):
            return [file for file in files if _is_like(file, patterns)]
    return [file for file in files if allow_pickle and _is_like(file, kind.pickles)]


def _is_like(file: str, patterns: Sequence[str]) -> bool:
    name = PurePosixPath(file).name
    return not is_optimizer(name) and any(fnmatchcase(name, pattern) for pattern in patterns)


def is_optimizer(name: str) -> bool:
    """True if a file holds the state of an optimizer, by its name."""
    return name.startswith(("optim", "pytorch_optim"))


def _no_weights(
    name: HubName, kind: Kind, listed: Sequence[str], folder: PurePosixPath
) -> NoWeightsError:
    here = [file for file in listed if PurePosixPath(file).parent == folder]
    pickles = [file for file in here if _is_like(file, kind.pickles)]
    if pickles:
        target = f"{PurePosixPath(name.repository).name}-safetensors"
        return NoWeightsError(
            f"got {kind.noun} {str(name)!r} on the hub, whose weights ({pickles[0]}) are pickled, "
            "and a pickle can run code as it is read; expected safetensors; "
            f"{kind.advice.format(name=name, target=target)}"
        )

    there = ", ".join(sorted(listed)[:8]) or "nothing"
    if len(listed) > 8:
        there += f" and {len(listed) - 8} more"
    return NoWeightsError(
        f"got {kind.noun} {str(name)!r} on the hub, which holds no {kind.content} there; expected "
        f"a file of that kind, or a folder with one; there are: {there}; name one of these as "
        f"{name.repository}/PATH, or check the name"
    )


def _not_fetched(name: HubName, kind: Kind, error: Exception) -> ValueError:
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    # Errors of huggingface_hub have several lines, and a page of advice.
    text = " ".join(str(error).split())[:300] or type(error).__name__
    reason = f"cannot be fetched from the hub ({text})"
    if isinstance(error, LocalEntryNotFoundError):
        is_offline = constants.HF_HUB_OFFLINE
        because = "HF_HUB_OFFLINE=1 is set" if is_offline else "the hub cannot be reached"
        reason = f"not in the hub's cache, while {because}"
    revision = f" --revision {name.revision}" if name.revision else ""
    return ValueError(
        f"got {kind.noun} {str(name)!r}, which is not on disk ({describe_missing(str(name))}) and, "
        f"read as a name, {reason}; expected a path, or a name on the hub and a "
        "network to fetch it; check the path, which is relative to the working directory, or "
        f"download the name where there is a network: hf download {name.repository}{revision} "
        "--local-dir DIR (`hf auth login` for private ones)"
    )
