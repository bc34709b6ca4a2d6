"""Chapters keep the house rules, run, and are committed as they run; so do the tools that draw and build them."""
import base64
import importlib.util
import re
import runpy
import sys
import time
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest

from attention_ref import plot

ROOT = Path(__file__).parents[1]


def load(name):
    """A module of the folder notebooks/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"notebooks_{name}", ROOT / "notebooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build, lint = load("build"), load("lint")
chapters = pytest.mark.parametrize("source", build.chapters(), ids=lambda source: source.stem)


def displays(notebook):
    """The MIME bundles of all outputs of a notebook."""
    return [out.data for cell in notebook.cells for out in cell.get("outputs", []) if "data" in out]


def images_without_alt(notebook):
    """Outputs that are images, which carry no alternative text, and <img> tags without one."""
    found = [kind for data in displays(notebook) for kind in data if kind.startswith("image/")]
    tags = [tag for data in displays(notebook) for tag in re.findall("<img[^>]*>", data.get("text/html", ""))]
    return found + [tag[-80:] for tag in tags if not re.search(r'alt="[^"]+"', tag)]


# The chapters


@chapters
def test_chapter_keeps_the_rules(source):
    assert lint.lint(source) == []


@chapters
def test_chapter_runs(source, tmp_path, monkeypatch):
    """Every cell, in this process, with warnings as errors, in less than 30 seconds of computing."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setenv("MPLBACKEND", "agg")
    start = time.process_time()
    runpy.run_path(str(source), run_name="__main__")
    assert time.process_time() - start < 30
    drawn = {path.name for path in tmp_path.glob("figures/*")}
    assert drawn == {path.name for path in ROOT.glob(f"figures/{source.stem}_*")}


@chapters
def test_chapter_is_committed_as_it_runs(source):
    path = source.with_suffix(".ipynb")
    assert path.exists(), f"run python notebooks/build.py {source.stem}"
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert [(cell.id, cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.id, cell.cell_type, cell.source) for cell in build.read(source).cells]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert [out for cell in code for out in cell.outputs if out.output_type == "error"] == []
    assert path.stat().st_size <= build.LARGEST_NOTEBOOK
    assert images_without_alt(notebook) == []


@chapters
def test_chapter_shows_its_committed_figures(source):
    shown = {}
    for data in displays(nbformat.read(source.with_suffix(".ipynb"), 4)):
        if match := re.search("svg.xml;base64,([^\"]+)", data.get("text/html", "")):
            shown[data["text/plain"].split(": ")[0]] = base64.b64decode(match[1])
    assert shown == {f"figures/{path.name}": path.read_bytes() for path in ROOT.glob(f"figures/{source.stem}_*")}


# Building

TINY = '''# %% [markdown]
# # A tiny chapter with $x_i \\lt 1$

# %%
import numpy as np

from attention_ref import plot

plot.show(plot, "COLOURS")
print("max error", 2.5, "(limit 1e-3)")

# %%
figure = plot.attention_maps({"uniform": np.full((3, 4), 0.25)})
plot.save(figure, "01_tiny_weights", alt='Three rows of four "equal" cells.')
'''


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A folder with one chapter that was built once."""
    root = tmp_path_factory.mktemp("house")
    (root / "notebooks").mkdir()
    (root / "notebooks/01_tiny.py").write_text(TINY)
    assert build.main([], root) == 0
    return root


@pytest.fixture
def built(house):
    """The chapter's source, its notebook as text and its figures, from that build."""
    source = house / "notebooks/01_tiny.py"
    figures = {path.name: path.read_text() for path in house.glob("figures/*")}
    return SimpleNamespace(source=source, text=source.with_suffix(".ipynb").read_text(), figures=figures)


