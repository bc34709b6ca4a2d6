"""Run the chapters and write their notebooks: python notebooks/build.py [NAMES...] [--check]

A chapter is written as NN_name.py (percent cells, the text that is reviewed). This makes NN_name.ipynb beside it, with
its outputs, and figures/NN_name_*.svg: the same bytes on every run. NAMES are chapters or how they begin, such as 01.
With --check nothing is written: the chapters run in a temporary folder, and the cells and figures that differ from the
committed ones are listed. Exit code 1 if a cell fails, a notebook is over 300 kB, or --check finds a difference.
"""
import argparse
import asyncio
import base64
import hashlib
import io
import math
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
LARGEST_NOTEBOOK = 300_000  # bytes
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?(?!\w)", re.IGNORECASE)


def main(arguments=None, root=ROOT):
    """Build or check the chapters in root/notebooks, two at a time. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAMES", help="chapters, or how they begin; without it, all")
    parser.add_argument("--check", action="store_true", help="write nothing, list what differs from what is committed")
    options = parser.parse_args(arguments)
    names = [Path(name).stem for name in options.names]
    sources = [source for source in chapters(root) if not names or source.stem.startswith(tuple(names))]
    for name in names:
        if not any(source.stem.startswith(name) for source in sources):
            parser.error(f"no chapter begins with {name}")
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(partial(run, finish=check if options.check else write), sources))
    print("".join(f"\n{problem}\n" for problems in results for problem in problems), end="", file=sys.stderr)
    return int(any(results))


def chapters(root=ROOT):
    """The sources of the chapters, root/notebooks/NN_name.py, in order."""
    return sorted((root / "notebooks").glob("[0-9][0-9]_*.py"))


def run(source, finish):
    """Execute a chapter in a temporary folder, give its notebook and figures to finish. Returns a list of problems."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            text = nbformat.writes(execute(read(source), Path(folder))) + "\n"
            figures = {path.name: path.read_text(encoding="utf-8") for path in Path(folder).glob("figures/*")}
            require_limits(source, text, figures)
            problems = finish(source, text, figures)
        except (RuntimeError, ValueError) as error:
            problems = [f"{source.stem}: {error}"]
    outcome = "FAILED" if problems else "ok"
    print(f"{source.stem}: {outcome}, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    return problems


def read(source):
    """The notebook of a percent script, without outputs: cells numbered in order, the same metadata everywhere."""
    make = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    parsed = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    cells = [make[cell.cell_type](cell.source, id=f"cell-{n:02}") for n, cell in enumerate(parsed.cells, 1)]
    return nbformat.v4.new_notebook(cells=cells, metadata=METADATA)


def execute(notebook, folder):
    """Run the cells in folder/notebooks with this checkout of the package. Returns the notebook with its outputs.

    RuntimeError if a cell fails, with its number, its text and its traceback.
    """
    (folder / "notebooks").mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",
        "IPYTHONDIR": str(folder / "ipython"),  # nobody's settings or history
    }
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=600, record_timing=False, coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=ERROR"], resources={"metadata": {"path": str(folder / "notebooks")}})
    try:
        asyncio.run(client.async_execute(env=environment))
    except Exception as error:
        text = re.sub(r"\x1b\[[\d;]*m", "", str(error))
        raise RuntimeError(f"cell {failed_cell(notebook)} failed\n{text}") from error
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    return notebook


def failed_cell(notebook):
    """The number of the first code cell that holds an error or was not finished."""
    for number, cell in enumerate(notebook.cells, 1):
        failed = any(output.output_type == "error" for output in cell.get("outputs", []))
        if failed or cell.get("execution_count", 0) is None:
            return number


def require_limits(source, text, figures):
    """ValueError for a notebook that is too large and for a figure that bears another chapter's name."""
    size = len(text.encode())
    if size > LARGEST_NOTEBOOK:
        raise ValueError(f"the notebook has {size // 1000} kB (limit 300): draw and print less")
    for name in figures:
        if not name.startswith(f"{source.stem}_"):
            raise ValueError(f"figure {name} must be named {source.stem}_<slug>")


def write(source, text, figures):
    """Put the figures (file name -> SVG) and then the notebook in their places, whole; drop figures no longer drawn."""
    folder = source.parents[1] / "figures"
    folder.mkdir(exist_ok=True)
    for stale in set(folder.glob(f"{source.stem}_*.svg")) - {folder / name for name in figures}:
        stale.unlink()
    for name, svg in figures.items():
        replace(folder / name, svg)
    replace(source.with_suffix(".ipynb"), text)
    return []


def replace(path, text):
    """Write a file under a temporary name and move it, so that nobody ever finds half of it."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def check(source, text, figures):
    """List the cells and figures that differ from the committed ones by more than rounding."""
    path = source.with_suffix(".ipynb")
    if not path.exists():
        return [f"{source.stem}: {path.name} is missing"]
    old, new = nbformat.read(path, 4).cells, nbformat.reads(text, 4).cells
    found = [f"{source.stem}: {len(old)} cells are committed, {len(new)} are in the source"] * (len(old) != len(new))
    for number, (a, b) in enumerate(zip(old, new), 1):
        if (a.cell_type, a.source) != (b.cell_type, b.source):
            found.append(f"{source.stem}: cell {number}: the source differs")
        elif not same_text(outputs(a), outputs(b)):
            found.append(f"{source.stem}: cell {number}: committed\n{outputs(a)}\nnow\n{outputs(b)}")
    committed = {p.name: p.read_text(encoding="utf-8") for p in source.parents[1].glob(f"figures/{source.stem}_*.svg")}
    for name in sorted(committed.keys() | figures.keys()):
        if not (name in committed and name in figures and same_figure(committed[name], figures[name])):
            found.append(f"{source.stem}: figure {name} differs")
    return found


def outputs(cell):
    """What a cell printed and displayed, as one text, without the bytes of its images: those are checked as figures."""
    parts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {"text": output.get("text", output.get("ename"))})
        parts += [re.sub(r"base64,[\w+/=]+", "", data[kind]) for kind in sorted(data)]
    return "\n".join(parts)


def same_text(a, b):
    """Whether two texts have the same words and, up to rounding, the same numbers."""
    words = ["".join(NUMBER.sub("#", text).split()) for text in (a, b)]
    pairs = zip(NUMBER.findall(a), NUMBER.findall(b))
    return words[0] == words[1] and all(math.isclose(float(x), float(y), rel_tol=1e-3, abs_tol=1e-5) for x, y in pairs)


def same_figure(a, b):
    """Whether two SVGs show the same, up to rounding; only their titles are compared if two matplotlibs drew them."""
    if re.findall(r"Matplotlib v[^,]*", a) != re.findall(r"Matplotlib v[^,]*", b):
        return re.findall(r"<title>[^<]*", a) == re.findall(r"<title>[^<]*", b)
    return same_text(comparable(a), comparable(b))


def comparable(svg):
    """An SVG with a digest of its pixels for each image and without the ids that hang on the bytes of the content."""
    svg = re.sub(r"data:image/png;base64,\s*([\w+/=\s]+)", lambda match: pixels(match[1]), svg)
    return re.sub(r"\b(image|[a-z])[0-9a-f]{10}\b", r"\1", svg)


def pixels(png):
    """A digest of the pixels of a base64 PNG, the same whatever library compressed it."""
    image = Image.open(io.BytesIO(base64.b64decode(png)))
    return hashlib.sha256(image.tobytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
