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
from itertools import chain

import pytest
import yaml

from select_service.cli import parse
from select_service.edge.security.exposure import side_address
from select_service.planner.cli import parser as planner_parser
from select_service.planner.settings import RunSettings
from select_service.settings.command_line import read_section
from tests.deploy import tools
from tests.deploy.manifests import (
    DEPLOY,
    EXAMPLE,
    OVERLAYS,
    SAME,
    VARIED,
    Object,
    kustomized,
    ours,
    pods,
    templated,
)
from tests.deploy.validation import PROBES, complaints, matches, running
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
every = pytest.mark.parametrize("name", RENDERED)
OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")


def test_every_overlay_is_rendered() -> None:
    assert {path.name for path in OVERLAYS.iterdir()} == SAME.keys()


# -- the same twice --------------------------------------------------------------------------------


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


@every
@pytest.mark.parametrize("version", tools.VERSIONS)
def test_kubernetes_takes_it(name: str, version: str) -> None:
    objects = [one for one in RENDERED[name]() if not one["apiVersion"].startswith("monitoring.")]
    assert objects
    assert [*chain.from_iterable(complaints(one, version) for one in objects)] == []


@pytest.mark.parametrize("version", tools.VERSIONS)
def test_kubernetes_takes_the_example(version: str) -> None:
    objects = [
        one for one in kustomized(str(EXAMPLE)) if not one["apiVersion"].startswith("monitoring.")
    ]
    assert {"vllm", "select-service"} <= {one["metadata"]["name"] for one in objects}
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


# -- the planner's ---------------------------------------------------------------------------------


def test_the_planner_s_manifests() -> None:
    objects = [
        one
        for path in sorted((DEPLOY / "planner").glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text("utf-8"))
    ]
    for version in tools.VERSIONS:
        assert [*chain.from_iterable(complaints(one, version) for one in objects)] == []
    (pod,) = pods(tuple(objects))
    spec = pod["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }, "any user"
    (container,) = spec["containers"]
    assert container["image"] == "registry.example.com/select-service:0.1.0", "as the chart has it"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["command"] == ["select-planner"]
    settings = read_section(RunSettings, planner_parser().parse_args(container["args"]))
    assert {port["containerPort"] for port in container["ports"]} == {settings.port}
    writable = [one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")]
    assert writable == [str(settings.state_dir)]
    accounts = {one["metadata"]["name"] for one in objects if one["kind"] == "ServiceAccount"}
    bindings = [one for one in objects if one["kind"] == "RoleBinding"]
    roles = {one["metadata"]["name"] for one in objects if one["kind"] == "Role"}
    assert {spec["serviceAccountName"]} == accounts
    assert {one["roleRef"]["name"] for one in bindings} == roles
    assert {subject["name"] for one in bindings for subject in one["subjects"]} == accounts


# -- linters ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not tools.HADOLINT.exists(), reason="no hadolint here: make manifests")
def test_the_dockerfile_is_linted() -> None:
    command = [str(tools.HADOLINT), "--no-color", str(DEPLOY / "Dockerfile")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout
