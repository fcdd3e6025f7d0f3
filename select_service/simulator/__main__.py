"""`python -m select_service.simulator`: the same as the console script `select-sim`."""

from __future__ import annotations

import sys

from select_service.simulator.cli import main

sys.exit(main())
