"""What a tag sets in motion: GitHub's files have their form, and make the wheels, the image and the
chart that the documents promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from select_service.version import __version__
from tests.deploy import tools

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
FORMS = {
    "workflows/release.yml": "github-workflows",
    "workflows/test.yml": "github-workflows",
    "ISSUE_TEMPLATE/bug.yml": "github-issue-forms",
    "ISSUE_TEMPLATE/feature.yml": "github-issue-forms",
    "ISSUE_TEMPLATE/config.yml": "github-issue-config",
    "dependabot.yml": "dependabot",
    "../deploy/compose.yaml": "compose-spec",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PYTHONS = [
    one.rpartition(" ")[2]
    for one in PROJECT["project"]["classifiers"]
    if one.startswith("Programming Language :: Python :: 3.")
]

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        not (tools.FORMATS.exists() and tools.WHEELS.exists() and tools.HELM.exists()),
        reason="no schemas, cibuildwheel or helm here: make manifests",
    ),
]


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((GITHUB / "workflows" / name).read_text("utf-8"))
    return found


RELEASE = workflow("release.yml")["jobs"]


def step(job: str, **wanted: str) -> dict[str, Any]:
    """The step of a job whose value under a key starts with what is wanted."""
    ((key, start),) = wanted.items()
    (found,) = (one for one in RELEASE[job]["steps"] if one.get(key, "").startswith(start))
    assert isinstance(found, dict)
    return found


def test_every_file_is_of_a_kind() -> None:
    """`zizmor.yml` is the one that its own program checks."""
    found = {str(one.relative_to(GITHUB)) for one in GITHUB.rglob("*.yml")}
    assert found - {"zizmor.yml"} == {one for one in FORMS if not one.startswith("..")}


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_the_form_of_a_file(name: str, form: str) -> None:
    """As GitHub and compose read them: a key that neither knows is ignored there, or stops all."""
    schema = json.loads((tools.FORMATS / f"{form}.json").read_text("utf-8"))
    content = yaml.safe_load((GITHUB / name).read_text("utf-8"))
    if True in content:
        content["on"] = content.pop(True)  # which is true in YAML 1.1, and PyYAML reads that
    jsonschema.validators.validator_for(schema)(schema).validate(content)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [(tools.ACTIONLINT, ("-no-color",)), (tools.ZIZMOR, ("--offline", "--no-progress", "."))],
    ids=["actionlint", "zizmor"],
)
def test_a_linter_finds_nothing(program: Path, arguments: tuple[str, ...]) -> None:
    """Inputs that no action has, actions whose runtime is gone, what a stranger's text can run."""
    if not program.exists():
        pytest.skip(f"no {program.name} here: make manifests")
    done = subprocess.run(
        [str(program), *arguments], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def cibuildwheel(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cibuildwheel", *arguments, str(ROOT)],
        env=os.environ | {"PYTHONPATH": str(tools.WHEELS)},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_release_has_the_wheels_that_are_promised() -> None:
    archs = {
        one["arch"]: one["runner"] for one in RELEASE["wheels"]["strategy"]["matrix"]["include"]
    }
    assert archs.keys() == set(PROJECT["tool"]["cibuildwheel"]["linux"]["archs"])
    assert archs.keys() == {"x86_64", "aarch64"}
    wanted = {
        f"cp{python.replace('.', '')}-{libc}_{arch}"
        for python in PYTHONS
        for libc in ("manylinux", "musllinux")
        for arch in archs
    }
    asked = ("--print-build-identifiers", "--platform", "linux", "--archs", ",".join(archs))
    assert set(cibuildwheel(*asked).split()) == wanted
    floor = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert [floor, "3.12", "3.13", "3.14"] == PYTHONS


def test_the_release_runs_what_is_tested_here() -> None:
    version = tools.MAKES_WHEELS.partition("==")[2]
    assert step("wheels", uses="pypa/cibuildwheel@")["uses"] == f"pypa/cibuildwheel@v{version}"
    tested = workflow("test.yml")["jobs"]["light"]["strategy"]["matrix"]["python"]
    assert tested == PYTHONS
    assert set(RELEASE["publish"]["needs"]) == {"wheels", "sdist"}


def run_step(found: dict[str, Any], folder: Path, **environment: str) -> int:
    """What a runner does with a step that names no shell."""
    command = ["bash", "-e", "-c", found["run"]]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, check=False, capture_output=True
    ).returncode


@pytest.mark.parametrize(
    ("tag", "is_taken"),
    [(f"v{__version__}", True), ("v99.0.0", False), (f"v{__version__}1", False)],
)
def test_a_tag_is_the_version(tag: str, is_taken: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_step(step("version", id="tag"), ROOT, GITHUB_REF_NAME=tag, GITHUB_OUTPUT=str(out))
    assert (done == 0) == is_taken
    assert (out.read_text("utf-8") if out.exists() else "") == (
        f"version={__version__}\n" if is_taken else ""
    )


def test_the_chart_asks_for_the_image_of_its_release(tmp_path: Path) -> None:
    """Packaged by the workflow's own lines; only what would go to a registry is written down."""
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    program, said = tmp_path / "bin" / "helm", tmp_path / "said"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\ncase $1 in package) exec {tools.HELM} "$@";; *) echo "$*" >> {said};; esac\n'
        '[ "$1" != registry ] || cat > /dev/null\n'
    )
    program.chmod(0o755)
    given = {
        "PATH": f"{program.parent}:{os.environ['PATH']}", "VERSION": "7.8.9", "TOKEN": "t",
        "GITHUB_ACTOR": "someone", "GITHUB_REPOSITORY_OWNER": "select-service",
    }  # fmt: skip
    assert run_step(step("chart", name="Push the chart"), tmp_path, **given) == 0
    package = tmp_path / "select-service-7.8.9.tgz"
    login, push = said.read_text("utf-8").splitlines()
    assert login == "registry login ghcr.io --username someone --password-stdin"
    assert push == f"push {package.name} oci://ghcr.io/select-service/charts"
    with tarfile.open(package) as content:
        files = {one.removeprefix("select-service/") for one in content.getnames()}
    assert {"README.md", "values.schema.json", "templates/NOTES.txt"} <= files
    registry = "ghcr.io/select-service/select-service"
    rendered = subprocess.run(
        [tools.HELM, "template", str(package), "--set", f"image.repository={registry}"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert f"image: {registry}:7.8.9\n" in rendered
    tags = step("image", uses="docker/build-push-action@")["with"]["tags"]
    version = "${{ needs.version.outputs.version }}"
    assert tags == "ghcr.io/${{ github.repository }}:" + version
    assert step("chart", name="Push the chart")["env"]["VERSION"] == version
