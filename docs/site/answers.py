"""Put what answers a guess out of sight: ``python docs/site/answers.py lectures/NN_topic.ipynb``.

GitHub, Colab, VS Code and JupyterLab show the outputs of a notebook, and not all of them know a tag
or a mark that folds one. So a lecture is committed with these outputs in the metadata of their
cells, under ``answer``, where no viewer shows them. The web pages and the PDF put them back.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode


def hide(notebook: NotebookNode) -> None:
    """Move the outputs of cells that answer a guess into their metadata."""
    for cell in notebook.cells:
        scores = ".score(" in cell.source and "ask(" not in cell.source
        is_answer = scores or "hide-output" in cell.metadata.get("tags", [])
        if cell.cell_type == "code" and is_answer and cell.outputs:
            cell.metadata["answer"], cell.outputs = cell.outputs, []


def main() -> None:
    """Rewrite the notebooks that the command line names."""
    for path in map(Path, sys.argv[1:]):
        notebook = nbformat.read(path, as_version=4)
        hide(notebook)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
