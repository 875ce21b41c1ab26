"""Run notebooks from top to bottom, and write their outputs into them: python notebooks/run.py [NAME ...].

Without a name, all of this folder. A notebook in which a cell fails is left as it was.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_SECONDS = 240


def execute(path: Path) -> NotebookNode:
    """Run all cells of a notebook in a new kernel, and return it with the outputs; the file is not touched.

    What a run leaves besides outputs is not kept: no times, no state of widgets, no version of Python. The kernel
    has one thread, for the same numbers on any number of cores, and takes none of the user's IPython settings.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell fails.
    """
    notebook: NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],  # a warning that TCP, here on the loopback, is not encrypted
        resources={"metadata": {"path": str(path.parent)}},
    )
    with tempfile.TemporaryDirectory(prefix="flwr-kd-notebook-") as settings:
        client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", "IPYTHONDIR": settings})
    notebook.metadata = nbformat.from_dict(METADATA)  # type: ignore[no-untyped-call]
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    return notebook


def main() -> None:
    """Run the notebooks that are named."""
    known = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    names = [Path(name).stem for name in parser.parse_args().names]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no notebook {unknown[0]!r}; there are {', '.join(known)}")
    for name in names or known:
        nbformat.write(execute(known[name]), known[name])  # type: ignore[no-untyped-call]
        print(f"{known[name].name}: {known[name].stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