@pytest.fixture
def copy(built, tmp_path):
    """The same, in a place that a test may change."""
    (tmp_path / "notebooks").mkdir()
    source = tmp_path / "notebooks/01_tiny.py"
    source.write_text(TINY)
    build.write(source, built.text, built.figures)
    return SimpleNamespace(source=source, text=built.text, figures=built.figures, path=source.with_suffix(".ipynb"))


def test_build_writes_an_executed_notebook(built):
    notebook = nbformat.reads(built.text, 4)
    assert [cell.id for cell in notebook.cells] == ["cell-01", "cell-02", "cell-03"]
    assert [cell.get("execution_count") for cell in notebook.cells] == [None, 1, 2]
    assert notebook.metadata == build.METADATA
    assert all(cell.metadata == {} for cell in notebook.cells)
    assert list(built.figures) == ["01_tiny_weights.svg"]


def test_build_shows_code_and_figures_with_text_for_every_viewer(built):
    code, figure = displays(nbformat.reads(built.text, 4))
    assert code["text/markdown"].startswith("```python\nCOLOURS = (") and code["text/plain"].startswith("COLOURS = (")
    assert 'alt="Three rows of four &quot;equal&quot; cells."' in figure["text/html"]
    assert figure["text/plain"] == 'figures/01_tiny_weights.svg: Three rows of four "equal" cells.'
    svg = base64.b64decode(re.search('base64,([^"]+)', figure["text/html"])[1]).decode()
    assert svg == built.figures["01_tiny_weights.svg"]


def test_build_is_the_same_twice(house, built):
    assert build.main(["01_tiny"], house) == 0
    assert (house / "notebooks/01_tiny.ipynb").read_text() == built.text
    assert (house / "figures/01_tiny_weights.svg").read_text() == built.figures["01_tiny_weights.svg"]


def test_build_of_a_failing_chapter_leaves_the_old_notebook(copy, capsys):
    copy.source.write_text(TINY + "\n# %%\nprint('so far')\n1 / 0\n")
    assert build.main([], copy.source.parents[1]) == 1
    message = capsys.readouterr().err
    assert "01_tiny: cell 4 failed" in message and "----> 2 1 / 0" in message and "ZeroDivisionError" in message
    assert copy.path.read_text() == copy.text
    assert sorted(path.name for path in copy.path.parent.iterdir()) == ["01_tiny.ipynb", "01_tiny.py"]


def test_check_runs_the_chapters_and_writes_nothing(copy, capsys):
    copy.source.write_text(TINY.replace("2.5", "2.7").replace("0.25", "0.2"))
    assert build.main(["--check"], copy.source.parents[1]) == 1
    message = capsys.readouterr().err
    assert "cell 2: the source differs" in message and "figure 01_tiny_weights.svg differs" in message
    assert copy.path.read_text() == copy.text


def test_check_accepts_what_was_built(copy):
    assert build.check(copy.source, copy.text, copy.figures) == []
    assert build.check(copy.source, copy.text.replace("2.5 (", "2.500001 ("), copy.figures) == []


@pytest.mark.parametrize("old, new, expected", [
    ("max error 2.5", "max error 2.6", "cell 2: committed\n"),
    ("max error 2.5", "least error 2.5", "cell 2: committed\n"),
    ("A tiny chapter", "A small chapter", "cell 1: the source differs"),
    ("rows of four &quot;equal", "rows of three &quot;equal", "cell 3: committed\n"),
])
def test_check_names_the_cell_that_differs(copy, old, new, expected):
    assert old in copy.text
    problems = build.check(copy.source, copy.text.replace(old, new), copy.figures)
    assert len(problems) == 1 and problems[0].startswith(f"01_tiny: {expected}")


