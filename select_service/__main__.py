"""`python -m select_service`: the same as the console script `select-service`."""

from __future__ import annotations

import sys

from select_service.cli import main

sys.exit(main())
