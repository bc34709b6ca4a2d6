"""What verify writes for machines and as a page: JSON, JUnit XML, HTML; and the colours of a terminal."""
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from attention_ref import check, load_cases, sdpa, variants
from attention_ref.conformance import cli, drawing, formats, html, report, reports
from attention_ref.conformance.diagnosis import Diagnosis
from attention_ref.conformance.implementations import judge, run

COMMAND = "attention-ref verify sdpa --impl mine:attention --dtype float32"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def wrong(q, k, v, mask, scale, softcap):
    """A row without keys gives the mean of all values; a cap is refused in words that no format takes as they are."""
    if softcap is not None:
        raise ValueError("no <script>alert(1)</script> & \x1b[31m \0 here")
    return sdpa.BUGS["empty_row_uniform"][1](dict(q=q, k=k, v=v, mask=mask, bias=np.array(0.0, q.dtype),
                                                  sink=np.array(-np.inf, q.dtype), scale=scale, softcap=None))


@pytest.fixture(scope="module")
def judged():
    """Results and Diagnosis of `wrong`: cases passed, failed, raised and unsupported."""
    golden = load_cases("sdpa", "causal") + load_cases("sdpa", "empty_row") + load_cases("sdpa", "softcap")
    asked = [replace(c, inputs=c.inputs | dict(bias=np.zeros_like(c.inputs["bias"]))) if c.name == "softcap" else c
             for c in golden]
    return judge(wrong, asked, "float32")


@pytest.fixture(scope="module")
def page(judged):
    return html.page(*judged, COMMAND)