@pytest.mark.parametrize("change", [
    lambda svg: {"01_tiny_weights.svg": svg.replace(">0.25<", ">0.35<")},
    lambda svg: {"01_tiny_weights.svg": re.sub(r"(M 0 )(\d+)", r"\g<1>1\2", svg, count=1)},
    lambda svg: {},
    lambda svg: {"01_tiny_weights.svg": svg, "01_tiny_more.svg": svg},
])
def test_check_names_the_figure_that_differs(copy, change):
    problems = build.check(copy.source, copy.text, change(copy.figures["01_tiny_weights.svg"]))
    assert len(problems) == 1 and re.fullmatch(r"01_tiny: figure 01_tiny_\w+\.svg differs", problems[0])


def test_check_of_a_figure_by_another_matplotlib_compares_its_title(built):
    svg = built.figures["01_tiny_weights.svg"]
    other = re.sub("Matplotlib v[0-9.]+", "Matplotlib v0", svg).replace(">0.25<", ">0.35<")
    assert build.same_figure(svg, other)
    assert not build.same_figure(svg, other.replace("<title>Three", "<title>Four"))


def test_check_reports_a_missing_notebook(copy):
    copy.path.unlink()
    assert build.check(copy.source, copy.text, copy.figures) == ["01_tiny: 01_tiny.ipynb is missing"]


def test_figures_no_longer_drawn_are_removed(copy):
    build.write(copy.source, copy.text, {"01_tiny_other.svg": "<svg/>"})
    assert [path.name for path in copy.source.parents[1].glob("figures/*")] == ["01_tiny_other.svg"]


def test_limits(built):
    with pytest.raises(ValueError, match="has 400 kB"):
        build.require_limits(built.source, "x" * 400_000, {})
    with pytest.raises(ValueError, match="02_other.svg must be named 01_tiny_"):
        build.require_limits(built.source, "", {"02_other.svg": ""})


def test_unknown_chapter(house):
    with pytest.raises(SystemExit) as stop:
        build.main(["07"], house)
    assert stop.value.code == 2


@pytest.mark.parametrize("a, b, same", [
    ("error 3e-16 (limit 1e-12)", "error 7.1e-16 (limit 1e-12)", True),
    ("[ 0.5 -0. ]", "[0.5 0.]", True),
    ("error 0.5", "error 0.51", False),
    ("float32 ok", "float64 ok", False),
    ("ok", "ok ok", False),
    ("1 2", "1", False),
])
def test_same_text_forgives_rounding_only(a, b, same):
    assert build.same_text(a, b) == same


# Drawing

CAUSAL = np.tri(5, dtype=bool)
WEIGHTS = CAUSAL / CAUSAL.sum(-1, keepdims=True)


def test_attention_map_has_a_fixed_scale_and_hatches_masked_cells():
    _, axis = plot.subplots()
    image = plot.attention_map(axis, WEIGHTS * 0.3, CAUSAL, "Causal")
    assert image.get_clim() == (0, 1) and image.get_cmap().name == "viridis"
    assert (image.get_array().mask == ~CAUSAL).all() and axis.patch.get_hatch()
    assert axis.patch.get_facecolor() == (1, 1, 1, 1)
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_title()) == ("key j", "query i", "Causal")
    assert axis.yaxis_inverted() and not axis.xaxis_inverted()


def test_attention_map_writes_numbers_up_to_eight():
    _, axes = plot.subplots(1, 2)
    plot.attention_map(axes[0], WEIGHTS, CAUSAL)
    plot.attention_map(axes[1], np.eye(9))
    assert [text.get_text() for text in axes[0].texts[:3]] == ["1.00", "0.50", "0.50"]
    assert [text.get_color() for text in axes[0].texts[:2]] == ["black", "white"]
    assert len(axes[0].texts) == CAUSAL.sum() and len(axes[1].texts) == 0


def test_attention_map_shows_nan_and_integer_ticks():
    _, axis = plot.subplots()
    plot.attention_map(axis, np.full((2, 3), np.nan))
    assert [text.get_text() for text in axis.texts] == ["nan"] * 6
    assert list(axis.get_xticks()) == [0, 1, 2] and list(axis.get_yticks()) == [0, 1]


