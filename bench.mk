# Measurements. Included by Makefile. On a GPU, the same scripts with the sizes of docs/performance.md.

BENCH_OUT ?= benchmarks/results/cpu.json
BENCH_DIR ?= .cache/bench
# Environments that have a vLLM with extract_hidden_states (0.17 and newer), to compare with.
BENCH_VLLM ?=
# About 140,000 tokens: 12 minutes at 200 tokens a second (estimated for two quiet cores without bfloat16 instructions).
BENCH_SIZE ?= --sequences 16 --length 128 --batch 4
BENCH_SWEEPS ?= layers=1,4,16,30 tokens=256,1024,2048 calls=2,8 short=24
BENCH_ROUNDS ?= 3
# Seconds after which no further round begins.
BENCH_BUDGET ?= 1200

.PHONY: bench bench-import bench-kill bench-plot
bench: env model ## every way to extract side by side on this machine, and sweeps (BENCH_VLLM="PYTHON..." for vLLM's own)
	$(RUN) benchmarks/throughput.py $(BENCH_OUT) --model $(CACHE)/SmolLM2-135M-Instruct --layers 2 15 27 29 --utilization 0.3 \
	  $(BENCH_SIZE) --sides prefill generate save=$(BENCH_DIR) disk=$(BENCH_DIR) hand transformers sample \
	  $(foreach python,$(BENCH_VLLM),vllm-prefill=$(python) vllm=$(python) vllm-files=$(python)) --rounds $(BENCH_ROUNDS) \
	  --sweep $(BENCH_SWEEPS) --sweep-sequences 4 --sweep-rounds $(BENCH_ROUNDS) --budget $(BENCH_BUDGET)

bench-import: env ## what importing costs, alone and beside vLLM
	$(RUN) benchmarks/import_time.py benchmarks/results/import.json

bench-kill: env ## fifty drivers killed at random moments: nothing may be left
	$(RUN) benchmarks/kill.py benchmarks/results/kill.json --times 50

bench-plot: $(UV) ## docs/performance.svg from the results
	$(UV) run --quiet --isolated --no-project --with matplotlib python benchmarks/plot.py docs/performance.svg
