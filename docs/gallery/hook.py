"""Hook of MkDocs that runs the examples of the gallery, and puts their pictures, outputs and code into the page.

In `gallery.md`, `<!-- example: NAME -->` is replaced. An example that fails ends the build. mkdocs-gallery is not used, because
its links do not work with `use_directory_urls: false`, and it writes its files into `docs/`.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
_MARKER = re.compile(r"^<!-- example: (\w+) -->$", re.MULTILINE)
_outputs: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Run the examples, and add their pictures to the site."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}  # the same pictures on every machine
        command = [sys.executable, str(FOLDER / "run.py")]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PluginError(f"an example of the gallery failed:\n{done.stderr}")
        for picture in sorted(Path(folder).glob("*.png")):
            files.append(File.generated(config, f"gallery/{picture.name}", content=picture.read_bytes()))
            _outputs[picture.stem] = picture.with_suffix(".txt").read_text()
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the markers of the page."""
    return _MARKER.sub(lambda marker: _shown(marker[1]), markdown) if page.file.src_uri == "gallery.md" else markdown


def _shown(name: str) -> str:
    """Return an example as Markdown: its picture, its output and its code."""
    code = (FOLDER / f"{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(code))
    return (
        f"![{docstring}](gallery/{name}.png)\n\n```text\n{_outputs[name]}```\n\n"
        f'```python title="docs/gallery/{name}.py"\n{code}```\n'
    )
