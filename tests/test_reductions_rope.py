"""Who rotary and disentangled attention become under which setting, and what their forms cost."""
from fractions import Fraction
from itertools import count as numbers_from

import numpy as np
import pytest

from attention_ref import deberta, rope, sdpa
from attention_ref.conformance.numbers import count
from attention_ref.masks import causal
from attention_ref.names import draw

LAYOUTS = pytest.mark.parametrize("layout", ["half", "interleaved"])
READINGS = pytest.mark.parametrize("p2c", ["released", "paper"])


def close(got, expected):
    """Whether arrays, or tuples of them, are equal within rounding of numbers of order one."""
    return all(np.allclose(y, z, rtol=1e-12, atol=1e-12) for y, z in zip(got, expected, strict=True))


# Rotary position embedding

def vectors(T=5, dk=8, H=3):
    return draw("q", (2, H, T, dk)), draw("k", (2, H, T, dk)), draw("v", (2, H, T, 7))


def turned(x, positions, layout="half", rotary=6, base=100.0):
    return rope.dense(x, np.asarray(positions), rotary=rotary, base=base, layout=layout)


@LAYOUTS
@pytest.mark.parametrize("offset", [1, -7, 1000])
def test_scores_depend_on_the_distance_only(layout, offset):
    q, k, _ = vectors()
    p = np.arange(5)
    scores, moved, apart = (turned(q, p + a, layout) @ turned(k, p + b, layout).swapaxes(-1, -2)
                            for a, b in ((0, 0), (offset, offset), (offset, 0)))
    assert close(moved, scores) and not close(apart, scores)


@LAYOUTS
def test_attention_does_not_see_an_offset(layout):
    q, k, v = vectors()
    p = np.array([0, 2, 3, 7, 8])
    here, there = (sdpa.dense(turned(q, p + n, layout), turned(k, p + n, layout), v, causal(5, 5), scale=0.25)
                   for n in (0, 40))
    assert close(there, here) and not close(sdpa.dense(q, k, v, causal(5, 5), scale=0.25), here)


def test_the_layouts_are_one_permutation_of_channels_apart():
    q = vectors()[0]
    order = np.array([0, 3, 1, 4, 2, 5, 6, 7])               # channel 2t of the one is t of the other, 2t + 1 is t + 3
    y = turned(q[..., order], np.arange(5), "interleaved")
    assert np.array_equal(y, turned(q, np.arange(5), "half")[..., order])
    assert not close(y, turned(q[..., order], np.arange(5), "half"))


@LAYOUTS
def test_an_offset_is_a_position(layout):
    """The last tokens of a sequence, alone but at their places, and every token in a call of its own."""
    q = vectors()[0]
    whole = turned(q, np.arange(5), layout)
    assert np.array_equal(turned(q[:, :, 3:], [3, 4], layout), whole[:, :, 3:])
    assert np.array_equal(np.concatenate([turned(q[:, :, [t]], [t], layout) for t in range(5)], 2), whole)


@LAYOUTS
def test_turning_back_and_turning_on(layout):
    q, p = vectors()[0], np.array([3, 1, -4, 1, 5])
    y = turned(q, p, layout)
    assert close(turned(y, -p, layout), q) and close(turned(y, p, layout), turned(q, 2 * p, layout))
    assert np.allclose((y * y).sum(-1), (q * q).sum(-1)) and not close(y, q)
    assert np.array_equal(turned(q, 0 * p, layout), q)


def test_channels_that_are_not_turned_are_a_narrower_head_beside_them():
    q, p = vectors()[0], np.arange(5)
    y = turned(q, p, rotary=4)
    assert np.array_equal(y[..., :4], turned(q[..., :4], p, rotary=4)) and np.array_equal(y[..., 4:], q[..., 4:])


def test_linear_scaling_is_a_smaller_step():
    """theta / 4 at position 4 p is theta at position p."""
    q, p = vectors()[0], np.arange(5)
    angle = 4 * p[:, None] * (rope.frequencies(q, 6, 100.0) / 4)
    assert close(rope.rotate(q, np.cos(angle), np.sin(angle), "half"), turned(q, p))


