"""Drawing for the chapters: one style, maps of weights and masks, curves, the text of the code.

Figures are made here without pyplot, so nothing stays open and no cell draws a figure twice; `save` is what shows it.
This is the only file that imports matplotlib, and nothing else in the package imports this file.
"""
import ast
import base64
import html
import inspect
import io
import re
import sys
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.bezier import BezierSegment
from matplotlib.collections import EllipseCollection
from matplotlib.colors import ListedColormap, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch
from matplotlib.path import Path as Curve

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
PALE = ListedColormap(0.4 * to_rgba_array(COLOURS)[:, :3] + 0.6)  # the same, light enough to be written on
MARKERS = "osD^vPX"
LARGEST_FIGURE = 100_000  # bytes
NODE = 0.15  # radius of the nodes of a graph
FONT = "font-family: 'DejaVu Sans', 'Verdana', sans-serif;"  # as every text of an SVG repeats it

matplotlib.rcParams.update({
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # the first ships with matplotlib, the second is as wide
    "font.size": 9,
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.facecolor": "white",
    "axes.linewidth": 0.6,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
    "hatch.color": "0.65",
    "hatch.linewidth": 0.5,
    "xtick.major.size": 2,
    "ytick.major.size": 2,
    "svg.fonttype": "none",  # text stays text: half the bytes, readable in a diff
    "svg.hashsalt": "attention_ref",  # the same ids on every run
})


def show(thing, *names):
    """Show the source of a function, as it stands in its file; or of the named definitions of a module.

    show(sdpa.dense) shows one function, decorators included; show(sdpa, "INPUTS", "dense") shows module-level names.
    ValueError if the module does not define a name.
    """
    text = _definitions(thing, names) if names else inspect.getsource(inspect.unwrap(thing))
    text = textwrap.dedent(text).rstrip()
    _display({"text/markdown": f"```python\n{text}\n```"}, text)


def subplots(rows=1, columns=1, size=(3.2, 2.8)):
    """A figure and its axis, or its array of axes (rows, columns) without the sides of length 1.

    size is the width and height of one panel in inches.
    """
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns)


def attention_map(axis, weights, mask=None, title=None, *, signed=False, limit=None, labels=("key j", "query i")):
    """Draw weights (Tq, Tk), rows queries and columns keys, on the fixed scale 0 to 1. Returns the image.

    mask (Tq, Tk) is boolean, True = may attend; the other cells are left white and hatched. With signed=True, for
    scores and differences, the scale is -limit to limit, by default the largest size seen. Sides up to 8 get numbers.
    ValueError for a shape that is not (Tq, Tk), and for a weight outside 0 to 1 that is not signed.
    """
    weights, seen = _matrix(weights, mask)
    if signed:
        limit, low, colours = limit or _largest(weights, seen), -1, "RdBu_r"
    else:
        _require_weights(weights[seen])
        limit, low, colours = 1, 0, "viridis"
    axis.patch.set(hatch="/////", linewidth=0)
    shown = np.ma.array(weights, mask=~seen)
    image = axis.imshow(shown, cmap=colours, vmin=low * limit, vmax=limit, interpolation="none")
    if max(weights.shape) <= 8:
        _write_numbers(axis, image, weights, seen, limit)
    _label(axis, weights.shape, title, labels)
    return image


def attention_maps(panels, title=None, *, signed=False, labels=("key j", "query i")):
    """A figure of one `attention_map` per panel (name -> weights, or (weights, mask)), one scale and one colour bar."""
    panels = {name: panel if isinstance(panel, tuple) else (panel, None) for name, panel in panels.items()}
    limit = max(_largest(*_matrix(*panel)) for panel in panels.values()) if signed else None
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.7 * columns + 0.8, 2.8 * rows + 0.3), layout="compressed")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, (name, (weights, mask)) in zip(axes, panels.items()):
        image = attention_map(axis, weights, mask, name, signed=signed, limit=limit, labels=labels)
    for axis in axes[len(panels):]:
        axis.remove()
    figure.colorbar(image, ax=axes[:len(panels)], label="value" if signed else "weight", shrink=0.85)
    figure.suptitle(title)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    return figure


def mask_map(axis, mask, title=None):
    """Draw a boolean mask (Tq, Tk), dark = may attend, rows queries and columns keys. Returns the image.

    ValueError for a mask that is not boolean or not (Tq, Tk).
    """
    mask = np.asarray(mask)
    if mask.dtype != bool or mask.ndim != 2:
        raise ValueError(f"mask must be boolean of shape (Tq, Tk), got {mask.dtype} of shape {mask.shape}")
    image = axis.imshow(mask, cmap=ListedColormap(["white", "#1F4E79"]), vmin=0, vmax=1, interpolation="none")
    if max(mask.shape) <= 16:
        _rule(axis, *mask.shape)
    _label(axis, mask.shape, title, ("key j", "query i"))
    return image


