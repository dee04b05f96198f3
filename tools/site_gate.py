"""Shows that the strict build of the site can fail: builds a copy with a broken link of each kind, and wants all named.

Run by `make site` in the environment that builds the site.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULTS = {  # file, broken link, what the build says
    "docs/start.md": ("[x](cli.md#no-such-anchor)", "does not contain an anchor '#no-such-anchor'"),
    "docs/cli.md": ("[x](no-such-page.md)", "the target is not found"),
    "docs/evidence.md": ("[x](../benchmarks/no-such-file.json)", "no-such-file.json, which is not in the repository"),
    "docs/security.md": (
        "[x](changelog.md)",
        "changelog.md, which is not in the repository",
    ),  # a page of the site only
    "README.md": ("[x](docs/no-such-doc.md)", "README.md links to docs/no-such-doc.md"),
    "docs/api.md": ("[x](#spec_vllm_compat.NoSuchName)", "'#spec_vllm_compat.NoSuchName', but there is no such anchor"),
}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "repository")
        leave = shutil.ignore_patterns(".*", "site", "dist", "__pycache__", "*.pt", "*.safetensors")
        shutil.copytree(ROOT, copy, ignore=leave)
        for name, (link, _) in FAULTS.items():
            with (copy / name).open("a", encoding="utf-8") as page:
                page.write(f"\n\n{link}\n")
        done = subprocess.run(
            [sys.executable, "-m", "mkdocs", "build"], cwd=copy, capture_output=True, text=True, check=False
        )
    said = done.stdout + done.stderr
    unseen = [link for link, words in FAULTS.values() if words not in said]
    if done.returncode == 0 or unseen:
        print(
            f"the strict build does not see {unseen or 'anything'} (status {done.returncode})\n{said}", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
