"""What an engine's events mean, computed the slow and obvious way.

A dict of what is held and a loop over the prompt: the independent opponent of the index. Rules are
quoted by their R-numbers (KV events, requirements). Shares no code with the service.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]
Query = Mapping[str, Any]
Content = tuple[Any, ...]  # (parent content or namespace, tokens, media): identity of a prefix

INDEXED_KINDS = {"full_attention", "mla_attention", "sink_full_attention"}
LIMITING_KINDS = {"mamba", "sliding_window", "sliding_window_mla"}
TIERS: dict[str, set[str | None]] = {
    "device": {None, "GPU", "DEVICE"},
    "host": {"CPU", "CPU_PINNED", "CPU_TIER1"},
    "disk": {"STORAGE", "FS", "OBJ", "DISK", "NVME", "CPU_TIER2"},
    "external": {"EXTERNAL", "NETWORK", "REMOTE", "SHARED"},
}
HEX_64 = re.compile(r"[0-9a-f]{64}")
U64 = (1 << 64) - 1


def as_u64(value: int | Mapping[str, str]) -> int:
    """An engine hash; `{"b": hex}` is a bytes value, of which the last eight bytes count."""
    if isinstance(value, Mapping):
        return int.from_bytes(bytes.fromhex(value["b"])[-8:], "big")
    return value & U64


def tier_of(medium: str | None) -> str | None:
    """The tier of a medium in any case; None: an unknown one, credited nowhere."""
    name = medium.upper() if medium else None
    return next((tier for tier, media in TIERS.items() if name in media), None)


@dataclass
class RankTruth:
    """What one (worker, rank) holds."""

    block_size: int
    known: dict[int, Content] = field(default_factory=dict)
    held: Counter[tuple[str, int, int]] = field(default_factory=Counter)  # (tier, group, hash)
    kinds: dict[int, str] = field(default_factory=dict)
    # Groups beside full attention: (blocks needed at the end, their size in blocks of the main
    # group), and what they hold.
    needs: dict[int, tuple[int, int]] = field(default_factory=dict)
    is_hybrid: bool = False
    beside: Counter[tuple[str, int, int]] = field(default_factory=Counter)

    def apply(self, events: Sequence[Event]) -> None:
        """Apply one batch."""
        kinds = {e.get("kv_cache_spec_kind") for e in events if e["type"] == "BlockStored"}
        # an engine tells of all groups at once: otherwise these are not of one model
        self.is_hybrid |= bool(kinds & INDEXED_KINDS and kinds & LIMITING_KINDS)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.held.clear()
                self.beside.clear()
                self.known.clear()
            elif event["type"] == "BlockStored":
                self._store(event)
            elif event["type"] == "BlockRemoved":
                self._remove(event)

    def _is_indexed_group(self, event: Event) -> bool:
        """A kind names what a group is, for later events without one as well."""
        group = event.get("group_idx") or 0
        kind = event.get("kv_cache_spec_kind")
        if kind is not None:
            self.kinds[group] = kind
        window, size = event.get("kv_cache_spec_sliding_window"), event.get("block_size")
        if kind == "mamba":
            self.needs[group] = 1, 1
        elif kind in ("sliding_window", "sliding_window_mla") and window and size:
            self.needs[group] = max(1, math.ceil((window - 1) / size)), size // self.block_size
        return self.kinds.get(group) in INDEXED_KINDS if group in self.kinds else group == 0

    def _store(self, event: Event) -> None:
        tier = tier_of(event.get("medium"))
        is_main, group = self._is_indexed_group(event), event.get("group_idx") or 0
        if not is_main and group in self.needs and event.get("locality") != "REMOTE" and tier:
            self.beside.update((tier, group, as_u64(h)) for h in event["block_hashes"])
        if not self._is_indexed_group(event) or event.get("locality") == "REMOTE" or tier is None:
            return
        hashes = [as_u64(h) for h in event["block_hashes"]]
        group = event.get("group_idx") or 0
        if not event["token_ids"] and not event["block_size"]:  # a placeholder
            self.held.update((tier, group, h) for h in hashes if h in self.known)
            return
        if event["block_size"] != self.block_size:
            return
        if len(event["token_ids"]) != len(hashes) * self.block_size:
            return
        content = self._parent_content(event)
        if content is None:  # never a root
            return
        for index, engine_hash in enumerate(hashes):
            tokens = event["token_ids"][index * self.block_size : (index + 1) * self.block_size]
            media, poison = _media_of(event, index)
            content = (content, tuple(tokens), media, poison)
            self.known[engine_hash] = content
            self.held[tier, group, engine_hash] += 1

    def _parent_content(self, event: Event) -> Content | None:
        parent = event.get("parent_block_hash")
        if parent is not None:
            return self.known.get(as_u64(parent))
        adapter = event.get("lora_name") or (
            ("lora_id", event["lora_id"]) if event.get("lora_id") else None
        )
        return ("root", adapter, _salt_of(event))

    def _remove(self, event: Event) -> None:
        if event.get("locality") != "REMOTE":
            place = tier_of(event.get("medium")) or "", event.get("group_idx") or 0
            self.beside.subtract((*place, as_u64(h)) for h in event["block_hashes"])
            self.beside = +self.beside
        if not self._is_indexed_group(event) or event.get("locality") == "REMOTE":
            return
        tier = tier_of(event.get("medium"))
        for engine_hash in event["block_hashes"]:
            key = (tier or "", event.get("group_idx") or 0, as_u64(engine_hash))
            if self.held[key] > 0:
                self.held[key] -= 1

    def row(self, query: Query) -> list[int]:
        """[device, host, disk] blocks of a prompt, cumulative."""
        on_tier: dict[str, set[Content]] = {tier: set() for tier in TIERS}
        for (tier, _, engine_hash), count in self.held.items():
            if count > 0 and engine_hash in self.known:
                on_tier[tier].add(self.known[engine_hash])
        prefixes = _prefixes(query, self.block_size)
        position, reached = 0, {}
        for tier in TIERS:
            start = position
            while position < len(prefixes) and prefixes[position] in on_tier[tier]:
                position += 1
            while position > start and not self._all_groups_allow(tier, prefixes[:position], start):
                position -= 1
            reached[tier] = position
        return [reached["device"], reached["host"], reached["external"]]

    def _all_groups_allow(self, tier: str, prefix: list[Content], start: int) -> bool:
        """Whether each group has its last blocks of a prefix; those before `start` it has."""
        if not self.is_hybrid:
            return True
        hashes = [
            {name for name, content in self.known.items() if content == one} for one in prefix
        ]
        for group, (count, size) in self.needs.items():
            if not any((t, g) == (tier, group) for t, g, _ in self.beside):
                continue
            if len(prefix) % size:
                return False
            for end in range(len(prefix), max(0, len(prefix) - count * size), -size):
                if end > start and not any(
                    (tier, group, h) in self.beside for h in hashes[end - 1]
                ):
                    return False
        return True


def _prefixes(query: Query, block_size: int) -> list[Content]:
    tokens = query["token_ids"]
    media = query.get("block_mm_infos") or []
    content: Content = ("root", query.get("lora_name") or None, query.get("cache_salt") or None)
    found = []
    for index in range(len(tokens) // block_size):
        info = media[index] if index < len(media) else None
        objects = tuple(sorted(o["mm_hash"] for o in info["mm_objects"])) if info else ()
        block = tuple(tokens[index * block_size : (index + 1) * block_size])
        content = (content, block, objects, None)
        found.append(content)
    return found


def _keys_of(event: Event, index: int) -> list[Any]:
    """What `extra_keys` says of one block, without the adapter's name in front."""
    per_block = event.get("extra_keys") or []
    keys = list(per_block[index] or []) if index < len(per_block) else []
    if keys and event.get("lora_name") and keys[0] == event["lora_name"]:
        keys = keys[1:]
    return keys


def _media_of(event: Event, index: int) -> tuple[tuple[int, ...], Any]:
    """Sorted media hashes of a block, and what makes it unmatchable by tokens."""
    media, poison = [], None
    for key in _keys_of(event, index):
        if isinstance(key, Mapping):
            poison = key["b"]
        elif isinstance(key, list):
            media.append(int(key[0][:16], 16))
        elif _has_bare_media(event) and HEX_64.fullmatch(key):
            media.append(int(key[:16], 16))
    return tuple(sorted(media)), poison


def _salt_of(event: Event) -> str | None:
    if event.get("cache_salt"):
        return str(event["cache_salt"])
    bare = [k for k in _keys_of(event, 0) if isinstance(k, str)]
    if _has_bare_media(event):
        bare = [k for k in bare if not HEX_64.fullmatch(k)]
    return bare[0] if bare else None


def _has_bare_media(event: Event) -> bool:
    """Only engines that knew no groups wrote media identifiers without a list around them."""
    return "group_idx" not in event
