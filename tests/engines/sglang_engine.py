"""One SGLang as users start it, with a tiny model on this machine's processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from tests.engines.install_sglang import SGLANG
from tests.engines.vllm_engine import SERVED_NAME, EngineConfig

ENVIRONMENT: Final[Mapping[str, str]] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


@dataclass(frozen=True)
class SglangConfig(EngineConfig):
    """What decides how an SGLang keeps its radix tree: its blocks are that one's pages."""

    environment: ClassVar[Mapping[str, str]] = ENVIRONMENT
    publisher: ClassVar[Mapping[str, object]] = {"publisher": "zmq", "topic": "kv-events"}

    def __str__(self) -> str:
        whole = "" if self.chunked_prefill else ", prompts whole"
        return f"pages of {self.block_size}{whole}"

    @property
    def command(self) -> Sequence[str | Path]:
        """What starts it, before the model's folder."""
        return SGLANG.python, "-m", "sglang.launch_server", "--model-path"

    @property
    def flags(self) -> list[str]:
        """The command line, without addresses."""
        return [
            *("--served-model-name", SERVED_NAME, "--load-format", "dummy"),
            *("--dtype", "bfloat16", "--device", "cpu", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--disable-overlap-schedule", "--skip-server-warmup", "--enable-cache-report"),
            *("--context-length", "4096", "--max-running-requests", "8"),
            *("--mem-fraction-static", "0.1", "--page-size", str(self.block_size)),
            *("--max-total-tokens", str(self.blocks * self.block_size)),
            *("--chunked-prefill-size", "512" if self.chunked_prefill else "-1"),
        ]
