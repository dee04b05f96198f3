"""``python -m spec_vllm_compat``: the same as the command ``spec-vllm-compat``."""

from spec_vllm_compat.cli import main

if __name__ == "__main__":
    main()
