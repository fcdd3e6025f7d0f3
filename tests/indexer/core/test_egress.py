"""Where connections may lead: schemes, wildcards, lists, and addresses inside addresses."""

from __future__ import annotations

import pytest

from indexer.core.egress import Egress, read_address
from indexer.errors import EndpointRefused, InvalidEndpoint, SchemeRefused
from indexer.types import EgressSettings


def why(settings: EgressSettings, host: str, address: str) -> str | None:
    found = read_address(address)
    assert found is not None
    return Egress(settings).why_not(host, found)


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "169.254.0.1", "fe80::1", "fe80::1%eth0", "fd00:ec2::254"),
        "fd00:ec2::23",  # gives credentials to pods of EKS
        *("100.100.100.200", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255", "ff02::1"),
        *(
            "::ffff:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::a9fe:a9fe",
            "::ffff:0:a9fe:a9fe",
            "168.63.129.16",
            "2002:a9fe:a9fe::1",
            "::169.254.1.1",
            "2001:0:a9fe:a9fe::1",  # Teredo by a server at 169.254.169.254
            "2001:0:4136:e378:8000:63bf:5601:5601",  # of a client there, its bits turned over
            "2001:db8::5efe:169.254.169.254",  # ISATAP
            "2001:db8::200:5efe:169.254.169.254",
        ),
    ],
)
def test_what_is_denied_by_default(address: str) -> None:
    assert "--connect-deny" in (why(EgressSettings(), "engine", address) or "")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "::1",
        "10.1.2.3",
        "192.168.0.1",
        "8.8.8.8",
        "2001:db8::1",
        "fd00::1",
        "2001:0:4136:e378:8000:63bf:f7f7:f7f7",
    ],
)
def test_what_is_allowed_by_default(address: str) -> None:
    assert why(EgressSettings(), "engine", address) is None


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.9.9.9",
        "::1",
        "::ffff:127.0.0.1",
        "2002:7f00:1::",
        "2001:0:808:808::80ff:fffe",
    ],
)
def test_loopback_may_be_denied(address: str) -> None:
    assert "loopback" in (why(EgressSettings(loopback=False), "engine", address) or "")
    assert why(EgressSettings(loopback=False), "engine", "10.0.0.1") is None


def test_an_allow_list_is_all_there_is() -> None:
    lists = EgressSettings(allow=("10.0.0.0/8", "*.engines.example", "one.example"))
    assert why(lists, "whoever", "10.255.255.255") is None
    assert why(lists, "a.b.ENGINES.example.", "192.168.0.1") is None
    assert why(lists, "one.example", "192.168.0.1") is None
    for host in ("engines.example", "notengines.example", "two.example", "xone.example"):
        assert why(lists, host, "192.168.0.1") == "it is not among --connect-allow"
    assert why(lists, "whoever", "11.0.0.0") == "it is not among --connect-allow"
    assert why(lists, "whoever", "127.0.0.1") == "it is not among --connect-allow"
    assert why(lists, "a.engines.example", "169.254.169.254"), "deny is stronger"


def test_hosts_may_be_denied_by_name() -> None:
    reach = Egress(EgressSettings(deny=("metadata.google.internal", "*.internal.example")))
    for host in ("metadata.google.internal", "Metadata.Google.Internal.", "x.internal.example"):
        assert "--connect-deny" in (reach.why_not(host) or "")
    assert reach.why_not("internal.example") is None


@pytest.mark.parametrize("entry", ["", "*", "10.0.0.0/33", "10.0.0.1/8", "a/b", "1.2.3", "a b"])
def test_an_entry_that_is_none(entry: str) -> None:
    with pytest.raises(ValueError, match="is"):
        Egress(EgressSettings(deny=(entry,)))


@pytest.mark.parametrize(
    ("endpoint", "before", "host", "port"),
    [
        ("tcp://h:1", "tcp://", "h", "1"),
        ("tcp://[::1]:1", "tcp://", "::1", "1"),
        ("tcp://eth0;10.0.0.1:5", "tcp://eth0;", "10.0.0.1", "5"),
        ("tcp://0x7f.1:1", "tcp://", "0x7f.1", "1"),
    ],
)
def test_endpoints_taken_apart(endpoint: str, before: str, host: str, port: str) -> None:
    target = Egress().target(endpoint)
    assert target[1:] == (before, host, port)
    four, six = read_address("10.0.0.9"), read_address("2001:db8::1")
    assert four is not None
    assert six is not None
    assert target.at(four) == f"{before}10.0.0.9:{port}"
    assert target.at(six) == f"{before}[2001:db8::1]:{port}"


@pytest.mark.parametrize(
    "endpoint",
    [
        *("tcp://*:1", "tcp://a*:1", "tcp://h/x:1", "tcp://a b:1", "tcp://-a:1", "tcp://@h:1"),
        *("tcp://[]:1", "tcp://;:1", "tcp://eth0;*:1", "tcp://a\n:1", "tcp://\u0661:1"),
    ],
)
def test_wildcards_and_what_is_no_host(endpoint: str) -> None:
    with pytest.raises(EndpointRefused):
        Egress().target(endpoint)


@pytest.mark.parametrize("endpoint", ["ipc:///etc/passwd", "inproc://x"])
def test_other_schemes_only_by_flag(endpoint: str) -> None:
    with pytest.raises(SchemeRefused, match="--connect-schemes"):
        Egress().target(endpoint)
    assert not Egress(EgressSettings(schemes=("tcp", "ipc", "inproc"))).target(endpoint).host


def test_what_is_no_endpoint() -> None:
    with pytest.raises(InvalidEndpoint):
        Egress().target("file:///etc/passwd")


@pytest.mark.parametrize("text", ["127.1", "0x7f000001", "2130706433", "0177.0.0.1", "localhost"])
def test_odd_spellings_are_for_the_resolver(text: str) -> None:
    assert read_address(text) is None


def test_an_allowed_network_does_not_allow_what_may_only_lead_to_it() -> None:
    """A 6to4 address with 10.0.0.1 in it goes to whoever relays 6to4."""
    settings = EgressSettings(allow=("10.0.0.0/8",))
    for address in ("10.0.0.1", "::ffff:10.0.0.1"):
        assert why(settings, "h", address) is None
    for address in ("2002:a00:1::1", "64:ff9b::10.0.0.1", "::10.0.0.1"):
        assert why(settings, "h", address) is not None
