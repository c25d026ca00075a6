"""Other hosts, reached as ``colossalai run`` reaches them: by fabric, with the user's ssh config, keys and agent."""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import fabric
import paramiko

from opensora_sp.runtime.environment import is_loopback
from opensora_sp.runtime.host_checks import interfaces

from .host_report import PASSED_ON, Check, Report

CONNECT = 5  # seconds
LARGEST_SKEW = (
    5.0  # seconds; torchrun's c10d rendezvous takes a host for dead whose clock is 15 s behind
)
NOTICEABLE_SKEW = 1.0


def read_hostfile(path: str) -> list[str]:
    """The hosts of a hostfile of ``colossalai run``: one name or address a line.

    Raises:
        ValueError: if there is no such file, or a line that ``colossalai run`` would not understand.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"got hostfile {path!r}, which is not a file; expected one host a line; correct the path"
        )
    hosts = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
    for number, host in enumerate(hosts):
        if len(host.split()) > 1 or host.startswith("#"):
            raise ValueError(
                f"got the line {host!r} in {path}; expected a bare host name or address, which is all that colossalai "
                "run understands (no comments, no slots); shorten it"
            )
        if host in hosts[:number]:
            raise ValueError(
                f"got the host {host!r} twice in {path}; expected every host once; remove one"
            )
    if not hosts:
        raise ValueError(
            f"got hostfile {path!r} without a host; expected one host a line; add them"
        )
    return hosts


def is_this_host(name: str) -> bool:
    """Whether a name means one of this machine's own addresses."""
    own = {address for addresses in interfaces().values() for address in addresses}
    try:
        found = {
            str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        }
    except OSError:
        return False
    return any(address in own or is_loopback(address) for address in found)


@dataclass
class Remote:
    """A host and the way to it. Commands run in the folder and with the variables that a launcher would take along."""

    name: str
    connection: fabric.Connection

    @classmethod
    def of(cls, name: str, port: int) -> Remote:
        """Not connected yet."""
        return cls(name, fabric.Connection(name, port=port, connect_timeout=CONNECT))

    def connect(self) -> Check:
        """Log in and run a command; one that fails says why."""
        start = time.perf_counter()
        try:
            self.connection.open()
            opened = time.perf_counter() - start
            done = self._run(f"cd {shlex.quote(os.getcwd())}")
            if done.failed:
                advice = "colossalai run starts everything in this folder: share it, or copy the project there"
                return Check("ssh", f"no folder {os.getcwd()} there", "FAIL", advice)
            return Check("ssh", f"logged in within {opened:.2f} s")
        except (
            Exception
        ) as error:  # fabric lets pass whatever paramiko, invoke and the system raise
            found, advice = _explained(error, self.name)
            return Check("ssh", found, "FAIL", advice)

    def clock(self) -> Check:
        """How far the clocks are apart, to half of the shortest round trip."""
        trips = []
        for _ in range(3):
            before = time.time()
            there = float(self._run("date +%s.%N").stdout)
            after = time.time()
            trips.append((after - before, there - (before + after) / 2))
        trip, skew = min(trips)
        found = f"{skew:+.3f} s from here, to {trip / 2:.3f} s"
        if abs(skew) > NOTICEABLE_SKEW + trip / 2:
            advice = "set the clocks by NTP: torchrun's rendezvous loses hosts that are 15 s behind"
            return Check("clock", found, "FAIL" if abs(skew) > LARGEST_SKEW else "warn", advice)
        return Check("clock", found)

    def examine(self, *options: str, seconds: float) -> Report:
        """What ``opensora-sp doctor`` says there.

        Raises:
            ValueError: if it cannot be run there.
        """
        done = self.python(
            "-m",
            "opensora_sp.cli",
            "doctor",
            "--json",
            "--no-collective",
            *options,
            seconds=seconds,
        )
        try:
            return Report.from_dict(json.loads(done.stdout))
        except (json.JSONDecodeError, KeyError, TypeError):
            said = (
                done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["nothing"]
            )[-1]
            raise ValueError(
                f"got {said!r} from {sys.executable} on {self.name}; expected opensora-sp of this version to run "
                "there; install it in an environment at the same path on every host"
            ) from None

    def python(self, *arguments: str, seconds: float) -> fabric.Result:
        """Run this Python there, for so long at most, in this folder and environment."""
        sent = {
            name: value
            for name, value in os.environ.items()
            if PASSED_ON.fullmatch(name) and "\n" not in value
        }
        words = [
            "timeout",
            "-k",
            "5",
            str(seconds),
            "env",
            *(f"{name}={value}" for name, value in sent.items()),
        ]
        return self._run(
            f"cd {shlex.quote(os.getcwd())} && {shlex.join([*words, sys.executable, *arguments])}"
        )

    def _run(self, command: str) -> fabric.Result:
        return self.connection.run(command, hide=True, warn=True, in_stream=False)


def _explained(error: Exception, name: str) -> tuple[str, str]:
    """What went wrong with ssh, and what to do about it."""
    if isinstance(error, socket.gaierror):
        return "unknown host name", "correct the hostfile, or add the name to DNS or /etc/hosts"
    refused = isinstance(error, ConnectionRefusedError)
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        causes = {getattr(one, "errno", None) for one in error.errors.values()}
        refused = errno.ECONNREFUSED in causes
    if refused:
        return (
            "connection refused: no ssh server at this port",
            "start sshd there, or pass --ssh-port",
        )
    if isinstance(error, (paramiko.AuthenticationException, paramiko.PasswordRequiredException)):
        return (
            "no key that it accepts",
            f"ssh-copy-id {name}; logging in must work without a password",
        )
    if isinstance(error, (TimeoutError, paramiko.ssh_exception.NoValidConnectionsError)):
        return "not reachable", "check that it runs, its address, and firewalls"
    if isinstance(error, OSError):
        return (
            f"not reachable: {error.strerror or error}",
            "check that it runs, its address, and firewalls",
        )
    if isinstance(error, paramiko.SSHException) and "No authentication methods" in str(error):
        return "no key to log in with", f"ssh-keygen and ssh-copy-id {name}, or start an ssh agent"
    return f"{type(error).__name__}: {error}", f"try: ssh {name} true"
