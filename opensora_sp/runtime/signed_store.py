"""A store that others may reach too, in which only the ranks of one run can read and write.

torch's ``TCPStore`` answers whoever connects: any process that reaches its port could end a run, in
the name of a rank. Here the names of entries are digests, which nobody else can guess, and each
entry has a signature (HMAC-SHA-256). Both depend on a token that rank 0 draws for each run. An
entry without the right signature, such as one of another run or of another name, counts as absent.
"""

from __future__ import annotations

import hmac
import logging
from typing import Any

logger = logging.getLogger(__name__)
DIGEST_BYTES = 32  # of SHA-256


class SignedStore:
    """Texts by name in a store of torch.

    Args:
        store: a ``torch.distributed.Store``, or a ``BoundedStore`` of one.
        token: secret bytes that the ranks of this run alone know.
    """

    def __init__(self, store: Any, token: bytes) -> None:
        self._store, self._token = store, token
        self._has_warned = False

    def set(self, name: str, text: str) -> None:
        self._store.set(self._key(name), self._signed(name, text))

    def get(self, names: list[str]) -> list[str | None]:
        """The text of each name, which must have been set; None where a stranger replaced it."""
        entries = self._store.multi_get([self._key(name) for name in names])
        return [self._verified(name, entry) for name, entry in zip(names, entries)]

    def contains(self, names: list[str]) -> bool:
        """Whether all these names have been set."""
        return bool(self._store.check([self._key(name) for name in names]))

    def replace(self, name: str, expected: str, text: str) -> str:
        """Set a text if it is ``expected``, or a stranger's; returns the text thereafter."""
        expected_entry, entry = self._signed(name, expected), self._signed(name, text)
        found = self._store.compare_set(self._key(name), expected_entry, entry)
        result = self._verified(name, found)

        if result is None:
            self.set(name, text)
        return text if result is None else result

    def _key(self, name: str) -> str:
        return self._digest("name", name).hex()

    def _signed(self, name: str, text: str) -> str:
        # Paths in messages may have bytes that are no text.
        text = text.encode(errors="replace").decode()
        return self._digest("entry", name, text).hex() + text

    def _verified(self, name: str, entry: bytes) -> str | None:
        signature, content = entry[: 2 * DIGEST_BYTES], entry[2 * DIGEST_BYTES :]
        text = content.decode(errors="replace")
        if hmac.compare_digest(signature, self._digest("entry", name, text).hex().encode()):
            return text

        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "got an entry in the watchdog's store that no rank of this run has signed; "
                "expected none but the ranks to reach its port; ignored; see docs/security.md"
            )
        return None

    def _digest(self, *parts: str) -> bytes:
        return hmac.digest(self._token, "\0".join(parts).encode(), "sha256")
