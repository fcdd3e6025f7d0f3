"""Kustomize and Helm say the same, and what Kubernetes of several versions takes.

With helm, kubectl and the schemas out of packages (`make manifests` fetches them). A ServiceMonitor
is no part of Kubernetes: its types are held to the operator's schema as kubernetes-models has it
compiled, its names to those of its declarations; what the operator's server would default or refuse
beyond that is not seen here.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

from select_service.cli import parse
from select_service.client.cli import _read as read_call
from select_service.edge.security.exposure import side_address
from tests.deploy import tools
from tests.deploy.manifests import (
    CHART,
    DEPLOY,
    OVERLAYS,
    SAME,
    VARIED,
    Object,
    as_dependency,
    helm,
    kustomized,
    ours,
    pods,
    templated,
)
from tests.wait import PATIENCE_S

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        not (tools.HELM.exists() and tools.SCHEMAS.exists()),
        reason="no helm, kubectl or schemas here: make manifests",
    ),
]

RENDERED: dict[str, Callable[[], tuple[Object, ...]]] = {
    **{f"kustomize {name}": lambda name=name: kustomized(name) for name in SAME},  # type: ignore[misc]
    **{
        f"helm {name}": lambda values=values: templated(values, "fleet")  # type: ignore[misc]
        for name, values in (*SAME.items(), *VARIED.items())
    },
}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
every = pytest.mark.parametrize("name", RENDERED)
OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")


def test_every_overlay_is_rendered() -> None:
    assert {path.name for path in OVERLAYS.iterdir()} == SAME.keys()


# -- the same twice --------------------------------------------------------------------------------


def running(objects: tuple[Object, ...]) -> tuple[Object, ...]:
    """All but what `helm test` starts."""
    return tuple(one for one in objects if "annotations" not in one["metadata"]
                 or "helm.sh/hook" not in one["metadata"]["annotations"])  # fmt: skip


def normal(objects: tuple[Object, ...]) -> dict[tuple[str, str], Object]:
    """By kind and name, without what only one of the two has to say."""
    found = {}
    for one in json.loads(json.dumps(objects)):
        for label in OF_HELM:
            one["metadata"].get("labels", {}).pop(label, None)
        for pod in pods((one,)):
            for container in pod["spec"]["containers"]:
                assert container.pop("imagePullPolicy", "IfNotPresent") == "IfNotPresent"
                container["args"] = sorted(container.get("args", ()))
        found[one["kind"], one["metadata"]["name"]] = one
    assert len(found) == len(objects)
    return found


@pytest.mark.parametrize("overlay", SAME)
def test_the_chart_says_what_the_overlay_says(overlay: str) -> None:
    by_kustomize, by_helm = normal(kustomized(overlay)), normal(running(templated(SAME[overlay])))
    assert by_helm.keys() == by_kustomize.keys()
    for key, one in by_kustomize.items():
        assert by_helm[key] == one, key


# -- what Kubernetes takes -------------------------------------------------------------------------


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


@every
@pytest.mark.parametrize("version", tools.VERSIONS)
def test_kubernetes_takes_it(name: str, version: str) -> None:
    objects = [one for one in RENDERED[name]() if not one["apiVersion"].startswith("monitoring.")]
    assert objects
    assert [*chain.from_iterable(complaints(one, version) for one in objects)] == []


def test_the_schemas_are_strict() -> None:
    (wrong,) = (one for one in kustomized("shared") if one["kind"] == "Deployment")
    wrong = json.loads(json.dumps(wrong))
    container = wrong["spec"]["template"]["spec"]["containers"][0]
    container["readinesProbe"] = container.pop("readinessProbe")
    container["ports"][0]["containerPort"] = "8092"
    found = complaints(wrong, tools.VERSIONS[0])
    assert any("readinesProbe" in one for one in found)
    assert any("containerPort" in one for one in found)


CHECK = """
import { ServiceMonitor } from
  "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor";
const { apiVersion, kind, ...rest } = JSON.parse(process.argv[2]);
new ServiceMonitor(rest).validate();
"""


def monitor_complaint(monitor: Object) -> str:
    script = tools.MODELS / "check.mjs"
    script.write_text(CHECK, "utf-8")
    command = ["node", str(script), json.dumps(monitor)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        return done.stderr
    spec = monitor["spec"]
    unknown = spec.keys() - fields("ServiceMonitorSpec")
    for endpoint in spec["endpoints"]:
        unknown |= endpoint.keys() - fields("Endpoint")
    return f"unknown: {sorted(unknown)}" if unknown else ""


def fields(name: str) -> set[str]:
    """What a type's declaration names."""
    folder = tools.MODELS / "node_modules/@kubernetes-models/prometheus-operator"
    text = (folder / f"monitoring.coreos.com/v1/{name}.d.ts").read_text("utf-8")
    return set(re.findall(r'^\s*"?(\w+)"?\??:', text, re.MULTILINE))


@pytest.mark.skipif(not tools.MODELS.exists(), reason="no kubernetes-models here: make manifests")
def test_the_operator_takes_the_service_monitor() -> None:
    for objects in (one() for one in RENDERED.values()):
        for monitor in (one for one in objects if one["kind"] == "ServiceMonitor"):
            assert monitor_complaint(monitor) == ""
    (monitor,) = (one for one in kustomized("shared") if one["kind"] == "ServiceMonitor")
    for field, value in (("interval", "15"), ("port", 8092), ("intervall", "15s")):
        wrong = json.loads(json.dumps(monitor))
        wrong["spec"]["endpoints"][0][field] = value
        assert monitor_complaint(wrong), field


# -- what fits together ----------------------------------------------------------------------------


def matches(selector: Object, labels: Object) -> bool:
    return selector.items() <= labels.items()


@every
def test_names_lead_where_they_should(name: str) -> None:
    objects = RENDERED[name]()
    by_kind: dict[str, list[Object]] = {}
    for one in objects:
        by_kind.setdefault(one["kind"], []).append(one)
    (pod,) = pods(objects)
    labels = pod["metadata"]["labels"]
    ports = {port["name"] for one in pod["spec"]["containers"] for port in one["ports"]}
    services = {one["metadata"]["name"]: one for one in by_kind["Service"]}
    for service in services.values():
        assert matches(service["spec"]["selector"], labels)
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    (deployment,) = by_kind["Deployment"]
    assert matches(deployment["spec"]["selector"]["matchLabels"], labels)
    for policy in by_kind.get("NetworkPolicy", ()):
        assert matches(policy["spec"]["podSelector"]["matchLabels"], labels)
        for rule in policy["spec"].get("ingress", ()):
            assert {port["port"] for port in rule["ports"]} <= ports
    for budget in by_kind.get("PodDisruptionBudget", ()):
        assert matches(budget["spec"]["selector"]["matchLabels"], labels)
    for scaler in by_kind.get("HorizontalPodAutoscaler", ()):
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        assert "replicas" not in deployment["spec"]
        assert ours(pod)["resources"]["requests"]["cpu"], "of what it scales by"
    for monitor in by_kind.get("ServiceMonitor", ()):
        selector = monitor["spec"]["selector"]["matchLabels"]
        (service,) = (s for s in services.values() if matches(selector, s["metadata"]["labels"]))
        named = {port["name"] for port in service["spec"]["ports"]}
        assert {one["port"] for one in monitor["spec"]["endpoints"]} <= named
        job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
        assert job == "select-service", "as the rules and the dashboard have it"
    account = pod["spec"]["serviceAccountName"]
    assert [one["metadata"]["name"] for one in by_kind.get("ServiceAccount", ())] in ([], [account])
    assert account == "theirs" or by_kind["ServiceAccount"]
    (binding,) = by_kind["RoleBinding"]
    assert binding["subjects"][0]["name"] == account
    assert binding["roleRef"]["name"] == by_kind["Role"][0]["metadata"]["name"]


