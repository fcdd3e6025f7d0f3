"""The command line of the service as one table; `cli.py` builds its parser from it.

A flag sets the field of Settings with its name. deploy/reference/flags.md is made from it.
"""

from typing import Final

from select_service.config.flags.admission import ADMISSION
from select_service.config.flags.booking import BOOKING
from select_service.config.flags.choice import CHOICE
from select_service.config.flags.discovery import DISCOVERY
from select_service.config.flags.entrance import ENTRANCE
from select_service.config.flags.flag import Flag
from select_service.config.flags.index import INDEX
from select_service.config.flags.keeping import KEEPING
from select_service.config.flags.recovery import RECOVERY
from select_service.config.flags.replication import REPLICATION
from select_service.config.flags.security import SECURITY
from select_service.config.flags.telling import TELLING

__all__ = ["FLAGS", "ROOMS", "Flag"]

ROOMS: Final = {
    "entrance": ENTRANCE,
    "security": SECURITY,
    "booking": BOOKING,
    "choice": CHOICE,
    "admission": ADMISSION,
    "index": INDEX,
    "recovery": RECOVERY,
    "replication": REPLICATION,
    "discovery": DISCOVERY,
    "keeping": KEEPING,
    "telling": TELLING,
}
FLAGS: Final = tuple(flag for room in ROOMS.values() for flag in room)
