"""What the documentation site needs beside its pages: results and examples outside of docs/."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_KEPT = ("benchmarks/contest", "benchmarks/results", "benchmarks/reproduction", "examples")
_SHOWN = (".csv", ".ipynb", ".json", ".png", ".py", ".svg", ".toml")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add tables, figures and scripts, at the paths that pages have for them."""
    root = Path(config.config_file_path).parent
    for folder in _KEPT:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _SHOWN:
                name = path.relative_to(root).as_posix()
                files.append(File(name, str(root), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """In the repository they are one folder up from the pages, on the site beside them."""
    for folder in ("benchmarks", "examples"):
        markdown = markdown.replace(f"](../{folder}/", f"]({folder}/")
    return markdown
