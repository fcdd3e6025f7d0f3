"""The image and the manifests ask for no root, no capability and no file that can be written."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from select_service.cli import parse
from select_service.demo.cli import add_commands
from select_service.standard_output import parse_command

DEPLOY = Path(__file__).parents[2] / "deploy"
LAST_STAGE = (DEPLOY / "Dockerfile").read_text("utf-8").rpartition("\nFROM ")[2]
MANIFESTS = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))


def word(name: str) -> str:
    """What the last stage says last of one instruction."""
    found: list[str] = re.findall(rf"^{name} (.*)$", LAST_STAGE, re.MULTILINE)
    return found[-1]


def test_the_image_runs_as_nobody() -> None:
    user, _, group = word("USER").partition(":")
    assert int(user) > 0, "a number: Kubernetes cannot see from a name that it is not root"
    assert int(group) > 0
    after = LAST_STAGE.partition("\nUSER ")[2]
    assert not re.search(r"^(RUN|USER|ADD|COPY) ", after, re.MULTILINE)
    assert json.loads(word("ENTRYPOINT")) == ["select-service"]
    assert "apt-get" not in LAST_STAGE
    assert "VOLUME" not in LAST_STAGE, "nothing is kept unless somebody says where"


@contextmanager
def answering(status: int) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield server.server_port
        thread.join()


@pytest.mark.parametrize("status", [200, 503, None])
def test_the_health_check_is_what_health_answers(status: int | None) -> None:
    check = word("HEALTHCHECK").partition("CMD ")[2]
    python, *arguments = json.loads(check)
    assert python == "python"
    assert "8092" in check

    def ask(port: int) -> int:
        command = [one.replace("8092", str(port)) for one in arguments]
        return subprocess.run(
            [sys.executable, *command], check=False, capture_output=True
        ).returncode

    if status is None:
        assert ask(9) != 0, "nobody is there"
    else:
        with answering(status) as port:
            assert (ask(port) == 0) == (status == 200)


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            template = document.get("spec", {}).get("template")
            if template is not None:
                yield f"{path.name}: {document['metadata']['name']}", template["spec"]


def test_pods_are_confined() -> None:
    """As they are written; test_manifests.py looks at what is made of them."""
    found = list(pods())
    assert found
    for name, pod in found:
        of_pod = pod.get("securityContext")
        assert ("serviceAccountName" in pod) == (of_pod is not None), name
        if of_pod is not None:  # else the sidecar's patch says it
            assert of_pod["runAsNonRoot"] is True, name
            # the image names one by number; OpenShift refuses any but its own
            assert not of_pod.keys() & {"runAsUser", "runAsGroup", "fsGroup"}, name
            assert int(word("USER").partition(":")[0]) > 0
            assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for shared in ("hostNetwork", "hostPID", "hostIPC"):
            assert not pod.get(shared), name
        assert not [one for one in pod.get("volumes", ()) if "hostPath" in one], name
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True, name
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            assert not own.get("privileged"), name
            if container["name"] == "select-service":
                arguments = [one.replace("$(POD_IP)", "10.0.0.1") for one in container["args"]]
                assert parse(arguments, {}).replica_sync_port == 9092, name


def test_the_account_may_only_look() -> None:
    rules = [
        rule
        for path in MANIFESTS
        for document in yaml.safe_load_all(path.read_text("utf-8"))
        if document["kind"] in {"Role", "ClusterRole"}
        for rule in document["rules"]
    ]
    assert rules
    for rule in rules:
        assert set(rule["verbs"]) == {"list", "watch"}, "what discovery asks for"
        assert "*" not in rule["resources"]
        assert "secrets" not in rule["resources"]


# -- compose.yaml ----------------------------------------------------------------------------------

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))


def test_what_compose_mounts_is_there() -> None:
    mounts = [one for service in COMPOSE["services"].values() for one in service.get("volumes", ())]
    assert mounts
    for mount in mounts:
        source, target, *mode = mount.split(":")
        if source.startswith("."):
            assert (DEPLOY / source).exists(), source
            assert mode == ["ro"]
            assert target.startswith("/etc/")
        else:
            assert source in COMPOSE["volumes"]


def test_compose_starts_what_there_is() -> None:
    services = COMPOSE["services"]
    ours = services["select-service"]
    settings = parse(ours["command"], {})
    assert ours["ports"] == [f"127.0.0.1:{settings.port}:{settings.port}"]
    assert float(ours["stop_grace_period"][:-1]) > settings.leave_grace_s + 5
    engines = services["engines"]
    asked = parse_command(add_commands, engines["command"])
    assert asked.command == "demo"
    assert asked.url == f"http://127.0.0.1:{settings.port}"
    assert engines["network_mode"] == "service:select-service", "engines publish on the loopback"
    for name, service in services.items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "a version"
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_compose_scrapes_by_the_name_the_rules_have() -> None:
    folder = DEPLOY / "prometheus"
    scraped, usual = (
        yaml.safe_load((folder / name).read_text("utf-8"))
        for name in ("compose.yaml", "prometheus.yaml")
    )
    (job,) = scraped["scrape_configs"]
    assert job["job_name"] == usual["scrape_configs"][0]["job_name"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert COMPOSE["services"][host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert scraped["rule_files"] == usual["rule_files"]


def test_grafana_finds_the_dashboard_and_its_source() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "dashboards/select-service.yaml").read_text())[
        "providers"
    ]
    grafana = COMPOSE["services"]["grafana"]
    board = f"{provider['options']['path']}/select-service.json"
    assert f"./grafana/select-service.json:{board}:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == board
