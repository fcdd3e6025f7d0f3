"""The chart: its values are where they belong, `helm test`, notes, and charts that depend on it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from select_service.client.cli import _read as read_call
from select_service.client.cli import main as call
from select_service.edge.driver.driver import Driver
from select_service.edge.server import Server
from tests.deploy import tools
from tests.deploy.manifests import (
    CHART,
    IMAGE,
    ROUTER_VALUES,
    SAME,
    VARIED,
    Object,
    as_dependency,
    helm,
    ours,
    pods,
    templated,
)
from tests.deploy.validation import PROBES, complaints, matches, running
from tests.select_service.edge.security.credentials_made import Authority
from tests.select_service.edge.serving import on_a_port

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        not (tools.HELM.exists() and tools.SCHEMAS.exists()),
        reason="no helm, kubectl or schemas here: make manifests",
    ),
]

GIVEN = ("--set", f"image.repository={IMAGE['repository']}")

# -- what the chart refuses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"image": {"repository": ""}}, "image.repository"),
        ({"mode": "sidecar", "image": {"repository": ""}}, "image.repository"),
        ({"mode": "sidecar", "sidecar": {"router": {"enabled": True}}}, "sidecar.router.image"),
    ],
)
def test_an_image_that_is_not_named_is_asked_for(values: Object, name: str) -> None:
    """A placeholder would be an ImagePullBackOff, found out only in the cluster."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        templated(values)
    assert f"{name} is required" in refused.value.stderr


def test_the_readme_names_values_that_there_are() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    table = (CHART / "README.md").read_text("utf-8").partition("| value |")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(named) > 10
    for name in named:
        found: Any = values
        for part in name.split("."):
            assert part in found, name
            found = found[part]


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
    assert "0 chart(s) failed" in (said := helm("lint", "--strict", *GIVEN, str(CHART)))
    assert "icon" not in said, "it is recommended"
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
        (
            "mode=sidecar,sidecar.router.enabled=true,sidecar.router.image=r:1",
            "asks unix:/run/select-service/select.sock",
        ),
        ("mode=sidecar,sidecar.listen=loopback", "asks http://localhost:8092"),
        ("mode=sidecar,sidecar.listen=loopback,tls.secretName=c", "asks https://localhost:8092"),
        (
            "mode=sidecar,tls.secretName=c",
            "curl -sw '\\n' --insecure 'https://localhost:8093/ready",
        ),
    ],
)
def test_notes(values: str, wanted: str) -> None:
    text = helm("install", "fleet", str(CHART), "--dry-run=client", *GIVEN, "--set", values)
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


@pytest.mark.parametrize("case", ["everything", "everything beside a router"])
def test_what_is_set_is_where_it_belongs(case: str) -> None:
    values = VARIED[case]
    is_shared = values.get("mode") != "sidecar"
    objects = templated(values, "fleet")
    (pod,) = pods(objects)
    spec, container = pod["spec"], ours(pod)
    for name in (
        "imagePullSecrets", "affinity", "tolerations", "topologySpreadConstraints", "dnsPolicy",
        "dnsConfig", "initContainers", "nodeSelector", "priorityClassName",
    ):  # fmt: skip
        assert spec[name] == values[name], name
    assert spec["securityContext"]["fsGroup"] == 65532
    assert pod["metadata"]["annotations"] == {"a": "b"}
    found_by = {
        "app.kubernetes.io/name": "select-service",
        "app.kubernetes.io/instance": "fleet",
    } if is_shared else {"app": "router", "select-service.io/replica-of": "chooser"}  # fmt: skip
    labels = values["podLabels"] | found_by
    assert pod["metadata"]["labels"] == labels, "what finds the pods is not for others to say"
    assert container["envFrom"] == values["envFrom"]
    assert values["extraEnv"][0] in container["env"]
    assert values["extraVolumeMounts"][0] in container["volumeMounts"]
    assert values["extraVolumes"][0] in spec["volumes"]
    assert container["startupProbe"]["failureThreshold"] == 90
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    deployment = by_name["Deployment", "chooser" if is_shared else "router"]
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert by_name["ServiceAccount", "watcher"]["metadata"]["annotations"] == {"iam": "role"}
    policy, said = by_name["NetworkPolicy", "chooser"]["spec"], values["networkPolicy"]
    assert said["extraIngress"][0] in policy["ingress"]
    if not is_shared:
        return  # no Service that callers reach, and all that leaves the pod is the router's
    service = by_name["Service", "chooser"]
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["metadata"]["annotations"] == {"lb": "internal"}
    assert said["clients"][0] in policy["ingress"][0]["from"]
    assert said["extraEgress"][0] in policy["egress"]
    (names,) = (rule for rule in policy["egress"] if rule.get("to") == said["dns"]["peers"])
    assert {(one["port"], one["protocol"]) for one in names["ports"]} == {
        (53, "UDP"), (53, "TCP"), (5353, "UDP"), (5353, "TCP"),
    }  # fmt: skip
    assert {"ports": [{"port": 6443, "protocol": "TCP"}]} in policy["egress"]