@pytest.mark.parametrize("rotary, factor", [(4, 2), (8, 8.0), (128, 4)])
def test_ntk_scaling_slows_the_slowest_pair_and_not_the_fastest(rotary, factor):
    one = np.ones(1)
    theta, scaled = (rope.frequencies(one, rotary, b) for b in (1e4, rope.ntk_base(1e4, rotary, factor)))
    assert np.isclose(scaled[-1], theta[-1] / factor, rtol=1e-12) and scaled[0] == theta[0] == 1
    assert (scaled[1:] < theta[1:]).all()


def test_an_odd_number_of_channels_is_refused():
    for form in rope.FORMS:
        with pytest.raises(ValueError, match="rotary: expected an even number, got 5"):
            form(vectors()[0], np.arange(5), rotary=5, base=100.0, layout="half")


def work(form, *arguments, **options):
    """Flops of a form on arrays by position."""
    names = dict(zip(form.__code__.co_varnames, arguments))
    return count(form, **names | options)["flops"]


def test_turning_a_vector_costs_three_flops_per_channel_and_a_matrix_2dk():
    """What a head more costs: the table is the same for all."""
    def head(form, T, rotary):
        few, more = (work(form, vectors(T, H=H)[0], np.arange(T), rotary=rotary, base=100.0, layout="half")
                     for H in (3, 4))
        return (more - few) / (2 * T)
    for T in (5, 9):
        assert [head(rope.dense, T, rotary) for rotary in (2, 6, 8)] == [6, 18, 24]
        assert head(rope.matrix, T, 6) == 2 * 8 * 8


# Disentangled attention

def tables(R=6, H=3, dk=4):
    return draw("pos_key", (H, R, dk)), draw("pos_query", (H, R, dk))


def qkv(T=5, H=3, dk=4):
    return draw("q", (2, H, T, dk)), draw("k", (2, H, T, dk)), draw("v", (2, H, T, 7))


def attend(x, pos, mask=True, p2c="released", form=deberta.dense, **options):
    return form(*x, *pos, np.asarray(mask), scale=0.25, p2c=p2c, **options)


@READINGS
def test_tables_of_zeros_are_sdpa(p2c):
    x, zeros = qkv(), [np.zeros((3, 6, 4))] * 2
    for form in deberta.FORMS:
        assert close(attend(x, zeros, causal(5, 5), p2c, form), sdpa.dense(*x, causal(5, 5), scale=0.25))
        assert not close(attend(x, tables(), causal(5, 5), p2c, form), sdpa.dense(*x, causal(5, 5), scale=0.25))


def test_a_table_that_every_query_meets_alike_is_a_bias_by_distance():
    """One channel of q is 1 and pos_key has no other: a relative bias, one number per head and distance."""
    (q, k, v), b = qkv(), draw("bias", (3, 6))
    q[..., 2] = 1
    pos_key = np.zeros((3, 6, 4))
    pos_key[..., 2] = b
    by_distance = sdpa.dense(q, k, v, bias=0.25 * b[:, deberta.delta(5, 3)], scale=0.25)
    assert close(attend((q, k, v), (pos_key, 0 * pos_key)), by_distance)
    assert not close(attend((q, k, v), (pos_key[:, ::-1], 0 * pos_key)), by_distance)


def test_the_paper_reads_the_same_for_queries_and_keys():
    """Exchange queries with keys, and their tables: the scores are transposed. Not so as released."""
    (q, k, _), (pos_key, pos_query) = qkv(), tables()
    for p2c, same in dict(paper=True, released=False).items():
        rows = deberta.table_rows(q, pos_key, p2c, None)
        scores = sum(deberta.terms(q, k, pos_key, pos_query, *rows))
        exchanged = sum(deberta.terms(k, q, pos_query, pos_key, *rows))
        assert close(exchanged.swapaxes(-1, -2), scores) == same


def test_the_two_readings_are_one_table_upside_down():
    """Row S + d of the one is row S - d of the other, where no distance is clipped."""
    x, (pos_key, pos_query) = qkv(T=3), tables()
    flipped = np.concatenate([pos_query[:, :1], pos_query[:, :0:-1]], 1)
    assert close(attend(x, (pos_key, flipped), p2c="paper"), attend(x, (pos_key, pos_query)))
    assert not close(attend(x, (pos_key, pos_query), p2c="paper"), attend(x, (pos_key, pos_query)))


