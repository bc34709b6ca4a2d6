"""The budget tells honest from wrong: honest runs stay within it, mistakes are far beyond, docs/budget.md says so."""
import re
from functools import cache

import numpy as np
import pytest

from attention_ref import flash, load_cases, variants
from attention_ref.conformance import budget, numbers
from attention_ref.conformance.budget import DRAWS, DTYPES
from attention_ref.conformance.verify import FACTOR, check

WIDER = np.finfo(np.longdouble).nmant > 60               # else nothing is known of a draw beyond float64
TABLE, DRAWN = budget.DOC.read_text().split("<!-- limits")[1].split("##")[0].split("<!-- draws")
CLAIMED = {(row[0], row[1]): row[2:] for row in ([cell.strip() for cell in line.split("|")[1:-1]]
                                                 for line in TABLE.splitlines() if re.search(r"float\d", line))}
DRAWN = {variant: [float(cell) for cell in cells] for variant, *cells in re.findall(
    r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", DRAWN, re.M)}
STALE = "docs/budget.md is stale: run python -m attention_ref.conformance.budget --write"


@cache
def draws():
    return [budget.draw(n) for n in range(200)]


def prove_within(runs, variant, dtype):
    """These honest runs are within the budget, and the largest of their scores is that of docs/budget.md."""
    worst = max(runs, key=budget.score)
    assert worst.score <= 1, f"{worst.what} on {worst.case} scores {worst.score:.3g}"
    assert (variant, dtype) in CLAIMED, STALE
    assert abs(worst.score - float(CLAIMED[variant, dtype][0])) < 0.25, STALE


# Honest implementations

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", variants())
def test_honest_runs_stay_within(variant, dtype):
    with np.errstate(all="ignore"):
        prove_within([run for case in load_cases(variant) for run in budget.honest(case, dtype)], variant, dtype)


@pytest.mark.parametrize("dtype", DTYPES if WIDER else DTYPES[1:])
def test_honest_runs_stay_within_on_random_draws(dtype):
    with np.errstate(all="ignore"):
        runs = [run for case in draws() for run in budget.honest(case, dtype)]
    prove_within(runs, DRAWS, dtype)
    assert len(runs) == 200 * 3 * len(budget.ways(dtype)), "the definition, the online softmax and the split"
    assert max(runs, key=budget.score).score > 0.2, "a budget that no honest run comes near tells nothing"


@pytest.mark.skipif(not WIDER, reason="nothing is known of a draw beyond float64")
@pytest.mark.parametrize("variant", variants())
def test_honest_runs_stay_within_on_draws_of_every_variant(variant):
    """200 draws, a quarter of them in each type; the page is made of all in every type."""
    for i, dtype in enumerate(DTYPES):
        runs = budget.honest_draws(variant, dtype, range(50 * i, 50 * i + 50))
        worst = max(runs, key=budget.score)
        assert worst.score <= 1, f"{worst.what} on {worst.case} in {dtype} scores {worst.score:.3g}"
        assert worst.score > 0.2 and len(runs) >= 50 * len(budget.ways(dtype))
        assert worst.score < DRAWN[variant][i] + 0.1, STALE


def test_draws_differ_where_it_matters():
    assert {case.inputs["k"].shape[2] for case in draws()} == {5, 16, 48, 128, 256}
    assert {case.inputs["key_block"] for case in draws()} == {16, 64}
    assert len({case.why for case in draws()}) == 12, "four kinds of data, three sizes of scores"
    assert {case.inputs["mask"].all() for case in draws()} == {True, False}
    assert {case.inputs["sink"][0] for case in draws()} == {0, -np.inf}


@pytest.mark.skipif(not WIDER, reason="long double is no wider than float64")
def test_exact_values_of_draws_are_certified():
    pytest.importorskip("flint")
    small = [case for case in draws() if case.inputs["k"].shape[2] <= 16][:12]
    dense = budget.cases.named(flash.dense, flash.OUTPUTS)
    for case in small:
        exact = numbers.certified(dense, case.inputs)[0]
        for name, y in case.outputs.items():
            unsure = 2.0 ** -52 * np.abs(np.where(np.isfinite(y), y, 0)) + 2.0 ** -62 * case.conditioning[name]
            assert np.all((np.abs(y - exact[name]) <= unsure) | (y == exact[name])), f"{case.name}: {name}"


@pytest.mark.parametrize("dtype", DTYPES if WIDER else DTYPES[1:])
def test_torch_stays_within(dtype):
    torch = pytest.importorskip("torch")
    golden = [case for case in load_cases("sdpa") if not np.isnan(case.inputs["v"]).any()]
    used = 0
    for case in [*golden, *draws()]:
        x = case.inputs
        if (x["sink"] > -np.inf).any() or x.get("softcap") or not x["mask"].any(-1).all() or not x["k"].shape[2]:
            continue
        q, k, v = (torch.from_numpy(x[name].copy()).to(getattr(torch, dtype)) for name in "qkv")
        mask = torch.from_numpy(np.where(x["mask"], x.get("bias", 0.0), -np.inf)).to(q.dtype)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=x["scale"])
        result = check(case, o.to(torch.float64).numpy(), dtype)
        assert result.passed, f"{case.name}: {result.score:.3g}"
        used += 1
    assert used > 120


# The arithmetics are what they say, and what goes through them is not lost on the way

def test_one_by_one_and_from_the_last():
    x = np.array([1] + 100 * [2.0 ** -25], np.float32)
    for system, expected in (budget.OneByOne, 1), (budget.FromTheLast, 1 + 26 * 2.0 ** -23):
        assert x.view(system).sum() == expected and x.sum() != expected or system is budget.FromTheLast
        assert (x.view(system)[None] @ np.ones((101, 1), np.float32))[0, 0] == x.view(system).sum()
    y = np.arange(24, dtype=np.float32).reshape(2, 3, 4).view(budget.OneByOne)
    for axis in (None, 1, -1, (0, 2)):
        for keepdims in (False, True):
            assert np.array_equal(y.sum(axis, keepdims=keepdims), np.asarray(y).sum(axis, keepdims=keepdims))
    assert y[:, :, :0].sum(-1).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_base_2_is_another_exp_of_the_same_number():
    x = np.linspace(-20, 20, 999, dtype=np.float32)
    got = np.asarray(np.exp(x.view(budget.Base2)))
    assert got.dtype == np.float32 and np.any(got != np.exp(x)) and np.allclose(got, np.exp(x), rtol=1e-5)
    assert np.allclose(np.log(np.exp(x.view(budget.Base2))), x, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_weights_lie_on_the_grid(dtype):
    _, system, _ = budget.ways(dtype)["short weights"]
    x = np.linspace(0.1, 3, 99, dtype=np.float32).view(system)
    for y, short in (np.exp(x), True), (x / x[3], True), (x * x[3], False):
        assert np.array_equal(numbers.round_to(np.asarray(y), dtype), y) == short and y.dtype == np.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_gives_other_numbers(dtype):
    """No arithmetic is lost on the way through a formula."""
    case = next(case for case in draws() if case.inputs["k"].shape[2] == 128)
    found = set()
    for inside, system, _ in budget.ways(dtype).values():
        x = {name: y.view(system) if system and np.asarray(y).dtype.kind == "f" and np.ndim(y) else y
             for name, y in numbers.cast(case.inputs, inside).items()}
        found.add(np.asarray(flash.dense(**x)[0]).tobytes())
    assert len(found) == len(budget.ways(dtype))


# Mistakes

def clearest(variant, slug, dtype):
    """The largest score of a mistake on the cases that catch it."""
    found = [budget.wrong(case, dtype, [slug]) for case in load_cases(variant) if slug in case.catches]
    return max(run.score for runs in found for run in runs)


@pytest.mark.parametrize("variant", variants())
def test_mistakes_are_far_beyond(variant):
    """Ten times the budget in float32, 3 in bfloat16; ten in float16 for a mistake of which float64 shows nothing."""
    with np.errstate(all="ignore"):
        for slug in budget.mistakes(variants()[variant]):
            if clearest(variant, slug, "float64") <= 1:
                assert clearest(variant, slug, "float16") >= 10, slug
                continue
            assert clearest(variant, slug, "float32") >= budget.LEAST["float32"], slug
            excused = (variant, slug) in budget.FAINT
            assert (clearest(variant, slug, "bfloat16") < budget.LEAST["bfloat16"]) == excused, slug


def test_no_other_metric_tells_more():
    """With the threshold that lets all honest runs of sdpa pass, for every type."""
    for left_out, dtype, _, _, *found in budget.shares({"sdpa": budget.measure(load_cases("sdpa"))}):
        share = [float(text.split()[0]) for text in found]
        assert share[0] > 90 and share[0] >= max(share), f"{dtype}: {dict(zip(budget.METRICS, share))}"


# Where the rule ends

def absorbed(Tk):
    """One key has weight 1, the weights of all others are just too small to move a float32 sum that has reached 1."""
    k = np.where(np.arange(Tk) > 0, -16.75, 0.0)[None, None, :, None]
    return budget.solved(f"{Tk} keys", "absorbed", dict(
        q=np.ones((1, 1, 1, 1)), k=k, v=np.ones((1, 1, Tk, 2)), mask=np.ones((1, 1, 1, Tk), bool),
        sink=np.array([-np.inf]), scale=1.0, query_block=1, key_block=16))


@pytest.mark.parametrize("Tk, least", [(16, 1.3), (64, 2.5), (256, 6)])
def test_running_sums_of_equal_terms_drift(Tk, least):
    found = {run.what: run.score for run in budget.honest(absorbed(Tk), "float32")}
    assert found["dense, one by one"] > least and found["dense, eager"] < 1 and found["online, eager"] < 1


def test_tiles_stay_within_where_running_sums_do_not():
    found = {run.what: run.score for run in budget.honest(absorbed(4096), "float32")}
    assert found["dense, one by one"] > 20 and found["online, eager"] < 1


# The page

def test_the_page_states_the_rule():
    text = " ".join(budget.DOC.read_text().split())
    assert f"= {FACTOR} \\left( u \\thinspace \\lvert y \\rvert + u' K \\right) + \\eta" in text
    for dtype in DTYPES:
        u, eta = (round(np.log2(table[dtype])) for table in (numbers.UNIT, numbers.TINY))
        assert f"| {dtype} | $2^{{{u}}}$ | $2^{{{eta}}}$ |" in text


def test_the_page_has_a_row_for_everything():
    assert list(CLAIMED) == [(name, dtype) for name in (*variants(), DRAWS) for dtype in DTYPES], STALE


@pytest.mark.parametrize("variant", variants())
def test_the_page_is_true_of_mistakes(variant):
    """What it calls the least clear mistake has that score; the last digits are those of a machine."""
    with np.errstate(all="ignore"):
        for dtype in DTYPES:
            assert (variant, dtype) in CLAIMED, STALE
            _, _, score, slug = CLAIMED[variant, dtype]
            assert clearest(variant, slug, dtype) == pytest.approx(float(score), rel=0.1), STALE


def test_the_figure_is_there_with_the_text_of_the_page():
    alt = re.search(rf"!\[([^]]*)\]\(../figures/{budget.FIGURE.name}\)", budget.DOC.read_text())[1]
    svg = budget.FIGURE.read_text()
    assert len(svg) < 100_000 and f"<title>{' '.join(alt.split())}</title>" in re.sub(r"\s*(</?title>)\s*", r"\1", svg)


def test_the_page_can_be_written(tmp_path, monkeypatch):
    """Tables go between their markers and nothing else moves; the figure has the same bytes on every run."""
    monkeypatch.setattr(budget, "DOC", tmp_path / "budget.md")
    monkeypatch.setattr(budget, "FIGURE", tmp_path / budget.FIGURE.name)
    page = budget.ROOT / "docs" / "budget.md"
    budget.DOC.write_text(page.read_text())
    found = {"gqa": budget.measure(load_cases("gqa")[:3])}
    written = []
    for _ in range(2):
        budget.write(found, found, {"gqa": {dtype: runs for dtype, (runs, _) in found["gqa"].items()}})
        written.append((budget.DOC.read_text(), budget.FIGURE.read_bytes()))

    def prose(text):
        return [line for line in text.splitlines() if not line.startswith("| ")]
    assert written[0] == written[1] and prose(written[0][0]) == prose(page.read_text())
    assert "| gqa | float32 |" in written[0][0] and "| sdpa | float32 |" not in written[0][0]