def test_probes_of_one_s_own() -> None:
    (pod,) = pods(templated({"probes": None}))
    assert not {*PROBES} & ours(pod).keys()
    own = {"startup": None, "liveness": {"exec": {"command": ["true"]}}}
    (pod,) = pods(templated({"probes": own}))
    container = ours(pod)
    assert "startupProbe" not in container
    liveness = container["livenessProbe"]
    assert liveness == {"exec": {"command": ["true"]}, "periodSeconds": 10, "timeoutSeconds": 3}
    assert "httpGet" in container["readinessProbe"]


@pytest.mark.parametrize("mode", ["shared", "sidecar"])
def test_probes_need_no_certificate(mode: str) -> None:
    """The kubelet has none to show where every caller needs one."""
    flags = ["--tls-cert=/etc/s/server.pem", "--tls-client-ca=/etc/s/ca.pem"]
    readiness = {"exec": {"command": ["true"]}}
    values = {
        "mode": mode,
        "extraArgs": flags,
        "probes": {"readiness": readiness},
        "sidecar": {"router": ROUTER_VALUES},
    }
    objects = templated(values)
    (pod,) = pods(objects)
    container = ours(pod)
    port = container["ports"][0]["name"]
    for name in ("startupProbe", "livenessProbe"):
        assert container[name]["tcpSocket"] == {"port": port}
        assert "httpGet" not in container[name]
    assert container["readinessProbe"]["exec"] == readiness["exec"]
    assert "tcpSocket" not in container["readinessProbe"]
    assert running(objects) == objects, "no test, which has no certificate either"
    for version in tools.VERSIONS:
        assert [*chain.from_iterable(complaints(one, version) for one in objects)] == []


def test_prometheus_follows_tls_and_shows_a_token() -> None:
    found = {}
    for name in ("over TLS", "over TLS by a flag", "a sidecar over TLS"):
        (monitor,) = (one for one in templated(VARIED[name], "fleet")
                      if one["kind"] == "ServiceMonitor")  # fmt: skip
        (found[name],) = monitor["spec"]["endpoints"]
    authority = {"secret": {"name": "certificate", "key": "ca.crt"}}
    assert found["over TLS"]["tlsConfig"] == {"ca": authority, "serverName": "fleet-select-service"}
    assert found["a sidecar over TLS"]["tlsConfig"] == {
        "ca": authority,
        "serverName": "fleet-select-service-peers",
    }
    assert found["over TLS"]["authorization"] == {
        "type": "Bearer",
        "credentials": {"name": "reader", "key": "text"},
    }
    assert found["over TLS by a flag"]["tlsConfig"] == {
        "insecureSkipVerify": True,
        "serverName": "fleet-select-service",
    }


