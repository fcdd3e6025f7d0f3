"""Network namespaces: machines of their own on one kernel, with a cable that can be pulled.

Needs root and iproute2; who cannot have one says why, and its tests are skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Self

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count(os.getpid() % 200)


def why_not() -> str | None:
    """None where namespaces can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip command: iproute2 is not installed"
    probe = subprocess.run(
        ["ip", "netns", "add", f"probe{os.getpid()}"], capture_output=True, check=False
    )
    if probe.returncode:
        return f"no network namespace: {probe.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", f"probe{os.getpid()}"], check=False)
    return None


class Namespace:
    """One, joined to ours by a pair of virtual interfaces. Use as a context manager.

    Attributes:
        here: our address on the cable.
        there: its.
    """

    def __init__(self) -> None:
        number = next(_numbers)
        self.name = f"faults{os.getpid()}-{number}"
        self._ends = f"sv{os.getpid() % 100_000}a{number}", f"sv{os.getpid() % 100_000}b{number}"
        subnet = f"10.231.{number % 256}"
        self.here, self.there = f"{subnet}.1", f"{subnet}.2"

    @property
    def command(self) -> tuple[str, ...]:
        """What runs a program in it."""
        return ("ip", "netns", "exec", self.name)

    def __enter__(self) -> Self:
        here, there = self._ends
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", self.name)
            _ip("addr", "add", f"{self.here}/30", "dev", here)
            _ip("link", "set", here, "up")
            _ip("-n", self.name, "addr", "add", f"{self.there}/30", "dev", there)
            _ip("-n", self.name, "link", "set", "lo", "up")
            self.join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _ip("netns", "del", self.name)

    def cut(self) -> None:
        """Pull the cable: no reset, no refusal, nothing."""
        _ip("-n", self.name, "link", "set", self._ends[1], "down")

    def join(self) -> None:
        """Plug it in again."""
        _ip("-n", self.name, "link", "set", self._ends[1], "up")


class Network:
    """Machines on one switch, which is a namespace as well. Use as a context manager.

    Attributes:
        here: our own address on it.
    """

    def __init__(self) -> None:
        number = next(_numbers)
        self._switch = f"switch{os.getpid()}-{number}"
        self._subnet = f"10.232.{number % 256}"
        self._mark = f"{os.getpid() % 10_000}{chr(97 + number % 26)}"
        self._hosts: list[str] = []
        self.here = f"{self._subnet}.1"

    def __enter__(self) -> Self:
        _ip("netns", "add", self._switch)
        try:
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            self._plug(self.here, ())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self._hosts, self._switch):
            _ip("netns", "del", name)

    def host(self) -> tuple[str, str]:
        """Put up another machine; returns its namespace and its address."""
        number = len(self._hosts) + 2
        name, address = f"host{os.getpid()}-{self._mark}{number}", f"{self._subnet}.{number}"
        _ip("netns", "add", name)
        self._hosts.append(name)
        self._plug(address, ("-n", name))
        _ip("-n", name, "link", "set", "lo", "up")
        return name, address

    def _plug(self, address: str, where: tuple[str, ...]) -> None:
        """Lead a cable from the switch to a machine, or to ours."""
        number = len(self._hosts)
        port, end = f"sp{self._mark}{number}", f"se{self._mark}{number}"
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", end)
        _ip("-n", self._switch, "link", "set", port, "master", "bridge")
        _ip("-n", self._switch, "link", "set", port, "up")
        _ip("-n", self._switch, "link", "set", end, "netns", where[1] if where else "1")
        _ip(*where, "addr", "add", f"{address}/24", "dev", end)
        _ip(*where, "link", "set", end, "up")


@contextlib.contextmanager
def alone_on_ipv6() -> Iterator[str]:
    """A namespace whose only address is ::1; its name."""
    name = f"six{os.getpid()}-{next(_numbers)}"
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "-4", "addr", "flush", "dev", "lo")
        yield name
    finally:
        _ip("netns", "del", name)


def command_in(name: str) -> tuple[str, ...]:
    """What runs a program in a namespace."""
    return ("ip", "netns", "exec", name)


def enter(name: str) -> None:
    """Be in a namespace from now on, this thread and those it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)
