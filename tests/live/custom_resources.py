"""The custom resources that the planner scales, as far as it sees them.

Group, versions, fields and the paths of /scale are those that LeaderWorkerSet 0.7 and Dynamo 1.0
publish; the templates of pods, which a planner does not read, are kept as they come.
"""

from __future__ import annotations

from typing import Any, Final

from tests.live.apiserver import NAMESPACE, Admin
from tests.wait import block_until

_CRDS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_COUNT: Final = {"type": "integer", "format": "int32"}
_ANY: Final = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_TEXT: Final = {"type": "string"}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    found = {"type": "object", "properties": properties}
    return found | {"required": list(required)} if required else found


def _definition(
    kind: str, group: str, versions: tuple[str, ...], schema: Any, scale: str
) -> dict[str, Any]:
    """A CustomResourceDefinition; the last version is stored.

    Args:
        kind: of the objects.
        group: of the kind.
        versions: that are served, all alike.
        schema: of spec and status.
        scale: the field of the status that names the pods; empty: there is no /scale.
    """
    plural = f"{kind.lower()}s"
    paths = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    paths |= {"labelSelectorPath": scale}
    served = [
        {
            "name": version,
            "served": True,
            "storage": version == versions[-1],
            "schema": {"openAPIV3Schema": schema},
            "subresources": {"status": {}} | ({"scale": paths} if scale else {}),
        }
        for version in versions
    ]
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": served},
    }


LEADER_WORKER_SET: Final = _definition(
    "LeaderWorkerSet",
    "leaderworkerset.x-k8s.io",
    ("v1",),
    _object(
        spec=_object(
            "leaderWorkerTemplate",
            replicas={**_COUNT, "default": 1},
            leaderWorkerTemplate=_ANY,
            startupPolicy={"type": "string", "default": "LeaderCreated"},
        ),
        status=_object(
            replicas=_COUNT, readyReplicas=_COUNT, updatedReplicas=_COUNT, hpaPodSelector=_TEXT
        ),
    ),
    ".status.hpaPodSelector",
)
SCALING_ADAPTER: Final = _definition(
    "DynamoGraphDeploymentScalingAdapter",
    "nvidia.com",
    ("v1alpha1", "v1beta1"),
    _object(
        spec=_object(
            "dgdRef",
            "replicas",
            dgdRef=_object("name", "serviceName", name=_TEXT, serviceName=_TEXT),
            replicas={**_COUNT, "minimum": 0},
        ),
        status=_object(replicas=_COUNT, selector=_TEXT, lastScaleTime=_TEXT),
    ),
    ".status.selector",
)
ENGINE: Final = _definition(
    "Engine",
    "example.org",
    ("v1",),
    _object(spec=_object(replicas=_COUNT), status=_object(replicas=_COUNT, readyReplicas=_COUNT)),
    ".status.selector",
)
"""Somebody's own, whose count may be missing."""
UNSCALED: Final = _definition("Model", "example.org", ("v1",), _object(spec=_ANY), "")


def path(definition: Any, name: str, version: str = "") -> str:
    """Of a custom object in our namespace."""
    spec = definition["spec"]
    version = version or spec["versions"][0]["name"]
    plural = spec["names"]["plural"]
    return f"/apis/{spec['group']}/{version}/namespaces/{NAMESPACE}/{plural}/{name}"


def define(admin: Admin, *definitions: Any) -> None:
    """Create definitions, and wait until their objects can be."""
    for one in definitions:
        admin.do("POST", _CRDS, one)
        _await(admin, one, 200)


def forget(admin: Admin, definition: Any) -> None:
    """Delete a definition, and wait until its objects are gone."""
    admin.do("DELETE", f"{_CRDS}/{definition['metadata']['name']}")
    _await(admin, definition, 404)


def _await(admin: Admin, definition: Any, status: int) -> None:
    folder = path(definition, "").removesuffix("/")
    block_until(lambda: admin.ask("GET", folder).status_code == status)


def create(admin: Admin, definition: Any, name: str, spec: Any) -> None:
    """Create an object without a status, as its controller finds it."""
    names, group = definition["spec"]["names"], definition["spec"]["group"]
    version = f"{group}/{definition['spec']['versions'][0]['name']}"
    one = {"apiVersion": version, "kind": names["kind"], "metadata": {"name": name}, "spec": spec}
    admin.apply(one, names["plural"])
