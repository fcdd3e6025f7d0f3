"""Settings of the process: flags in `flags`, environment in `environment`, the sum in `settings`.

Read by `cli.py` and by the edges, never by a core: what a core needs it is handed. A flag that
cannot be read ends the process (exit 2), an environment variable that cannot be read keeps its
default and leaves a warning.
"""

from select_service.config.defaults import Durability, FieldValidation, LogFormat
from select_service.config.environment import (
    ENVIRONMENT,
    PolicyFile,
    RouterSettings,
    Variable,
    read_environment,
)
from select_service.config.flags import FLAGS, Flag
from select_service.config.layers import ConfigError, Layers
from select_service.config.settings import Settings

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