@every
def test_flags_are_taken_and_say_what_the_objects_say(name: str) -> None:
    objects = RENDERED[name]()
    (pod,) = pods(objects)
    container = ours(pod)
    arguments = [one.replace("$(POD_IP)", "10.0.0.1") for one in container["args"]]
    settings = parse(arguments, {})
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    has_company = len(pod["spec"]["containers"]) > 1
    reached = {"side": settings.side_port} if has_company else {"http": settings.port}
    assert ports == {**reached, "replica-sync": settings.replica_sync_port}
    assert {container[probe]["httpGet"]["port"] for probe in PROBES} == reached.keys()
    scheme = "HTTPS" if settings.tls_cert else "HTTP"
    assert {container[probe]["httpGet"].get("scheme", "HTTP") for probe in PROBES} == {scheme}
    for url in settings.indexer_peers:
        assert url.startswith(f"{scheme.lower()}://")
    for monitor in (one for one in objects if one["kind"] == "ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint.get("scheme", "http") == scheme.lower()
        assert ("tlsConfig" in endpoint) is (scheme == "HTTPS")
    if has_company:
        assert side_address(settings) == ("0.0.0.0", settings.side_port)
        ways = {(None, "/run/select-service/select.sock"), (("localhost", 8092), None)}
        at = None if settings.port is None else (settings.host, settings.port)
        assert (at, settings.uds) in ways, "nobody but the router finds the API"
    assert settings.kubernetes_replicas is not None
    found = settings.kubernetes_replicas.removeprefix("kubernetes.io/service-name=")
    (peers,) = (one for one in objects
                if one["kind"] == "Service" and one["metadata"]["name"] == found)  # fmt: skip
    assert peers["spec"]["publishNotReadyAddresses"] is True
    assert peers["spec"]["clusterIP"] == "None"
    assert {port["targetPort"]: port["port"] for port in peers["spec"]["ports"]} == ports
    given_s = pod["spec"]["terminationGracePeriodSeconds"]
    assert given_s > settings.leave_grace_s + settings.shutdown_timeout_s
    assert settings.leave_notice_s > 0
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > settings.recovery_hold_s
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready?for=traffic"
    if settings.uds is not None:
        assert settings.uds_mode == "0666", "a router may be another user"
        (mount,) = (one for one in container["volumeMounts"] if one["name"].endswith("socket"))
        assert settings.uds.startswith(mount["mountPath"] + "/")


@every
def test_every_pod_is_confined(name: str) -> None:
    (pod,) = pods(RENDERED[name]())
    spec = pod["spec"]
    given = VARIED.get(name.removeprefix("helm "), {}).get("podSecurityContext", {}).keys()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        # as OpenShift's restricted-v2 wants it: it gives the user, and refuses another
        assert spec["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"} | given
        assert re.search(r":\d|@sha256:[0-9a-f]{64}$", container["image"]), "a version, or a digest"
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("overlay", SAME)
def test_nothing_comes_in_that_is_not_said(overlay: str) -> None:
    policies = [one["spec"] for one in kustomized(overlay) if one["kind"] == "NetworkPolicy"]
    denied = {kind for policy in policies for kind in policy["policyTypes"]}
    assert denied == ({"Ingress", "Egress"} if overlay == "shared" else {"Ingress"})
    for policy in policies:
        for rule in policy.get("ingress", ()):
            named = {port["port"] for port in rule["ports"]}
            assert "from" in rule or named == {"router"}, "ours is for those who are named"


# -- what the chart refuses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"mod": "shared"},
        {"mode": "both"},
        {"image": {"tag": "latest"}},
        {"image": {"digest": "sha256:short"}},
        {"extraArgs": ["port"]},
        {"autoscaling": {"cpuPercent": 0}},
        {"sidecar": {"listen": "everywhere"}},
        {"engines": {"podLabels": {}, "eventPorts": [1]}},
        {"imagePullSecrets": ["registry"]},
        {"service": {"type": "ExternalName"}},
        {"strategy": {"type": "Sometimes"}},
        {"networkPolicy": {"dns": {"peers": []}}},
        {"podLabels": {"a": 1}},
        {"probes": {"health": {}}},
    ],
)
def test_values_that_make_no_sense(values: Object) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        templated(values)
    assert "values don't meet the specifications of the schema" in refused.value.stderr