def test_signed_map_is_centred_at_zero():
    _, axis = plot.subplots()
    assert plot.attention_map(axis, [[-3.0, 1.0]], signed=True).get_clim() == (-3, 3)
    assert [text.get_text() for text in axis.texts] == ["-3.00", "1.00"]


@pytest.mark.parametrize("values, written", [
    ([-0.001, 5.0], ["0.00", "5.00"]), ([20.0], ["20.0"]), ([300.0], ["300"]), ([2e-9, 0.0], ["2e-09", "0e+00"])])
def test_numbers_are_written_in_the_size_of_the_scale(values, written):
    _, axis = plot.subplots()
    plot.attention_map(axis, [values], signed=True)
    assert [text.get_text() for text in axis.texts] == written


def test_attention_maps_share_one_scale_and_one_bar():
    figure = plot.attention_maps({"a": (WEIGHTS, CAUSAL), "b": 4 * WEIGHTS}, "Two", signed=True)
    images = [image for axis in figure.axes for image in axis.get_images()]
    assert [image.get_clim() for image in images] == [(-4, 4), (-4, 4)]
    assert [axis.get_title() for axis in figure.axes[:2]] == ["a", "b"] and len(figure.axes) == 3
    assert figure.get_suptitle() == "Two"
    assert len(plot.attention_maps(dict.fromkeys("abcde", WEIGHTS)).axes) == 6


@pytest.mark.parametrize("weights, message", [
    (np.zeros((1, 2, 3)), r"shape \(Tq, Tk\), got \(1, 2, 3\)"),
    ([[0.5, 1.5]], "0.5 to 1.5"),
    ([[-0.5]], "signed=True"),
])
def test_attention_map_refuses(weights, message):
    with pytest.raises(ValueError, match=message):
        plot.attention_map(plot.subplots()[1], weights)


def test_mask_map_is_dark_where_keys_may_be_attended():
    _, axis = plot.subplots()
    image = plot.mask_map(axis, np.tri(64, dtype=bool), "Causal")
    colours = image.cmap(image.norm(image.get_array()))
    assert colours[5, 3, :3].max() < 0.5 and (colours[3, 5] == 1).all()
    assert list(axis.get_xticks()) == list(range(0, 64, 8)) and axis.get_title() == "Causal"
    with pytest.raises(ValueError, match="boolean"):
        plot.mask_map(axis, np.tri(3))


def test_graph_draws_an_arrow_and_its_weight_for_every_edge():
    _, axis = plot.subplots()
    source, target, weights = [0, 1, 0, 2], [1, 0, 1, 2], [0.25, 1.0, 0.75, 0.5]        # two parallel, a loop
    plot.graph(axis, [(0, 0), (1, 0), (0, 1)], source, target, weights, "Three nodes")
    assert len(axis.patches) == 4 and axis.get_title() == "Three nodes"
    assert [text.get_text() for text in axis.texts] == ["0", "1", "2", "0.25", "1.00", "0.75", "0.50"]
    written = {text.get_position() for text in axis.texts}
    assert len(written) == 7
    assert all(axis.viewLim.contains(*place) for place in written)
    with pytest.raises(ValueError, match="one weight for every edge"):
        plot.graph(axis, [(0, 0), (1, 0)], [0], [1], [0.5, 0.5])
    with pytest.raises(ValueError, match="not 0 to 1"):
        plot.graph(axis, [(0, 0), (1, 0)], [0], [1], [1.5])


def test_lines_differ_in_colour_and_marker():
    _, axis = plot.subplots()
    plot.lines(axis, [2, 4], {"dense": [4, 16], "linear": [2, 4]}, "tokens T", "multiply-adds")
    assert len({(line.get_color(), line.get_marker()) for line in axis.lines}) == 2
    assert axis.get_xscale() == axis.get_yscale() == "log"
    assert [text.get_text() for text in axis.get_legend().texts] == ["dense", "linear"]


