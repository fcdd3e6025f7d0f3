"""Settings of the process: flags in `flags`, environment in `environment`, combined in `settings`.

`cli.py` and the edges read them, never a core: a core is passed what it needs. An unreadable flag
ends the process (exit 2); an unreadable environment variable leaves the default and a warning.
"""

from select_service.settings.defaults import Durability, FieldValidation, LogFormat
from select_service.settings.environment import (
    ENVIRONMENT,
    PolicyFile,
    RouterSettings,
    Variable,
    read_environment,
)
from select_service.settings.flags import FLAGS, Flag
from select_service.settings.layers import ConfigError, Layers
from select_service.settings.settings import Settings

__all__ = [
    "ENVIRONMENT",
    "FLAGS",
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
