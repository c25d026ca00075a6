"""Other hosts, reached by fabric with the user's ssh config, as ``colossalai run`` does."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import fabric
import paramiko
from paramiko.ssh_exception import NoValidConnectionsError

from opensora_sp.json_reader import parse_json
from opensora_sp.runtime.environment import is_loopback, resolve
from opensora_sp.runtime.host_checks import interfaces

from .host_report import FORWARDED, Check, Report

CONNECT_TIMEOUT = 5  # seconds

# Seconds. torchrun's c10d rendezvous drops a host whose clock is 15 s behind.
MAX_SKEW = 5.0
NOTICEABLE_SKEW = 1.0


def read_hostfile(path: str) -> list[str]:
    """The hosts of a hostfile of ``colossalai run``: one name or address per line.

    Raises:
        ValueError: if there is no such file, or a line that ``colossalai run`` does not understand.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"got hostfile {path!r}, which is not a file; expected one host per line; correct the "
            "path"
        )

    hosts = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
    for number, host in enumerate(hosts):
        if len(host.split()) > 1 or host.startswith("#"):
            raise ValueError(
                f"got the line {host!r} in {path}; expected a bare host name or address, which is "
                "all that colossalai run understands (no comments, no slots); shorten it"
            )
        if host in hosts[:number]:
            raise ValueError(
                f"got the host {host!r} twice in {path}; expected every host once; remove one"
            )

    if not hosts:
        raise ValueError(f"got hostfile {path!r} without a host; expected one per line; add them")
    return hosts


def is_this_host(name: str) -> bool:
    """Whether a name resolves to one of this host's own addresses."""
    own = set().union(*interfaces().values())
    try:
        return any(address in own or is_loopback(address) for address in resolve(name))
    except OSError:
        return False


@dataclass
class Remote:
    """A host reached by ssh. Commands run in this folder, with this environment's variables."""

    name: str
    connection: fabric.Connection

    @classmethod
    def of(cls, name: str, port: int) -> Remote:
        """Not connected yet."""
        return cls(name, fabric.Connection(name, port=port, connect_timeout=CONNECT_TIMEOUT))

    def connect(self) -> Check:
        """Log in and run a command; a failed check has the reason."""
        start = time.perf_counter()
        folder = os.getcwd()
        try:
            self.connection.open()
            seconds = time.perf_counter() - start
            done = self._run(f"cd {shlex.quote(folder)}")
        except Exception as error:  # fabric raises errors of paramiko, invoke and the system
            found, advice = _explain(error, self.name)
            return Check("ssh", found, "FAIL", advice)

        if done.failed:
            advice = "colossalai run starts in this folder: share it, or copy the project there"
            return Check("ssh", f"no folder {folder} there", "FAIL", advice)
        return Check("ssh", f"logged in within {seconds:.2f} s")

    def clock(self) -> Check:
        """Clock skew, accurate to half of the shortest round trip."""
        trips = []
        for _ in range(3):
            before = time.time()
            remote = float(self._run("date +%s.%N").stdout)
            after = time.time()
            trips.append((after - before, remote - (before + after) / 2))

        trip, skew = min(trips)
        found = f"{skew:+.3f} s from here, to {trip / 2:.3f} s"
        if abs(skew) > NOTICEABLE_SKEW + trip / 2:
            advice = "set the clocks by NTP: torchrun's rendezvous loses hosts that are 15 s behind"
            return Check("clock", found, "FAIL" if abs(skew) > MAX_SKEW else "warn", advice)
        return Check("clock", found)

    def examine(self, *options: str, timeout: float) -> Report:
        """The report of ``opensora-sp doctor`` on that host.

        Raises:
            ValueError: if it cannot be run there.
        """
        doctor = ["-m", "opensora_sp.cli", "doctor", "--json", "--no-collective"]
        done = self.python(*doctor, *options, timeout=timeout)
        try:
            return Report.from_dict(parse_json(done.stdout, f"the report of {self.name}"))
        except (ValueError, KeyError, TypeError):
            lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines()
            raise ValueError(
                f"got {lines[-1] if lines else 'nothing'!r} from {sys.executable} on {self.name}; "
                "expected opensora-sp of this version to run there; install it in an environment "
                "at the same path on every host"
            ) from None

    def python(self, *arguments: str, timeout: float) -> fabric.Result:
        """Run this Python there, for so many seconds at most, in this folder and environment."""
        variables = [
            f"{name}={value}"
            for name, value in os.environ.items()
            if FORWARDED.fullmatch(name) and "\n" not in value
        ]
        limited = ["timeout", "-k", "5", str(timeout), "env", *variables]
        command = shlex.join([*limited, sys.executable, *arguments])
        return self._run(f"cd {shlex.quote(os.getcwd())} && {command}")

    def _run(self, command: str) -> fabric.Result:
        return self.connection.run(command, hide=True, warn=True, in_stream=False)


def _explain(error: Exception, name: str) -> tuple[str, str]:
    """The cause of a failed login, and what to do about it."""
    if isinstance(error, socket.gaierror):
        return "unknown host name", "correct the hostfile, or add the name to DNS or /etc/hosts"
    if isinstance(error, NoValidConnectionsError) and any(
        getattr(cause, "errno", None) == errno.ECONNREFUSED for cause in error.errors.values()
    ):
        found = "connection refused: no ssh server at this port"
        return found, "start sshd there, or pass --ssh-port"

    if isinstance(error, (paramiko.AuthenticationException, paramiko.PasswordRequiredException)):
        advice = f"ssh-copy-id {name}; logging in must work without a password"
        return "no key that it accepts", advice
    if isinstance(error, paramiko.SSHException) and "No authentication methods" in str(error):
        advice = f"ssh-keygen and ssh-copy-id {name}, or start an ssh agent"
        return "no key to log in with", advice

    if isinstance(error, OSError):
        found = f"not reachable: {error.strerror or error}"
        return found, "check that it runs, its address, and firewalls"
    return f"{type(error).__name__}: {error}", f"try: ssh {name} true"
