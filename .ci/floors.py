"""Print `name==lowest` for every direct dependency declared in a pyproject.toml.

Used as a pip constraints file: what is not named there (dependencies of dependencies) resolves
freely, so the result is the oldest set of direct dependencies that the project claims to support.
"""

import re
import sys
import tomllib
from pathlib import Path

REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[.*\])?\s*>=\s*([0-9][0-9a-z.]*)")


def floors(pyproject: Path) -> list[str]:
    """The lowest allowed version of each direct dependency, extras included."""
    project = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    lowest: dict[str, str] = {}
    for requirement in (line for group in groups for line in group):
        if requirement.startswith(f"{project['name']}["):
            continue  # an extra that takes in another
        found = REQUIREMENT.match(requirement)
        if not found:
            raise SystemExit(f"no lower bound: {requirement}")
        name, version = found.groups()
        if lowest.setdefault(name.lower(), version) != version:
            raise SystemExit(f"two lower bounds for {name}: {lowest[name.lower()]} and {version}")
    return [f"{name}=={version}" for name, version in sorted(lowest.items())]


if __name__ == "__main__":
    print("\n".join(floors(Path(sys.argv[1]))))