def test_every_value_is_in_the_schema_and_has_a_word_of_explanation() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    of_parents = {"global", "enabled"}  # `condition: select-service.enabled`
    assert schema["properties"].keys() - of_parents == values.keys()
    jsonschema.Draft7Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ("mode=shared", "Callers in this namespace ask http://fleet-select-service:8092"),
        ("mode=shared", "--selector http://fleet-select-service-peers:8092"),
        ("mode=shared", "helm test fleet"),
        ("tls.secretName=c", "ask https://fleet-select-service:8092"),
        ("mode=sidecar", "Nothing runs yet"),
        ("mode=sidecar,sidecar.router.enabled=true", "asks unix:/run/select-service/select.sock"),
        ("mode=sidecar,sidecar.listen=loopback", "asks http://localhost:8092"),
    ],
)
def test_notes(values: str, wanted: str) -> None:
    text = helm("install", "fleet", str(CHART), "--dry-run=client", "--set", values)
    notes = text.partition("NOTES:")[2]
    assert wanted in notes
    assert "set image.digest" in notes


def test_every_value_is_rendered() -> None:
    """Each has a case of its own, whose objects are validated above."""

    def named(schema: Object) -> set[tuple[str, ...]]:
        if "properties" not in schema or schema.get("additionalProperties") is not False:
            return {()}
        below = schema["properties"].items()
        return {(name, *rest) for name, one in below for rest in named(one)}

    def is_given(path: tuple[str, ...]) -> bool:
        for values in (*SAME.values(), *VARIED.values()):
            found: Any = values
            for name in path:
                found = found.get(name) if isinstance(found, dict) else None
            if found is not None:
                return True
        return False

    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    (resources,) = ({"requests", "limits", "claims"},)
    wanted = {path for path in named(schema) if path[-1] not in resources}
    assert [path for path in sorted(wanted) if not is_given(path)] == [("enabled",), ("global",)]


def test_what_is_set_is_where_it_belongs() -> None:
    objects = templated(VARIED["everything"], "fleet")
    values = VARIED["everything"]
    (pod,) = pods(objects)
    spec, container = pod["spec"], ours(pod)
    for name in (
        "imagePullSecrets", "affinity", "tolerations", "topologySpreadConstraints", "dnsPolicy",
        "dnsConfig", "initContainers", "nodeSelector", "priorityClassName",
    ):  # fmt: skip
        assert spec[name] == values[name], name
    assert spec["securityContext"]["fsGroup"] == 65532
    assert pod["metadata"]["annotations"] == {"a": "b"}
    assert pod["metadata"]["labels"] == {
        "team": "inference",
        "app.kubernetes.io/name": "select-service",
        "app.kubernetes.io/instance": "fleet",
    }, "what finds the pods is not for others to say"
    assert container["envFrom"] == values["envFrom"]
    assert values["extraEnv"][0] in container["env"]
    assert values["extraVolumeMounts"][0] in container["volumeMounts"]
    assert values["extraVolumes"][0] in spec["volumes"]
    assert container["startupProbe"]["failureThreshold"] == 90
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert by_name["Deployment", "chooser"]["spec"]["strategy"] == {"type": "Recreate"}
    service = by_name["Service", "chooser"]
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["metadata"]["annotations"] == {"lb": "internal"}
    assert by_name["ServiceAccount", "watcher"]["metadata"]["annotations"] == {"iam": "role"}
    policy, said = by_name["NetworkPolicy", "chooser"]["spec"], values["networkPolicy"]
    assert said["clients"][0] in policy["ingress"][0]["from"]
    assert said["extraIngress"][0] in policy["ingress"]
    assert said["extraEgress"][0] in policy["egress"]
    (names,) = (rule for rule in policy["egress"] if rule.get("to") == said["dns"]["peers"])
    assert {(one["port"], one["protocol"]) for one in names["ports"]} == {
        (53, "UDP"), (53, "TCP"), (5353, "UDP"), (5353, "TCP"),
    }  # fmt: skip
    assert {"ports": [{"port": 6443, "protocol": "TCP"}]} in policy["egress"]


def test_probes_of_one_s_own() -> None:
    own = {"startup": None, "liveness": {"exec": {"command": ["true"]}}}
    (pod,) = pods(templated({"probes": own}))
    container = ours(pod)
    assert "startupProbe" not in container
    liveness = container["livenessProbe"]
    assert liveness == {"exec": {"command": ["true"]}, "periodSeconds": 10, "timeoutSeconds": 3}
    assert "httpGet" in container["readinessProbe"]


