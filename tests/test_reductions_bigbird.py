"""Blocks and hash buckets: who becomes whom, how selections are made, and work in proportion to what is selected."""
import numpy as np
import pytest
from watched import rows_read

from attention_ref import bigbird, longformer, masks, reformer, sdpa
from attention_ref.conformance.numbers import count
from attention_ref.core import take
from attention_ref.names import draw, draw_cotangent
from attention_ref.sparse.bigbird import adjacency, draw_random_blocks
from attention_ref.sparse.reformer import hash_buckets, places


def assert_close(got, expected):
    """assert_allclose for tuples of outputs, within rounding of numbers of order one."""
    for y, z in zip(got, expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-12, atol=1e-13)


def inputs(T=13, B=2, H=3, dk=4, dv=5):
    return dict(q=draw("q", (B, H, T, dk)), k=draw("k", (B, H, T, dk)), v=draw("v", (B, H, T, dv)), scale=0.5)


def first_and_last(M):
    return np.isin(np.arange(M), (0, M - 1))


def itc(T=13, b=2, r=1, seed=7, **sizes):
    """Inputs of BigBird-ITC without padding."""
    x, M = inputs(T, **sizes), -(-T // b)
    return x | dict(random_blocks=draw_random_blocks(x["q"].shape[1], first_and_last(M), r, seed), block_size=b,
                    global_blocks=first_and_last(M), keep=np.ones((len(x["q"]), T), bool), global_tokens=0)


def plain(x):
    return {name: x[name] for name in ("q", "k", "v", "scale")}


# BigBird

@pytest.mark.parametrize("form", bigbird.FORMS)
@pytest.mark.parametrize("b", [5, 7, 13, 40])
def test_few_blocks_are_sdpa(form, b):
    assert_close(form(**itc(b=b)), sdpa.dense(**plain(itc())))


@pytest.mark.parametrize("form", bigbird.FORMS)
def test_all_blocks_listed_are_sdpa(form):
    x = itc(r=7)
    x["random_blocks"] = np.broadcast_to(np.arange(7), (3, 7, 7))
    assert_close(form(**x), sdpa.dense(**plain(x)))
    assert not np.allclose(form(**itc())[0], sdpa.dense(**plain(x))[0])


@pytest.mark.parametrize("form", bigbird.FORMS)
def test_without_random_blocks_the_mask_is_a_union_of_masks(form):
    x, block = itc(r=0), np.arange(13) // 2
    union = masks.blocks(masks.window(7, 7, 1, 1), 2, 13, 13) | masks.global_(13, 13, np.flatnonzero(block % 6 == 0))
    assert_close(form(**x), sdpa.dense(**plain(x), mask=union[None, None]))


def test_blocks_of_one_token_are_longformer():
    x, is_global = itc(b=1, r=0), np.broadcast_to(first_and_last(13), (2, 13))
    both = {f"{name}{kind}": x[name] for name in "qkv" for kind in ("", "_global")}
    assert_close(bigbird.blocks(**x), longformer.band(
        **both, is_global=is_global, keep=x["keep"], half_window=1, dilation=1, scale=0.5))


@pytest.mark.parametrize("form", bigbird.FORMS)
def test_extra_tokens_that_are_a_block_may_be_a_global_block(form):
    etc = itc(T=14, b=2) | dict(global_tokens=2, global_blocks=np.zeros(6, bool), random_blocks=np.full((3, 6, 0), -1))
    as_block = etc | dict(global_tokens=0, global_blocks=np.arange(7) == 0, random_blocks=np.full((3, 7, 0), -1))
    assert_close(form(**etc), form(**as_block))


@pytest.mark.parametrize("form", bigbird.FORMS)
def test_all_tokens_extra_are_sdpa(form):
    x = itc() | dict(global_tokens=13, global_blocks=np.zeros(0, bool), random_blocks=np.zeros((3, 0, 1), int))
    assert_close(form(**x), sdpa.dense(**plain(x)))


@pytest.mark.parametrize("form", bigbird.FORMS)
def test_a_list_is_a_set(form):
    x = itc(r=2)
    repeated = np.concatenate([x["random_blocks"], x["random_blocks"][..., ::-1], np.full((3, 7, 1), -1)], -1)
    assert_close(form(**x), form(**x | dict(random_blocks=repeated)))


def arbitrary(n):
    """Arguments number n of a call of bigbird: any lists, any global blocks, extra tokens, padding."""
    random = np.random.default_rng(n)
    T, b, r = int(random.integers(1, 15)), int(random.integers(1, 5)), int(random.integers(0, 4))
    g = int(random.integers(0, T + 1)) if n % 2 else 0
    M = -(-(T - g) // b)
    return inputs(T) | dict(random_blocks=random.integers(-1, M, (3, M, r)), global_blocks=random.random(M) < 0.3,
                            keep=random.random((2, T)) < 0.8, block_size=b, global_tokens=g)


@pytest.mark.parametrize("form", bigbird.FORMS[1:])
def test_every_form_of_bigbird_is_dense_for_any_arguments(form):
    for n in range(200):
        assert_close(form(**arbitrary(n)), bigbird.dense(**arbitrary(n)))


@pytest.mark.parametrize("form", bigbird.FORMS)
@pytest.mark.parametrize("M", [6, 8])
def test_a_table_of_another_length_is_refused(form, M):
    x = itc() | dict(global_blocks=first_and_last(M), random_blocks=np.full((3, M, 1), -1))
    with pytest.raises(ValueError, match="random_blocks: expected"):
        form(**x)


# The draw of random blocks

TABLE = [[[6, 3], [5, 6], [1, 6], [1, 6], [2, 1], [1, 3]], [[5, 6], [6, 4], [5, 1], [6, 2], [3, 1], [2, 3]]]

def test_random_blocks_are_a_function_of_the_seed():
    """The same numbers on every machine and with every version of NumPy."""
    assert draw_random_blocks(2, first_and_last(8), 2, seed=1)[:, 1:-1].tolist() == TABLE
    assert (draw_random_blocks(2, first_and_last(8), 2, seed=2) != draw_random_blocks(2, first_and_last(8), 2, 1)).any()


@pytest.mark.parametrize("global_blocks", [first_and_last(16), np.zeros(16, bool), np.arange(16) == 5])
def test_random_blocks_are_distinct_and_free(global_blocks):
    table = draw_random_blocks(4, global_blocks, 3, seed=5)
    seen = adjacency(np.full((4, 16, 0), -1), global_blocks)
    for h, row in np.ndindex(4, 16):
        found = table[h, row]
        if global_blocks[row]:
            assert (found == -1).all()
        else:
            assert len(set(found)) == 3 and (found >= 0).all() and not seen[0, row, found].any()


def test_where_few_blocks_are_free_the_rest_is_minus_1():
    table = draw_random_blocks(1, first_and_last(5), 2, seed=0)[0]
    assert table.tolist() == [[-1, -1], [3, -1], [-1, -1], [1, -1], [-1, -1]]
    assert (draw_random_blocks(1, first_and_last(3), 5, seed=0) == -1).all()


def test_every_free_block_is_drawn_about_equally_often():
    tables = np.stack([draw_random_blocks(1, first_and_last(12), 2, seed)[0, 5] for seed in range(700)])
    times = np.bincount(tables.ravel(), minlength=12)
    assert times[[0, 4, 5, 6, 11]].sum() == 0
    assert (abs(times[[1, 2, 3, 7, 8, 9, 10]] - 200) < 60).all()


# Reformer

def hashed(T=13, B=2, H=3, L=2, half=3, dk=4, dv=5, **more):
    """Inputs of reformer without a mask and without padding."""
    qk = draw("qk", (B, H, T, dk))
    return dict(qk=qk, v=draw("v", (B, H, T, dv)), buckets=hash_buckets(qk, draw("k", (H, L, dk, half))),
                mask=np.ones((1, 1), bool), keep=np.ones((B, T), bool), chunk_length=3, self_penalty=2.0,
                scale=0.5) | more


def as_sdpa(x, mask, own):
    """sdpa with keys of length 1 and `own` added to the score of a token with itself."""
    T, q = x["qk"].shape[2], x["qk"]
    k = q / np.sqrt((q * q).sum(-1, keepdims=True))
    return sdpa.dense(q, k, x["v"], mask=mask & x["mask"], bias=own * np.eye(T)[None, None], scale=x["scale"])


@pytest.mark.parametrize("form", reformer.FORMS)
def test_one_bucket_and_one_chunk_are_sdpa_with_keys_of_length_1(form):
    x = hashed(L=1, chunk_length=13, buckets=np.full((2, 3, 1, 13), 4))
    assert_close(form(**x), as_sdpa(x, np.ones((1, 1, 13, 13), bool), -2.0))


@pytest.mark.parametrize("form", reformer.FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_one_chunk_is_sdpa_over_all_that_share_a_bucket(form, causal):
    """Each key once, whatever the number of rounds, and a token with itself in every round: what log N is for."""
    x = hashed(L=4, chunk_length=13) | dict(mask=np.tri(13, dtype=bool) if causal else np.ones((1, 1), bool))
    share = (x["buckets"][..., None] == x["buckets"][..., None, :]).any(2)
    assert_close(form(**x), as_sdpa(x, share, np.log(4) - 2.0))


def test_under_a_causal_mask_chunks_change_nothing_if_no_bucket_is_longer():
    x = hashed(mask=np.tri(13, dtype=bool))
    longest = max(np.bincount(h).max() for h in x["buckets"].reshape(-1, 13))
    whole = reformer.dense(**x | dict(chunk_length=13))
    assert longest < 13
    assert_close(reformer.dense(**x | dict(chunk_length=longest)), whole)
    assert not np.allclose(reformer.dense(**x | dict(chunk_length=1))[0], whole[0])


@pytest.mark.parametrize("form", reformer.FORMS)
def test_rounds_that_agree_are_one_round(form):
    x = hashed(L=1, self_penalty=1e5)
    again = np.repeat(x["buckets"], 3, 2)
    assert_close(form(**x | dict(buckets=again))[:1], form(**x)[:1])


@pytest.mark.parametrize("form", reformer.FORMS)
def test_a_token_that_shares_no_bucket_returns_its_value(form):
    x = hashed(buckets=np.broadcast_to(np.arange(13)[::-1], (2, 3, 2, 13)), self_penalty=1e5)
    o, lse = form(**x)
    assert np.array_equal(o, x["v"]) and (lse < -9e4).all()


@pytest.mark.parametrize("form", reformer.FORMS)
def test_padding_of_reformer_is_as_if_it_were_not_there(form):
    x = hashed() | dict(keep=np.arange(13) < np.array([[9], [9]]))
    short = {name: a[:, :, :9] for name, a in x.items() if name in ("qk", "v")}
    short |= dict(keep=np.ones((2, 9), bool), buckets=x["buckets"][..., :9])
    o, lse = form(**x)
    assert_close((o[:, :, :9], lse[:, :, :9]), form(**x | short))
    assert (o[:, :, 9:] == 0).all() and (lse[:, :, 9:] == -np.inf).all()


def any_buckets(n):
    """Arguments number n of a call of reformer: any buckets, rounds and chunks, a mask, padding."""
    random = np.random.default_rng(n)
    T, L = int(random.integers(1, 14)), int(random.integers(1, 5))
    mask = random.random((T, T)) < 0.8 if n % 2 else masks.causal(T, T)
    return hashed(T) | dict(buckets=random.integers(0, 5, (2, 3, L, T)), mask=mask, keep=random.random((2, T)) < 0.8,
                            chunk_length=int(random.integers(1, 6)), self_penalty=float(random.choice([0, 2, 1e5])))


@pytest.mark.parametrize("form", reformer.FORMS[1:])
def test_every_form_of_reformer_is_dense_for_any_buckets(form):
    for n in range(200):
        for got, expected in zip(form(**any_buckets(n)), reformer.dense(**any_buckets(n)), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-10)


def test_the_backward_over_one_chunk_is_that_of_sdpa():
    x = hashed(L=1, chunk_length=13, buckets=np.zeros((2, 3, 1, 13), int))
    cotangents = dict(do=draw_cotangent((2, 3, 13, 5), 0), dlse=draw_cotangent((2, 3, 13), 1))
    q, norm = x["qk"], np.sqrt((x["qk"] ** 2).sum(-1, keepdims=True))
    expected = sdpa.vjp(**cotangents, q=q, k=q / norm, v=x["v"], bias=-2.0 * np.eye(13)[None, None], scale=0.5)
    dk = expected["dk"] - (expected["dk"] * q).sum(-1, keepdims=True) * q / norm ** 2
    assert_close(reformer.vjp(**cotangents, **x).values(), (expected["dq"] + dk / norm, expected["dv"]))


# The hash

def test_the_hash_is_the_nearest_of_the_rotated_axes_and_their_opposites():
    qk = np.array([[3.0, 1], [1, 3], [-3, 1], [1, -3]])[None, None]
    quarter = np.array([[0.0, 1], [-1, 0]])                                 # x R = (-x_1, x_0)
    rotations = np.stack([np.eye(2), quarter])[None]
    assert hash_buckets(qk, rotations).tolist() == [[[[0, 1, 2, 3], [1, 2, 3, 0]]]]


def test_a_tie_goes_to_the_first():
    assert hash_buckets(np.array([[[[1.0, 1], [-1, -1], [0, 0]]]]), np.eye(2)[None, None]).tolist() == [[[[0, 2, 0]]]]


def test_the_hash_asks_for_the_direction_and_tells_opposites_apart():
    qk, rotations = draw("qk", (2, 3, 13, 4)), draw("k", (3, 2, 4, 3))
    assert np.array_equal(hash_buckets(8 * qk, rotations), hash_buckets(qk, rotations))
    assert (hash_buckets(-qk, rotations) != hash_buckets(qk, rotations)).all()


def test_rounds_and_heads_have_rotations_of_their_own():
    qk, rotations = draw("qk", (2, 3, 13, 4)), draw("k", (3, 2, 4, 3))
    found = hash_buckets(qk, rotations)
    for h, r in np.ndindex(3, 2):
        assert np.array_equal(found[:, h:h + 1, r:r + 1], hash_buckets(qk[:, h:h + 1], rotations[h:h + 1, r:r + 1]))
    assert np.array_equal(hash_buckets(qk, rotations[:1])[:, :1], found[:, :1]), "rotations shared by the heads"


def test_the_sort_is_stable_and_padding_comes_last():
    buckets, keep = np.array([[[[2, 0, 2, 0, 1, 0]]]]), np.array([[1, 1, 1, 1, 1, 0]], bool)
    assert places(buckets, keep).tolist() == [[[[3, 0, 4, 1, 2, 5]]]]


def test_take_reads_many_axes_of_positions_and_zeros_for_minus_1():
    x, j = draw("q", (2, 3, 4, 5)), np.array([[[[0, -1], [3, 3], [1, 2]]], [[[2, 0], [-1, 1], [0, 0]]]])
    got = take(x, j)
    assert got.shape == (2, 3, 3, 2, 5)
    for b, h, m, n in np.ndindex(2, 3, 3, 2):
        i = j[b, 0, m, n]
        assert np.array_equal(got[b, h, m, n], np.zeros(5) if i < 0 else x[b, h, i])


# Work

def flops(form, x):
    return count(form, **x)["flops"]


def test_the_work_of_blocks_grows_with_tokens():
    """Both global blocks see all tokens, the other rows five blocks and r."""
    work = {T: flops(bigbird.blocks, itc(T, b=4, r=2, B=1, H=1)) for T in (256, 512, 1024)}
    assert work[512] == pytest.approx(2 * work[256], rel=0.05) and work[1024] == pytest.approx(2 * work[512], rel=0.05)
    assert flops(bigbird.dense, itc(1024, b=4, B=1, H=1)) > 20 * work[1024]


def test_the_work_of_blocks_grows_with_what_is_listed():
    work = [flops(bigbird.blocks, itc(256, b=4, r=r, B=1, H=1)) for r in (0, 1, 2, 3)]
    assert len(set(np.diff(work))) == 1 and 0 < work[1] - work[0] < work[0] / 4


def test_the_work_of_chunks_grows_with_tokens_rounds_and_chunk():
    def work(T, L, m):
        x = hashed(T, B=1, H=1, L=L, half=8, chunk_length=m)
        return flops(reformer.chunked, x)
    assert work(512, 2, 8) == pytest.approx(2 * work(256, 2, 8), rel=0.01)
    assert work(256, 4, 8) == pytest.approx(2 * work(256, 2, 8), rel=0.05)
    assert work(256, 2, 16) == pytest.approx(2 * work(256, 2, 8), rel=0.15)
    assert flops(reformer.dense, hashed(512, B=1, H=1, half=8)) > 10 * work(512, 2, 8)


def of_one_head(x):
    """The arguments of the first head of the first entry."""
    return {n: a[0, 0] if n in ("q", "k", "v", "qk", "buckets") else a[0] if n in ("random_blocks", "keep") else a
            for n, a in x.items()}


def test_the_loop_over_blocks_reads_what_is_listed_and_nothing_else():
    x = itc(23, b=3, r=2, B=1, H=1)
    mask = bigbird.mask_of(x)[0, 0]
    read = rows_read(bigbird.loop, of_one_head(x), "k")
    assert sorted(read) == sorted(j for j in np.nonzero(mask)[1] for _ in range(4))


def test_the_loop_over_chunks_reads_each_value_where_it_is_met():
    x = hashed(23, B=1, H=1, mask=np.tri(23, dtype=bool))
    met = reformer.sets(x)[1][0, 0]
    read = rows_read(reformer.loop, of_one_head(x), "v")
    assert sorted(read) == sorted(j for j in np.nonzero(met)[2] for _ in range(5))
