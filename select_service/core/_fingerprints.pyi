from collections.abc import Sequence

from select_service.types import PromptFields

ABI: int

class Form:
    def __init__(self, first: PromptFields, varying: Sequence[str]) -> None: ...
    def form_of(self, request: PromptFields) -> bytes | None: ...

BOOKING_FORM: Form
CHOSEN_FORM: Form
