"""What the image installs: pinned, with hashes, and within the bounds of pyproject.toml."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PIN = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)((?: --hash=sha256:[0-9a-f]{64})+)")


def pins(name: str) -> dict[str, str]:
    """Versions by name; fails on any line that is no pin with hashes."""
    text = (ROOT / "deploy" / name).read_text("utf-8").replace("\\\n", " ")
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = PIN.fullmatch(" ".join(line.split()))
        assert match, line[:80]
        assert match[1] not in found
        found[match[1]] = match[2]
    return found


EXTRAS = PROJECT["project"]["optional-dependencies"]
RUN = [*PROJECT["project"]["dependencies"], *EXTRAS["demo"], *EXTRAS["epp"], *EXTRAS["otel"]]
BUILD = PROJECT["build-system"]["requires"]


@pytest.mark.parametrize(
    ("name", "wanted"), [("requirements.txt", RUN), ("requirements-build.txt", BUILD)]
)
def test_pins_are_within_the_bounds(name: str, wanted: list[str]) -> None:
    found = pins(name)
    for one in map(Requirement, wanted):
        if one.name == PROJECT["project"]["name"]:
            continue  # an extra that takes in another
        version = found[canonicalize_name(one.name)]
        assert one.specifier.contains(version, prereleases=True), f"{one}: {version} (make pins)"


def test_nothing_but_the_pins_is_fetched() -> None:
    lines = (ROOT / "deploy/install.sh").read_text("utf-8").replace("\\\n", " ").splitlines()
    fetches = [line for line in lines if re.search(r"\bpip\b.* (install|wheel) ", line)]
    assert len(fetches) == 4
    for line in fetches:
        hashed = "--require-hashes" in line and "--only-binary :all:" in line
        assert hashed or ("--no-index" in line and "--no-deps" in line), line
    assert not [line for line in lines if re.search(r"\b(curl|wget|git|easy_install)\b", line)]


@pytest.mark.heavy
def test_the_bill_of_materials_names_every_pin_and_its_hashes(tmp_path: Path) -> None:
    file = tmp_path / "sbom.json"
    done = subprocess.run(
        ["make", "sbom", f"SBOM={file}"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    bill = json.loads(file.read_text("utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "select-service"
    assert {one["name"]: one["version"] for one in bill["components"]} == pins("requirements.txt")
    hashes = {
        said["content"]
        for one in bill["components"]
        for reference in one["externalReferences"]
        for said in reference.get("hashes", ())
    }
    text = (ROOT / "deploy/requirements.txt").read_text("utf-8")
    assert hashes == set(re.findall("sha256:([0-9a-f]{64})", text))
