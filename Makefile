# Everything a newcomer types: `make demo`, `make check`, `make test`. Each makes .venv first and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 3

VENV4 := .venv-transformers4
OLDEST := .venv-oldest
EMIT := .venv-emit-
TRAINERS := accelerate areal axolotl llamafactory ms-swift torchtitan trinity trl verl

.PHONY: check demo documents docs page walk test test-all test-pages test-emit test-ray test-oldest lint types contracts install clean-venv

install: $(READY)

$(READY): pyproject.toml constraints.txt tests/numeric/peers.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[train,dev,docs]'
	$(BIN)/pip install --quiet --no-deps -r tests/numeric/peers.txt
	touch $@

# Its versions, not ours: what a trial saves has to load where transformers 5 is not yet. From its own index torch is the CPU's.
$(VENV4)/.ready: constraints.txt
	test -x $(VENV4)/bin/python || $(PYTHON) -m venv $(VENV4)
	$(VENV4)/bin/pip install --quiet torch==2.13.0 'transformers==4.57.*'
	touch $@

# The lowest versions that pyproject.toml allows, as uv finds them: with torch come CUDA's libraries, which nothing here uses.
$(OLDEST)/.ready: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --resolution lowest-direct \
		-e '.[train,data,tensorboard,hub,qlora,low-bit]'
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python pytest pytest-timeout pytest-xdist hypothesis
	touch $@

# The trainers that `highwater emit` writes for: their requirements contradict each other, so each is alone, without its
# dependencies but those that its parser imports. They share one torch, through a path file.
$(EMIT)torch/.ready: tests/emit/requirements/torch.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -r $<
	touch $@

$(EMIT)%/.ready: tests/emit/requirements/%.txt $(EMIT)torch/.ready
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --no-deps -r $<
	$(EMIT)torch/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth
	touch $@

# What the demo needs and no more: below 1.2 GB. `make install` adds the rest to the same environment. uv takes a third of
# pip's time; torch is the CPU's, from pip's own folders of wheels where they are named, and else from PyTorch's index.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch for the CPU and transformers into $(VENV): half a minute, once"
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt torch -e '.[train]' \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend cpu)
	touch $@

# Nothing is compiled before it is imported: each of the demo's processes would compile torch if none wrote it down.
demo: $(VENV)/.demo
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python examples/demo.py

# What follows from code and records, below docs/: the H200 guide, a page a model, the picture, the reference, the list of decisions.
documents: $(READY)
	$(BIN)/python docs/generate.py

# The page that answers `predict` without a server, in build/page, in some minutes: a static Space as it is.
page: $(READY)
	$(BIN)/python docs/answers_page.py

# The documentation site, in build/site.
docs: documents
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# How large the source is, and how far one walks through it to follow a command.
walk: $(READY)
	$(BIN)/python tools/walk.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache . # a cache does not see that a module it calls foreign has become ours
	$(BIN)/codespell src benchmarks tools tests docs examples README.md CONTRIBUTING.md CHANGELOG.md SKILL.md
	$(BIN)/deptry src

# With room for young objects pyright takes a fifth less of the processor.
types: $(READY)
	NODE_OPTIONS=--max-semi-space-size=128 $(BIN)/pyright

contracts: $(READY)
	$(BIN)/lint-imports --no-cache

# Bytecode is written down, whatever the shell says: thousands of tests start a command, and each would compile it anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n $(JOBS) --dist worksteal

check: lint types contracts
	$(PYTEST) --hypothesis-profile quick -m 'not corpus' tests/unit

# Every test that needs no GPU, browser, trainer of others or Ray: a quarter of an hour on 2 cores, by three processes, as some
# of them wait for others. CI checks types meanwhile: `make --jobs 2 types test`.
test: lint contracts
	$(PYTEST)

# Everything: properties with ten times the examples, combinations of three settings where `make test` has those of two.
test-all: lint types contracts $(VENV4)/.ready
	HIGHWATER_DEEP=1 HIGHWATER_REQUIRE=transformers4 $(PYTEST)
	$(MAKE) test-pages test-emit test-ray test-oldest

$(VENV)/.ready-pages: $(READY)
	$(BIN)/pip install --quiet -e '.[pages]'
	touch $@

# In a headless Chromium: `apt-get install chromium`. Screenshots lie in build/pages.
test-pages: $(VENV)/.ready-pages
	$(BIN)/pytest -n 0 -m pages tests/pages

# Ray's own simulation of a cluster, on the loopback interface: one at a time.
test-ray: $(READY)
	$(BIN)/pytest -n 0 -m 'ray or not ray' tests/ray

# Models, their configs, training, checkpoints and exports: what torch and transformers change.
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/pytest -n $(JOBS) --dist worksteal --hypothesis-profile quick \
		$(addprefix tests/numeric/test_,$(addsuffix .py,attention configs_as_their_classes damaged_checkpoints earlier_keys \
		document_rope export loss low_bit recompute router saved_weights trained_model trainer)) \
		$(addprefix tests/dist/test_,$(addsuffix .py,checkpoints lora run_checkpoints sharded_equals_unsharded \
		trained_families))

test-emit: $(READY) $(TRAINERS:%=$(EMIT)%/.ready)
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m emit tests/emit

clean-venv:
	rm -rf $(VENV) $(VENV4) $(OLDEST) $(EMIT)torch $(TRAINERS:%=$(EMIT)%)