def draw(size=4):
    return plot.attention_maps({"uniform": np.full((size, size), 1 / size)})


def test_save_writes_the_same_bytes_with_a_title(tmp_path, monkeypatch, capsys):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    path = tmp_path / "figures/01_tiny_map.svg"
    plot.save(draw(), "01_tiny_map", "Sixteen\n  equal cells")
    first = path.read_bytes()
    plot.save(draw(), "01_tiny_map", "Sixteen equal cells")
    assert path.read_bytes() == first
    assert b"<title>Sixteen equal cells</title>" in first and b"dc:date" not in first
    assert capsys.readouterr().out == "figures/01_tiny_map.svg: Sixteen equal cells\n" * 2


def test_figures_stand_beside_notebooks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plot.figures_folder() == tmp_path / "figures"


@pytest.mark.parametrize("name, alt, message", [
    ("01_tiny_map", " \n", "01_tiny_map needs an alternative text"),
    ("tiny_map", "Cells", "named <notebook>_<slug>"),
    ("01_map", "Cells", "named <notebook>_<slug>"),
    ("../01_tiny_map", "Cells", "named <notebook>_<slug>"),
    ("01_Tiny_map", "Cells", "named <notebook>_<slug>"),
])
def test_save_refuses(name, alt, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        plot.save(draw(), name, alt)
    assert list(tmp_path.iterdir()) == []


def test_save_refuses_a_large_figure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figure, axis = plot.subplots()
    axis.plot(np.sin(np.arange(9000.0) ** 2))
    with pytest.raises(ValueError, match=r"01_tiny_map has \d{3} kB \(limit 100\)"):
        plot.save(figure, "01_tiny_map", "Noise")
    assert list(tmp_path.iterdir()) == []


def decorated(function):
    @wraps(function)
    def call(*args):
        return function(*args)
    return call


@decorated
def loop(q):
    return q + 1  # the text that is shown


def test_show_looks_under_decorators(capsys):
    plot.show(loop)
    assert capsys.readouterr().out == "@decorated\ndef loop(q):\n    return q + 1  # the text that is shown\n"


def test_show_finds_names_in_a_module(capsys):
    plot.show(sys.modules[__name__], "ROOT", "loop")
    shown = capsys.readouterr().out
    assert shown.startswith("ROOT = Path(__file__).parents[1]\n\n@decorated\ndef loop(q):\n")
    with pytest.raises(ValueError, match="does not define nothing_here"):
        plot.show(plot, "nothing_here")


# The rules


@pytest.mark.parametrize("text, expected", [
    (r"a set $\{1, 2\}$", "lbrace"),
    ("a norm $|x|$", "lvert"),
    ("an order $i<j$", r"\lt"),
    (r"thin $a\, b$", "Markdown changes this formula"),
    (r"$\bar{P}_{ij}$ and $\bar{Q}_{ij}$", "Markdown changes this formula"),
    ("$$\na\n- b\n$$", "Markdown changes this formula"),
    ("$$\n\\begin{aligned}\na &= b \\tag{1}\n\\end{aligned}\n$$", r"put \tag after \end"),
    ("$$\n\\begin{align}\na &= b\n\\end{align}\n$$", "use aligned"),
    (r"$\newcommand{\x}{y} \x$", "no macros"),
    (r"$a \label{x}$", "number with"),
    ("text $$ x $$ text", "lines of its own"),
    ("text\n\n$$\nx\n", "lines of its own, and close it"),
    ("it costs 5$", "close the formula"),
    ("$`x`$", "without backticks"),
    (r"\(x\)", "between dollar signs"),
    ("```{note}\nx\n```", "directives are shown raw"),
    ("```math\nx\n```", "directives are shown raw"),
    (":::{note}", "shown raw"),
    ("(label)=", "shown raw"),
    ("see {cite}`VSP17`", "shown raw"),
    ("![](x.svg)", "alternative text"),
    ('<img src="x.svg">', "alternative text"),
    ("it took 12 ms", "running time"),
    ("it took 3.5 s", "running time"),
    ("after 2 minutes", "running time"),
])
def test_lint_finds_in_markdown(text, expected):
    problems = list(lint.lint_markdown(text))
    assert problems and any(expected in problem for problem in problems)


def test_lint_accepts_the_subset():
    assert list(lint.lint_markdown(r"""# One softmax row, $i \lt T$

Weights $P_{ij} = \exp(s_{ij}) / \sum_l \exp(s_{il})$ with $\lvert s_{ij} \rvert$ in $\lbrace 0, 1 \rbrace$, and `$x$`:

$$
\begin{aligned}
o_i &= \sum_j P_{ij} v_j \\
z_i &= \sum_j \exp(s_{ij})
\end{aligned}
\tag{1.1}
$$

| mask | ![a causal mask](x.svg) |
|---|---|
| $i \geq j$ | the 1990s, 0s and 1s, 2 states |
""")) == []


def test_lint_of_a_page_allows_times_and_wants_fenced_rows(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("It takes 5 minutes.\n\n```math\na \\\\ b\n```\n")
    assert lint.lint(page) == []
    page.write_text("$$\na \\\\\nb\n$$\n")
    assert len(lint.lint(page)) == 1 and lint.lint(page)[0].startswith("page.md: Markdown changes this formula")


@pytest.mark.parametrize("code, expected", [
    ("def f(x):\n    y = x\n    z = y\n    return z", "f has 4 lines"),
    ("class A:\n    a = 1\n    b = 2\n    c = 3", "A has 4 lines"),
    ("# code\ndef f(x):\n    y = x\n    z = y\n    return z", "f has 4 lines"),
    ("%timeit x", "no magics"),
    ("import matplotlib.pyplot as plt", "draw with attention_ref.plot"),
    ("from time import perf_counter", "measure no time"),
    ("figure = plot.attention_maps(p)", "save each figure"),
    ("figure, axis = plot.subplots()", "save each figure"),
    ("plot.save(figure, '01_a_b')", "needs an alternative text"),
    ("plot.save(figure, '01_a_b', alt=' ')", "needs an alternative text"),
    ("plot.save(figure, '02_a_b', 'Cells')", "name the figure 01_a_<slug>"),
])
def test_lint_finds_in_code(code, expected):
    assert [problem for problem in lint.lint_code(code, "01_a") if expected in problem]


@pytest.mark.parametrize("code", [
    "def f(x):\n    return x\n",
    "# exercise\ndef f(x):\n    y = x\n    z = y\n    return z",
    "figure = plot.attention_maps(p)\nplot.save(figure, '01_a_b', alt='Cells')",
    "for n in 1, 2:\n    plot.save(draw(n), f'01_a_{n}', f'Cells of {n}')",
    "from . import x\nimport numpy as np\nnp.save",
])
def test_lint_accepts_code(code):
    assert list(lint.lint_code(code, "01_a")) == []


def test_lint_names_the_file_and_the_cell(tmp_path, capsys):
    chapter = tmp_path / "01_a.py"
    chapter.write_text(TINY.replace("01_tiny", "01_a").replace("A tiny", "In 3 ms, a tiny"))
    assert lint.main([str(chapter)]) == 1
    assert capsys.readouterr().out == "01_a.py: cell 1: state no running time, it differs between machines: 3 ms\n"
    chapter.write_text(TINY.replace("01_tiny", "01_a"))
    assert lint.main([str(chapter)]) == 0


def test_images_need_alternative_text(built):
    notebook = nbformat.reads(built.text.replace('alt=\\"', 'title=\\"'), 4)
    assert images_without_alt(nbformat.reads(built.text, 4)) == [] and len(images_without_alt(notebook)) == 1
    displays(notebook)[0]["image/png"] = "AAAA"
    assert len(images_without_alt(notebook)) == 2
