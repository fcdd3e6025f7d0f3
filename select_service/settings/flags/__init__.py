"""The command line of the service as one table; `cli.py` builds its parser from it.

A flag sets the field of Settings with its name. deploy/reference/flags.md is made from it.
"""

from typing import Final

from select_service.settings.flags.admission_flags import ADMISSION
from select_service.settings.flags.booking import BOOKING
from select_service.settings.flags.cost import CHOICE
from select_service.settings.flags.discovery import DISCOVERY
from select_service.settings.flags.durability import KEEPING
from select_service.settings.flags.flag import Flag
from select_service.settings.flags.kv_index import INDEX
from select_service.settings.flags.listening import ENTRANCE
from select_service.settings.flags.observability import TELLING
from select_service.settings.flags.peer_recovery import RECOVERY
from select_service.settings.flags.replication import REPLICATION
from select_service.settings.flags.security import SECURITY

__all__ = ["FLAGS", "ROOMS", "Flag"]

ROOMS: Final = {
    "listening": ENTRANCE,
    "security": SECURITY,
    "booking": BOOKING,
    "cost": CHOICE,
    "admission_flags": ADMISSION,
    "kv_index": INDEX,
    "peer_recovery": RECOVERY,
    "replication": REPLICATION,
    "discovery": DISCOVERY,
    "durability": KEEPING,
    "observability": TELLING,
}
FLAGS: Final = tuple(flag for room in ROOMS.values() for flag in room)
