"""Print a list of a TOML file, an item a line: `listed.py pyproject.toml build-system.requires`."""

import sys
import tomllib
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    table: Any = tomllib.loads(Path(sys.argv[1]).read_text("utf-8"))
    for name in sys.argv[2].split("."):
        table = table[name]
    print("\n".join(table))
