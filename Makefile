# Everything installs into .venv what it needs, on first use.
PYTHON ?= python3
PORT ?= 8080
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AIPERF := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/diptych/aiperf
SOURCES := $(wildcard libs/*/src services/*/src)
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
# Tests wait for timers and servers more than they compute; seeded faults only compute.
TESTERS ?= $(if $(filter 1 2 3,$(CORES)),4,$(CORES))

.DEFAULT_GOAL := help
.PHONY: help up test check faults live chaos alone compose clients triton vllm nixl deploy openapi nightly equality bench soak fuzz \
	hashes audit sbom format clean

help: ## this page
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

up: $(STAMP) ## the whole stack on this machine (make up PORT=8080)
	@exec $(BIN)/diptych up --port $(PORT)

test: $(STAMP) ## all but what takes minutes or needs a special machine
	$(BIN)/python -m pytest -q -n $(TESTERS) --dist worksteal

check: $(STAMP) ## format, lint, types, imports, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/codespell

faults: $(STAMP) ## 200 seeds of every fault, in virtual time (minutes)
	DIPTYCH_FAULT_SEEDS=200 $(BIN)/python -m pytest -q -n $(CORES) tests/faults/test_seeded_faults.py

live: $(STAMP) ## real nats-server, real engine, real processes (as root it brings Redis and memcached)
	infra/ci/stores.sh
	$(BIN)/diptych models pull
	$(BIN)/python -m pytest -q -m live

chaos: $(STAMP) ## kill and freeze everything for ten minutes (MINUTES=10 SEED= ENGINE=llamacpp)
	$(if $(filter sim,$(ENGINE)),,$(BIN)/diptych models pull)
	$(BIN)/python -m diptych_testkit.chaos --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) --engine $(or $(ENGINE),llamacpp) $(ARGUMENTS)

alone: ## each service, installed by itself in an empty environment
	PYTHON=$(PYTHON) .ci/alone

compose: $(STAMP) ## the compose file on a real engine (as root it brings its own)
	$(BIN)/python infra/supply/install.py --part dependencies compose
	PYTHON=$(BIN)/python infra/ci/compose.sh

nixl: $(STAMP) ## the KV link over NIXL: installs it (250 MB, Linux only) and runs its tests
	$(BIN)/python infra/supply/install.py --part dependencies --no-deps nixl
	$(BIN)/python -m pytest -q -n $(TESTERS) libs/kvlink/tests tests/faults/test_failing_links.py -k nixl
	$(BIN)/python -m pytest -q -m live tests/live/test_kv_over_networks.py -k nixl

deploy: $(STAMP) ## the Helm chart and the Dockerfiles, by the tools of their makers (installs 110 MB)
	$(BIN)/python infra/supply/install.py --part dependencies deploy
	$(BIN)/python -m pytest -q -m deploy tests/deploy

clients: $(STAMP) ## clients of other makers, and requests of ill will, on the real stack
	$(BIN)/diptych models pull
	$(BIN)/python -m diptych_testkit.outside_clients tests/clients
	$(BIN)/python -m pytest -q -m clients tests/clients

nightly: $(STAMP) ## a crowd by aiperf, a fifth of which leaves (installs 1.2 GB)
	test -x $(AIPERF)/bin/aiperf || ($(PYTHON) -m venv $(AIPERF) && $(AIPERF)/bin/pip install -qq --disable-pip-version-check -r tests/clients/aiperf/requirements.txt)
	DIPTYCH_AIPERF_VENV=$(AIPERF) $(BIN)/python -m pytest -q -m nightly tests/clients

openapi: $(STAMP) ## requests made from /openapi.json, for five minutes (make openapi SECONDS=60)
	$(BIN)/python -m diptych_testkit.outside_clients tests/clients
	DIPTYCH_FUZZ_S=$(or $(SECONDS),300) $(BIN)/python -m pytest -q -s -m clients tests/clients/test_openapi_document.py

triton: $(STAMP) ## workers in front of a real Triton server, on a CPU (installs 200 MB)
	$(BIN)/diptych models pull
	$(BIN)/python infra/supply/install.py --part dependencies triton
	$(BIN)/python -m diptych_testkit.triton_server tests/triton
	$(BIN)/python -m pytest -q --durations=5 -m triton tests/triton tests/engines

vllm: $(STAMP) ## workers in front of real vLLM servers, on a CPU (make vllm VLLM=/path/to/bin/vllm)
	DIPTYCH_VLLM=$(VLLM) $(BIN)/python -m pytest -q --durations=3 -m vllm tests/vllm

equality: $(STAMP) ## every mode and link against one bare engine; KV of 200 prompts over each link (half an hour)
	$(BIN)/diptych models pull
	DIPTYCH_EQUALITY_PROMPTS=50 DIPTYCH_EQUALITY_HAND_OFFS=200 $(BIN)/python -m pytest -q --durations=12 -m live tests/equality

bench: $(STAMP) ## the numbers in the README
	for bench in stream handoff durability; do $(BIN)/python bench/$$bench.py || exit 1; done

soak: $(STAMP) ## does anything grow? half an hour at half load (make soak MINUTES=3)
	$(BIN)/python bench/soak.py --minutes $(or $(MINUTES),30)

fuzz: $(STAMP) ## every parser, hostile input (SECONDS=600 each, SEED=; PARSER= CASE= for one)
	@exec $(BIN)/python -m diptych_testkit.fuzzing $(if $(SECONDS),--seconds $(SECONDS)) \
		$(if $(SEED),--seed $(SEED)) $(if $(PARSER),--parser $(PARSER)) $(if $(CASE),--case $(CASE))

audit: $(STAMP) ## licences, withdrawn and vulnerable versions (STRICT=1: all must be asked)
	$(BIN)/python -m diptych_testkit.supply audit $(if $(STRICT),--strict)

sbom: $(STAMP) ## each service's bill of materials, CycloneDX, into build/sbom
	$(BIN)/python -m diptych_testkit.supply sbom build/sbom

hashes: $(STAMP) ## after a change of constraints.txt: the digests of every pinned wheel
	$(BIN)/python -m diptych_testkit.supply hashes

format: $(STAMP) ## put the source in order
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what was installed and cached here
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(STAMP): pyproject.toml constraints.txt infra/supply/hashes.txt
	@echo "installing about 470 MB into $(VENV) (first use, or its requirements changed): a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python infra/supply/install.py --editable dev
	@touch $@
