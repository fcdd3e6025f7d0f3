"""What local hashing of a prompt needs to know about the workers: block size and window.

`session.py` passes prompts through it before sending them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from select_service.client.core.fallback import scope_of
from select_service.client.core.problems import BlockSizeUnknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.client.core.exchange import Run
    from select_service.client.core.fallback import FallbackCatalog
    from select_service.client.core.options import Options
    from select_service.types import Scope


class Prompts:
    """Hashes prompts if `hash_locally` is set."""

    def __init__(
        self,
        options: Options,
        catalog: FallbackCatalog,
        hash_prompt: Callable[..., dict[str, object]],
        refresh: Callable[[float, float | None], Run[None]],
    ) -> None:
        self._options = options
        self._catalog = catalog
        self._hash_prompt = hash_prompt
        self._refresh = refresh

    def hashed(
        self, prompt: dict[str, Any], now: float, timeout_s: float | None
    ) -> Run[dict[str, Any]]:
        """Return a prompt with its tokens replaced by hashes, if that is wanted.

        Raises:
            BlockSizeUnknown: no schedulable worker of its scope is known.
        """
        if not self._options.hash_locally or "token_ids" not in prompt:
            return prompt
        scope, is_eagle = scope_of(prompt), prompt.get("is_eagle")
        size = yield from self.block_size(scope, now, timeout_s)
        if is_eagle is None:
            worker = self._catalog.any_worker(scope)
            is_eagle = worker is not None and worker.is_eagle
        hashed = {name: one for name, one in prompt.items() if name != "token_ids"}
        return hashed | self._hash_prompt(
            prompt["token_ids"],
            size,
            lora_name=prompt.get("lora_name"),
            cache_salt=prompt.get("cache_salt") or prompt.get("cache_namespace"),
            is_eagle=bool(is_eagle),
        )

    def block_size(self, scope: Scope, now: float, timeout_s: float | None) -> Run[int]:
        """Return the block size of a scope: as configured, or from its workers.

        Raises:
            BlockSizeUnknown: no schedulable worker of the scope is known.
        """
        if self._options.block_size is not None:
            return self._options.block_size
        worker = self._catalog.any_worker(scope)
        if worker is None:
            yield from self._refresh(now, timeout_s)
            worker = self._catalog.any_worker(scope)
        if worker is None or not worker.block_size:
            raise BlockSizeUnknown(f"no schedulable worker of {scope} is known")
        return worker.block_size
