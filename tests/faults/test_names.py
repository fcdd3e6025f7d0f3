"""A resolver that does not answer: who has a name waits, who has an address does not."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.engine import Engine
from tests.faults.namespaces import Namespace, why_not
from tests.faults.patient import Patient, service
from tests.live.window import WATCHED
from tests.wait import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Record = Callable[[str, object], None]
NAMED = 40


@pytest.fixture
def mute() -> Iterator[Namespace]:
    """A namespace whose only resolver takes every question and answers none."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Namespace() as namespace, contextlib.ExitStack() as stack:
        resolver = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        resolver.bind((namespace.here, 53))
        folder = Path("/etc/netns") / namespace.name
        folder.mkdir(parents=True)
        stack.callback(shutil.rmtree, folder)
        (folder / "resolv.conf").write_text(f"nameserver {namespace.here}\noptions timeout:2\n")
        yield namespace


def test_a_resolver_that_is_mute(tmp_path: Path, mute: Namespace, record_property: Record) -> None:
    server = service(
        tmp_path,
        *("--host", "0.0.0.0", "--replica-sync-dns", "replicas.nowhere.test:9999"),
        command=(*mute.command, *WATCHED),
        host=mute.there,
    )
    with server, Engine(51, host=mute.here) as engine:
        patient = Patient(server, [engine])
        patient.register()
        engine.churn(20)
        patient.index_is_true()
        with patient.suffering("mute resolver", record_property):
            for number in range(NAMED):
                record = {
                    "worker_id": 1000 + number,
                    "tenant_id": "named",
                    "endpoint": "http://w",
                    "block_size": 16,
                    "kv_events_endpoint": f"tcp://engine-{number}.nowhere.test:5557",
                    "replay_endpoint": f"tcp://engine-{number}.nowhere.test:5558",
                }
                server.ask("POST", "/workers", record, ok=(201,))
            engine.run(100)
            time.sleep(3.0)
            engine.run(0)
            engine.churn(3)
            patient.index_is_true(deadline_s=10.0)
        eventually(lambda: server.metric("discovery_failures_total", source="dns") > 0, True)
        patient.recovers()
