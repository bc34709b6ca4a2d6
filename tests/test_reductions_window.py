"""Windows: who becomes whom, every width and offset against the definition, and work in proportion to the window."""
import tracemalloc

import numpy as np
import pytest
from watched import rows_read

from attention_ref import longformer, masked, masks, sdpa, window
from attention_ref.conformance.numbers import count
from attention_ref.core import gather
from attention_ref.names import draw, draw_cotangent

LOCAL, GLOBAL = ("q", "k", "v"), ("q_global", "k_global", "v_global")


def assert_close(got, expected):
    """assert_allclose for tuples of outputs, within rounding of numbers of order one."""
    for y, z in zip(got, expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-12, atol=1e-13)


def inputs(Tq=7, Tk=9, B=2, H=3, dk=4, dv=5):
    return dict(q=draw("q", (B, H, Tq, dk)), k=draw("k", (B, H, Tk, dk)), v=draw("v", (B, H, Tk, dv)), scale=0.5)


def run(form=window.dense, lengths=(), left=None, right=None, dilation=1, offset=0, **x):
    """A form of window; lengths are all of Tk unless they are given."""
    lengths = np.array(lengths) if len(lengths) else np.full(len(x["q"]), x["k"].shape[2])
    return form(**x, lengths=lengths, left=left, right=right, dilation=dilation, offset=offset)


def tokens(T=9, B=2, H=3, dk=4, dv=5, names=LOCAL + GLOBAL):
    return {name: draw(name, (B, H, T, dv if "v" in name else dk)) for name in names} | dict(scale=0.5)


def flags(*positions, T=9):
    """bool (B, T), True at the positions of each entry."""
    return np.stack([np.isin(np.arange(T), p) for p in positions])


# window

def test_open_on_both_sides_is_sdpa():
    x = inputs()
    assert_close(run(**x), sdpa.dense(**x))


@pytest.mark.parametrize("offset", [0, 2, -3])
def test_a_window_that_reaches_all_is_sdpa(offset):
    x = inputs()
    assert_close(run(**x, left=6 + max(0, offset), right=8 - min(0, offset), offset=offset), sdpa.dense(**x))
    assert not np.allclose(run(**x, left=5 + offset, right=8, offset=offset)[0], sdpa.dense(**x)[0])


@pytest.mark.parametrize("left", [None, 8, 99])
@pytest.mark.parametrize("anchor, offset", [("top-left", 0), ("bottom-right", 2)])
def test_nothing_on_the_right_is_causal(left, anchor, offset):
    x = inputs()
    assert_close(run(**x, left=left, right=0, offset=offset), sdpa.dense(**x, mask=masks.causal(7, 9, anchor)))


@pytest.mark.parametrize("form", window.FORMS)
def test_nothing_beside_the_own_key_returns_v(form):
    x = inputs(Tq=9)
    assert np.array_equal(run(form, **x, left=0, right=0)[0], x["v"])


@pytest.mark.parametrize("anchor, offset", [("top-left", 0), ("bottom-right", 2)])
@pytest.mark.parametrize("left, right, dilation", [(2, 1, 1), (1, 0, 2), (None, 1, 3), (2, None, 2)])
def test_it_is_masked_without_other_conditions(anchor, offset, left, right, dilation):
    x, sides = inputs(), dict(left=left, right=right, dilation=dilation)
    none = dict(query_segments=np.zeros((2, 7), int), key_segments=np.zeros((2, 9), int), lengths=np.array([9, 9]))
    assert_close(run(**x, **sides, offset=offset), masked.dense(**x, **none, **sides, anchor=anchor))


def test_padding_is_that_of_masked():
    x, lengths = inputs(), np.array([6, 3])
    none = dict(query_segments=np.zeros((2, 7), int), key_segments=np.zeros((2, 9), int))
    assert_close(run(**x, lengths=lengths, left=2, right=1),
                 masked.dense(**x, **none, lengths=lengths, left=2, right=1, anchor="top-left"))


