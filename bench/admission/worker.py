"""A worker that computes in model time: continuous batching, chunked prefill, a full KV cache.

One step computes one token of every decoding sequence and as much of the prompts, first come first
served, as the step's budget of tokens leaves. A request enters when
the batch has a place and there are KV blocks for its whole length: none is preempted. Reads no
clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench.admission.workload import Client

__all__ = ["Happening", "SimulatedWorker", "WorkerSettings"]

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """A mid-size model on one device of today, roughly; what matters: it is the same for all."""

    step_s: float = 0.008  # of every step, whatever is in it
    prefill_token_s: float = 50e-6
    sequence_s: float = 60e-6  # per decoding sequence
    step_tokens_max: int = 768  # max_num_batched_tokens
    sequences_max: int = 256  # max_num_seqs
    kv_blocks: int = 12_288
    block_size: int = _BLOCK_SIZE

    def work_s(self, tokens: int, output_tokens: int) -> float:
        """Return the time of a worker that a request takes; of steps, what a full batch leaves."""
        per_output_token = self.sequence_s + self.step_s / self.sequences_max
        return tokens * self.prefill_token_s + output_tokens * per_output_token


class Happening(NamedTuple):
    """What became of a request at the end of a step."""

    client: Client
    kind: Literal["first_token", "block", "done"]


class _Running:
    __slots__ = ("blocks", "client", "prefill_left", "started_at_step")

    def __init__(self, client: Client, blocks: int) -> None:
        self.client = client
        self.blocks = blocks
        self.prefill_left = client.tokens
        self.started_at_step = 0


class SimulatedWorker:
    """`submit` requests, and call `step` whenever `next_event` has come."""

    def __init__(
        self, worker_id: int, settings: WorkerSettings, *, reports_blocks: bool = True
    ) -> None:
        self.worker_id = worker_id
        self.settings = settings
        self.waiting: deque[Client] = deque()
        self.blocks_used = 0
        self.running = 0
        self.next_event = math.inf
        """When the step in progress ends."""
        self.output_blocks = 0
        """Filled so far, where not each is reported: that takes most of a long simulation."""
        self._reports_blocks = reports_blocks
        self._in_phase = [0] * settings.block_size  # those that decode, by when their blocks fill
        self._steps = 0
        self._prefilling: deque[_Running] = deque()
        self._chunks: list[tuple[_Running, int]] = []  # of the step in progress
        self._due: dict[int, list[_Running]] = {}  # step at whose end a block or an answer is full

    @property
    def sequences(self) -> int:
        """Requests in the running batch."""
        return self.running

    def submit(self, client: Client, now: float) -> None:
        """A request arrives; it is looked at when the step in progress is over."""
        self.waiting.append(client)
        if self.next_event == math.inf:
            self._begin(now)

    def step(self) -> list[Happening]:
        """End the step in progress and begin the next one."""
        now = self.next_event
        happened: list[Happening] = []
        for running, tokens in self._chunks:
            running.prefill_left -= tokens
            if not running.prefill_left:
                self._prefilling.remove(running)
                running.started_at_step = self._steps
                self._in_phase[self._steps % self.settings.block_size] += 1
                happened.append(Happening(running.client, "first_token"))
                self._await(running, 1)
        for running in self._due.pop(self._steps, ()):
            self._produced(running, happened)
        self._steps += 1
        self.output_blocks += self._in_phase[self._steps % self.settings.block_size]
        self._begin(now)
        return happened

    def _await(self, running: _Running, produced: int) -> None:
        """Look at it again when its next block is full or its last token is there."""
        size, total = self.settings.block_size, running.client.output_tokens
        until = min((produced // size + 1) * size, total) if self._reports_blocks else total
        step = running.started_at_step + until - 1
        self._due.setdefault(step, []).append(running)

    def _produced(self, running: _Running, happened: list[Happening]) -> None:
        produced = self._steps - running.started_at_step + 1
        if produced >= running.client.output_tokens:
            self.running -= 1
            self.blocks_used -= running.blocks
            self._in_phase[running.started_at_step % self.settings.block_size] -= 1
            happened.append(Happening(running.client, "done"))
            return
        happened.append(Happening(running.client, "block"))
        self._await(running, produced)

    def _begin(self, now: float) -> None:
        """Compose a batch and say how long it takes; without anything to do, wait."""
        settings = self.settings
        decoding = self.running - len(self._prefilling)
        budget = settings.step_tokens_max - decoding
        self._chunks = []
        prefill = 0
        for running in self._prefilling:
            if budget <= prefill:
                break
            prefill += self._chunk(running, budget - prefill)
        while self.waiting and prefill < budget and self._enters(self.waiting[0]):
            self.waiting.popleft()
            prefill += self._chunk(self._prefilling[-1], budget - prefill)
        if not (decoding or prefill):
            self.next_event = math.inf
            return
        self.next_event = (
            now
            + settings.step_s
            + prefill * settings.prefill_token_s
            + decoding * settings.sequence_s
        )

    def _chunk(self, running: _Running, most: int) -> int:
        tokens = min(running.prefill_left, most)
        self._chunks.append((running, tokens))
        return tokens

    def _enters(self, client: Client) -> bool:
        settings = self.settings
        blocks = -(-(client.tokens + client.output_tokens) // settings.block_size)
        if self.running >= settings.sequences_max or self.blocks_used + blocks > settings.kv_blocks:
            return False
        self.running += 1
        self.blocks_used += blocks
        self._prefilling.append(_Running(client, blocks))
        return True
