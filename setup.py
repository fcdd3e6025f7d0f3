"""Builds the compiled kernels: every `_*.pyx` below a package, wherever it lies.

Everything else about the package is in pyproject.toml. A kernel has a plain form, so one that
cannot be built (no compiler, no headers) is left out and the package works all the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
FLAGS = ["-O3", "-g0", "-ffp-contract=off"]  # prices are equal to the last bit in both forms


def kernels() -> list[Extension]:
    """Return an extension for each kernel; headers rebuild all kernels of their package."""
    os.chdir(ROOT)
    found = []
    sources = [*Path("indexer").rglob("_*.pyx"), *Path("select_service").rglob("_*.pyx")]
    for source in sorted(sources):
        headers = [str(one) for kind in ("*.h", "*.pxd") for one in source.parent.glob(kind)]
        name = ".".join(source.with_suffix("").parts)
        found.append(
            Extension(name, [str(source)], depends=headers, extra_compile_args=FLAGS, optional=True)
        )
    return found


class BuildKernels(build_ext):  # type: ignore[misc] # setuptools has no types
    """Compiles the kernels side by side, and says how far it is."""

    def build_extensions(self) -> None:
        """Translate all kernels to C, then compile as many at a time as there are processors."""
        from Cython.Build import cythonize  # is there only while the package is built

        self.parallel = os.cpu_count() or 1
        self._left = self._all = len(self.extensions)
        said(f"{self._all} kernels, {self.parallel} at a time")
        sources = [one.sources[0] for one in self.extensions]
        cythonize(sources, language_level="3", quiet=True, nthreads=self.parallel)
        for one in self.extensions:
            one.sources = [str(Path(one.sources[0]).with_suffix(".c"))]
        super().build_extensions()

    def build_extension(self, ext: Any) -> None:
        """Compile one kernel; one that cannot be is left out, and not without a word."""
        try:
            super().build_extension(ext)
        except Exception as error:
            if "SIGINT" in str(error):  # Ctrl-C reached the compiler: nothing is wrong with it
                raise KeyboardInterrupt from error
            said(f"NOT BUILT, plain Python will be used instead: {ext.name}: {error}")
            raise
        self._left -= 1
        said(f"{self._all - self._left} of {self._all}: {ext.name}")


def said(text: str) -> None:
    """Tell whoever waits: pip shows nothing of a build, so `make` names a file to write to."""
    progress = Path(os.environ.get("BUILD_PROGRESS", os.devnull))
    if progress.exists():
        with progress.open("a", encoding="utf-8") as file:
            file.write(f"  {text}\n")


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels})
