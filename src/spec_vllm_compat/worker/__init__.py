"""The workers' side: inside each of vLLM's worker processes. Knows nothing of speculators or its generator."""