def test_a_dilation_for_each_head_is_each_head_alone():
    x, sides = inputs(), dict(left=2, right=1, offset=2)
    o, lse = run(window.band, **x, **sides, dilation=np.array([2, 1, 3]))
    for h, dilation in enumerate((2, 1, 3)):
        one = {name: a[:, h:h + 1] if name in LOCAL else a for name, a in x.items()}
        assert_close((o[:, h:h + 1], lse[:, h:h + 1]), run(**one, **sides, dilation=dilation))


def test_a_dilated_window_is_a_window_on_every_other_token():
    x = inputs(Tq=9)
    o, lse = run(**x, left=1, right=1, dilation=2)
    for start in (0, 1):
        part = {name: a[:, :, start::2] if name in LOCAL else a for name, a in x.items()}
        assert_close((o[:, :, start::2], lse[:, :, start::2]), run(**part, left=1, right=1))


def arbitrary(n):
    """Arguments number n of a call: sizes from 0, windows open, zero, wide; positions before, among, after the keys."""
    random = np.random.default_rng(n)
    Tq, Tk, offset = (int(random.integers(*ends)) for ends in ((0, 9), (0, 9), (-9, 10)))
    left, right = (random.choice([None, 0, 1, 2, 3, 12]) for _ in "lr")
    return inputs(Tq, Tk) | dict(left=left, right=right, dilation=random.integers(1, 4, 3), offset=offset,
                                 lengths=random.integers(0, Tk + 1, 2))


@pytest.mark.parametrize("form", window.FORMS[1:])
def test_every_form_is_dense_for_any_arguments(form):
    for n in range(200):
        assert_close(form(**arbitrary(n)), window.dense(**arbitrary(n)))


def test_the_backward_is_that_of_sdpa_under_the_mask():
    for n in range(100):
        x = arbitrary(n)
        Tq, Tk = x["q"].shape[2], x["k"].shape[2]
        mask = window.visible(Tq, Tk, *(x[name] for name in ("lengths", "left", "right", "dilation", "offset")))
        cotangents = dict(do=draw_cotangent((2, 3, Tq, 5), 0), dlse=draw_cotangent((2, 3, Tq), 1))
        expected = sdpa.vjp(**cotangents, **{name: x[name] for name in (*LOCAL, "scale")}, mask=mask)
        got = window.vjp(**cotangents, **x)
        assert_close(got.values(), [expected[name] for name in got])


# longformer

@pytest.mark.parametrize("form", longformer.FORMS)
@pytest.mark.parametrize("half_window, dilation", [(0, 1), (2, 1), (1, 3), (12, 1)])
def test_longformer_without_globals_is_a_window(form, half_window, dilation):
    x = tokens()
    got = form(**x, is_global=flags([], []), keep=flags(range(9), range(9)), half_window=half_window, dilation=dilation)
    local = {name: x[name] for name in (*LOCAL, "scale")}
    assert_close(got, run(**local, left=half_window, right=half_window, dilation=dilation))


@pytest.mark.parametrize("form", longformer.FORMS)
def test_longformer_with_equal_projections_is_sdpa_under_the_union(form):
    x = tokens(names=LOCAL)
    glob, kept = flags([2], [0, 7]), flags(range(8), range(1, 9))
    union = np.stack([masks.window(9, 9, 1, 1) | masks.global_(9, 9, *np.nonzero(g & k)) for g, k in zip(glob, kept)])
    union &= kept[:, :, None] & kept[:, None, :]
    x |= {name + "_global": x[name] for name in LOCAL}
    got = form(**x, is_global=glob, keep=kept, half_window=1, dilation=1)
    x = {name: x[name] for name in (*LOCAL, "scale")}
    assert_close(got, sdpa.dense(**x, mask=union[:, None]))


@pytest.mark.parametrize("form", longformer.FORMS)
def test_longformer_with_all_tokens_global_is_sdpa_on_the_global_projections(form):
    x = tokens()
    got = form(**x, is_global=flags(range(9), range(9)), keep=flags(range(9), range(9)), half_window=1, dilation=1)
    assert_close(got, sdpa.dense(*(x[name] for name in GLOBAL), scale=0.5))


