"""Runs every command of a README's ```sh blocks; lines after the GPU heading are only resolved (they need a GPU's vLLM).

python tools/readme_commands.py README.md
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

#: A block after this comment installs the GPU build of vLLM: it is resolved against the index, not installed.
RESOLVE_ONLY = "<!-- resolved, not installed, in CI -->"
BLOCK = re.compile(rf"(?P<resolve>{re.escape(RESOLVE_ONLY)}\n)?```sh\n(?P<commands>.*?)```", re.S)
UV = ".tools/bin/uv"


def main(page: Path) -> int:
    blocks = list(BLOCK.finditer(page.read_text()))
    assert blocks, f"no ```sh block in {page}"
    subprocess.run(["make", UV], check=True)
    for block in blocks:
        for command in block["commands"].strip().splitlines():
            print(f"$ {command}", flush=True)
            words = shlex.split(command)
            if block["resolve"]:
                assert words[:2] == ["pip", "install"], command
                words = [UV, "pip", "compile", "--quiet", "--python-version", "3.12", "-", "-o", "/dev/null"]
                text = "\n".join(f"{word}" for word in shlex.split(command)[2:])
                subprocess.run(words, check=True, input=text, text=True)
            else:
                subprocess.run(words, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
