"""Write what README.md and docs/ quote from commands: python docs/refresh.py [--check]

A quotation is a fenced block under a comment that holds the command: <!-- output of: attention-ref list -->. The Python
block that names its file in the first line (# mine.py) is saved, so that commands can use it. The table of chapters is
made from the notebooks, docs/mistakes.md is one command's output as a whole, docs/wrong_implementations.md is made from
what tests/wrong holds. --check writes nothing; exit code 1 if a
page is not what it would be, up to measured numbers.
"""
import contextlib
import io
import re
import runpy
import shlex
import sys
import tempfile
from pathlib import Path

from attention_ref import variants
from attention_ref.conformance.cases import sentences
from attention_ref.conformance.cli import main as attention_ref

ROOT = Path(__file__).parents[1]
QUOTATION = re.compile(r"(<!-- output of: attention-ref (.*?)(?:, last (\d+) lines)? -->\n```\n)(.*?)(```)", re.S)
CHAPTERS = re.compile(r"(<!-- chapters -->\n)(.*?)(\n\n)", re.S)
CLAIM = re.compile(r"# # (.*?)\n#\n# \*\*(.*?)\*\*", re.S)
FILE = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.S)


def output(command):
    """What the attention-ref command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        attention_ref(shlex.split(command))
    return printed.getvalue()


def refreshed(text):
    """The text with every quotation made anew, its files lying in the current folder."""
    for name, code in FILE.findall(text):
        Path(name).write_text(code)

    def quote(match):
        head, command, last, _, end = match.groups()
        lines = output(command).splitlines()
        return head + "\n".join(lines[-int(last):] if last else lines) + "\n" + end
    return CHAPTERS.sub(lambda match: match[1] + chapters() + match[3], QUOTATION.sub(quote, text))


def chapters():
    """A Markdown table of the chapters: the title, linked, and the claim, the first bold sentence."""
    rows = ["| chapter | its claim |", "|---|---|"]
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py")):
        title, claim = CLAIM.search(path.read_text()).groups()
        claim = claim.replace("\n# ", " ")
        rows.append(f"| [{path.name[:2]} {title}](notebooks/{path.stem}.ipynb) | {claim} |")
    return "\n".join(rows)


WRONG = """# Wrong implementations, and what the tool says

Each was written from a public thread, as people write such code. The first 56 were written without a look at the
[named mistakes](mistakes.md): all were refused, and 38 were given the right name. What the other 18 showed was mended,
in the tables and in the diagnosis. The tests run all of them: each is refused, and {named} of {all} are named as below.

| implementation | what is wrong with it | from | it is named |
|---|---|---|---|
"""


def wrong_implementations():
    """The page of wrong implementations: what each does, the thread it is from, the mistake it is told to be."""
    wrong = runpy.run_path(str(ROOT / "tests/wrong/named.py"))
    rows, described = [], wrong["described"]()
    for name, mistake in wrong["NAMED"].items():
        (text, thread), path = described[name], name.partition(".")[0]
        known = sentences(variants()[wrong["variant"](name)])
        said = f"`{mistake}`: {known[mistake]}" if mistake else "caught, not named"
        rows.append(f"| [{name}](../tests/wrong/{path}.py) | {text} | {thread} | {said} |\n")
    named = sum(mistake is not None for mistake in wrong["NAMED"].values())
    return WRONG.format(named=named, all=len(rows)) + "".join(row.replace("_torch.", ".", 1) for row in rows)


def pages():
    """Path -> the text it should hold."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sys.path.insert(0, folder)
        readme = refreshed((ROOT / "README.md").read_text())
        sys.path.remove(folder)
        conventions = refreshed((ROOT / "docs/conventions.md").read_text())
    return {ROOT / "README.md": readme, ROOT / "docs/conventions.md": conventions,
            ROOT / "docs/mistakes.md": output("list --mistakes"),
            ROOT / "docs/wrong_implementations.md": wrong_implementations()}


def same(a, b):
    """Equal up to measured numbers, which differ from machine to machine in the last place; counts must be equal."""
    number = re.compile(r"\d+\.\d+(e[+-]\d+)?|\d+e[+-]\d+")
    return number.sub("#", a) == number.sub("#", b)


def main(check):
    """Refresh the pages, or only compare them; returns the exit code."""
    stale = {path: text for path, text in pages().items() if not path.exists() or not same(path.read_text(), text)}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)} {'is stale: make docs' if check else 'refreshed'}")
        if not check:
            path.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main("--check" in sys.argv))