@READINGS
def test_a_short_sequence_reads_the_middle_of_a_table(p2c):
    """Version 1 cuts the table to 2T rows around its centre: nothing else is read."""
    x, pos = qkv(T=3), tables(R=16)
    assert close(attend(x, [table[:, 5:11] for table in pos], p2c=p2c), attend(x, pos, p2c=p2c))
    assert not close(attend(x, [table[:, 4:10] for table in pos], p2c=p2c), attend(x, pos, p2c=p2c))


def test_delta_is_the_clipped_distance_of_eq_3():
    assert deberta.delta(5, 3).tolist() == [
        [3, 2, 1, 0, 0], [4, 3, 2, 1, 0], [5, 4, 3, 2, 1], [5, 5, 4, 3, 2], [5, 5, 5, 4, 3]]
    assert deberta.delta(600, 256, 512)[599, [599, 0, 599 - 129]].tolist() == [256, 511, 256 + 129]


def test_no_bucket_changes_a_distance_up_to_the_middle():
    assert np.array_equal(deberta.delta(5, 8, 100), deberta.delta(5, 8))
    assert not np.array_equal(deberta.delta(7, 8, 100), deberta.delta(7, 8))


KNOWN = {127: 127, 128: 128, 129: 129, 140: 137, 200: 169, 255: 192, 300: 207, 400: 233, 500: 254, 511: 255, 512: 256,
         600: 270}                                           # 256 buckets, 512 positions: versions 2 and 3


def test_known_buckets():
    r = np.array(list(KNOWN))
    for sign in (1, -1):
        assert deberta.bucket(sign * r, 256, 512).tolist() == [sign * n for n in KNOWN.values()]


@pytest.mark.parametrize("buckets, max_position", [(256, 512), (32, 128), (64, 512), (8, 16), (8, 33), (4, 5)])
def test_buckets_are_the_ceiling_of_a_ratio_of_logarithms(buckets, max_position):
    """By fractions, and by logarithms where these are not within rounding of an integer."""
    mid, r = buckets // 2, np.arange(-3 * max_position, 3 * max_position + 1, 61 if buckets > 100 else 1)
    step, found = Fraction(max_position - 1, mid), deberta.bucket(r, buckets, max_position)
    for distance, got in zip(r.tolist(), found.tolist()):
        far = max(1, Fraction(abs(distance), mid)) ** (mid - 1)
        n = abs(distance) if abs(distance) <= mid else mid + next(n for n in numbers_from() if far <= step ** n)
        assert got == n * np.sign(distance)
    n = np.log(np.maximum(abs(r) / mid, 1)) / np.log((max_position - 1) / mid) * (mid - 1)
    plain = abs(n - np.round(n)) > 1e-9
    assert plain.sum() > 5 or mid == 2
    assert np.array_equal(found[plain], (np.sign(r) * (mid + np.ceil(n)))[plain])


def test_a_logarithm_may_miss_its_ceiling():
    """|r| = 8 of 8 buckets and 33 positions is exactly one step beyond the middle; float64 says a little more."""
    assert deberta.bucket(np.array([8]), 8, 33).tolist() == [5]
    assert np.ceil(np.log(8 / 4) / np.log(32 / 4) * 3) in (1, 2)


@pytest.mark.parametrize("buckets, max_position, said", [
    (1, 9, "buckets: expected an integer >= 2, got 1"), (8, 5, "max_position: expected an integer >= 6, got 5")])
def test_buckets_that_do_not_exist(buckets, max_position, said):
    with pytest.raises(ValueError, match=said):
        deberta.bucket(np.arange(3), buckets, max_position)


def test_a_table_has_an_even_number_of_rows():
    for form in deberta.FORMS:
        with pytest.raises(ValueError, match="pos_key: expected an even number of rows, got 5"):
            attend(qkv(), tables(R=5), form=form)


def test_what_a_pair_costs():
    """The definition meets the tables in every pair, the gathered form once per token and row."""
    def flops(form, T, R):
        return work(form, *qkv(T), *tables(R), scale=0.25, p2c="released")
    T, dk, heads = 24, 4, 6
    assert flops(deberta.gathered, T, 8) - flops(deberta.gathered, T, 4) == heads * 2 * T * 4 * 2 * dk
    assert flops(deberta.dense, T, 8) == flops(deberta.dense, T, 4)
    assert flops(deberta.gathered, T, 8) < flops(deberta.dense, T, 8) < flops(deberta.gathered, T, 2 * T)
