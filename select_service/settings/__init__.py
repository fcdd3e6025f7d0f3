"""Settings of the process: one row each in `table`, combined by source in `layers`.

`cli.py` and the edges read them, never a core: a core is passed what it needs. An unreadable flag
ends the process (exit 2); an unreadable environment variable leaves the default and a warning.
"""

from select_service.settings.environment import (
    ENVIRONMENT,
    PolicyFile,
    RouterSettings,
    Variable,
    read_environment,
)
from select_service.settings.layers import ConfigError, Layers
from select_service.settings.row import Flag
from select_service.settings.service_settings import Settings
from select_service.settings.table import FLAGS, SECTIONS
from select_service.settings.value_types import Durability, FieldValidation, LogFormat

__all__ = [
    "ENVIRONMENT",
    "FLAGS",
    "SECTIONS",
    "ConfigError",
    "Durability",
    "FieldValidation",
    "Flag",
    "Layers",
    "LogFormat",
    "PolicyFile",
    "RouterSettings",
    "Settings",
    "Variable",
    "read_environment",
]
