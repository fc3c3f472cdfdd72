# SPDX-License-Identifier: Apache-2.0
"""Runs the notebooks top to bottom and keeps their outputs in them.

    pip install -e '.[test]' && python colab/execute.py [NAME]...

Paths of this machine are written as Colab's own folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).parent
_HOME = "/content"  # of Colab
_TIMEOUT_S = 600  # of one cell


def names() -> list[str]:
    """The notebooks, without their ending."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> Any:
    """A notebook as it lies here."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def executed(name: str, folder: Path) -> Any:
    """A notebook with the outputs of a run in an empty folder.

    Raises:
      nbclient.exceptions.CellExecutionError: with the trace of the cell that failed.
    """
    notebook = read(name)
    client = nbclient.NotebookClient(
        notebook,
        timeout=_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    text = json.dumps(notebook.cells).replace(str(folder), _HOME)
    notebook.cells = nbformat.from_dict(json.loads(text))
    return notebook


def main(chosen: list[str]) -> None:
    for name in chosen or names():
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(name, Path(folder).resolve())
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