def strictly(text):
    """JSON without the words that only Python reads."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


# JSON

def test_json_says_what_the_results_say(judged):
    results, diagnosis = judged
    found = strictly(formats.as_json(*judged))
    assert list(found) == ["format", "variant", "dtype", "limit", "versions", "verdict", "complete", "counts",
                           "diagnosis", "unexplained", "right_under", "cases"]
    assert (found["format"], found["variant"], found["dtype"]) == ("attention_ref-verdict-1", "sdpa", "float32")
    assert found["verdict"] == "wrong" and sum(found["counts"].values()) == len(results) == len(found["cases"])
    assert found["diagnosis"][0]["mistake"] == diagnosis.mistake == "empty_row_uniform"
    assert found["right_under"] == {} and set(found["versions"]) == {"attention_ref", "numpy", "python"}
    for entry, r in zip(found["cases"], results):
        assert (entry["name"], entry["why"]) == (r.case.name, r.case.why)
        assert entry["status"] == ("passed" if r.passed else "unsupported" if r.unsupported else "failed")
        assert (entry["error"], entry["unsupported"]) == (r.error, r.unsupported)
        assert [c["name"] for c in entry["outputs"]] == [c.name for c in r.comparisons]
        assert entry["conventions"] == r.case.conventions
        if r.comparisons:
            assert (float(entry["score"]), float(entry["got"])) == (r.score, r.worst.got)
            assert entry["place"] == r.worst.where(r.case) and entry["output"] == r.worst.name


def test_json_of_every_verdict():
    case = load_cases("sdpa", "basic")[0]
    right, unsupported = check(case, case.outputs), run(lambda q: q, case, "float64")
    nan = check(case, np.full_like(case.outputs["o"], np.nan))
    for results, verdict in (([right], "right"), ([right, unsupported], "right"), ([unsupported], "unsupported"),
                             ([right, nan], "wrong")):
        assert strictly(formats.as_json(results, Diagnosis()))["verdict"] == verdict
    entry = strictly(formats.as_json([nan], Diagnosis()))["cases"][0]
    assert (entry["score"], entry["got"], entry["diagnosis"]) == ("Infinity", "NaN", None)


# JUnit

def test_junit_has_a_test_case_per_case(judged):
    results, _ = judged
    suite = ElementTree.fromstring(formats.as_junit(*judged)).find("testsuite")
    tests = suite.findall("testcase")
    assert [t.get("name") for t in tests] == [r.case.name for r in results]
    for kind, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert len(suite.findall(f"testcase/{kind}")) == int(suite.get(count)) > 0, kind
    assert int(suite.get("tests")) == len(results)
    for t, r in zip(tests, results):
        assert (len(t) == 0) == r.passed
        text = t.findtext("failure", "")
        assert not text or text.startswith(f"FAILED {r.case.id} (float32)") and "empty_row_uniform: a row" in text
    assert "<script>alert(1)</script> & \ufffd[31m \ufffd here" in suite.findtext("testcase/error")


# HTML

class Page(HTMLParser):
    """Tags of a page with their attributes, unbalanced ones, and all text."""
    VOID = "meta", "br", "path", "rect", "circle", "polyline"

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag):
        assert tag in self.VOID or self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text += data


def test_page_is_whole_and_alone(page):
    found = Page(page)
    assert not found.open and page.startswith("<!DOCTYPE html>")
    assert ("html", dict(lang="en")) in found.tags and any(a.get("name") == "viewport" for _, a in found.tags)
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in found.tags}
    assert not [a for _, a in found.tags if a.get("src") or not a.get("href", "#").startswith("#")]
    assert "http:" not in page and "https:" not in page and "url(" not in page
    assert "prefers-color-scheme:dark" in page and "alert(1)" in found.text


def test_every_picture_has_its_words(page):
    pictures = [a for tag, a in Page(page).tags if tag == "svg"]
    assert len(pictures) > 12 and all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in pictures)
    labels = " | ".join(a["aria-label"] for a in pictures)
    for name in ("expected of o at batch", "obtained of o", "error of o", "expected weights of o", "weights behind",
                 "Worst row of o at batch"):
        assert name in labels, name


def test_page_explains_every_failure(judged, page):
    results, _ = judged
    found = Page(page)
    ids = [a["id"] for _, a in found.tags if "id" in a]
    failed = [r.case.name for r in results if formats.status(r) == "failed"]
    assert ids == failed == [a["href"][1:] for tag, a in found.tags if tag == "a"]
    for r in results:
        assert r.case.name in found.text
        if r.case.name in failed:
            assert f"{COMMAND} --case {r.case.id}" in found.text
            assert all(text in found.text for text in r.case.conventions.values())
    assert "empty_row_uniform: a row without keys gives the mean of all values" in found.text


def test_every_failing_case_of_sdpa_is_small():
    results = [run(lambda **x: sdpa.BUGS["mask_added_as_0_1"][1](x | dict(scale=-x["scale"])), c, "float32")
               for c in load_cases("sdpa")]
    failing = sum(not r.passed for r in results)
    text = html.page(results, Diagnosis(failing), COMMAND)
    assert failing > 20 and len(text.encode()) < 1_000_000 and text.count("<details") == failing


@pytest.mark.parametrize("variant", variants())
def test_page_of_every_variant(variant):
    """Every output, step and gradient is drawn, whatever its rank; all of it wrong, or nothing but NaN."""
    case = max(load_cases(variant), key=lambda c: len(c.expected))
    for wrong in (lambda y: y + 1, lambda y: y * np.nan):
        for name, y in case.expected.items():
            result = check(case, {name: wrong(y)})
            text = html.page([result], Diagnosis(1), COMMAND)
            assert Page(text).open == [] and (result.passed or f"<h3>{name}" in text), name


def test_the_limit_of_a_tier_is_that_of_the_page():
    case = load_cases("sdpa", "basic")[0]
    tolerance = 2 * 2.0 ** -53 * (np.abs(case.outputs["o"]) + case.conditioning["o"])
    case.limit, error = 4.0, np.zeros_like(tolerance)
    error[0, 0, 0, :2] = 3, 6
    result = check(case, case.outputs["o"] + error * tolerance)
    assert "1 of 35 beyond 4 times the budget, the worst" in html.page([result], Diagnosis(1), COMMAND)
    assert list(drawing.error_levels(result.comparisons[0].scores[0, 0, 0, :2], 4)) == [0, 1]


def test_types_that_differ_are_said():
    case = load_cases("sdpa", "basic")[0]
    mixed = check(case, (case.outputs["o"].astype(np.float16), case.outputs["lse"].astype(np.float32)))
    assert mixed.dtype == "float32" and "judged in float32: o in float16, lse in float32" in report.explain(mixed)
    same = check(case, {name: y.astype(np.float16) + 1 for name, y in case.outputs.items()})
    assert same.dtype == "float16" and "judged in" not in report.explain(same)


def test_what_cannot_be_drawn_is_said():
    case = load_cases("sdpa", "basic")[0]
    shape = check(case, case.outputs["o"][..., :1])
    text = html.page([shape, run(lambda **x: None, case, "float64")], Diagnosis(2), COMMAND)
    assert "<svg" not in text and "expected shape" in text and "the implementation raised" in text


def test_weights_behind_an_output():
    case = next(c for c in load_cases("sdpa", "empty_row") if "weights" in c.steps)
    v, weights = case.inputs["v"][0, 1], case.steps["weights"][0, 1]
    mixed = weights[:, ::-1]
    o = case.outputs["o"].copy()
    o[0, 1] = mixed @ v
    found = html.implied_weights(check(case, o), "o", dict(B=0, H=1, Tq=0, dv=0))
    assert np.allclose(found @ v, mixed @ v)
    assert len(v) > v.shape[1] or np.allclose(found, mixed)
    assert np.linalg.norm(found - weights) <= np.linalg.norm(mixed - weights) + 1e-12
    assert html.implied_weights(check(case, o), "o", dict(B=0, H=1, Tq=0)) is None


# Pictures

def test_levels():
    x = np.array([-2.0, -1, 0, 1, 2, np.nan, np.inf])
    assert drawing.signed_levels(x, 2.0).tolist() == [0, 2, 4, 6, 8, -1, -1]
    assert drawing.weight_levels(x).tolist() == [0, 0, 0, 8, 8, -1, -1]
    assert drawing.error_levels(np.array([0, 1, 1.1, 10, 11, 1e9, np.inf])).tolist() == [0, 0, 1, 1, 2, 5, 5]


def test_a_window_holds_the_place():
    for shape, place in (((5, 7), (4, 6)), ((100, 7), (99, 0)), ((100, 300), (0, 150)), ((33, 33), (16, 32))):
        window = drawing.window(shape, place)
        assert all(s.start <= i < s.stop <= n and s.stop - s.start == min(n, 32)
                   for s, i, n in zip(window, place, shape))


def test_a_map_holds_every_cell():
    levels = np.arange(12).reshape(3, 4) % 5 - 1
    text = drawing.heat_map(levels, "v", 'a "map"', mark=(1, 2), first=(10, 0))
    svg = ElementTree.fromstring(text)
    cells = {path.get("class"): path.get("d").count("z") for path in svg.iter("path")}
    assert cells == {"none": 3, "v0": 3, "v1": 2, "v2": 2, "v3": 2} and svg.get("aria-label") == 'a "map"'
    assert [t.text for t in svg.iter("text")] == ["10", "11", "12", "0", "1", "2", "3"]
    assert (svg.find("rect").get("x"), svg.find("rect").get("y")) == ("20", "10")


def test_a_chart_leaves_out_what_is_not_finite():
    svg = ElementTree.fromstring(drawing.line_chart(dict(expected=[0.0, 1, 2], got=[np.nan, np.inf, 1]), "a chart"))
    assert {g.get("class"): len(g.findall("circle")) for g in svg.findall("g[@class]")} == dict(expected=3, got=1)
    assert "nan" not in drawing.line_chart(dict(got=[np.nan, np.nan]), "nothing")


# The command

@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module whose function is wrong in some cases."""
    (tmp_path / "attempt_to_report.py").write_text(
        'from attention_ref import sdpa\n\n\ndef wrong(q, k, v, mask, scale):\n'
        '    return sdpa.dense(q, k, v, ~mask, scale=scale)\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    yield tmp_path
    sys.modules.pop("attempt_to_report", None)


VERIFY = ["verify", "sdpa", "--impl", "attempt_to_report:wrong", "--case", "causal_wide"]


def test_verify_writes_all_three(here, capsys):
    code = cli.main([*VERIFY, "--json", "v.json", "--junit", "v.xml", "--html=v.html", "--dtype", "float32"])
    out, _ = capsys.readouterr()
    assert code == 1 and "FAILED" in out and "mask_polarity" in out
    assert strictly((here / "v.json").read_text())["counts"] == dict(passed=0, failed=1, unsupported=0, not_asked=0)
    assert ElementTree.parse(here / "v.xml").getroot().get("failures") == "1"
    command = "attention-ref verify sdpa --impl attempt_to_report:wrong --dtype float32 --case sdpa/causal_wide<"
    assert command in (here / "v.html").read_text()
    assert sorted(p.name for p in here.glob("v.*")) == ["v.html", "v.json", "v.xml"]


def test_standard_output_is_the_report_alone(here, capsys):
    assert cli.main([*VERIFY, "--json", "-"]) == 1
    out, err = capsys.readouterr()
    assert strictly(out)["verdict"] == "wrong" and "mask_polarity" in err


def test_compare_writes_them_too(here, capsys):
    assert cli.main(["export", "sdpa", "cases", "--case", "causal"]) == 0
    for path in (here / "cases/expected").iterdir():
        shutil.copy(path, here / "cases/results")
    capsys.readouterr()
    code = cli.main(["compare", "sdpa", "cases", "--json", "-", "--html", "c.html"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert strictly(out)["verdict"] == "right" and "attention-ref compare sdpa cases<" in (here / "c.html").read_text()


@pytest.mark.parametrize("file", ["nowhere/v.json", "."])
def test_a_file_that_cannot_be(here, capsys, file):
    with pytest.raises(SystemExit) as stop:
        cli.main([*VERIFY, "--json", file])
    assert stop.value.code == 2 and f"--json: expected - or a file in a folder that exists, got '{file}'" in \
        capsys.readouterr().err


def test_reports_go_with_an_implementation(here, capsys):
    assert cli.main(["verify", "sdpa", "--html", "v.html"]) == 2
    assert "--html goes with --impl" in capsys.readouterr().err


def test_a_report_is_written_whole_or_not_at_all(here, judged, monkeypatch):
    (here / "v.json").write_text("before")
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        reports.write(dict(json="v.json"), *judged, [])
    assert (here / "v.json").read_text() == "before" and len(list(here.iterdir())) == 2


def test_the_command_again():
    arguments = ["compare", "sdpa", "cases", "--json", "-", "--html=x.html", "--command", "./a.out {in} {out}"]
    again = reports.without_reports([*arguments, "--case", "basic"])
    assert again == "attention-ref compare sdpa cases --command './a.out {in} {out}'"


def test_a_case_is_chosen_by_its_id():
    assert [c.name for c in load_cases("sdpa", "sdpa/sink")] == ["sink"] and len(load_cases("sdpa", "sink")) > 1


# Colour

class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_is_for_terminals(judged, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    rows = [report.row(r, [r.case for r in judged[0]]) for r in judged[0]]
    text = "\n".join([*rows, report.verdict(*judged, "float32")])
    terminal, file = Terminal(), io.StringIO()
    cli.say(text, terminal)
    cli.say(text, file)
    painted = terminal.getvalue()
    for word, colour in (("ok", 32), ("FAILED", 31), ("unsupported", 33)):
        assert re.search(rf"^\x1b\[{colour}m{word}\x1b\[0m +\w", painted, re.M), word
    plain = re.sub(r"\x1b\[\d+m(ok|FAILED|unsupported)\x1b\[0m", r"\1", painted)
    assert plain == file.getvalue() == text + "\n"


def test_no_color_is_honoured(judged, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    cli.say(report.verdict(*judged, "float32"), terminal)
    assert "\x1b" not in terminal.getvalue().replace("\x1b[31m \0 here", "")


# In a browser

MEASURE = """<script>
document.documentElement.style.width = 'WIDTHpx';
document.querySelectorAll('details').forEach(d => d.open = true);
const boxes = of => [...document.querySelectorAll(of)].map(e => e.getBoundingClientRect());
document.title = JSON.stringify([Math.max(...boxes('body *').map(b => b.right)),
    Math.min(...boxes('svg').map(b => b.width)), getComputedStyle(document.body).backgroundColor]);
</script></body>"""


def browse(file, folder, *options):
    """The page as a headless Chromium holds it, and what it complains about."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
               f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", *options, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium")
def test_in_a_browser(page, tmp_path):
    """Nothing is refused; at 400 and 1200 pixels nothing sticks out or is tiny; dark is dark and light is light."""
    (tmp_path / "page.html").write_text(page)
    free = re.sub("<meta http-equiv.*?>", "", page)
    dom, complaints = browse(tmp_path / "page.html", tmp_path, "--dump-dom")
    assert not complaints and dom.count("<svg") == page.count("<svg") > 0
    for width, scheme, background in ((400, 1, "rgb(255, 255, 255)"), (1200, 0, "rgb(22, 24, 27)")):
        (tmp_path / "measured.html").write_text(free.replace("</body>", MEASURE.replace("WIDTH", str(width))))
        dom, _ = browse(tmp_path / "measured.html", tmp_path, "--dump-dom", "--window-size=1300,800",
                        f"--blink-settings=preferredColorScheme={scheme}")
        right, least, colour = json.loads(re.search("<title>(.*?)</title>", dom)[1])
        assert 300 < right <= width and least > 90 and colour == background
