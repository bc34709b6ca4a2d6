"""The verdict as one HTML page that needs nothing else: no script, no network, light and dark, readable on a phone.

A failing case has its explanation, the expected and the obtained output beside the error in budgets, the weights where
the case has them, the worst row against the named mistake, its conventions, and the command that runs it alone.
"""
from html import escape

import numpy as np

from ..names import AXES
from ..shapes import GRID, head, parse
from . import drawing
from .conventions import right_under
from .diagnosis import golden_mistake
from .formats import counts, status, versions
from .report import explain, note, number, right_elsewhere

WORDS = dict(passed="ok", failed="FAILED", unsupported="unsupported", not_asked="not asked")
STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#1c1c1c;--soft:#595959;--line:#d0d0d0;--bad:#a8200d;--good:#15692f}
@media(prefers-color-scheme:dark){:root{--page:#16181b;--text:#e6e6e6;--soft:#a8a8a8;--line:#44484d;--bad:#ff8a70;
--good:#6fd08c}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--page);color:var(--text);
font:1rem/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.4rem;line-height:1.25}h2{font-size:1.15rem;margin-top:2rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
a{color:inherit}
p,figcaption,td small{color:var(--soft)}
pre,code{font:.85rem/1.45 ui-monospace,monospace;white-space:pre-wrap}
pre{margin:.5rem 0;padding:.6rem .8rem;border:1px solid var(--line);border-radius:.3rem}
table{border-collapse:collapse;width:100%}
th,td{padding:.3rem .6rem .3rem 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top;
font-weight:normal}
td:first-child,th[scope=row]{white-space:nowrap}td small{display:block}
.number{text-align:right;font-variant-numeric:tabular-nums}
.failed{color:var(--bad);font-weight:600}.passed{color:var(--good)}.unsupported,.not_asked{color:var(--soft)}
details{border-top:1px solid var(--line);padding:.6rem 0}
summary{cursor:pointer;font-weight:600}
.maps{display:grid;grid-template-columns:repeat(auto-fill,minmax(8rem,1fr));gap:1rem}
figure{margin:0}figure.wide{grid-column:span 2}
figcaption{font-size:.85rem;line-height:1.35}figcaption b{color:var(--text)}
svg{display:block;width:100%;height:auto}svg text{fill:var(--soft)}
.mark{fill:none;stroke:var(--text)}.none{fill:none;stroke:var(--bad);stroke-width:.8;stroke-dasharray:2 1}
.scale{display:inline-block;margin-right:1.2em}.key{display:inline-block;width:.8em;height:.8em}
polyline{fill:none;stroke-width:1.5;stroke:currentColor}circle{fill:currentColor}
.expected{color:var(--good)}.mistake{color:var(--bad)}.mistake polyline{stroke-dasharray:5 3}
.got{color:var(--text)}.got polyline{stroke:none}.got circle{fill:none;stroke:currentColor;stroke-width:1.3}
"""
LIGHT = dict(v=("#0b4f8a", "#f4f4f2", "#b3470c"),         # numbers, weights, errors: the ends and the middle of a scale
             w=("#f4f4f2", "#3f8f8a", "#0a2f4f"), e=("#e8efe9", "#e59a3c", "#7d0b0b"))
DARK = dict(v=("#69b5f5", "#26282b", "#ff9a55"),
            w=("#26282b", "#2f8f88", "#d8f3c8"), e=("#22302a", "#b86a1c", "#ffc9bd"))


def _scale(kind, levels, left, right):
    """The colours of a scale between what its ends mean."""
    colours = "".join(f'<span class="key {kind}{n}"></span>' for n in range(levels))
    return f'<span class="scale">{left} {colours} {right}</span>'


KEYS = "\n".join([_scale("v", drawing.LEVELS, "numbers: negative", "positive"),
                  _scale("w", drawing.LEVELS, "weights: 0", "1"),
                  _scale("e", len(drawing.LIMITS), "errors: accepted", "over 1e8 times that"),
                  "dashed: NaN or infinite; framed: the worst place"])


def page(results, diagnosis, command):
    """The HTML text for the results of one implementation; command is what gave them, without the cases it was for."""
    number_of, failed = counts(results), [r for r in results if status(r) == "failed"]
    title = f"{results[0].case.variant} in {results[0].dtype}"
    said = ", ".join(f'<span class="{name}">{n} {name.replace("_", " ")}</span>'
                     for name, n in number_of.items() if n or name != "not_asked")
    said += ": incomplete" * bool(number_of["not_asked"])
    parts = [f"<h1>{title}: {said}</h1>", f"<pre><code>{escape(command)}</code></pre>", _findings(results, diagnosis),
             "<h2>Cases</h2>", _cases(results)]
    opened = {f.cases[0] for f in diagnosis.findings} or {r.case.name for r in failed[:1]}
    parts += [f"<h2>What failed</h2><p>{KEYS}</p>"] * bool(failed)
    parts += [_failure(r, diagnosis.of(r.case.name), command, r.case.name in opened) for r in failed]
    parts.append(f"<p>{', '.join(f'{name} {version}' for name, version in versions().items())}</p>")
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'">\n'
            f"<style>{STYLE}{_colours(LIGHT)}@media(prefers-color-scheme:dark){{{_colours(DARK)}}}\n</style></head>\n"
            f"<body><main>\n{''.join(part + chr(10) for part in parts)}</main></body></html>\n")


def _colours(scales):
    """A CSS rule for every level of every scale: fill in a map, background in a key."""
    lines = []
    for kind, stops in scales.items():
        n = len(drawing.LIMITS) if kind == "e" else drawing.LEVELS
        red_green_blue = np.array([[int(stop[i:i + 2], 16) for i in (1, 3, 5)] for stop in stops])
        for level, x in enumerate(np.linspace(0, len(stops) - 1, n)):
            mixed = [round(np.interp(x, range(len(stops)), channel)) for channel in red_green_blue.T]
            colour = "#" + "".join(f"{c:02x}" for c in mixed)
            lines.append(f".{kind}{level}{{fill:{colour};background:{colour}}}")
    return "\n".join(lines)


def _findings(results, diagnosis):
    """The named mistakes, links to what no mistake explains, and the conventions under which all would be right."""
    lines = [f"<li><strong>{f.mistake}</strong>{escape(str(f).removeprefix(f.mistake))}</li>"
             for f in diagnosis.findings]
    if diagnosis.unexplained:
        lines.append(f"<li>no known mistake matches {', '.join(map(_link, diagnosis.unexplained))}</li>")
    lines += [f"<li>{escape(line)}</li>" for line in right_elsewhere(right_under(results, diagnosis))]
    return f"<h2>Diagnosis</h2><ul>{''.join(lines)}</ul>" if lines else ""


def _link(name):
    return f'<a href="#{name}">{name}</a>'


def _cases(results):
    rows = [f'<tr><td class="{status(r)}">{WORDS[status(r)]}</td>'
            f"<td>{_link(r.case.name) if status(r) == 'failed' else r.case.name}<small>{escape(note(r))}</small></td>"
            f'<td class="number">{number(r.score) if r.comparisons else ""}</td></tr>' for r in results]
    heads = ('<th scope="col">verdict</th><th scope="col">case</th>'
             '<th scope="col" class="number">error/budget</th>')
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _failure(result, diagnosis, command, opened):
    """All there is to see of one failing case."""
    case = result.case
    rows = "".join(f'<tr><th scope="row">{k}</th><td>{escape(str(v))}</td></tr>' for k, v in case.conventions.items())
    wrong = [c for c in result.comparisons
             if c.score > case.limit and c.scores is not None and c.name in result.outputs]
    shown = list({c.name: c for c in (wrong[:1] + [max(wrong, key=lambda c: c.score)] if wrong else [])}.values())
    pictures = "".join(_pictures(result, c, diagnosis) for c in shown)
    return (f'<details class="case"{" open" * opened}><summary>{case.name}</summary>\n'
            f'<pre id="{case.name}">{escape(explain(result, diagnosis))}</pre>\n{pictures}'
            f"<h3>Conventions</h3><table><tbody>{rows}</tbody></table>\n"
            f"<h3>This case alone</h3><pre><code>{escape(command)} --case {case.id}</code></pre></details>")


def _pictures(result, comparison, diagnosis):
    """The maps of one array around its worst place, the weights behind it, and its worst row."""
    view = View(result, comparison)
    maps = view.values() + (view.weights() if comparison.name == next(iter(result.case.outputs)) else [])
    return f'<h3>{escape(view.title)}</h3><div class="maps">{"".join(maps)}{view.row(diagnosis)}</div>'


class View:
    """The matrix of one array that holds its worst place: its last two axes, at most 32 a side."""

    def __init__(self, result, comparison):
        self.result, self.comparison = result, comparison
        self.name, place = comparison.name, comparison.place
        self.lead = place[:-2]
        at = (0, 0, *place)[-2:]
        axes = [AXES.get(a, a) for a in ("", "", *comparison.axes(result.case))]
        self.axes = axes[-2:]
        lead = ", ".join(f"{axis} {i}" for axis, i in zip(axes[2:-2], self.lead))
        self.title = f"{self.name}{f' at {lead}' * bool(lead)}"
        self.cut = drawing.window(np.atleast_2d(comparison.scores[self.lead]).shape, at)
        self.first = tuple(s.start for s in self.cut)
        self.mark = tuple(i - a for i, a in zip(at, self.first))

    def of(self, x):
        """What is seen of an array that is shaped like the compared one."""
        return np.atleast_2d(np.asarray(x, np.float64)[self.lead])[self.cut]

    def figure(self, levels, kind, name, text, mark=True):
        """One map with its caption, which is its label too."""
        rows, columns = self.axes if mark else ("query", "key")
        said = f"{f'{rows} down, ' * bool(rows)}{columns or 'its only entry'} across: {text}"
        frame, first = (self.mark, self.first) if mark else (None, (0, 0))
        picture = drawing.heat_map(levels, kind, f"{name} of {self.title}, {said}", frame, first)
        return f"<figure>{picture}<figcaption><b>{name}</b>, {escape(said)}</figcaption></figure>"

    def values(self):
        """Expected and obtained on one scale, and the error in budgets; the worst place is framed."""
        exact, got = self.of(self.result.case.expected[self.name]), self.of(self.result.outputs[self.name])
        most = np.abs(exact[np.isfinite(exact)]).max(initial=0) or 1
        scale = f"blue {-most:.3g} to orange {most:.3g}"
        scores, limit = self.of(self.comparison.scores), self.result.case.limit
        beyond = "the budget" if limit == 1 else f"{limit:g} times the budget"
        error = f"{np.sum(scores > limit)} of {scores.size} beyond {beyond}, the worst {number(scores.max())} times"
        return [self.figure(drawing.signed_levels(exact, most), "v", "expected", scale),
                self.figure(drawing.signed_levels(got, most), "v", "obtained", f"{scale}, {_span(got)}"),
                self.figure(drawing.error_levels(scores, limit), "e", "error", error)]

    def weights(self):
        """Maps of the expected weights and of those that the implementation gave or its output implies."""
        case, exact = self.result.case, self.result.case.steps.get("weights")
        if exact is None:
            return []
        at = dict(zip(self.comparison.axes(case), self.comparison.place))
        lead = tuple(at.get(a, 0) for a in parse(case.module.STEPS["weights"]).axes[:-2])
        got = implied_weights(self.result, self.name, at)
        found = {"expected weights": exact[lead]} | ({"weights behind the output": got} if got is not None else {})
        cut = (slice(drawing.LARGEST_SIDE),) * 2
        scale = "0 to 1, " + "its first rows and columns, " * (max(exact.shape[-2:]) > drawing.LARGEST_SIDE)
        return [self.figure(drawing.weight_levels(w[cut]), "w", name, scale + _sums(w), mark=False)
                for name, w in found.items()]

    def row(self, diagnosis):
        """The worst row: expected, obtained, and what the named mistake gives."""
        case, i = self.result.case, self.mark[0]
        finding = next(iter(diagnosis.findings), None)
        wrong = finding and golden_mistake(case.variant, case.name, finding.mistake, self.result.dtype,
                                           self.result.used).get(self.name)
        curves = dict(expected=case.expected[self.name])
        curves |= {} if wrong is None or wrong.shape != self.comparison.scores.shape else dict(mistake=wrong)
        curves = {name: self.of(y)[i] for name, y in (curves | dict(got=self.result.outputs[self.name])).items()}
        keys = dict(expected="line: right", got="rings: obtained")
        keys |= dict(mistake=f"dashed: {finding.mistake}") if finding else {}
        text = f"{self.axes[0]} {i + self.first[0]}, {self.axes[1]} across".strip()
        said = ", ".join(f'<span class="{name}">{keys[name]}</span>' for name in curves)
        meaning = f" ({finding.sentence})" if "mistake" in curves else ""
        label = f"Worst row of {self.title}, {text}: right, obtained{' and mistaken' * ('mistake' in curves)} output"
        return (f'<figure class="wide">{drawing.line_chart(curves, label)}'
                f"<figcaption><b>worst row</b>, {text}. {said}{escape(meaning)}</figcaption></figure>")


def implied_weights(result, name, place):
    """The weights (Tq, Tk) nearest to the expected ones that give the obtained output o = p v; None if o is not that.

    name is the output that o is; place, axis -> index, says of which batch entry and head.
    """
    case, n = result.case, result.case.sizes
    if "v" not in case.inputs or list(place)[-1:] != ["dv"]:
        return None
    grid = {a: i for a, i in place.items() if a in GRID}
    p, o, got = (x[tuple(grid.values())] for x in (case.steps["weights"], case.outputs[name], result.outputs[name]))
    v = np.nan_to_num(head(case.module.INPUTS["v"], case.inputs["v"], grid, n, np.dtype(np.float64)))
    difference = got.astype(np.float64) - o
    if difference.shape + p.shape != (len(p), v.shape[-1], len(p), len(v)) or not len(v):
        return None
    return p + difference @ np.linalg.pinv(v)


def _span(x):
    finite = x[np.isfinite(x)]
    odd = f", {x.size - finite.size} not finite" if finite.size < x.size else ""
    return (f"is {finite.min():.3g} to {finite.max():.3g}" if finite.size else "nothing finite") + odd


def _sums(w):
    sums = w.sum(-1)
    finite = sums[np.isfinite(sums)]
    low, high = (f"{round(x, 6):.4g}" for x in (finite.min(initial=np.inf), finite.max(initial=-np.inf)))
    return f"rows sum to {low if low == high else f'{low} to {high}'}" if finite.size else "rows sum to NaN"
