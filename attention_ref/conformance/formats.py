"""Verdicts for machines: JSON and JUnit XML. Both take results and their Diagnosis, wherever those come from."""
import json
import platform
import re
from collections import Counter
from xml.etree import ElementTree

import numpy as np

from .. import __version__
from .conventions import right_under
from .report import explain, mark

FORMAT = "attention_ref-verdict-1"
STATUS = {"ok": "passed", "FAILED": "failed", "unsupported": "unsupported", "not asked": "not_asked"}
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def status(result):
    """passed, failed, unsupported or not_asked."""
    return STATUS[mark(result)]


def counts(results):
    """Status -> number of results, all four of them."""
    return dict.fromkeys(STATUS.values(), 0) | Counter(map(status, results))


def versions():
    """What a verdict depends on, beside the implementation."""
    return dict(attention_ref=__version__, numpy=np.__version__, python=platform.python_version())


def as_json(results, diagnosis):
    """The verdict as JSON text.

    format, variant, dtype, limit (the largest score that passes), versions, verdict (right, wrong, incomplete if
    nothing is wrong so far, or unsupported if no case was run), complete (whether every case was asked), counts,
    diagnosis (the findings), unexplained (names of cases), right_under (the conventions under which a wrong
    implementation is right) and cases. A number that JSON lacks is "NaN", "Infinity" or "-Infinity".
    """
    number_of = counts(results)
    verdict = ("wrong" if number_of["failed"] else "incomplete" if number_of["not_asked"] else
               "right" if number_of["passed"] else "unsupported")
    findings = [_finding(f) | dict(cases=f.cases, next=_nearest(f)) for f in diagnosis.findings]
    record = dict(format=FORMAT, variant=results[0].case.variant, dtype=results[0].dtype,
                  limit=results[0].case.limit, versions=versions(), verdict=verdict,
                  complete=not number_of["not_asked"], counts=number_of, diagnosis=findings,
                  unexplained=diagnosis.unexplained, right_under=right_under(results, diagnosis),
                  cases=[_case(r, diagnosis) for r in results])
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def _case(result, diagnosis):
    """One entry of cases; score, output, place, got and expected are those of the worst element, null if none."""
    worst = _comparison(result.worst, result.case) if result.comparisons else {}
    findings = diagnosis.of(result.case.name).findings
    return dict(
        name=result.case.name, why=result.case.why, status=status(result), score=worst.get("score"),
        output=worst.get("name"), place=worst.get("where"), got=worst.get("got"), expected=worst.get("expected"),
        error=result.error, unsupported=result.unsupported, not_asked=result.not_asked,
        conventions=result.case.conventions,
        outputs=[_comparison(c, result.case) for c in result.comparisons],
        diagnosis=_finding(findings[0]) if findings else None)


def _comparison(c, case):
    return dict(name=c.name, score=_json(c.score), index=list(c.place), where=c.where(case), got=_json(c.got),
                expected=_json(c.expected), problem=c.problem)


def _finding(finding):
    return dict(mistake=finding.mistake, sentence=finding.sentence, same=finding.same)


def _nearest(finding):
    name, margin = finding.next
    return dict(mistake=name, budgets=_json(margin))


def _json(x):
    """x as JSON can say it."""
    x = float(x)
    return x if np.isfinite(x) else "NaN" if np.isnan(x) else "Infinity" if x > 0 else "-Infinity"


def as_junit(results, diagnosis):
    """The verdict as JUnit XML text: one test case per golden case; what is unsupported or was not asked is skipped."""
    variant, dtype, number_of = results[0].case.variant, results[0].dtype, counts(results)
    errors = sum(bool(r.error) for r in results)
    total = dict(tests=len(results), failures=number_of["failed"] - errors, errors=errors,
                 skipped=number_of["unsupported"] + number_of["not_asked"])
    total = {name: str(n) for name, n in total.items()}
    top = ElementTree.Element("testsuites", total)
    suite = ElementTree.SubElement(top, "testsuite", dict(name=f"{variant}-{dtype}") | total)
    properties = ElementTree.SubElement(suite, "properties")
    complete = dict(complete=str(not number_of["not_asked"]).lower())
    for name, version in (versions() | complete).items():
        ElementTree.SubElement(properties, "property", dict(name=name, value=version))
    for result in results:
        _test_case(suite, result, diagnosis)
    ElementTree.indent(top)
    return ElementTree.tostring(top, "unicode") + "\n"


def _test_case(suite, result, diagnosis):
    test = ElementTree.SubElement(suite, "testcase", dict(classname=suite.get("name"), name=result.case.name))
    if result.unsupported or result.not_asked:
        ElementTree.SubElement(test, "skipped", message=_xml(result.unsupported or f"not asked: {result.not_asked}"))
    elif not result.passed:
        text = _xml(explain(result, diagnosis.of(result.case.name)))
        kind = "error" if result.error else "failure"
        ElementTree.SubElement(test, kind, message=text.splitlines()[1].strip()).text = text


def _xml(text):
    """text without the characters that XML cannot hold."""
    return NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