def group_map(axis, groups, text, title=None, *, labels=("column", "row")):
    """Draw which group, 0 to 6, each cell of a matrix belongs to, a colour for each, and write text into the cells.

    Returns the image. ValueError for groups that are not an integer matrix of the shape of text.
    """
    groups, text = np.asarray(groups), np.asarray(text)
    if groups.dtype.kind not in "iu" or groups.ndim != 2 or groups.shape != text.shape:
        raise ValueError(f"groups must be integer of the shape of text {text.shape}, got {groups.dtype} {groups.shape}")
    image = axis.imshow(groups, cmap=PALE, vmin=0, vmax=len(COLOURS) - 1, interpolation="none")
    _rule(axis, *groups.shape)
    for (i, j), word in np.ndenumerate(text):
        axis.text(j, i, word, ha="center", va="center", fontsize=7)
    _label(axis, groups.shape, title, labels)
    return image


def graph(axis, places, source, target, weights, title=None):
    """Draw nodes at places (N, 2), a unit or more apart, and an arrow from source to target (E,) for every edge.

    weights (E,), 0 to 1, are the colour and the width of an arrow, and written on it. Edges that share their ends are
    bent apart. ValueError for lists of edges that are not equally long, and for a weight outside 0 to 1.
    """
    if not np.shape(source) == np.shape(target) == np.shape(weights):
        raise ValueError(f"one weight for every edge: got {np.shape(source)}, {np.shape(target)}, {np.shape(weights)}")
    places, weights, colours = np.asarray(places, float), np.asarray(weights, float), matplotlib.colormaps["viridis_r"]
    _require_weights(weights)
    axis.add_collection(EllipseCollection([2 * NODE], [2 * NODE], [0], units="xy", offsets=places, facecolors="white",
                                          edgecolors="black", offset_transform=axis.transData, zorder=3))
    for number, place in enumerate(places):
        axis.text(*place, str(number), ha="center", va="center", zorder=4)
    ends = [Circle(place, NODE, transform=axis.transData) for place in places]
    seen, pairs = [places - NODE, places + NODE], list(zip(source, target))
    for e, ((j, i), p) in enumerate(zip(pairs, weights)):
        bend = 0.3 + 0.45 * pairs[:e].count((j, i))
        curve = _curve(places, j, i, bend)
        line = dict(path=Curve(curve, [Curve.MOVETO] + 3 * [Curve.CURVE4])) if i == j else dict(
            posA=places[j], posB=places[i], connectionstyle=f"arc3,rad={bend:.2f}", patchA=ends[j], patchB=ends[i])
        axis.add_patch(FancyArrowPatch(**line, arrowstyle="-|>", mutation_scale=9, shrinkA=1, shrinkB=1,
                                       color=colours(0.2 + 0.8 * p), linewidth=0.8 + 2 * p))
        axis.text(*BezierSegment(curve)(0.4), f"{p:.2f}", ha="center", va="center", fontsize=7,
                  bbox=dict(facecolor="white", edgecolor="none", pad=0.6))
        seen.append(BezierSegment(curve)(np.linspace(0, 1, 9)))
    low, high = np.concatenate(seen).min(0) - 0.15, np.concatenate(seen).max(0) + 0.15
    axis.set(title=title, aspect="equal", xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    axis.set_axis_off()


def _curve(places, j, i, bend):
    """Control points of the arrow from node j to node i: three between centres, four of a loop away from the middle."""
    right = np.array([[0.0, -1.0], [1.0, 0.0]])
    if i != j:
        return np.stack([places[j], (places[j] + places[i]) / 2 + bend * (places[i] - places[j]) @ right, places[i]])
    out = places[j] - places.mean(0)
    out = out / (np.hypot(*out) or 1)
    steps = NODE * np.array([[0.8, -0.8], [2.5 + 4 * bend, -2.5], [2.5 + 4 * bend, 2.5], [0.8, 0.8]])
    return places[j] + steps @ np.stack([out, out @ right])


def lines(axis, x, curves, x_label, y_label, title=None):
    """Draw curves (name -> values at each of the few sizes x) on logarithmic axes, told apart by colour and marker."""
    for n, (name, y) in enumerate(curves.items()):
        axis.loglog(x, y, marker=MARKERS[n % len(MARKERS)], markersize=4, linewidth=1.2, label=name)
    axis.set_xticks(x, [f"{size:g}" for size in x])
    axis.set_xticks([], minor=True)
    axis.set(xlabel=x_label, ylabel=y_label, title=title)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.9", linewidth=0.5)
    axis.legend(frameon=False)


def save(figure, name, alt):
    """Write figures/<name>.svg, the same bytes on every run, and show it with its alternative text.

    name is <notebook>_<slug>, such as 01_scaled_dot_product_weights. alt is one paragraph that says what is to be seen.
    ValueError for another form of name, an empty alt, and a figure over 100 kB.
    The notebook receives an <img> that holds the SVG: hosting sites, JupyterLab (before the notebook is trusted, where
    an image/svg+xml output stays hidden) and converted pages all show it, and it is the one form that keeps its alt.
    """
    alt = " ".join(alt.split())
    if not re.fullmatch(r"\d\d(_[a-z0-9]+){2,}", name):
        raise ValueError(f"a figure is named <notebook>_<slug>, such as 01_scaled_dot_product_weights, not {name!r}")
    if not alt:
        raise ValueError(f"figure {name} needs an alternative text: say what is to be seen")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": alt})
    svg = _slim(buffer.getvalue().decode()).encode()
    if len(svg) > LARGEST_FIGURE:
        raise ValueError(f"figure {name} has {len(svg) // 1000} kB (limit 100): draw fewer points or smaller matrices")
    folder = figures_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_bytes(svg)
    source = "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    _display({"text/html": f'<img src="{source}" alt="{html.escape(alt)}">'}, f"figures/{name}.svg: {alt}")


def figures_folder():
    """figures/ beside the folder notebooks/ that chapters run in; under the working directory elsewhere."""
    here = Path.cwd()
    return (here.parent if here.name == "notebooks" else here) / "figures"


def _slim(svg):
    """The same drawing in two thirds of the bytes: no indentation, no turn by zero, the font named once."""
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"|(?m:^ +)', "", svg)
    svg = re.sub(r'<g id="text_\d+">\n(<text.*</text>)\n</g>', r"\1", svg)
    return svg.replace(f" {FONT}", "").replace("*{", f"*{{{FONT} ", 1)


def _display(rich, plain):
    """Show rich (MIME type -> text) in IPython, with plain for viewers that cannot; print plain elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        print(plain)
    else:
        shell.display_pub.publish(rich | {"text/plain": plain})


def _definitions(module, names):
    """The source of module-level functions, classes and assignments, in the order of names."""
    text = inspect.getsource(module)
    found = {}
    for node in ast.parse(text).body:
        targets = [node] if hasattr(node, "name") else getattr(node, "targets", [])
        first = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
        block = "\n".join(text.splitlines()[first - 1:node.end_lineno])
        found |= {getattr(target, "name", getattr(target, "id", None)): block for target in targets}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{module.__name__} does not define {', '.join(missing)}")
    return "\n\n".join(found[name] for name in names)


def _matrix(weights, mask):
    """weights as a float matrix (Tq, Tk) and which of its cells may be seen, a boolean of the same shape."""
    weights = np.asarray(weights, float)
    if weights.ndim != 2:
        raise ValueError(f"a map needs shape (Tq, Tk), got {weights.shape}: pick one head, as in weights[0, 0]")
    return weights, np.broadcast_to(True if mask is None else mask, weights.shape)


def _require_weights(weights):
    """ValueError unless all weights, but for rounding, lie in 0 to 1; NaN may stand among them."""
    if (weights < -1e-3).any() or (weights > 1 + 1e-3).any():
        low, high = np.nanmin(weights), np.nanmax(weights)
        raise ValueError(f"weights span {low:.3g} to {high:.3g}, not 0 to 1: draw them with signed=True")


def _largest(weights, seen):
    """The largest finite size among the seen cells, 1 if there is none, so that a scale is never empty."""
    sizes = np.abs(weights[seen & np.isfinite(weights)])
    return sizes.max(initial=0) or 1


def _write_numbers(axis, image, weights, seen, limit):
    """Write each seen number into its cell, black or white, whichever can be read on the colour."""
    digits = 2 if limit < 10 else 1 if limit < 100 else 0
    form = f".{digits}f" if 0.05 <= limit < 1000 else ".0e"
    for i, j in np.argwhere(seen):
        value = weights[i, j]
        brightness = image.cmap(image.norm(value))[:3] @ np.array([0.299, 0.587, 0.114])
        dark = np.isfinite(value) and brightness < 0.5
        colour = "white" if dark else "black"
        axis.text(j, i, format(value, "z" + form), ha="center", va="center", fontsize=7, color=colour)


def _rule(axis, rows, columns):
    """Thin lines between the cells, all in one path: a tick for each would take most of the bytes of a figure."""
    across = [((-0.5, y), (columns - 0.5, y), (np.nan, np.nan)) for y in np.arange(1, rows) - 0.5]
    down = [((x, -0.5), (x, rows - 0.5), (np.nan, np.nan)) for x in np.arange(1, columns) - 0.5]
    x, y = np.reshape(across + down, (-1, 2)).T
    axis.plot(x, y, color="0.8", linewidth=0.5, scalex=False, scaley=False)


def _label(axis, shape, title, labels):
    """Integer ticks, at most eight a side, and the names of the axes."""
    for set_ticks, size in ((axis.set_yticks, shape[0]), (axis.set_xticks, shape[1])):
        set_ticks(range(0, size, -(-size // 8)))
    axis.set(title=title, xlabel=labels[0], ylabel=labels[1])