def test_prometheus_follows_tls_and_shows_a_token() -> None:
    found = {}
    for name in ("over TLS", "over TLS by a flag"):
        (monitor,) = (one for one in templated(VARIED[name], "fleet")
                      if one["kind"] == "ServiceMonitor")  # fmt: skip
        (found[name],) = monitor["spec"]["endpoints"]
    authority = {"secret": {"name": "certificate", "key": "ca.crt"}}
    assert found["over TLS"]["tlsConfig"] == {"ca": authority, "serverName": "fleet-select-service"}
    assert found["over TLS"]["authorization"] == {
        "type": "Bearer",
        "credentials": {"name": "reader", "key": "text"},
    }
    assert found["over TLS by a flag"]["tlsConfig"] == {
        "insecureSkipVerify": True,
        "serverName": "fleet-select-service",
    }


@pytest.mark.parametrize("values", [{}, {"tls": {"secretName": "certificate"}}])
def test_helm_test_asks_as_a_caller_would(values: Object) -> None:
    objects = templated(values, "fleet")
    (pod,) = (one for one in objects if one["kind"] == "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["metadata"]["labels"]["select-service.io/client"] == "true"
    services = [one["spec"]["selector"] for one in objects if one["kind"] == "Service"]
    assert not any(matches(one, pod["metadata"]["labels"]) for one in services)
    (container,) = pod["spec"]["containers"]
    chosen = read_call(container["args"])
    scheme = "https" if values else "http"
    assert chosen.url == f"{scheme}://fleet-select-service:8092"
    assert (chosen.ca is None) is not bool(values)
    assert chosen.route == "/ready?for=traffic"


def test_a_sidecar_without_a_router_of_ours() -> None:
    objects = templated({"mode": "sidecar", "sidecar": {"router": {"port": 9000}}}, "fleet")
    kinds = [one["kind"] for one in objects]
    assert not {"Deployment", "Pod", "HorizontalPodAutoscaler"} & {*kinds}
    assert {"Service", "ServiceAccount", "NetworkPolicy"} <= {*kinds}
    (policy,) = (one["spec"] for one in objects if one["kind"] == "NetworkPolicy")
    assert policy["ingress"][-1]["ports"] == [{"port": 9000, "protocol": "TCP"}]


ROUTER = """
apiVersion: apps/v1
kind: Deployment
metadata:
  name: mine
spec:
  selector:
    matchLabels: {app: mine}
  template:
    metadata:
      labels:
        app: mine
        {{- include "select-service.selector" . | nindent 8 }}
    spec:
      {{- include "select-service.podSpec" . | nindent 6 }}
      containers:
        {{- include "select-service.container" . | nindent 8 }}
        - name: mine
          image: example.com/mine:1
          env:
            - name: SELECT_SERVICE
              value: {{ include "select-service.address" . }}
          volumeMounts:
            {{- include "select-service.socketMount" . | nindent 12 }}
      VOLUMES
"""


@pytest.mark.parametrize(
    "volumes",
    [
        '{{- include "select-service.volumes" . | nindent 6 }}',
        'volumes:\n        {{- include "select-service.volumeList" . | nindent 8 }}',
    ],
)
def test_a_chart_that_depends_on_it_includes_the_container(volumes: str, tmp_path: Path) -> None:
    objects = as_dependency(
        ROUTER.replace("VOLUMES", volumes),
        {"enabled": True, "mode": "sidecar", "extraVolumes": [{"name": "more", "emptyDir": {}}]},
        tmp_path,
    )
    (pod,) = pods(objects)
    assert ours(pod)["image"] == "registry.example.com/select-service:0.1.0", "not 9.9.9"
    assert [one["name"] for one in pod["spec"]["volumes"]] == ["select-service-socket", "more"]
    assert [one["name"] for one in pod["spec"]["containers"]] == ["select-service", "mine"]
    assert pod["spec"]["containers"][1]["env"][0]["value"].startswith("unix:/run/select-service/")
    accounts = [one["metadata"]["name"] for one in objects if one["kind"] == "ServiceAccount"]
    assert accounts == [pod["spec"]["serviceAccountName"]]
    for version in tools.VERSIONS:
        assert [*chain.from_iterable(complaints(one, version) for one in objects)] == []


# -- linters ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not tools.HADOLINT.exists(), reason="no hadolint here: make manifests")
def test_the_dockerfile_is_linted() -> None:
    command = [str(tools.HADOLINT), "--no-color", str(DEPLOY / "Dockerfile")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout
