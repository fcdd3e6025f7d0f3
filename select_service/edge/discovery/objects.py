"""Interprets Pods and EndpointSlices: ports and annotations that describe a worker or replica.

The conventions are documented in deploy/docs/discovery.md. The types have only the fields that are
read; the decoder skips whatever else an API server sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import Struct, field
from xxhash import xxh3_64_intdigest

from select_service.core.fleet.roster import Unready
from select_service.edge.discovery.dns import endpoint_of, is_of_our_family
from select_service.types import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PREFIX: Final = "select-service.io/"
HTTP, KV_EVENTS, KV_REPLAY, REPLICA_SYNC = "http", "kv-events", "kv-replay", "replica-sync"
_PORT_MAX: Final = 65535


class Meta(Struct):
    """Part of metadata."""

    name: str = ""
    namespace: str = ""
    resourceVersion: str = ""
    creationTimestamp: str | None = None
    deletionTimestamp: str | None = None
    annotations: dict[str, str] | None = None


class ContainerPort(Struct):
    """One port of a container."""

    containerPort: int
    name: str = ""


class Container(Struct):
    """One container of a pod."""

    ports: list[ContainerPort] | None = None
    restartPolicy: str | None = None  # of an init container: "Always" makes it run beside others


class PodSpec(Struct):
    """Part of a pod's spec."""

    containers: list[Container] | None = None
    initContainers: list[Container] | None = None

    def running(self) -> Iterator[Container]:
        """Yield the containers that run as long as the pod does."""
        yield from self.containers or ()
        yield from (one for one in self.initContainers or () if one.restartPolicy == "Always")


class Condition(Struct):
    """One condition of a pod."""

    type: str
    status: str


class PodStatus(Struct):
    """Part of a pod's status."""

    phase: str = ""
    podIP: str | None = None
    conditions: list[Condition] | None = None


class Pod(Struct):
    """Part of a pod."""

    metadata: Meta
    spec: PodSpec = field(default_factory=PodSpec)
    status: PodStatus = field(default_factory=PodStatus)


class EndpointConditions(Struct):
    """Of one endpoint; unknown counts as ready (the API's rule).

    A Service with `publishNotReadyAddresses` has every endpoint `ready`; `serving` still says
    whether the pod is.
    """

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class TargetRef(Struct):
    """The object behind an endpoint."""

    name: str = ""


class Endpoint(Struct):
    """One endpoint of a slice."""

    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    targetRef: TargetRef | None = None


class EndpointPort(Struct):
    """One port of a slice."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(Struct):
    """Part of an EndpointSlice."""

    metadata: Meta
    addressType: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


TERMINATING: Final = Unready("terminating")
NOT_READY: Final = Unready("not ready")
NO_ADDRESS: Final = Unready("no address")
_ENDED: Final = frozenset({"Failed", "Succeeded"})


class DiscoveredPod(NamedTuple):
    """What an object says of one pod that may be a worker."""

    worker_id: int
    pod: str  # namespace/name
    created: str  # RFC 3339; empty: not given
    spec: WorkerSpec | None  # None: it takes no new work
    unready: Unready | None = None  # why; None: it may be chosen

    @property
    def is_leaving(self) -> bool:
        """Whether it will never be ready again."""
        return self.unready is not None and (self.unready.has_ended or self.unready is TERMINATING)


class BadAnnotation(ValueError):
    """An annotation has an unusable value."""


def workers_of_pod(pod: Pod) -> Iterator[DiscoveredPod]:
    """Yield the pod, with its worker if that is running and ready.

    Raises:
        BadAnnotation: its annotations are unusable.
    """
    meta, address = pod.metadata, pod.status.podIP
    unready = _unready_pod(pod)
    spec = None
    if unready is None and address:
        ports: dict[str, int] = {}
        for container in pod.spec.running():
            for port in container.ports or ():
                ports.setdefault(port.name, port.containerPort)
        spec = _worker(meta, meta.name, address, ports)
    yield _found(meta, meta.name, meta.creationTimestamp or "", spec, unready)


def _unready_pod(pod: Pod) -> Unready | None:
    """Return why a pod takes no new work."""
    status = pod.status
    if status.phase in _ENDED:
        return Unready(f"phase {status.phase}", has_ended=True)
    if pod.metadata.deletionTimestamp:
        return TERMINATING
    if status.phase != "Running":
        return Unready(f"phase {status.phase or 'unknown'}")
    ready = any(one.type == "Ready" and one.status == "True" for one in status.conditions or ())
    if not ready:
        return NOT_READY
    return None if status.podIP else NO_ADDRESS


def workers_of_slice(piece: EndpointSlice) -> Iterator[DiscoveredPod]:
    """Yield each endpoint, with a worker if ready; the slice's annotations apply to all of them.

    Raises:
        BadAnnotation: its annotations are unusable.
    """
    ports: dict[str, int] = {}
    for port in piece.ports or ():
        if port.port:
            ports.setdefault(port.name or "", port.port)
    for endpoint in piece.endpoints or ():
        address = (endpoint.addresses or [""])[0]
        name = endpoint.targetRef.name if endpoint.targetRef is not None else address
        if name:
            unready = _unready_endpoint(endpoint)
            spec = _worker(piece.metadata, name, address, ports) if unready is None else None
            yield _found(piece.metadata, name, "", spec, unready)


def _unready_endpoint(endpoint: Endpoint) -> Unready | None:
    """Return why an endpoint takes no new work; unknown conditions count as ready."""
    conditions = endpoint.conditions or EndpointConditions()
    if conditions.terminating:
        return TERMINATING
    if conditions.ready is False or conditions.serving is False:
        return NOT_READY
    return None if endpoint.addresses else NO_ADDRESS


def replicas_of_slices(
    pieces: Iterable[EndpointSlice], own_addresses: Sequence[str]
) -> frozenset[str]:
    """Return the endpoints of replicas, ready or not: one that is booting must reach the others.

    A terminating one, too: it serves requests until it is gone, and publishes them. A dual-stack
    replica is in a slice of each family, and is listened to at one address: of our own family, if
    it has one.
    """
    found: dict[str, dict[str, list[int]]] = {}  # by pod: ports by address
    for piece in pieces:
        ports = [port.port for port in piece.ports or () if port.name == REPLICA_SYNC and port.port]
        for endpoint in piece.endpoints or ():
            for address in (endpoint.addresses or [])[:1]:
                ref = endpoint.targetRef
                pod = f"{piece.metadata.namespace}/{ref.name}" if ref and ref.name else address
                found.setdefault(pod, {})[address] = ports
    endpoints: set[str] = set()
    for addresses in found.values():
        if not addresses.keys() & set(own_addresses):
            address = min(
                addresses, key=lambda one: (not is_of_our_family(one, own_addresses), one)
            )
            endpoints |= {endpoint_of(address, port) for port in addresses[address]}
    return frozenset(endpoints)


def _annotations(meta: Meta) -> dict[str, str]:
    """Return our annotations, without their prefix."""
    return {
        key.removeprefix(PREFIX): value
        for key, value in (meta.annotations or {}).items()
        if key.startswith(PREFIX)
    }


def _found(
    meta: Meta, name: str, created: str, spec: WorkerSpec | None, unready: Unready | None
) -> DiscoveredPod:
    worker_id = _worker_id(meta, name) if spec is None else spec.worker_id
    return DiscoveredPod(worker_id, f"{meta.namespace}/{name}", created, spec, unready)


def _worker_id(meta: Meta, name: str) -> int:
    """Return a pod's worker id; one created anew under its name is the same worker."""
    worker_id = _whole(_annotations(meta), "worker-id")
    if worker_id is None:
        return xxh3_64_intdigest(f"{meta.namespace}/{name}".encode())
    return worker_id


def _worker(meta: Meta, name: str, address: str, ports: Mapping[str, int]) -> WorkerSpec:
    annotations = _annotations(meta)
    start, size = (
        _whole(annotations, "data-parallel-start-rank"),
        _whole(annotations, "data-parallel-size"),
    )
    port = _port(annotations, "port", ports, HTTP)
    if port is None:
        port = next(iter(ports.values()), None)  # the first named port
    events = _port(annotations, "kv-events-port", ports, KV_EVENTS)
    replay = _port(annotations, "kv-replay-port", ports, KV_REPLAY)
    host = f"[{address}]" if ":" in address else address
    fields = {
        "worker_id": _worker_id(meta, name),
        "model_name": annotations.get("model-name", "default"),
        "tenant_id": annotations.get("tenant-id", "default"),
        "endpoint": None
        if port is None
        else f"{annotations.get('scheme', 'http')}://{host}:{port}",
        "block_size": _whole(annotations, "block-size"),
        "data_parallel_start_rank": start,
        "data_parallel_size": size,
        "kv_events_endpoints": _by_rank(events, start or 0, size, address),
        "replay_endpoint": None if replay is None else endpoint_of(address, replay),
        "replay_endpoints": {}
        if size is None or size == 1  # the single endpoint says it
        else _by_rank(replay, start or 0, size, address),
        "max_num_batched_tokens": _whole(annotations, "max-num-batched-tokens"),
        "max_num_seqs": _whole(annotations, "max-num-seqs"),
        "total_kv_blocks": _whole(annotations, "total-kv-blocks"),
        "stable_routing_id": annotations.get("stable-routing-id"),
        "is_eagle": _switch(annotations, "is-eagle"),
        "taints": _list(annotations.get("taints", "")),
        "topology_domains": _pairs(annotations, "topology-domains"),
        "kv_transfer_domain": annotations.get("kv-transfer-domain"),
        "kv_transfer_enforcement": annotations.get("kv-transfer-enforcement"),
        "kv_transfer_preferred_weight": _number(annotations, "kv-transfer-preferred-weight"),
        "role": annotations.get("role"),
        "kv_events": annotations.get("kv-events"),
        "kv_cache_report_mode": annotations.get("kv-cache-report-mode"),
    }
    try:
        return msgspec.convert(fields, WorkerSpec)  # the same validation as for HTTP
    except msgspec.ValidationError as error:
        raise BadAnnotation(f"{meta.namespace}/{name}: {error}") from None


def _by_rank(port: int | None, start: int, size: int | None, address: str) -> dict[str, str]:
    """Return one endpoint per rank, on consecutive ports."""
    if port is None:
        return {}
    ranks = min(1 if size is None else size, _PORT_MAX + 1 - port)
    return {str(start + i): endpoint_of(address, port + i) for i in range(ranks)}


def _whole(annotations: Mapping[str, str], key: str) -> int | None:
    text = annotations.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise BadAnnotation(f"{PREFIX}{key}: {text[:64]!r} is not a whole number")
    return int(text)


def _number(annotations: Mapping[str, str], key: str) -> float | None:
    text = annotations.get(key)
    try:
        return None if text is None else float(text)
    except ValueError:
        raise BadAnnotation(f"{PREFIX}{key}: {text!r:.64} is not a number") from None


def _port(
    annotations: Mapping[str, str], key: str, ports: Mapping[str, int], usual: str
) -> int | None:
    """Return a port by number or by name; without the annotation, the port with the usual name."""
    text = annotations.get(key)
    if text is None:
        return ports.get(usual)
    port = int(text) if text.isascii() and text.isdigit() else ports.get(text)
    if port is None or not 0 < port <= _PORT_MAX:
        raise BadAnnotation(f"{PREFIX}{key}: there is no port {text[:64]!r}")
    return port


def _switch(annotations: Mapping[str, str], key: str) -> bool | None:
    text = annotations.get(key)
    if text not in (None, "true", "false"):
        raise BadAnnotation(f"{PREFIX}{key}: {text!r} is neither true nor false")
    return None if text is None else text == "true"


def _list(text: str) -> list[str]:
    return [part for part in (part.strip() for part in text.split(",")) if part]


def _pairs(annotations: Mapping[str, str], key: str) -> dict[str, str]:
    pairs = {}
    for part in _list(annotations.get(key, "")):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadAnnotation(f"{PREFIX}{key}: {part[:64]!r} is not name=value")
        pairs[name] = value
    return pairs


# Which pod has a worker id that several claim: one of them, always the same; the others have none.
# A `worker-id` annotation comes with a pod template, so each of its pods has it. The id belongs to
# the oldest pod that is not leaving (`creationTimestamp`, then the name), ready or not: an id that
# followed readiness would go back and forth. Endpoints have no age: the one that has the id keeps
# it, and the first is one that is ready, by name.


class WorkerIdClaims:
    """Which object has which id, over time.

    Attributes:
        shared: the pods that were refused an id at the last look, by id.
        refused: the same pods, and why.
    """

    def __init__(self) -> None:
        self.shared: dict[int, list[str]] = {}
        self.refused: dict[str, str] = {}
        self._owners: dict[int, str] = {}  # of ids whose pods have no age

    def settle(self, found: Iterable[DiscoveredPod]) -> list[DiscoveredPod]:
        """Return one pod for each id, as one object of several may say it."""
        pods: dict[tuple[int, str], DiscoveredPod] = {}
        for one in found:
            key = one.worker_id, one.pod
            pods[key] = _merged(pods[key], one) if key in pods else one
        claims: dict[int, list[DiscoveredPod]] = {}
        for one in pods.values():
            claims.setdefault(one.worker_id, []).append(one)
        before, self._owners = self._owners, {}
        self.shared, self.refused = {}, {}
        return [self._owner(claim, before.get(worker_id)) for worker_id, claim in claims.items()]

    def _owner(self, claim: list[DiscoveredPod], before: str | None) -> DiscoveredPod:
        def order(one: DiscoveredPod) -> tuple[bool, str, bool, bool, str]:
            ageless = not one.created
            return (
                one.is_leaving,
                one.created,
                ageless and one.pod != before,
                ageless and one.spec is None,
                one.pod,
            )

        owner, *others = sorted(claim, key=order)
        if not owner.created:
            self._owners[owner.worker_id] = owner.pod
        # one that leaves has had the id, and its successor has it now
        refused = [one.pod for one in others if not one.is_leaving]
        if refused:
            self.shared[owner.worker_id] = [owner.pod, *refused]
            why = f"worker-id {owner.worker_id} is that of {owner.pod}"
            self.refused |= dict.fromkeys(refused, why)
        return owner


def _merged(one: DiscoveredPod, other: DiscoveredPod) -> DiscoveredPod:
    """Return what two objects say of a pod; one for each address family names it, for example.

    It leaves if either says so, and is ready if either says so; the first that is ready names its
    address, and of two families IPv4 does: slices that are made anew have other names, and another
    address would be another engine.
    """
    if one.is_leaving or other.is_leaving:
        return one._replace(spec=None, unready=TERMINATING)
    if one.spec is None or other.spec is None:
        return other if one.spec is None and other.spec is not None else one
    return other if _is_ipv6(one.spec) and not _is_ipv6(other.spec) else one


def _is_ipv6(spec: WorkerSpec) -> bool:
    return any("[" in at for at in (spec.endpoint or "", *spec.kv_events_endpoints.values()))
