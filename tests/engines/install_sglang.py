"""A whole SGLang in an environment of its own, for the tests in this folder: `make sglang`.

SGLang has no package for processors: its wheel asks for CUDA. Without the packages built for that
it runs on processors all the same, with torch's own attention. It takes 3 GB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.engines.environment import Environment

VERSION: Final = "0.5.23"
NEEDS: Final = (
    # as sglang's wheel pins them
    *("apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0", "numba==0.65.1"),
    *("openai==2.8.0", "openai-harmony==0.0.4", "tokenizers==0.23.2", "transformers==5.19.0"),
    # the newest torch for processors that is known to do; the wheel pins 2.14.1
    "torch==2.13.0",
    *("aiohttp", "blobfile", "build", "cloudpickle", "dill", "diskcache", "distro", "easydict"),
    *("einops", "fastapi", "gguf", "interegular", "IPython", "jsonschema", "llguidance<2.0.0"),
    *("loguru", "msgspec", "numpy", "nvidia-ml-py", "orjson", "packaging", "partial_json_parser"),
    *("pillow", "prometheus-client", "psutil", "pybase64", "pycountry", "pydantic"),
    *("python-dateutil", "python-multipart", "pyzmq", "regex", "requests", "scipy"),
    *("sentencepiece", "setproctitle", "soundfile", "tiktoken", "tqdm", "uvicorn", "uvloop"),
    *("watchfiles", "xxhash", "zstandard"),
)
ALONE: Final = (f"sglang=={VERSION}", "triton", "xgrammar==0.2.7")
"""Without what they ask for, which is built for CUDA. Triton is imported, and compiles nothing."""
STAND_INS: Final = Path(__file__).with_name("sglang_stand_ins.py")


def fill(environment: Environment) -> str | None:
    """Install it, and stand-ins for what is missing."""
    environment.pip("install", *NEEDS)
    environment.pip("install", "--no-deps", *ALONE)
    (environment.packages / "sitecustomize.py").write_text(STAND_INS.read_text("utf-8"), "utf-8")
    return None


SGLANG: Final = Environment(
    name="sglang",
    version=VERSION,
    command="sglang",
    disk_bytes=6 * 2**30,
    recipe=(NEEDS, ALONE, STAND_INS.read_text("utf-8")),
    fill=fill,
)

if __name__ == "__main__":
    SGLANG.make()
