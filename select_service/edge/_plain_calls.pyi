from collections.abc import Callable, Mapping

from select_service.core._booking import Clerk
from select_service.core._shortcut import Shortcut
from select_service.core.effects import Effects
from select_service.edge.codec.answers import Response
from select_service.edge.http.api import Handler

ABI: int

class PlainCalls:
    def __init__(
        self,
        shortcut: Shortcut | None,
        clerk: Clerk,
        clock: Callable[[], float],
        carry_out: Callable[[Effects], None],
        reads_json: bool,
        encode: Callable[[object], bytes],
        done: Response,
    ) -> None: ...
    def twins(self) -> Mapping[Handler, Handler]: ...
