"""Tutorials as notebooks and as pages, made of their scripts with what they print and draw:

    python -m tests.tutorial_pages docs/tutorials/NAME.py ...

A script is in the percent format, which editors and jupytext read too: `# %% [markdown]` begins text, `# %%` begins
code, and what stands before the first mark is for the script alone. It runs in a folder of its own. NAME.ipynb has the
outputs, NAME.md and its pictures NAME-1.png, NAME-2.png, ... are made of it.
"""

import argparse
import base64
import os
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "tutorials"
MARK = re.compile(r"^# %%( \[markdown\])?.*\n", re.MULTILINE)
INLINE = "module://matplotlib_inline.backend_inline"
SECONDS = 3600


def notebook(script):
    """The notebook of a script, without outputs."""
    _, *parts = MARK.split(script)
    cells = []
    for number, (text, source) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        body = re.sub(r"^# ?", "", source, flags=re.MULTILINE) if text else source
        make = nbformat.v4.new_markdown_cell if text else nbformat.v4.new_code_cell
        cells.append(make(body.strip("\n"), id=f"cell-{number}"))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def execute(book, folder, environment=None):
    """Run a notebook in a folder and keep its outputs, without what differs from machine to machine."""
    client = NotebookClient(
        book, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}, record_timing=False
    )
    client.execute(env={**os.environ, "PYTHONPATH": search_path(), "MPLBACKEND": INLINE, **(environment or {})})
    book.metadata.pop("language_info", None)
    for cell in book.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = tidied(cell.outputs)
    return book


def tidied(outputs):
    """Outputs without those on standard error (progress bars), and what is printed as one, however it came."""
    kept = []
    for output in outputs:
        if output.output_type == "stream" and kept and kept[-1].output_type == "stream" and output.name == "stdout":
            kept[-1].text += output.text
        elif output.get("name") != "stderr":
            kept.append(output)
    return kept


def search_path():
    """PYTHONPATH on which this repository comes first."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def markdown(book, name):
    """The page of a notebook with outputs, and its pictures by the names of their files."""
    parts, pictures = [], {}
    for cell in book.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}-{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode(data["image/png"])
                parts.append(f"![{_title(parts)}]({file})")
            else:
                said = output.get("text", data.get("text/plain", "")).rstrip("\n")
                parts.append(f"```text\n{said}\n```")
    return "\n\n".join(parts) + "\n", pictures


def _title(parts):
    """What a picture is of: the heading that it stands under."""
    return next((line.lstrip("# ") for part in reversed(parts) if (line := part.split("\n")[0]).startswith("#")), "")


def text_of(book):
    """A notebook as its file has it."""
    return nbformat.writes(book, version=4).rstrip("\n") + "\n"


def with_outputs(book, earlier):
    """A notebook with the outputs of an earlier one, whose code must be the same; text may differ."""
    ours, theirs = ([cell for cell in b.cells if cell.cell_type == "code"] for b in (book, earlier))
    if [cell.source for cell in ours] != [cell.source for cell in theirs]:
        raise ValueError("code has changed since the notebook was made: run it again, without --text.")
    for cell, before in zip(ours, theirs, strict=True):
        cell.outputs, cell.execution_count = tidied(before.outputs), before.execution_count
    return book


def build(script, text=False, place=None):
    """Run a script as a notebook in a place and write this, the page and its pictures; `text` keeps the outputs."""
    book = notebook(script.read_text())
    if text:
        with_outputs(book, nbformat.read(script.with_suffix(".ipynb"), as_version=4))
    else:
        with tempfile.TemporaryDirectory() as folder:
            execute(book, place or folder)
    script.with_suffix(".ipynb").write_text(text_of(book))
    page, pictures = markdown(book, script.stem)
    script.with_suffix(".md").write_text(page)
    for old in script.parent.glob(f"{script.stem}-*.png"):
        old.unlink()
    for file, content in pictures.items():
        (script.parent / file).write_bytes(content)


def main():
    """The command: builds the scripts that are named, by default all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("scripts", type=Path, nargs="*", help="docs/tutorials/NAME.py")
    parser.add_argument("--text", action="store_true", help="only text has changed: outputs stay as they are")
    parser.add_argument(
        "--place", type=Path, help="folder to run in, which keeps what they write (one that is removed)"
    )
    given = parser.parse_args()
    for script in given.scripts or sorted(FOLDER.glob("*.py")):
        build(script, given.text, given.place)
        print(f"wrote {script.with_suffix('.ipynb')} and {script.with_suffix('.md')}", flush=True)


if __name__ == "__main__":
    main()