@pytest.mark.parametrize("form", longformer.FORMS)
def test_padding_is_as_if_it_were_not_there(form):
    x, glob = tokens(), flags([2], [0, 5])
    whole = form(**x, is_global=glob, keep=flags(range(6), range(6)), half_window=2, dilation=1)
    short = {name: a[:, :, :6] if name != "scale" else a for name, a in x.items()}
    alone = form(**short, is_global=glob[:, :6], keep=np.ones((2, 6), bool), half_window=2, dilation=1)
    assert_close([y[:, :, :6] for y in whole], alone)
    assert (whole[0][:, :, 6:] == 0).all() and (whole[1][:, :, 6:] == -np.inf).all()


@pytest.mark.parametrize("form", longformer.FORMS[1:])
def test_every_form_of_longformer_is_dense_for_any_flags(form):
    for n in range(100):
        random = np.random.default_rng(n)
        T = int(random.integers(0, 9))
        x = tokens(T) | dict(is_global=random.random((2, T)) < 0.3, keep=random.random((2, T)) < 0.8,
                             half_window=int(random.choice([0, 1, 2, 9])), dilation=random.integers(1, 4, 3))
        assert_close(form(**x), longformer.dense(**x))


# What both are built on

def test_gather_reads_zeros_beyond_the_ends_and_nothing_that_is_not_asked_for():
    x = draw("q", (2, 3, 4, 5))
    x[:, :, 2] = np.nan
    j = np.array([[[-1, 0, 3, 4, 1]], [[1, 1, -5, 0, 99]]])
    got = gather(x, j)
    for b, h, n in np.ndindex(2, 3, 5):
        inside = 0 <= j[b, 0, n] < 4
        assert np.array_equal(got[b, h, n], x[b, h, j[b, 0, n]] if inside else np.zeros(5))


# Work and memory

def flops(T, left, right):
    return count(run, form=window.band, **inputs(T, T, B=1, H=1), left=left, right=right)["flops"]


def test_the_work_of_a_band_grows_with_tokens_times_window():
    assert flops(256, 3, 4) == 2 * flops(128, 3, 4)
    assert flops(256, 7, 8) == pytest.approx(2 * flops(256, 3, 4), rel=0.02)
    assert flops(256, None, None) > 20 * flops(256, 3, 4)


def test_the_work_of_longformer_grows_with_tokens_times_window_and_globals():
    def flops(T, w, G):
        x = tokens(T, B=1, H=1) | dict(is_global=flags(range(0, 2 * G, 2), T=T), keep=np.ones((1, T), bool))
        return count(longformer.band, **x, half_window=w)["flops"]
    assert flops(256, 4, 3) == pytest.approx(2 * flops(128, 4, 3), rel=0.01)
    more = [flops(256, 4, G) - flops(256, 4, G - 1) for G in (2, 3, 4)]
    assert len(set(more)) == 1 and more[0] < flops(256, 4, 0)


@pytest.mark.parametrize("dilation, lengths", [(1, 23), (3, 17)])
def test_the_loop_reads_the_band_and_nothing_else(dilation, lengths):
    x = {name: a[0, 0] if name in LOCAL else a for name, a in inputs(23, 23, B=1, H=1).items()}
    sides = dict(left=2, right=1, dilation=dilation, offset=0)
    mask = window.visible(23, 23, np.array([lengths]), **sides)
    read = rows_read(window.loop, x | sides | dict(lengths=lengths), "k")
    assert read == [j for j in np.nonzero(mask[0, 0])[1] for _ in range(4)]


def peak(form, T):
    """The most memory that one call holds at a time, in bytes."""
    x = {name: a.astype(np.float32) if name in LOCAL else a for name, a in inputs(T, T, B=1, H=1, dk=8, dv=8).items()}
    tracemalloc.start()
    try:
        run(form, **x, left=8, right=8)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_band_holds_no_square():
    """Some arrays of 17 scores for each query; dense holds several of one for each pair."""
    assert peak(window.band, 2048) < 2048 * 17 * 40 < 2048 ** 2
    assert peak(window.band, 4096) < 2.2 * peak(window.band, 2048)
    assert peak(window.dense, 2048) > 2048 ** 2 * 4
