"""Hooks of the documentation site (mkdocs.yml): pages and files of the repository that lie outside of docs/.

In the repository, README.md links to ``docs/x.md`` and pages link to ``../benchmarks/x.json``; those links stay. On the
site the pages of :data:`ROOT_PAGES` are pages too, and every other file that a page links to is shown as a page of its own,
so the site needs no address of a repository and always shows the file that belongs to the text. A link to a file that the
repository does not have is a warning, at which the strict build stops.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
#: Path in the repository to page of the site.
ROOT_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LANGUAGES = {".py": "python", ".json": "json", ".sh": "sh", ".yml": "yaml", ".toml": "toml", ".mk": "make"}
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
logger = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/ and those of the files that pages link to."""
    for source, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        source = _source(page.src_uri)
        for link in LINK.findall((ROOT / source).read_text(encoding="utf-8")):
            target = _target(source, link)
            uri = target and _uri(target)
            if target and uri and files.get_file_from_path(uri) is None:
                shown = File.generated(config, uri, content=_show(target), inclusion=InclusionLevel.NOT_IN_NAV)
                files.append(shown)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links at the pages of the site."""
    if page.file.src_uri.startswith("repository/"):
        return markdown
    source = _source(page.file.src_uri)

    def resolved(link: re.Match[str]) -> str:
        target = _target(source, link[0])
        if target is None:
            logger.warning("%s links to %s, which is not in the repository", source, link[0])
            return link[0]
        return posixpath.relpath(_uri(target), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(resolved, markdown)


def _source(uri: str) -> str:
    """Path in the repository of a page of the site."""
    return next((path for path, page in ROOT_PAGES.items() if page == uri), f"docs/{uri}")


def _target(source: str, link: str) -> str | None:
    """Path in the repository that a link leads to, or None where no file is."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def _uri(path: str) -> str:
    """Page or file of the site for a path in the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return ROOT_PAGES.get(path, f"repository/{path}.md")


def _show(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n~~~~~{language}\n{text}~~~~~\n"
