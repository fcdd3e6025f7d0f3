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
    # as sglang's wheel pins them, or the newest it runs with; torch is the newest for processors
    *("apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0", "numba==0.65.1", "openai==2.8.0"),
    *("openai-harmony==0.0.4", "tokenizers==0.23.2", "transformers==5.19.0", "torch==2.13.0"),
    *("aiohttp==3.14.5", "blobfile==3.3.0", "build==1.6.1", "cloudpickle==3.1.3", "dill==0.4.1"),
    *("diskcache==5.6.3", "distro==1.9.0", "easydict==1.14", "einops==0.8.2", "fastapi==0.165.0"),
    *("gguf==0.19.0", "interegular==0.3.3", "IPython==9.18.1", "jsonschema==4.26.0"),
    *("llguidance==1.9.1", "loguru==0.7.3", "msgspec==0.22.0", "numpy==2.4.6"),
    *("nvidia-ml-py==13.615.71", "orjson==3.13.0", "packaging==26.4"),
    *("partial_json_parser==0.2.1.1.post7", "pillow==13.0.0", "prometheus-client==0.26.0"),
    *("psutil==7.2.2", "pybase64==1.5.1", "pycountry==26.2.16", "pydantic==2.14.4"),
    *("python-dateutil==4.0.0", "python-multipart==0.0.34", "pyzmq==27.3.0", "regex==2026.11.19"),
    *("requests==2.34.2", "scipy==1.17.1", "sentencepiece==0.2.3", "setproctitle==1.3.8"),
    *("soundfile==0.14.0", "tiktoken==0.14.0", "tqdm==4.70.1", "uvicorn==0.54.0"),
    *("uvloop==0.23.0", "watchfiles==1.3.0", "xxhash==4.1.0", "zstandard==0.25.0"),
)
ALONE: Final = (f"sglang=={VERSION}", "triton==3.9.0", "xgrammar==0.2.7")
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
