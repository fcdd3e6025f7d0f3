"""`python -m select_service.planner`: the same as the console script `select-planner`."""

from __future__ import annotations

import sys

from select_service.planner.cli import main

sys.exit(main())
