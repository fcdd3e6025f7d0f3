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

DEPLOY = Path(__file__).parents[2] / "deploy"
LAST_STAGE = (DEPLOY / "Dockerfile").read_text("utf-8").rpartition("\nFROM ")[2]
MANIFESTS = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))


def word(name: str) -> str:
    """What the last stage says last of one instruction."""
    found: list[str] = re.findall(rf"^{name} (.*)$", LAST_STAGE, re.MULTILINE)
    return found[-1]


def test_the_image_runs_as_nobody() -> None:
    user, _, group = word("USER").partition(":")
    assert int(user) > 0, "a number: Kubernetes cannot tell from a name that it is not root"
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
        words = [one.replace("8092", str(port)) for one in arguments]
        return subprocess.run([sys.executable, *words], check=False, capture_output=True).returncode

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
    found = list(pods())
    assert found
    for name, pod in found:
        of_pod = pod["securityContext"]
        assert of_pod["runAsNonRoot"] is True, name
        assert of_pod["runAsUser"] == int(word("USER").partition(":")[0]), name
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


def test_the_account_may_only_look() -> None:
    rules = [
        rule
        for path in MANIFESTS
        for document in yaml.safe_load_all(path.read_text("utf-8"))
        if document["kind"] in ("Role", "ClusterRole")
        for rule in document["rules"]
    ]
    assert rules
    for rule in rules:
        assert set(rule["verbs"]) <= {"get", "list", "watch"}
        assert "*" not in rule["resources"]
        assert "secrets" not in rule["resources"]
