"""House rules for chapters and other pages: python notebooks/lint.py [FILES...]

FILES are chapters (.py) or pages (.md); without any, all chapters. Formulas are kept to the TeX that the hosting site,
JupyterLab and converted pages all show; chapters call the package instead of defining functions, draw with its plot
module, give every figure an alternative text, and state no running times. Exit code 1 if a rule is broken.
"""
import ast
import html
import re
import sys
from collections import Counter
from pathlib import Path

import cmarkgfm
import jupytext
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin

MARKDOWN = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin, double_inline=True, allow_labels=False)
LONGEST_DEFINITION = 3  # lines
OTHER_TOOLS = {
    "matplotlib": "draw with attention_ref.plot",
    "time": "measure no time: it differs between machines",
    "timeit": "measure no time: it differs between machines",
}
DRAW, SAVE = {"plot.subplots", "plot.attention_maps"}, "plot.save"
TEX = {  # pattern in a formula: what to do instead
    r"\\[{}]": r"write \lbrace and \rbrace",
    r"\|": r"write \lvert \rvert, \lVert \rVert or \mid",
    r"[<>]": r"write \lt and \gt",
    "`": "write $...$ without backticks",
    r"\\(newcommand|renewcommand|def|let|DeclareMathOperator)\b": "use no macros",
    r"\\(label|ref|eqref)\b": r"number with \tag and name the number in the text",
    r"\\begin\{(?!aligned|cases|[bpvV]?matrix)": "use aligned, cases or a matrix between $$",
    r"\\begin\{((?!\\end\{).)*\\tag": r"put \tag after \end: renderers refuse it before",
}
PROSE = {  # pattern in the text around formulas and code: what to do instead
    r"\$\$": "put a $$ formula on lines of its own, and close it",
    r"(?<!\$)\$(?!\$)": "close the formula, or write no dollar sign",
    r"\\[(\[]": "write formulas between dollar signs",
    r"^:::|^\([\w:.-]+\)=|\{(math|eq|ref|cite|doc|numref)[\w:]*\}": "directives, labels and roles are shown raw",
    r"!\[\s*\]\(|<img(?![^>]*\balt=[\"'][^\"'])": "give the image an alternative text",
}
RUNNING_TIME = r"\d\s*(ns|µs|μs|us|ms|seconds?|minutes?|hours?)\b|\d\s+s\b"


def main(names):
    """Print what breaks a rule, one line each. Returns the exit code."""
    paths = [Path(name) for name in names] or sorted(Path(__file__).parent.glob("[0-9][0-9]_*.py"))
    found = [line for path in paths for line in lint(path)]
    print("".join(f"{line}\n" for line in found), end="")
    return int(bool(found))


def lint(path):
    """What breaks a rule in a chapter or a Markdown page, as a list of lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [f"{path.name}: {' '.join(problem.split())}" for problem in lint_markdown(text, page=True)]
    found = []
    for number, cell in enumerate(jupytext.reads(text, fmt="py:percent").cells, 1):
        problems = lint_code(cell.source, path.stem) if cell.cell_type == "code" else lint_markdown(cell.source)
        found += [f"{path.name}: cell {number}: {' '.join(problem.split())}" for problem in problems]
    return found


def lint_markdown(text, page=False):
    """Yield what breaks a rule in a Markdown cell, or in a page: there times may be stated, and ```math is shown."""
    tokens = MARKDOWN.parse(text)
    formulas = [leaf for token in tokens for leaf in [token, *(token.children or [])] if leaf.type.startswith("math_")]
    for formula in formulas:
        if formula.type == "math_inline_double":
            yield f"put a $$ formula on lines of its own: {formula.content}"
        for pattern, advice in TEX.items():
            if re.search(pattern, formula.content, re.DOTALL):
                yield f"{advice}: {formula.content}"
    yield from broken_formulas(text, formulas, page)
    for token in tokens:
        if token.type == "fence" and (token.info.startswith("{") or (token.info == "math" and not page)):
            yield f"directives are shown raw: {token.info}"
        if token.type in ("inline", "html_block"):
            yield from lint_prose(token, page)


def broken_formulas(text, formulas, page):
    """Yield the formulas that a hosting site's Markdown pass changes before they reach the TeX renderer.

    In a cell, unlike in a page, a row break keeps both its backslashes.
    """
    source = text if page else text.replace(r"\\", r"\\\\")
    rendered = re.sub(r"<[^>]*>", "", cmarkgfm.github_flavored_markdown_to_html(source))
    rendered = " ".join(html.unescape(rendered).split())
    for formula, times in Counter(" ".join(formula.content.split()) for formula in formulas).items():
        if rendered.count(formula) < times:
            hints = r"\bar P_{i} for \bar{P}_{i}, \thinspace for \,"
            yield f"Markdown changes this formula (write {hints}): {formula}"


def lint_prose(token, page):
    """Yield what breaks a rule in a paragraph, its code and its formulas left out."""
    prose = re.sub(r"(`+).+?\1", "", token.content, flags=re.DOTALL)
    for leaf in token.children or []:
        if leaf.type.startswith("math_"):
            prose = prose.replace(f"{leaf.markup}{leaf.content}{leaf.markup}", "", 1)
    for pattern, advice in PROSE.items():
        for match in re.finditer(pattern, prose, re.MULTILINE):
            yield f"{advice}: {match[0]}"
    if not page:
        for match in re.finditer(RUNNING_TIME, prose):
            yield f"state no running time, it differs between machines: {match[0]}"


def lint_code(source, chapter):
    """Yield what breaks a rule in a code cell of the chapter (01_name)."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError as error:
        yield f"write plain Python, no magics: {error.msg}"
        return
    for node in nodes:
        yield from lint_import(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            length = node.end_lineno - node.lineno + 1
            if length > LONGEST_DEFINITION and not source.startswith("# exercise"):
                yield f"{node.name} has {length} lines: the package should own it (or mark the cell # exercise)"
    calls = [(ast.unparse(node.func), node) for node in nodes if isinstance(node, ast.Call)]
    saves = [call for name, call in calls if name == SAVE]
    if sum(name in DRAW for name, _ in calls) > len(saves):
        yield f"save each figure in the cell that draws it, with {SAVE}(figure, name, alt)"
    for call in saves:
        yield from lint_save(call, chapter)


def lint_import(node):
    """Yield the advice for an import that chapters do without."""
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
    for module in modules:
        if isinstance(node, ast.Import | ast.ImportFrom) and (module or "").split(".")[0] in OTHER_TOOLS:
            yield f"import {module}: {OTHER_TOOLS[module.split('.')[0]]}"


def lint_save(call, chapter):
    """Yield what is wrong with plot.save(figure, name, alt), as far as it is written out."""
    given = dict(zip(("figure", "name", "alt"), call.args)) | {word.arg: word.value for word in call.keywords}
    name, alt = (getattr(given.get(part), "value", given.get(part)) for part in ("name", "alt"))
    if isinstance(name, str) and not name.startswith(f"{chapter}_"):
        yield f"name the figure {chapter}_<slug>, not {name}"
    if alt is None or (isinstance(alt, str) and not alt.strip()):
        yield f"figure {name} needs an alternative text"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
