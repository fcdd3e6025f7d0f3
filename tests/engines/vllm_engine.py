"""One vLLM as users start it, `vllm serve`, with a tiny model on this machine's processors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from tests.engines.install import VLLM
from tests.live.http import exchange
from tests.live.ports import HOST, is_free
from tests.wait import PATIENCE_S, block_until

LOG_TAIL_CHARS: Final = 4000
START_S: Final = 3 * PATIENCE_S
"""For one to start, which takes half a minute on a quiet machine."""
SERVED_NAME: Final = "tiny"
HTTP, EVENTS, REPLAY, INTERNAL = 0, 10, 30, 50
"""Offsets of an engine's ports; of events and replays, each rank has the next one."""
OFFSETS: Final = (HTTP, *range(EVENTS, EVENTS + 4), *range(REPLAY, REPLAY + 4), INTERNAL)

ENVIRONMENT: Final[Mapping[str, str]] = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": HOST,
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


@dataclass(frozen=True)
class EngineConfig:
    """What decides how an engine keeps its cache."""

    model: str
    block_size: int = 16
    hash_algorithm: str = "sha256"
    chunked_prefill: bool = True
    blocks: int = 600
    """In the pool of each rank: few, so that some must go."""
    ranks: int = 1
    buffer_steps: int = 10_000
    """Batches that are kept for replays."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    draft_tokens: int = 0
    """Speculated at once, from tokens that came before."""
    full_reports: bool = False
    """Whether all requests ask it to publish again what they find cached."""

    def __str__(self) -> str:
        chunked = "" if self.chunked_prefill else ", prompts whole"
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        full = ", full reports" if self.full_reports else ""
        drafted = f", {self.draft_tokens} drafted" if self.draft_tokens else ""
        return f"blocks of {self.block_size}, {self.hash_algorithm}{chunked}{ranks}{full}{drafted}"

    environment: ClassVar[Mapping[str, str]] = ENVIRONMENT
    publisher: ClassVar[Mapping[str, object]] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
    }

    @property
    def command(self) -> Sequence[str | Path]:
        """What starts it, before the model's folder."""
        return VLLM.python.with_name("vllm"), "serve"

    @property
    def flags(self) -> list[str]:
        """The command line, without addresses."""
        flags = [
            *("--served-model-name", SERVED_NAME, "--load-format", "dummy"),
            *("--dtype", "bfloat16", "--enforce-eager", "--enable-prompt-tokens-details"),
            *("--max-model-len", "4096", "--max-num-seqs", "8", "--enable-prefix-caching"),
            *("--block-size", str(self.block_size)),
            *("--num-gpu-blocks-override", str(self.blocks)),
            *("--prefix-caching-hash-algo", self.hash_algorithm),
            *("--data-parallel-size", str(self.ranks)),
        ]
        if self.chunked_prefill:
            flags += ["--enable-chunked-prefill", "--max-num-batched-tokens", "512"]
        else:
            flags += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
        if self.draft_tokens:
            draft = {"method": "ngram", "num_speculative_tokens": self.draft_tokens}
            lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
            flags += ["--speculative-config", json.dumps(draft | lookup)]
        if self.adapters:
            pairs = [f"{name}={path}" for name, path in self.adapters.items()]
            flags += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
            flags += ["--lora-modules", *pairs]
        return flags


@dataclass
class VllmEngine:
    """One engine process with its children; its ports stay its own while it is down."""

    worker_id: int
    model: Path
    config: EngineConfig
    base: int
    log_path: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.base + HTTP}"

    @property
    def events(self) -> dict[int, str]:
        """Where each rank publishes."""
        return {rank: self._tcp(EVENTS + rank) for rank in range(self.config.ranks)}

    def worker(self, **fields: object) -> dict[str, Any]:
        """Its registration."""
        ranks = range(self.config.ranks)
        return {
            "worker_id": self.worker_id,
            "endpoint": self.url,
            "block_size": self.config.block_size,
            "data_parallel_size": self.config.ranks,
            "kv_events_endpoints": {str(rank): self.events[rank] for rank in ranks},
            "replay_endpoints": {str(rank): self._tcp(REPLAY + rank) for rank in ranks},
            **({"kv_cache_report_mode": "full"} if self.config.full_reports else {}),
            **fields,
        }

    def start(self) -> None:
        """Start it, and do not wait for it."""
        publisher = {
            **self.config.publisher,
            "endpoint": f"tcp://*:{self.base + EVENTS}",
            "replay_endpoint": f"tcp://*:{self.base + REPLAY}",
            "buffer_steps": self.config.buffer_steps,
        }
        command: Sequence[str | Path] = [
            *(*self.config.command, self.model),
            *("--host", HOST, "--port", str(self.base + HTTP)),
            *("--kv-events-config", json.dumps(publisher), *self.config.flags),
        ]
        if self.config.ranks > 1:
            command = [*command, "--data-parallel-rpc-port", str(self.base + INTERNAL)]
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**inherited, **self.config.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its children end with it, whatever it comes to
            )

    def wait_until_up(self) -> None:
        saying = f"no answer of engine {self.worker_id}"
        block_until(self._answers, lambda: f"{saying}:\n{self.log_tail()}", deadline_s=START_S)
        pages = [line for line in self.log().splitlines() if "Setting attention block size" in line]
        size = f"to {self.config.block_size} tokens"
        assert all(size in line for line in pages), f"the engine chose another block size: {pages}"

    def complete(self, prompt: Sequence[int]) -> int:
        """Send it a prompt past the service; how many of its tokens were cached."""
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1}
        answer = exchange(self.base + HTTP, "POST", "/v1/completions", body)
        assert answer.status == 200, answer.raw
        said: Any = answer.json
        return int(said["usage"]["prompt_tokens_details"]["cached_tokens"])

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"the engine ended before it answered:\n{self.log_tail()}")
        try:
            return exchange(self.base + HTTP, "GET", "/health").status == 200
        except OSError:
            return False

    def kill(self) -> None:
        """Kill it and its children, as the end of a machine would."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        block_until(lambda: all(is_free(self.base + offset) for offset in OFFSETS))

    def stop(self) -> None:
        """Ask it to end; kill what has not ended then."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _tcp(self, offset: int) -> str:
        return f"tcp://{HOST}:{self.base + offset}"

    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def log_tail(self) -> str:
        return self.log()[-LOG_TAIL_CHARS:]
