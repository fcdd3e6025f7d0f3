"""What `kubectl kustomize` and `helm template` make of deploy/, as objects."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tests.deploy.tools import HELM, KUBECTL, ROOT
from tests.wait import PATIENCE_S

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = DEPLOY / "kubernetes" / "overlays"
CHART = DEPLOY / "helm" / "select-service"

Object: TypeAlias = dict[str, Any]

MONITORED = {"serviceMonitor": {"enabled": True}}
SAME: dict[str, Object] = {
    "shared": MONITORED,
    "sidecar": {"mode": "sidecar", **MONITORED},
    "sidecar-loopback": {"mode": "sidecar", "sidecar": {"listen": "loopback"}, **MONITORED},
}
"""By overlay, the values with which the chart says the same."""

VARIED: dict[str, Object] = {
    "plain": {
        "autoscaling": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
    },
    "everything": {
        "image": {"digest": "sha256:" + "a" * 64},
        "imagePullSecrets": ["registry"],
        "extraArgs": ["--token-file=/etc/select-service/tokens"],
        "extraEnv": [{"name": "DYN_ROUTER_TEMPERATURE", "value": "0.1"}],
        "extraVolumes": [{"name": "tokens", "secret": {"secretName": "tokens"}}],
        "extraVolumeMounts": [{"name": "tokens", "mountPath": "/etc/select-service"}],
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "high",
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "a sidecar with more": {
        "mode": "sidecar",
        "extraVolumes": [{"name": "tokens", "secret": {"secretName": "tokens"}}],
        "extraVolumeMounts": [{"name": "tokens", "mountPath": "/etc/select-service"}],
        "sidecar": {"router": {"args": ["--verbose"], "port": 9000}},
    },
}


@cache
def kustomized(overlay: str) -> tuple[Object, ...]:
    """Every object of an overlay."""
    return _objects(_run(KUBECTL, "kustomize", str(OVERLAYS / overlay)))


@cache
def _templated(values: str, release: str) -> tuple[Object, ...]:
    given = ROOT / f"values-{os.getpid()}.json"
    given.write_text(values, "utf-8")
    try:
        return _objects(_run(HELM, "template", release, str(CHART), "--values", str(given)))
    finally:
        given.unlink()


def templated(values: Object, release: str = "select-service") -> tuple[Object, ...]:
    """Every object of the chart with these values.

    Raises:
        subprocess.CalledProcessError: helm refuses; its `stderr` says why.
    """
    return _templated(json.dumps(values, sort_keys=True), release)


def helm(*arguments: str) -> str:
    """Run helm, with nothing of this machine's."""
    return _run(HELM, *arguments)


def pods(objects: tuple[Object, ...]) -> Iterator[Object]:
    """Every pod that would run."""
    for one in objects:
        if "template" in one.get("spec", {}):
            yield one["spec"]["template"]


def ours(pod: Object) -> Object:
    """Our container in a pod."""
    (found,) = (one for one in pod["spec"]["containers"] if one["name"] == "select-service")
    assert isinstance(found, dict)
    return found


def _objects(text: str) -> tuple[Object, ...]:
    return tuple(one for one in yaml.safe_load_all(text) if one is not None)


def _run(program: Path, *arguments: str) -> str:
    own = {
        f"HELM_{kind}_HOME": str(ROOT / "helm-home" / kind.lower())
        for kind in ("CACHE", "CONFIG", "DATA")
    }
    done = subprocess.run(
        [str(program), *arguments], check=True, capture_output=True, text=True, timeout=PATIENCE_S,
        env={**os.environ, **own, "KUBECONFIG": os.devnull},
    )  # fmt: skip
    return done.stdout
