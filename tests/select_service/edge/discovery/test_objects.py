"""Ports and annotations, read as deploy/docs/discovery.md says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from select_service.edge.discovery.objects import (
    NOT_READY,
    TERMINATING,
    BadAnnotation,
    EndpointSlice,
    Pod,
    workers_of_pod,
    workers_of_slice,
)
from select_service.types import WorkerSpec
from tests.select_service.edge.discovery.fake_kubernetes import pod


def read(fields: dict[str, Any]) -> list[WorkerSpec]:
    fields["metadata"] |= {"name": "w-0", "namespace": "ns"}
    return [one.spec for one in workers_of_pod(msgspec.convert(fields, Pod)) if one.spec]


def test_a_pod_without_annotations() -> None:
    (spec,) = read(pod("10.0.0.1"))
    assert spec == WorkerSpec(
        worker_id=xxh3_64_intdigest(b"ns/w-0"),
        tenant_id="default",
        endpoint="http://10.0.0.1:8000",
        kv_events_endpoints={"0": "tcp://10.0.0.1:5557"},
    )


def test_every_annotation() -> None:
    (spec,) = read(
        pod(
            "fd00::1",
            worker_id="18446744073709551615",
            model_name="m",
            tenant_id="t",
            block_size="16",
            data_parallel_start_rank="4",
            data_parallel_size="2",
            port="9000",
            scheme="https",
            kv_events_port="6000",
            kv_replay_port="7000",
            max_num_batched_tokens="8192",
            max_num_seqs="256",
            total_kv_blocks="100",
            stable_routing_id="s",
            is_eagle="true",
            taints="a, b",
            topology_domains="zone=z1,rack=r1",
            kv_transfer_domain="zone",
            kv_transfer_enforcement="preferred",
            kv_transfer_preferred_weight="0.85",
            role="prefill",
            kv_events="engine",
            kv_cache_report_mode="full",
        )
    )
    assert spec == WorkerSpec(
        worker_id=(1 << 64) - 1,
        model_name="m",
        tenant_id="t",
        endpoint="https://[fd00::1]:9000",
        block_size=16,
        data_parallel_start_rank=4,
        data_parallel_size=2,
        kv_events_endpoints={"4": "tcp://[fd00::1]:6000", "5": "tcp://[fd00::1]:6001"},
        replay_endpoint="tcp://[fd00::1]:7000",
        replay_endpoints={"4": "tcp://[fd00::1]:7000", "5": "tcp://[fd00::1]:7001"},
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        total_kv_blocks=100,
        stable_routing_id="s",
        is_eagle=True,
        taints=["a", "b"],
        topology_domains={"zone": "z1", "rack": "r1"},
        kv_transfer_domain="zone",
        kv_transfer_enforcement="preferred",
        kv_transfer_preferred_weight=0.85,
        role="prefill",
        kv_events="engine",
        kv_cache_report_mode="full",
    )


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        ("block_size", "16.0"),
        ("block_size", "4294967296"),
        ("worker_id", "-1"),
        ("worker_id", "18446744073709551616"),
        ("port", "nameless"),
        ("port", "70000"),
        ("kv_events_port", "0"),
        ("max_num_seqs", "0"),
        ("kv_events", "maybe"),
        ("kv_cache_report_mode", "Full"),
        ("is_eagle", "yes"),
        ("topology_domains", "zone"),
        ("kv_transfer_preferred_weight", "much"),
        ("kv_transfer_enforcement", "now"),
        ("role", "encode"),
    ],
)
def test_nonsense_is_named(annotation: str, value: str) -> None:
    with pytest.raises(BadAnnotation, match=r"ns/w-0|select-service.io/"):
        read(pod("10.0.0.1", ready=True, **{annotation: value}))


def test_a_port_by_name() -> None:
    (spec,) = read(pod("10.0.0.1", port="kv-events"))
    assert spec.endpoint == "http://10.0.0.1:5557"


def test_ports_of_containers_that_run_beside_others() -> None:
    """An init container that is restarted is a sidecar; one that ends serves nobody."""
    fields = pod("10.0.0.1")
    (container,) = fields["spec"]["containers"]
    ports, container["ports"] = container["ports"], [{"name": "other", "containerPort": 1}]
    fields["spec"]["initContainers"] = [
        {"ports": [{"name": "http", "containerPort": 2}]},
        {"ports": ports, "restartPolicy": "Always"},
    ]
    (spec,) = read(fields)
    assert spec.endpoint == "http://10.0.0.1:8000"
    assert spec.kv_events_endpoints == {"0": "tcp://10.0.0.1:5557"}


@pytest.mark.parametrize(
    "names", [("api", "metrics", "kv-events"), ("", "metrics", ""), ("api", "metrics", "api")]
)
def test_without_a_port_called_http_it_is_the_first(names: tuple[str, ...]) -> None:
    numbers = list(zip(names, (8000, 9090, 5557), strict=True))
    fields = pod("10.0.0.1")
    (container,) = fields["spec"]["containers"]
    container["ports"] = [{"name": name, "containerPort": port} for name, port in numbers]
    (of_pod,) = read(fields)
    piece = {
        "metadata": {"name": "s-1", "namespace": "ns"},
        "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {}}],
        "ports": [{"name": name, "port": port} for name, port in numbers],
    }
    (found,) = workers_of_slice(msgspec.convert(piece, EndpointSlice))
    assert found.spec is not None
    assert of_pod.endpoint == found.spec.endpoint == "http://10.0.0.1:8000"


def test_slices_name_pods_as_pods_do() -> None:
    piece = {
        "metadata": {
            "name": "s-1",
            "namespace": "ns",
            "annotations": {"select-service.io/block-size": "16"},
        },
        "endpoints": [
            {"addresses": ["10.0.0.1"], "conditions": {}, "targetRef": {"name": "w-0"}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": False}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": True, "terminating": True}},
            {"addresses": ["10.0.0.4"], "conditions": {"ready": True}},
        ],
        "ports": [{"name": "http", "port": 8000}, {"name": "kv-events", "port": 5557}],
    }
    found = list(workers_of_slice(msgspec.convert(piece, EndpointSlice)))
    assert [one.unready for one in found] == [None, NOT_READY, TERMINATING, None]
    specs = [one.spec for one in found if one.spec]
    assert [spec.endpoint for spec in specs] == ["http://10.0.0.1:8000", "http://10.0.0.4:8000"]
    assert specs[0].worker_id == read(pod("10.0.0.1"))[0].worker_id
    assert specs[0].block_size == 16