@pytest.mark.parametrize(
    ("values", "url", "ca"),
    [
        ({}, "http://fleet-select-service:8092", None),
        (VARIED["over TLS"], "https://fleet-select-service:8092", "/etc/select-service-tls/ca.crt"),
        ({"mode": "sidecar"}, "http://fleet-select-service-peers:8093", None),
        (
            VARIED["a sidecar over TLS"],
            "https://fleet-select-service-peers:8093",
            "/etc/select-service-tls/ca.crt",
        ),
        (
            VARIED["a sidecar over TLS by a flag"],
            "https://fleet-select-service-peers:8093",
            "/etc/s/ca.pem",
        ),
    ],
)
def test_helm_test_asks_as_a_caller_would(values: Object, url: str, ca: str | None) -> None:
    objects = templated(values, "fleet")
    (pod,) = (one for one in objects if one["kind"] == "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    is_shared = values.get("mode") != "sidecar"
    assert ("select-service.io/client" in pod["metadata"]["labels"]) is is_shared
    if not is_shared:  # the side port lets it in while the test runs
        (policy,) = (one for one in objects if one["kind"] == "NetworkPolicy"
                     and one["metadata"].get("annotations", {}).get("helm.sh/hook"))  # fmt: skip
        (rule,) = policy["spec"]["ingress"]
        (peer,) = rule["from"]
        assert matches(peer["podSelector"]["matchLabels"], pod["metadata"]["labels"])
    services = [one["spec"]["selector"] for one in objects if one["kind"] == "Service"]
    assert not any(matches(one, pod["metadata"]["labels"]) for one in services)
    (container,) = pod["spec"]["containers"]
    chosen = read_call(container["args"])
    assert chosen.url == url
    assert chosen.ca == ca
    folders = [one["mountPath"] for one in container.get("volumeMounts", ())]
    assert ca is None or str(Path(ca).parent) in folders
    assert chosen.route == "/ready?for=traffic"


def test_helm_test_runs_where_our_pods_do() -> None:
    objects = templated(VARIED["everything"], "fleet")
    (pod,) = (one for one in objects if one["kind"] == "Pod")
    for name in ("imagePullSecrets", "nodeSelector", "tolerations", "dnsPolicy", "dnsConfig"):
        assert pod["spec"][name] == VARIED["everything"][name], name


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["over TLS", "a sidecar over TLS", "shared", "sidecar"])
def test_helm_test_against_a_service(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its container runs, with another address and authority; nobody is registered."""
    objects = templated((VARIED | SAME)[name], "fleet")
    (pod,) = (one for one in objects if one["kind"] == "Pod")
    arguments = pod["spec"]["containers"][0]["args"]
    settings: dict[str, Any] = {}
    authority = Authority(tmp_path)
    if read_call(arguments).ca is not None:
        cert, key = authority.issue("server")
        settings = {"tls_cert": str(cert), "tls_key": str(key)}
    is_ready = {}

    async def use(port: int, driver: Driver, _: Server) -> None:
        def asked() -> int:
            url = f"--url={read_call(arguments).url.partition('://')[0]}://localhost:{port}"
            given = [one for one in arguments if not one.startswith(("--url=", "--ca="))]
            ca = [f"--ca={authority.cert}"] if settings else []
            return call([*given, url, *ca])

        is_ready["at work"] = await asyncio.to_thread(asked)
        driver.announce_leaving()
        is_ready["leaving"] = await asyncio.to_thread(asked)

    on_a_port(use, **settings)
    assert is_ready["at work"] == 0
    assert is_ready["leaving"] != 0
    assert "leaving" in "".join(capsys.readouterr())


def test_a_sidecar_without_a_router_of_ours() -> None:
    objects = running(
        templated({"mode": "sidecar", "sidecar": {"router": {"port": 9000}}}, "fleet")
    )
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
    matchLabels:
      app.kubernetes.io/name: mine
      app.kubernetes.io/instance: {{ .Release.Name }}
  template:
    metadata:
      labels:
        app.kubernetes.io/name: mine
        app.kubernetes.io/instance: {{ .Release.Name }}
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
    labels = pod["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "mine", "its Deployment finds it by that"
    for one in objects:
        found_by = (
            {
                "Service": one["spec"].get("selector"),
                "NetworkPolicy": one["spec"].get("podSelector", {}).get("matchLabels"),
                "Deployment": one["spec"].get("selector", {}).get("matchLabels"),
            }
            if "spec" in one
            else {}
        )
        assert matches(found_by.get(one["kind"]) or {}, labels), one
    for version in tools.VERSIONS:
        assert [*chain.from_iterable(complaints(one, version) for one in objects)] == []
