"""Who attention with a bias of positions becomes under which setting, and what its slopes, rows and buckets are."""
from fractions import Fraction

import numpy as np
import pytest
from flint import arb, ctx

from attention_ref import alibi, relative_bias, sdpa, t5
from attention_ref.conformance.numbers import nearest
from attention_ref.core import scatter
from attention_ref.masks import causal
from attention_ref.names import draw


def close(got, expected):
    """Whether arrays, or tuples of them, are equal within rounding of numbers of order one."""
    return all(np.allclose(y, z, rtol=1e-12, atol=1e-12) for y, z in zip(got, expected, strict=True))


def qkv(B=2, H=3, Tq=5, Tk=6, dk=4, dv=7):
    return draw("q", (B, H, Tq, dk)), draw("k", (B, H, Tk, dk)), draw("v", (B, H, Tk, dv))


def later(x, start):
    """The queries from a position on."""
    return x[:, :, start:]


# ALiBi

def test_alibi_with_slopes_of_zero_is_sdpa():
    x, mask = qkv(), causal(5, 6)
    assert close(alibi.dense(*x, mask, np.zeros(3), 7, scale=0.5), sdpa.dense(*x, mask, scale=0.5))
    assert not close(alibi.dense(*x, mask, scale=0.5), sdpa.dense(*x, mask, scale=0.5))


def test_alibi_is_sdpa_with_a_bias():
    x, (i, j) = qkv(), np.ogrid[:5, :6]
    bias = -alibi.slopes(3)[:, None, None] * abs(i + 2 - j)
    assert close(alibi.dense(*x, offset=2, scale=0.5), sdpa.dense(*x, bias=bias[None], scale=0.5))


@pytest.mark.parametrize("offset", [0, 1, -3])
def test_alibi_is_a_relative_bias_if_the_table_reaches_far_enough(offset):
    x, m = qkv(), draw("slopes", (3,))
    expected = alibi.dense(*x, slopes=m, offset=offset, scale=0.5)
    furthest = max(abs(4 + offset), abs(5 - offset))

    def by_table(reach):
        table = -m[:, None] * abs(np.arange(-reach, reach + 1))
        index = relative_bias.clipped_distance(5, 6, reach, offset)
        return relative_bias.dense(*x, table, index, scale=0.5)
    assert close(by_table(furthest), expected) and close(by_table(furthest + 2), expected)
    assert not close(by_table(furthest - 1), expected)


def test_the_position_of_the_query_moves_lse_alone():
    """Under a causal mask m j in place of m (j - p) adds m p to lse, and nothing else."""
    x, m, p = qkv(Tq=6), alibi.slopes(3), np.arange(6)
    o, lse = alibi.dense(*x, causal(6, 6), scale=0.5)
    bias = np.broadcast_to(m[:, None, None] * p, (3, 6, 6))
    assert close(sdpa.dense(*x, causal(6, 6), bias[None], scale=0.5), (o, lse + m[:, None] * p))


@pytest.mark.parametrize("heads, expected", [
    (1, [2 ** -8]), (2, [2 ** -4, 2 ** -8]), (3, [2 ** -4, 2 ** -8, 2 ** -2]),
    (6, [2 ** -2, 2 ** -4, 2 ** -6, 2 ** -8, 2 ** -1, 2 ** -3]),
    (12, [2 ** -n for n in range(1, 9)] + [2 ** -(n - 0.5) for n in (1, 2, 3, 4)])])
def test_published_slopes(heads, expected):
    assert np.array_equal(alibi.slopes(heads), expected)


@pytest.mark.parametrize("heads", range(1, 65))
def test_slopes_are_rounded_once(heads):
    n = 2 ** (heads.bit_length() - 1)
    with ctx.workprec(200):
        def power(h, n):
            return nearest((-arb(8 * h) / n * arb(2).log()).exp().mid())
        exact = [power(h, n) for h in range(1, n + 1)] + [power(2 * h + 1, 2 * n) for h in range(heads - n)]
        assert np.array_equal(alibi.slopes(heads), exact)
        assert np.array_equal(alibi.closed_form(heads), alibi.slopes(heads)) == (heads == n)


# Tables

@pytest.mark.parametrize("form", relative_bias.FORMS)
def test_relative_bias_with_a_table_of_zeros_is_sdpa(form):
    x, index = qkv(), relative_bias.clipped_distance(5, 6, 2)
    assert close(form(*x, np.zeros((3, 5)), index, causal(5, 6), scale=0.5), sdpa.dense(*x, causal(5, 6), scale=0.5))
    assert not close(form(*x, draw("table", (3, 5)), index, True, scale=0.5), sdpa.dense(*x, scale=0.5))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("form", t5.FORMS)
def test_t5_is_a_relative_bias_with_its_buckets(form, bidirectional):
    x, table, (i, j) = qkv(), draw("table", (8, 3)), np.ogrid[:5, :6]
    index = t5.bucket(j - i - 2, 8, 5, bidirectional)
    got = form(*x, table, bidirectional=bidirectional, max_distance=5, offset=2, scale=0.5)
    assert close(got, relative_bias.dense(*x, table.T, index, scale=0.5))
    assert not close(got, relative_bias.dense(*x, table.T, index[:, ::-1], scale=0.5))
    assert close(form(*x, 0 * table, bidirectional=bidirectional, scale=0.5), sdpa.dense(*x, scale=0.5))


def test_a_window_of_a_picture_is_a_block_of_its_attention():
    """Windows of 2 by 3 in a picture of 4 by 6: attention of the whole picture that stays inside windows."""
    h, w, table = 2, 3, draw("table", (3, 15))
    y, x = np.divmod(np.arange(24), 6)
    window, (dy, dx) = y // h * 2 + x // w, (y[:, None] - y, x[:, None] - x)
    same = window[:, None] == window
    bias = np.where(same, table[:, np.where(same, (dy + h - 1) * (2 * w - 1) + dx + w - 1, 0)], 0)
    q, k, v = qkv(1, 3, 24, 24)
    o, lse = sdpa.dense(q, k, v, same, bias[None], scale=0.5)
    for n in range(4):
        inside = [z[:, :, window == n] for z in (q, k, v)]
        got = relative_bias.dense(*inside, table, relative_bias.window_index(h, w), scale=0.5)
        assert close(got, (o[:, :, window == n], lse[:, :, window == n]))
        assert not close(relative_bias.dense(*inside, table, relative_bias.window_index(w, h), scale=0.5), got)


# Queries that come one by one

@pytest.mark.parametrize("form", alibi.FORMS)
def test_alibi_of_later_queries_has_an_offset(form):
    q, k, v = qkv(Tq=6)
    whole = alibi.dense(q, k, v, causal(6, 6), scale=0.5)
    for start in range(1, 6):
        mask = causal(6 - start, 6, start)
        rest = form(later(q, start), k, v, mask, offset=start, scale=0.5)
        assert close(rest, [later(y, start) for y in whole])
        assert not close(form(later(q, start), k, v, mask, scale=0.5), rest)


@pytest.mark.parametrize("form", t5.FORMS)
def test_t5_of_later_queries_has_an_offset(form):
    q, k, v = qkv(Tq=6)
    options = dict(table=draw("table", (8, 3)), bidirectional=False, max_distance=5, scale=0.5)
    whole = t5.dense(q, k, v, mask=causal(6, 6), **options)
    for start in range(1, 6):
        rest = form(later(q, start), k, v, mask=causal(6 - start, 6, start), offset=start, **options)
        assert close(rest, [later(y, start) for y in whole])


def test_a_clipped_distance_of_later_queries_has_an_offset():
    whole = relative_bias.clipped_distance(6, 6, 2)
    assert whole[0].tolist() == [2, 3, 4, 4, 4, 4] and whole[5].tolist() == [0, 0, 0, 0, 1, 2]
    assert all(np.array_equal(relative_bias.clipped_distance(6 - n, 6, 2, n), whole[n:]) for n in range(6))


# Rows of tables

def test_rows_of_a_window():
    """2 by 3 tokens: the key itself is in the middle row, one to the right of the query in the row before."""
    index = relative_bias.window_index(2, 3)
    assert index[0].tolist() == [7, 6, 5, 2, 1, 0] and index[5].tolist() == [14, 13, 12, 9, 8, 7]
    assert set(index.ravel().tolist()) == set(range(15)) and np.array_equal(index.T, 14 - index)


def by_definition(d, n, far):
    """The bucket of distance d >= 0 among n of one side, by the equation, with fractions for logarithms."""
    e = n // 2
    if d < e:
        return d
    beyond = [t for t in range(n - e) if Fraction(d, e) ** (n - e) >= Fraction(far, e) ** t]
    return e + beyond[-1]


@pytest.mark.parametrize("buckets, far", [(32, 128), (8, 5), (8, 8), (4, 3), (48, 81), (9, 20), (5, 300), (2, 2)])
def test_buckets_are_those_of_the_equation(buckets, far):
    d = np.arange(far + 5)
    one_side = [by_definition(n, buckets, far) for n in d.tolist()]
    assert t5.bucket(-d, buckets, far, False).tolist() == one_side
    assert not t5.bucket(d, buckets, far, False).any(), "what follows the query shares bucket 0"
    both = t5.bucket(np.append(-d, d[1:]), 2 * buckets, far, True)
    assert both.tolist() == one_side + [buckets + n for n in one_side[1:]]
    assert max(one_side) == buckets - 1


def test_published_buckets():
    """32 buckets up to distance 128: where each begins, and the first and last row of ten tokens."""
    assert t5.first_distances(16, 128).tolist() == [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
    assert t5.first_distances(32, 128).tolist() == [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87,
                                                    99, 113]
    i, j = np.ogrid[:10, :10]
    table = t5.bucket(j - i, 32, 128, True)
    assert table[0].tolist() == [0, 17, 18, 19, 20, 21, 22, 23, 24, 24]
    assert table[9].tolist() == [8, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_a_bucket_that_no_distance_reaches():
    """More buckets than distances: of those that begin at one distance the last has it."""
    assert t5.first_distances(8, 5).tolist() == [0, 1, 2, 3, 4, 5, 5, 5]
    assert t5.bucket(-np.arange(7), 8, 5, False).tolist() == [0, 1, 2, 3, 4, 7, 7]


def test_scatter_is_what_adding_at_gives():
    x, row = draw("q", (2, 3, 5, 6)), relative_bias.clipped_distance(5, 6, 2)
    expected = np.zeros((2, 3, 5, 7))
    np.add.at(expected, (slice(None), slice(None), np.arange(5)[:, None], row), x)
    assert close([scatter(x, row, 7)], [expected]) and not expected[..., 5:].any() and expected.any()


# What is refused

@pytest.mark.parametrize("call, message", [
    (lambda: alibi.slopes(0), "heads: expected an integer >= 1, got 0"),
    (lambda: alibi.closed_form(0), "heads: expected an integer >= 1, got 0"),
    (lambda: relative_bias.clipped_distance(5, 6, -1), "reach: expected an integer >= 0, got -1"),
    (lambda: relative_bias.window_index(0, 3), "height: expected an integer >= 1, got 0"),
    (lambda: relative_bias.window_index(3, 0), "width: expected an integer >= 1, got 0"),
    (lambda: t5.bucket(np.arange(3), 3, 9, True), "buckets: expected an integer >= 2, got 1"),
    (lambda: t5.bucket(np.arange(3), 32, 16, False), "max_distance: expected an integer >= 17, got 16")])
def test_what_has_no_meaning_is_refused(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
