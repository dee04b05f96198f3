# The matrix of versions. Included by Makefile.

NOX ?= $(if $(UV),$(UV) tool run --quiet --with 'uv>=0.9' nox,nox)
CELLS ?=
VLLM ?= nightly

.PHONY: matrix support contract architectures
matrix: | $(UV) ## check cells of the matrix: CELLS="0.32.0 0.16.0/0.3.0" or all; default: those without a result
	CELLS="$(CELLS)" $(NOX) -f noxfile.py -s matrix; status=$$?; $(PYTHON) tools/render_matrix.py; exit $$status

support: ## the support table from the results of the matrix
	$(PYTHON) tools/render_matrix.py

contract: ## what the patch sets lean on, in the sources of any vLLM: VLLM="0.33.0 nightly"
	$(PYTHON) tools/contract.py $(VLLM)

ARCHITECTURES ?=
architectures: env ## small models of many architectures, every row compared: ARCHITECTURES="llama kimi-k2.5"; default: those without a result
	$(RUN) tools/architectures.py $(ARCHITECTURES); status=$$?; $(RUN) tools/render_architectures.py; exit $$status
