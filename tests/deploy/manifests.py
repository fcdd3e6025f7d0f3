"""What `kubectl kustomize` and `helm template` make of deploy/, as objects."""

from __future__ import annotations

import json
import os
import shutil
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
EXAMPLE = DEPLOY.parent / "examples" / "kubernetes"
CHART = DEPLOY / "helm" / "select-service"

Object: TypeAlias = dict[str, Any]

MONITORED = {"serviceMonitor": {"enabled": True}}
IMAGE = {"repository": "registry.example.com/select-service"}
ROUTER_VALUES = {"enabled": True, "image": "registry.example.com/router:1.0.0"}
SAME: dict[str, Object] = {
    "shared": MONITORED,
    "sidecar": {"mode": "sidecar", "sidecar": {"router": ROUTER_VALUES}, **MONITORED},
    "sidecar-loopback": {
        "mode": "sidecar",
        "sidecar": {"listen": "loopback", "router": ROUTER_VALUES},
        **MONITORED,
    },
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
        "imagePullSecrets": [{"name": "registry"}],
        "fullnameOverride": "chooser",
        "serviceAccount": {"name": "watcher", "annotations": {"iam": "role"}},
        "extraArgs": ["--token-file=/etc/select-service/tokens"],
        "extraEnv": [{"name": "DYN_ROUTER_TEMPERATURE", "value": "0.1"}],
        "extraVolumes": [{"name": "tokens", "secret": {"secretName": "tokens"}}],
        "extraVolumeMounts": [{"name": "tokens", "mountPath": "/etc/select-service"}],
        "envFrom": [{"secretRef": {"name": "more"}}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "inference", "app.kubernetes.io/name": "not-this"},
        "podSecurityContext": {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532},
        "nodeSelector": {"disk": "ssd"},
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
                    ]
                }
            }
        },
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["10.0.0.10"], "options": [{"name": "ndots", "value": "2"}]},
        "initContainers": [{"name": "first", "image": "registry.example.com/first:1"}],
        "strategy": {"type": "Recreate"},
        "probes": {
            "startup": {"failureThreshold": 90},
            "liveness": {"timeoutSeconds": 9},
            "readiness": {"successThreshold": 2},
        },
        "service": {"type": "LoadBalancer", "annotations": {"lb": "internal"}},
        "networkPolicy": {
            "clients": [
                {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gw"}}}
            ],
            "dns": {
                "peers": [
                    {"ipBlock": {"cidr": "169.254.20.10/32"}},
                    {"namespaceSelector": {"matchLabels": {"a": "openshift-dns"}}},
                ],
                "ports": [53, 5353],
            },
            "apiServerPorts": [6443],
            "extraIngress": [{"ports": [{"port": "http"}]}],
            "extraEgress": [{"ports": [{"port": 4318}]}],
        },
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "high",
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "over TLS": {
        "tls": {"secretName": "certificate"},
        "serviceMonitor": {"enabled": True, "tokenSecret": {"name": "reader", "key": "text"}},
    },
    "over TLS by a flag": {
        "extraArgs": ["--tls-cert=/etc/select-service/server.pem"],
        "serviceMonitor": {"enabled": True, "tlsConfig": {"insecureSkipVerify": True}},
    },
    "with the numbers of somebody": {
        "image": {"repository": "example.com/s", "tag": "0.1.1", "pullPolicy": "Always"},
        "workers": "app=sglang",
        "engines": {
            "podLabels": {"app": "sglang"},
            "eventPorts": [5557, 5560],
            "replayPorts": [6557, 6560],
        },
        "leaving": {"notice": 6, "grace": 31, "slack": 11},
        "resources": {"limits": {"memory": "3Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}},
        "autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 4, "cpuPercent": 60},
        "podDisruptionBudget": {"enabled": True, "minAvailable": "50%"},
        "networkPolicy": {
            "enabled": True,
            "clientLabels": {"c": "d"},
            "monitoringNamespace": "watching",
        },
        "serviceMonitor": {"enabled": True, "interval": "30s"},
        "tls": {"secretName": "certificate", "ca": "root.pem"},
    },
    "a sidecar over TLS": {
        "mode": "sidecar",
        "tls": {"secretName": "certificate"},
        "sidecar": {"router": ROUTER_VALUES},
        "serviceMonitor": {"enabled": True},
    },
    "a sidecar over TLS by a flag": {
        "mode": "sidecar",
        "extraArgs": ["--tls-cert=/etc/s/server.pem", "--peer-ca=/etc/s/ca.pem"],
        "extraVolumes": [{"name": "s", "secret": {"secretName": "s"}}],
        "extraVolumeMounts": [{"name": "s", "mountPath": "/etc/s"}],
        "sidecar": {"listen": "loopback", "router": ROUTER_VALUES},
        "serviceMonitor": {"enabled": True},
    },
    "with fixed replicas": {"autoscaling": {"enabled": False}, "replicas": 5},
    "with another's account": {"serviceAccount": {"create": False, "name": "theirs"}},
    "a sidecar with more": {
        "mode": "sidecar",
        "extraVolumes": [{"name": "tokens", "secret": {"secretName": "tokens"}}],
        "extraVolumeMounts": [{"name": "tokens", "mountPath": "/etc/select-service"}],
        "sidecar": {
            "listen": "unix",
            "leaving": {"notice": 6, "grace": 31, "slack": 11},
            "resources": {"limits": {"memory": "3Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}},
            "router": {
                "enabled": True,
                "name": "gateway",
                "image": "example.com/gateway:1",
                "args": ["--verbose"],
                "port": 9000,
                "replicas": 3,
                "addressVariable": "WHERE",
                "resources": {
                    "limits": {"memory": "3Gi"},
                    "requests": {"cpu": "1", "memory": "1Gi"},
                },
            },
        },
    },
}

VARIED["everything beside a router"] = {
    **VARIED["everything"],
    "mode": "sidecar",
    "sidecar": {"router": ROUTER_VALUES},
    "networkPolicy": {"extraIngress": [{"ports": [{"port": "side"}]}]},
}


@cache
def kustomized(overlay: str) -> tuple[Object, ...]:
    """Every object of an overlay, or of the folder with that path."""
    return _objects(_run(KUBECTL, "kustomize", str(OVERLAYS / overlay)))


@cache
def _templated(values: str, release: str) -> tuple[Object, ...]:
    given = ROOT / f"values-{os.getpid()}.json"
    given.write_text(values, "utf-8")
    try:
        return _objects(_run(HELM, "template", release, str(CHART), "--values", str(given)))
    finally:
        given.unlink()


def as_dependency(pod: str, values: Object, folder: Path) -> tuple[Object, ...]:
    """Every object of a chart that depends on ours, under an alias, and has this Deployment."""
    parent = folder / "parent"
    (parent / "templates").mkdir(parents=True)
    (parent / "charts").mkdir()
    chart = {"apiVersion": "v2", "name": "parent", "version": "9.9.9", "appVersion": "9.9.9"}
    values = values | {"image": IMAGE}
    chart |= {"dependencies": [{"name": "select-service", "version": "0.1.0", "alias": "chooser"}]}  # type: ignore[dict-item]
    (parent / "Chart.yaml").write_text(json.dumps(chart), "utf-8")
    (parent / "values.yaml").write_text(json.dumps({"chooser": values}), "utf-8")
    (parent / "templates" / "router.yaml").write_text(pod, "utf-8")
    shutil.copytree(CHART, parent / "charts" / "select-service")
    return _objects(_run(HELM, "template", "fleet", str(parent)))


def templated(values: Object, release: str = "select-service") -> tuple[Object, ...]:
    """Every object of the chart with these values, and an image unless they name one.

    Raises:
        subprocess.CalledProcessError: helm refuses; its `stderr` says why.
    """
    values = values | {"image": IMAGE | values.get("image", {})}
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
