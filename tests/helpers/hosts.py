"""Several "hosts" on this machine, each with its own network, processes, mounts, name and sshd.

A host is a process in new namespaces, and all it starts lives in them: when it is killed,
everything of it is gone, the network included. A bridge in one more such namespace joins the
hosts, so the machine's network is never touched. If the tests are killed, so are the hosts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from polling import wait_until
from runs import BIN, ROOT

TOOLS = ("ip", "unshare", "nsenter", "setpriv", "ssh-keygen")
NETWORK = "10.77.0"
NAMESPACES = ("--net", "--uts", "--mount", "--pid")
UNSHARED = (*NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def lacking() -> str | None:
    """Why there can be no hosts here, None if there can."""
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)) or not Path(SSHD).exists():
        return "no root, or no iproute2 and openssh-server"
    made = subprocess.run(["unshare", *UNSHARED, "true"], capture_output=True).returncode == 0
    return None if made else "no network namespaces"


@dataclass
class Host:
    """A host that runs. ``pid`` is its first process, as seen from outside; ``switch`` the one
    that has the bridge."""

    name: str
    address: str
    folder: Path
    pid: int
    switch: int

    def command(self, *command: str | Path) -> list[str]:
        """The command line that runs a command on the host, in the project's root."""
        inside = ["nsenter", "--target", str(self.pid), *NAMESPACES, f"--wd={ROOT}", "--"]
        return [*inside, "setpriv", "--pdeathsig", "KILL", *map(str, command)]  # ends with nsenter

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Of a user in the virtual environment; small, since colossalai run sends all of it."""
        return {
            "HOME": str(self.folder),
            "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
            **(more or {}),
        }

    def start(
        self, *command: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        options = dict(env=self.environment(env), text=True, stdin=subprocess.DEVNULL)
        outputs = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return subprocess.Popen(self.command(*command), **options, **outputs)

    def run(
        self, *command: str | Path, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        options = dict(env=self.environment(env), text=True, stdin=subprocess.DEVNULL)
        return subprocess.run(
            self.command(*command), capture_output=True, timeout=timeout, **options
        )

    def replace(self, path: Path, text: str, mode: int = 0o644) -> None:
        """Let a file of the machine have another content on this host alone."""
        other = self.folder / f"other-{path.name}"
        other.write_text(text)
        other.chmod(mode)
        self.mount("--bind", other, path)

    def mount(self, *options: str | Path) -> None:
        subprocess.run(self.command("mount", *options), check=True)

    def cut_off(self) -> None:
        """From now on the network drops all packets to and from this host, without a word."""
        _inside(self.switch, "ip", "link", "set", f"to-{self.name}", "down")

    def connect(self) -> None:
        _inside(self.switch, "ip", "link", "set", f"to-{self.name}", "up")

    def ranks(self) -> list[int]:
        """Ranks on this host, without their children; process ids as seen from outside."""
        having = []
        for pid in processes_beside(self.pid):
            if b"\0LOCAL_RANK=" in b"\0" + _of(pid, "environ"):
                having.append(pid)
        return [pid for pid in having if _parent(pid) not in having]


def processes_beside(pid: int) -> list[int]:
    """All processes in the PID namespace of one."""
    namespace = os.readlink(f"/proc/{pid}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "ns/pid") == namespace:
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return found


def _parent(pid: int) -> int:
    fields = _of(pid, "stat").rpartition(b") ")[2].split()
    return int(fields[1]) if fields else 0


def _of(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


@contextmanager
def hosts(folder: Path, *names: str) -> Iterator[list[Host]]:
    """Hosts of these names, which reach each other by name with ssh, without a password."""
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, start=1)}
    lines = ["127.0.0.1 localhost", *(f"{addresses[name]} {name}" for name in names)]
    known = "\n".join([*lines, ""])

    with ExitStack() as running:
        switch = running.enter_context(_namespaces())
        _inside(switch, "ip", "link", "add", "bridge", "type", "bridge")
        _inside(switch, "ip", "link", "set", "bridge", "up")

        made = []
        for name, address in addresses.items():
            home = folder / name
            (home / ".ssh").mkdir(parents=True)
            host = Host(name, address, home, running.enter_context(_namespaces()), switch)
            _connect(switch, host)
            _inside(host.pid, "hostname", name)
            _inside(host.pid, "mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", "/dev/shm")
            host.replace(Path("/etc/hosts"), known)
            _start_sshd(host, key)
            made.append(host)
        yield made


@contextmanager
def _namespaces() -> Iterator[int]:
    """A process in new namespaces; yields its id as seen from outside, kills what is in them."""
    # setpriv lets unshare die with this process, and unshare kills its child, the first process of
    # its PID namespace.
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *UNSHARED, "sleep", "infinity"]
    )
    try:
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        first = int(wait_until(lambda: children.read_text().split())[0])
        wait_until(lambda: _of(first, "comm").strip() == b"sleep")  # after --mount-proc
        yield first
    finally:
        holder.kill()
        holder.wait()


def _connect(switch: int, host: Host) -> None:
    """A cable from the bridge to eth0 of the host."""
    port = f"to-{host.name}"
    # The process id as seen from outside.
    cable = f"ip link add {port} type veth peer name eth0 netns {host.pid}"
    subprocess.run(["nsenter", "--target", str(switch), "--net", "--", *cable.split()], check=True)
    _inside(switch, *f"ip link set {port} master bridge up".split())
    _inside(host.pid, *f"ip address add {host.address}/24 dev eth0".split())
    for device in ("lo", "eth0"):
        _inside(host.pid, "ip", "link", "set", device, "up")


def _start_sshd(host: Host, key: Path) -> None:
    ssh = host.folder / ".ssh"
    (ssh / "authorized_keys").write_text(key.with_suffix(".pub").read_text())
    (ssh / "config").write_text(f"Host *\n  IdentityFile {key}\n")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "host_key")], check=True
    )

    (ssh / "sshd_config").write_text(
        f"HostKey {ssh}/host_key\nAuthorizedKeysFile {ssh}/authorized_keys\n"
        "StrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\nPidFile none\n"
    )

    _inside(host.pid, "mount", "-t", "tmpfs", "tmpfs", "/run")
    _inside(host.pid, "mkdir", "/run/sshd")
    server = host.command(SSHD, "-f", ssh / "sshd_config", "-E", host.folder / "sshd.log")
    subprocess.run(server, check=True, env={"PATH": "/usr/sbin:/usr/bin"})
    wait_until(lambda: b":0016 " in _of(host.pid, "net/tcp"))  # it listens at port 22


def _inside(pid: int, *command: str | Path) -> None:
    inside = ["nsenter", "--target", str(pid), *NAMESPACES, "--"]
    done = subprocess.run([*inside, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr}"
