"""Small pictures as inline SVG: heat maps and a line chart. Colours are classes, which a page gives in light and dark.

Every picture has a role and a label, for those who do not see it.
"""
from html import escape

import numpy as np

LEVELS = 9
LIMITS = 1, 10, 100, 1e4, 1e8, np.inf                    # of the levels of an error / budget, in what passes
LARGEST_SIDE = 32
CELL = 10


def signed_levels(x, limit):
    """Level 0 to 8 of every number from -limit to limit, -1 where it is not finite."""
    return _levels((x / limit + 1) / 2)


def weight_levels(x):
    """Level 0 to 8 of every number from 0 to 1, what lies outside counted to the ends; -1 where it is not finite."""
    return _levels(x)


def _levels(x):
    finite = np.isfinite(x)
    return np.where(finite, np.rint(np.clip(np.where(finite, x, 0), 0, 1) * (LEVELS - 1)), -1).astype(int)


def error_levels(scores, limit=1):
    """Level 0 to 5 of every error / budget: up to 1, 10, 100, 1e4, 1e8 times the limit and beyond."""
    return np.searchsorted(LIMITS, scores / limit)


def window(shape, place):
    """Slices of a matrix of that shape that hold the place and have sides of at most LARGEST_SIDE."""
    starts = [max(0, min(i - LARGEST_SIDE // 2, n - LARGEST_SIDE)) for i, n in zip(place, shape)]
    return tuple(slice(a, min(a + LARGEST_SIDE, n)) for a, n in zip(starts, shape))


def heat_map(levels, kind, label, mark=None, first=(0, 0)):
    """An SVG of a matrix of levels, rows down; kind is the first letter of the classes, -1 has the class `none`.

    mark: a row and a column to be framed. first: the numbers of the first row and column.
    """
    rows, columns = levels.shape
    paths = [f'<path class="{kind}{n}" d="{_squares(levels == n)}"/>' if n >= 0 else
             f'<path class="none" d="{_squares(levels == n)}"/>' for n in np.unique(levels)]
    font = max(rows, columns) * CELL / 16 + 2
    frame = "" if mark is None else (f'<rect class="mark" x="{mark[1] * CELL}" y="{mark[0] * CELL}" width="{CELL}" '
                                     f'height="{CELL}" stroke-width="{font / 5:.3g}"/>')
    box = f"{-1.6 * font:.4g} {-1.4 * font:.4g} {columns * CELL + 2 * font:.4g} {rows * CELL + 1.8 * font:.4g}"
    text = _ticks(rows, columns, font, first)
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">{"".join(paths)}{text}{frame}</svg>'


def _squares(where):
    return "".join(f"M{j * CELL} {i * CELL}h{CELL}v{CELL}h-{CELL}z" for i, j in np.argwhere(where))


def _ticks(rows, columns, font, first):
    """Numbers of rows and columns, at most eight a side."""
    step = -(-max(rows, columns) // 8)
    edge = f"{-0.4 * font:.3g}"
    down = [f'<text x="{edge}" y="{(i + 0.5) * CELL + 0.35 * font:.4g}" text-anchor="end">{first[0] + i}</text>'
            for i in range(0, rows, step)]
    across = [f'<text x="{(j + 0.5) * CELL}" y="{edge}" text-anchor="middle">{first[1] + j}</text>'
              for j in range(0, columns, step)]
    return f'<g font-size="{font:.3g}">{"".join(down + across)}</g>'


def line_chart(curves, label):
    """An SVG of curves (class -> numbers), one column an entry; what is not finite is left out."""
    y = np.array(list(curves.values()))
    finite = np.where(np.isfinite(y), y, np.nan)
    low, high = (np.nanmin(finite), np.nanmax(finite)) if np.isfinite(y).any() else (0, 1)
    across = 30 + 280 * (np.arange(y.shape[1]) + 0.5) / y.shape[1]
    down = 105 - 90 * (finite - low) / (high - low or 1)
    parts = [_curve(name, across, row) for name, row in zip(curves, down)]
    step = -(-y.shape[1] // 16)
    ticks = [f'<text x="{x:.4g}" y="122" text-anchor="middle">{j}</text>' for j, x in enumerate(across)][::step]
    ends = f'<text x="0" y="18">{high:.3g}</text><text x="0" y="108">{low:.3g}</text>'
    text = f'<g font-size="10">{ends}{"".join(ticks)}</g>'
    return f'<svg viewBox="0 0 315 126" role="img" aria-label="{escape(label)}">{"".join(parts)}{text}</svg>'


def _curve(name, across, down):
    points = [(x, y) for x, y in zip(across, down) if np.isfinite(y)]
    line = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.4g}" cy="{y:.4g}" r="{3 if name == "got" else 2}"/>' for x, y in points)
    return f'<g class="{name}"><polyline points="{line}"/>{dots}</g>'
