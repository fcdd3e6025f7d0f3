"""What Kubernetes' schemas say of an object, and which of the chart's objects run."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

from tests.deploy import tools
from tests.deploy.manifests import Object

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def running(objects: tuple[Object, ...]) -> tuple[Object, ...]:
    """All but what `helm test` starts."""
    return tuple(one for one in objects if "annotations" not in one["metadata"]
                 or "helm.sh/hook" not in one["metadata"]["annotations"])  # fmt: skip


@cache
def schema(version: str, kind: str, group: str) -> Any:
    """A validator that knows every field, and no other."""
    group = re.sub(r"\..*/", "-", group).replace("/", "-")  # its first word, and the version
    text = json.loads(file(version, f"{kind.lower()}-{group}.json"))
    registry: Registry[Any] = Registry(retrieve=lambda uri: definitions(version, uri))  # type: ignore[call-arg]
    return jsonschema.Draft7Validator(text, registry=registry)


@cache
def definitions(version: str, uri: str) -> Any:
    """What is named by an address of Kubernetes', out of the file: nothing is fetched."""
    text = json.loads(file(version, uri.rpartition("/")[2]))
    return Resource.from_contents(text, default_specification=DRAFT7)


def file(version: str, name: str) -> str:
    return (tools.SCHEMAS / version / name).read_text("utf-8")


def complaints(one: Object, version: str) -> list[str]:
    validator = schema(version, one["kind"], one["apiVersion"])
    return [f"{one['kind']} {error.json_path}: {error.message[:200]}"
            for error in validator.iter_errors(one)]  # fmt: skip


def matches(selector: Object, labels: Object) -> bool:
    return selector.items() <= labels.items()
