"""What a person reads: tables and explanations, as plain text."""
import re
from collections import Counter
from textwrap import fill, indent

import numpy as np

from .conventions import CONVENTIONS, outputs_only, read_so_by, right_under, rows, spelt
from .cases import load_cases, sentences
from .verify import FACTOR, types_of


def table(rows, heads):
    """Rows of strings under heads, columns aligned, numbers to the right."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    right = [all(row[i][:1].isdigit() for row in rows) for i in range(len(heads))]

    def line(cells):
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right)).rstrip()
    return "\n".join([line(heads), line(["-" * w for w in widths]), *map(line, rows)])


def number(x):
    """A score as people want it: two digits, no exponent where it can be read without."""
    return f"{x:.2f}" if x < 100 else f"{x:.1e}"


def explain(result, diagnosis=None):
    """Why a case failed: the case and its reason, the worst place, and the mistake if it is known."""
    case = result.case
    lines = [f"FAILED {case.id} ({result.dtype}): {case.why}"]
    if result.error:
        return "\n".join(lines + [f"  {result.error}"])
    if not result.comparisons:
        return "\n".join(lines + ["  there is no output to compare"])
    step = next(c for c in result.comparisons if c.score > case.limit)
    for c in dict.fromkeys([step.name, result.worst.name]):
        lines.append("  " + sentence(next(k for k in result.comparisons if k.name == c), case, first=c == step.name))
    types = types_of(result.outputs)
    if len(set(types.values())) > 1:
        came = ", ".join(f"{name} in {dtype}" for name, dtype in types.items())
        lines.append(f"  judged in {result.dtype}: {came}")
    own = {k: v for k, v in case.conventions.items() if v != case.module.CONVENTIONS.get(k)}
    lines += [f"  convention of this case: {k} = {v}" for k, v in own.items()]
    if diagnosis is not None:
        lines.append(indent(str(diagnosis), "  "))
    return "\n".join(lines)


def sentence(comparison, case, first):
    """One comparison in words."""
    c = comparison
    if c.problem:
        return f"{c.name}: {c.problem}"
    label = "first step to differ: " if first and c.name in case.steps else ""
    return (f"{label}{c.name} at {c.where(case) or 'its only entry'}: got {c.got:.9g}, expected {c.expected:.9g}, "
            f"{number(c.score)} times the budget")


def line(cells, cases):
    """One line of the table of cases, as wide as their names need, whatever the results will be."""
    name = max(len(case.name) for case in cases)
    return "{:11}  {:{}}  {:>12}  {}".format(cells[0], cells[1], name, *cells[2:])


def heads(cases):
    """The head of the table of cases, two lines."""
    titles = ("", "case", "error/budget", "why the case exists")
    return "\n".join([line(titles, cases), line(["-" * len(title) for title in titles], cases)])


def row(result, cases):
    """The line of one result in the table of cases."""
    return line((mark(result), result.case.name, number(result.score) if result.comparisons else "", note(result)),
                cases)


def progress(done, cases):
    """A bar, the number of cases that are done, and the one that is asked now."""
    full = 24 * done // len(cases)
    return f"[{'#' * full}{'.' * (24 - full)}] {done}/{len(cases)}  {cases[done].name if done < len(cases) else ''}"


def verdict(results, diagnosis, dtype, absent="not judged"):
    """What follows the table of cases: the failures, and the verdict in the last lines.

    absent: what is said of gradients that are none of the outputs.
    """
    text, failed, passed = [], [r for r in results if r.failed], sum(r.passed for r in results)
    for result in failed:
        text += [explain(result), ""]
    unsupported, not_asked = (sum(map(bool, column)) for column in
                              zip(*((r.unsupported, r.not_asked) for r in results)))
    counts = f"{passed} passed, {len(failed)} failed, {unsupported} unsupported"
    counts += f", {not_asked} not asked: incomplete" * bool(not_asked)
    text += [distribution(results), ""] if any(r.comparisons for r in results) else []
    text += [f"{results[0].case.variant} in {dtype}: {counts}", *scope(results, absent)]
    limit = results[0].case.limit
    text += [f"warning: {limit:g} times the budget of an honest run was accepted"] if limit > 1 else []
    if diagnosis.failing:
        text.append("diagnosis:\n" + indent(str(diagnosis), "  "))
        text += [ambiguous(finding, results) for finding in diagnosis.findings if finding.same]
        text += right_elsewhere(right_under(results, diagnosis))
    elif passed and not failed:
        scores = [r.score for r in results if r.passed]
        text.append(f"largest error {number(max(scores))} times its budget, median {number(np.median(scores))}")
    return "\n".join(text)


def ambiguous(finding, results):
    """A line that says in which cases, of those that can be run, the mistakes behind one finding differ."""
    by_case, unsupported = {}, {r.case.name for r in results if r.unsupported}
    for name in finding.same:
        by_case.setdefault(finding.told_from(name, unsupported), []).append(name)
    said = [f"{', '.join(names)} by {'case {} in {}'.format(*found) if found else 'no golden case'}"
            for found, names in by_case.items()]
    return f"{finding.mistake} can be told from {'; from '.join(said)}"


def scope(results, absent):
    """Lines that say which outputs were judged, in how many of the cases, and where no more is; none if nothing was."""
    found, by_count = Counter(c.name for r in results for c in r.comparisons), {}
    for name, count in found.items():
        by_count.setdefault(count, []).append(name)
    if not found:
        return []
    counts = " and ".join(f"{', '.join(names)} in {count}" for count, names in by_count.items())
    missing = [name for name in dict.fromkeys(name for r in results for name in r.case.outputs) if name not in found]
    gradients = {name for r in results for name in r.case.gradients}
    moved = [r.case.name for r in results if outputs_only(r.case)]
    return [f"judged: {counts} of {len(results)} cases" + f"; not returned: {', '.join(missing)}" * bool(missing)
            + f"; gradients {absent}" * bool(gradients and not gradients & set(found)),
            *[f"no steps and no gradients are known under this convention in {', '.join(moved)}"] * bool(moved)]


def distribution(results):
    """Table: how many numbers of every output lie how far from exact, and where the farthest is."""
    rows, edges = [], (0, 1 / 4, 1 / 2, 1, 10, np.inf)
    for name in dict.fromkeys(c.name for r in results for c in r.comparisons):
        found = [(c, r.case) for r in results for c in r.comparisons if c.name == name]
        scores = np.concatenate([c.scores.ravel() for c, _ in found if c.scores is not None] or [np.zeros(0)])
        upto = np.searchsorted(np.sort(scores), edges, side="right")
        worst, case = max(found, key=lambda pair: pair[0].score)
        where = ", ".join(filter(None, (case.name, worst.where(case))))
        rows.append((name, *np.diff(upto, prepend=0), number(worst.score), where))
    heads = "exact", "to 1/4", "to 1/2", "to 1", "to 10", "beyond", "largest", "where"
    return table(rows, ("error/budget", *heads))


def right_elsewhere(chosen):
    """Lines that name the readings (convention -> reading) under which a wrong implementation is right."""
    if not chosen:
        return []
    those = [f"  {name}={reading}: {CONVENTIONS[name].what}; read so by {read_so_by(name, reading) or 'none measured'}"
             for name, reading in chosen.items()]
    return [f"right under another convention: --convention {spelt(chosen)}", *those]


def mark(result):
    """One word for a result."""
    return ("ok" if result.passed else "unsupported" if result.unsupported else
            "not asked" if result.not_asked else "FAILED")


def paint(text):
    """text with a colour for every verdict at the start or the end of a line, as terminals understand it."""
    colours = {"ok": 32, "FAILED": 31, "unsupported": 33, "not asked": 33}
    return re.sub(r"(?m)^(ok|FAILED|unsupported|not asked)\b|(?<=  )(ok|FAILED)$",
                  lambda found: f"\x1b[{colours[found[0]]}m{found[0]}\x1b[0m", text)


def note(result):
    """Why the case exists, or why it was not run."""
    return result.unsupported or result.not_asked or result.case.why


def summaries(rows):
    """The table of the package's own run and the score of the suite."""
    cells = [(s.variant, s.forms, s.cases, number(s.worst.score), s.worst.case.name, f"{s.caught}/{s.total}",
              f"{s.named}/{s.total}", "ok" if s.passed else "FAILED") for s in rows]
    heads = ("variant", "forms", "cases", "worst error/budget", "in case", "mistakes caught", "named", "")
    total = sum(s.total for s in rows)
    score = f"suite score: {sum(s.caught for s in rows)} of {total} mistakes caught, {sum(s.named for s in rows)} named"
    budget = f"budget: {FACTOR} (u_io |exact| + u_acc K) + eta, K measured and stored with every case"
    return f"{table(cells, heads)}\n\n{score}\n{budget}"


def page(module, cases):
    """All there is to know about a variant: formula, shapes, conventions, mistakes, cases."""
    shapes = [(name, text or "number") for name, text in module.INPUTS.items()]
    outputs = [(name, text) for name, text in (module.OUTPUTS | getattr(module, "STEPS", {})).items()]
    parts = [module.__doc__.strip(), "INPUTS\n" + table(shapes, ("name", "kind and shape")),
             "OUTPUTS AND STEPS\n" + table(outputs, ("name", "shape")),
             "CONVENTIONS\n" + table(module.CONVENTIONS.items(), ("what", "ours")),
             "FORMS\n" + ", ".join([form.__name__ for form in module.FORMS] + ["vjp"] * hasattr(module, "vjp")),
             "CASES\n" + table([(c.name, c.why) for c in cases], ("name", "why it exists")),
             "MISTAKES\n" + table(sentences(module).items(), ("name", "what is wrong"))]
    return "\n\n".join(parts)




def readings(names):
    """The choices of variants, by name: every reading, whose own it is, and the libraries that have it."""
    text, cells = [], list(rows(names))
    width = max((len(reading) for _, reading, *_ in cells), default=0)
    for name, convention in CONVENTIONS.items():
        found = [cell[1:] for cell in cells if cell[0] == name]
        text += ["", f"{name}: {convention.what}"] if found else []
        for reading, ours, mistake in found:
            parts = (ours and f"ours in {ours}", mistake and f"a mistake elsewhere: {mistake}",
                     read_so_by(name, reading))
            text.append(fill("; ".join(filter(None, parts)), 120, initial_indent=f"  {reading:{width}}  ",
                             subsequent_indent=" " * (width + 4)))
    return "\n".join(text[1:] or ["no choice"])


def catalogue(modules):
    """Markdown: every mistake of every variant, what is wrong, and the cases that catch it."""
    lines = ["# Named mistakes", "", "Written by `attention-ref list --mistakes`. What is not in it, and why: "
             "[not covered](not_covered.md).", ""]
    for name, module in modules.items():
        lines += [f"## {name}", "", "| mistake | what is wrong | caught by |", "|---|---|---|"]
        golden = load_cases(name)
        for slug, text in sentences(module).items():
            catching = [case.name for case in golden if slug in case.catches]
            more = f" and {len(catching) - 2} more" if len(catching) > 2 else ""
            lines.append(f"| `{slug}` | {text} | {', '.join(catching[:2])}{more} |")
        lines.append("")
    return "\n".join(lines).rstrip()
