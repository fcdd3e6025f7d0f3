#!/bin/sh
# Installs the service of this checkout into a directory of its own: deploy/install.sh DIR [PYTHON]
# Whatever is fetched has a hash in requirements.txt or requirements-build.txt, or is refused. DIR
# gets no pip; what builds the service does not stay.
set -eu
dir=$1
python=${2:-python3}
cd "$(dirname "$0")/.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
"$python" -m venv "$build"
"$build/bin/python" -m pip install --quiet --require-hashes --only-binary :all: \
    -r deploy/requirements-build.txt
"$python" -m venv --without-pip "$dir"
"$build/bin/python" -m pip --python "$dir/bin/python" install --quiet --require-hashes \
    --only-binary :all: -r deploy/requirements.txt
# out of a copy: setuptools builds beside the sources, and what lies there may be a stranger's
mkdir "$build/src"
cp -R pyproject.toml setup.py README.md LICENSE indexer select_service "$build/src"
find "$build/src" \( -name '*.so' -o -name '_*.c' -o -name __pycache__ \) -prune -exec rm -rf {} +
"$build/bin/python" -m pip wheel --quiet --no-deps --no-index --no-build-isolation \
    --wheel-dir "$build/wheels" "$build/src"
"$build/bin/python" -m pip --python "$dir/bin/python" install --quiet --no-deps --no-index \
    "$build"/wheels/*.whl
"$dir/bin/python" -m compileall -q "$dir/lib"
