# `make` lists the targets. A machine needs Python 3.11 or newer with its venv module, make and a shell.

PYTHON ?= python3
## More flags for any target that starts a program (demo, up, quality, test, bench, gpu, chaos, fuzz, mutants and more): make up ARGS="--denoisers 2".
ARGS ?=
## Which images `make images` builds: cpu or gpu.
PROFILE ?= cpu
## Where torch comes from: .../whl/cpu or, for NVIDIA GPUs, .../whl/cu130 (the last part names the build); by default from
## where the environment has it already.
ifndef TORCH_INDEX
TORCH_INDEX := $(or $(shell cat .venv/.ready-* 2>/dev/null),https://download.pytorch.org/whl/cpu)
endif

BIN := .venv/bin
SERVICES := $(patsubst %/pyproject.toml,%,$(wildcard services/*/pyproject.toml))
LOCK := constraints.txt requirements-dev.txt shared/pyproject.toml deploy/lab/pyproject.toml deploy/tools/pyproject.toml $(SERVICES:%=%/pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The build is asked for by its full version (2.13.0+cpu), because a plain 2.13.0 is also met by PyPI's, which brings
# gigabytes of CUDA. Wheels for macOS have only one build and no such suffix.
TORCH_BUILD := $(notdir $(patsubst %/,%,$(TORCH_INDEX)))
TORCH_SUFFIX := $(if $(filter Darwin,$(shell uname -s)),,+$(TORCH_BUILD))
TORCH := $(shell sed -n 's/^torch==.*/&/p' constraints.txt)$(TORCH_SUFFIX)
# Compiled tests are kept from run to run: without them each worker spends ten seconds on compiling what it collects.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder
READY := .venv/.ready-$(TORCH_BUILD)

.DEFAULT_GOAL := help
.PHONY: help setup demo up quality test test-unit test-stress test-long test-lab compose-test images check bench gpu gpu-wheels chaos fuzz mutants sbom clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do \
		printf 'make %-12s %s\n' "$$target" "$$text"; done
	@printf '\nmake setup TORCH_INDEX=https://download.pytorch.org/whl/cu130 takes the CUDA build of torch.\n'

setup: $(READY) ## create .venv with the nine distributions, the embedded servers and the tools

# torch first: from pip's own --find-links, if it is configured and holds the wheel (then no index is asked), else from
# TORCH_INDEX and from nowhere else. What torch needs comes with the rest, where constraints.txt holds.
# All nine distributions in one command: each is taken from its folder, none is looked up by its name. With
# giornata-tools comes .venv/bin/giornata. Pip compiles what it installs; what is installed from its folder is compiled
# last, or all processes of the first stack would do so at the same time.
$(READY): $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is missing or older than 3.11; name another: make setup PYTHON=python3.12" >&2; exit 1; }
	@rm -f .venv/.ready-*
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --quiet --constraint constraints.txt pip setuptools
	$(PIP) install --quiet --quiet --no-deps --no-index $(TORCH) 2>/dev/null || \
		$(PIP) install --no-deps --index-url $(TORCH_INDEX) $(TORCH)
	$(PIP) install --quiet --quiet --constraint constraints.txt --no-build-isolation \
		--requirement requirements-dev.txt --editable 'shared[traces]' --editable 'deploy/tools[local,profiling]' \
		--editable 'deploy/lab[bench,local]' $(SERVICES:%=--editable %)
	$(BIN)/python -m compileall -qq -j 0 shared services deploy
	@echo '$(TORCH_INDEX)' >$@

demo: setup ## edit two photographs and three scenes with the whole system and write out/demo/
	$(BIN)/giornata demo $(ARGS)

up: setup ## run the whole system in the foreground; Ctrl-C drains it
	$(BIN)/giornata up $(ARGS)

quality: setup ## measure the model's edits on held-out scenes and write out/quality.json
	$(BIN)/giornata quality $(ARGS)

test: setup ## run the tests of all that serves, but for those that last for minutes
	$(PYTEST) -m 'not long' --ignore tests/lab $(ARGS)

# None of them waits: a worker for each processor, for each spends twenty seconds on what it imports.
test-unit: setup ## run the fast tests that start no server: while you work
	$(PYTEST) --numprocesses "$$(getconf _NPROCESSORS_ONLN)" -m 'not long and not slow' tests/unit $(ARGS)

test-stress: setup ## run changed tests that start something 20 times on a machine that stands still, or ARGS="FILE --rounds 5"
	$(BIN)/python -m tests.stress $(ARGS)

test-long: setup ## run the tests that last for minutes: whole families, the doors' clients
	$(PYTEST) -m long --ignore tests/lab

test-lab: setup ## run all tests of the lab: simulator, load generator, quality, training, benchmarks and rehearsals
	$(PYTEST) tests/lab --ignore tests/lab/compose $(ARGS)

compose-test: setup ## build the images and start the Compose files, in a Docker engine of its own; needs root and Debian's tools
	GIORNATA_REQUIRE_DOCKER=1 $(PYTEST) -m long tests/lab/compose $(ARGS)

# The plugin, or the program docker-compose where there is no plugin. Compose wants a folder of keys, which a build does not read.
images: ## build the services' images, giornata/SERVICE:VERSION, with the Docker engine here; PROFILE=gpu for GPUs
	@compose="docker compose"; $$compose version >/dev/null 2>&1 || compose=docker-compose; \
	$$compose version >/dev/null 2>&1 || { echo "make images needs a Docker engine and docker compose 2.20 or newer" \
		"(the plugin, or the program docker-compose); see docs/deploy.md" >&2; exit 1; }; \
	set -- -f deploy/compose.yaml --profile $(PROFILE) --profile profiling; \
	export GIORNATA_KEYS_FOLDER="$${GIORNATA_KEYS_FOLDER:-keys}"; \
	$$compose "$$@" build $(ARGS) && $$compose "$$@" config --images | grep '^giornata/' | sort -u

check: setup ## lint, format, types, import rules, the pages, and the schemas of Compose and Kubernetes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/unit/test_import_rules.py tests/unit/test_readme_facts.py \
		tests/unit/deploy/test_kubernetes.py
	$(MAKE) --no-print-directory docs
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml deploy/compose.cluster.yaml

.PHONY: docs
docs: setup ## build the pages into out/site, whose index.html is their first
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --conf-dir docs . out/site

bench: setup ## measure speed beside its baselines and what serving adds; write out/bench/*.json
	$(BIN)/python -m giornata_lab.bench $(ARGS)

# Without `setup`: a machine with a GPU may have torch and no network.
gpu: export PYTHONPATH := .:shared:services/denoiser:services/prepost:deploy/tools:deploy/lab:.whl/site:$(PYTHONPATH)
gpu: ## test and measure on a GPU, 25 minutes at most, again where it stopped; write out/gpu/*.json and results.md
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m giornata_lab.rehearsals.gpu $(ARGS)

# What images with torch and transformers lack, or have too old a version of, and what these bring.
WHEELS := annotated-types diffusers importlib-metadata lazy-importer msgpack nats-py pydantic pydantic-core \
	pydantic-settings python-dotenv structlog tenacity torchao typing-extensions typing-inspection uvloop zipp
gpu-wheels: ## collect what a machine with torch and no network lacks, about 18 MB, into .whl; ARGS="--python-version 3.11"
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		--constraint constraints.txt --dest .whl $(ARGS) $(WHEELS)

chaos: setup ## kill, freeze and restart everything under load, count what becomes of the edits and write out/chaos.json
	$(BIN)/python -m giornata_lab.rehearsals.chaos $(ARGS)

fuzz: setup ## send hostile bytes to all that reads a stranger's, an hour each or ARGS="--seconds 60"; write out/fuzz.json
	$(BIN)/python -m tests.lab.fuzz $(ARGS)

mutants: setup ## put faults into a copy of the code and count which the tests notice; ARGS="--sample 200" draws them; write out/mutants.json
	$(BIN)/python -m tests.mutants $(ARGS)

sbom: setup ## list what each image's Python environment holds, in CycloneDX's JSON: out/sbom/*.cdx.json
	$(BIN)/python -m deploy.sbom

clean: ## remove the environment, state, results and caches
	rm -rf .venv .giornata out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find shared services deploy tests -name __pycache__ -prune -exec rm -rf {} +
	find shared services \( -name '*.egg-info' -o -name build \) -prune -exec rm -rf {} +
