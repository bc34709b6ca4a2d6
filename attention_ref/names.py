"""The glossary as data: what every argument means, its domain, how golden cases draw it, and what others call it.

Cases are drawn by an integer formula, the same in every language: entry n (row-major) of `tab(shape, a, b)` is
(((a n^2 + b n + 3) mod 13) - 6) / 8, a multiple of 1/8 in [-3/4, 3/4], exact in bfloat16, float16, float32 and float64.
"""
from typing import Callable, NamedTuple

import numpy as np


def tab(shape, a, b):
    """float64 array of the given shape, filled by the integer formula above."""
    n = np.arange(int(np.prod(shape)))
    return ((((a * n * n + b * n + 3) % 13) - 6) / 8).reshape(shape)


def values(shape):
    """tab(., 7, 5) + j + 2 (j mod 2), j the key position: the step makes a shifted weight visible in the output."""
    j = np.arange(shape[-2])
    return tab(shape, 7, 5) + (j + 2 * (j % 2))[:, None]


class Name(NamedTuple):
    """One argument name; `draw` maps a shape to an array, None where every case states its own value."""
    meaning: str
    domain: str = "real"
    draw: Callable | None = None
    torch: str = ""
    jax: str = ""
    onnx: str = ""
    fla: str = ""


AXES = dict(B="batch", H="head", Hq="head", Hkv="kv head", Tq="query", Tk="key", T="token", P="cached key", W="slot",
            R="row", M="block", L="round", dk="channel", dv="channel", D="feature", Dq="feature", Dz="feature",
            G="group", N="node", E="edge")

NAMES = dict(
    q=Name("queries", draw=lambda s: 3 * tab(s, 3, 1), torch="query", jax="query", onnx="Q", fla="q"),
    k=Name("keys", draw=lambda s: 3 * tab(s, 5, 2), torch="key", jax="key", onnx="K", fla="k"),
    v=Name("values", draw=values, torch="value", jax="value", onnx="V", fla="v"),
    o=Name("output", onnx="Y", fla="o"),
    lse=Name("natural log of the row sum of exponentials, sink included; -inf for a row without keys",
             torch="lse", jax="residual", fla="softmax_lse"),
    scale=Name("number that multiplies the scores, usually 1/sqrt(dk)", "> 0",
               torch="scale", jax="scale", onnx="scale", fla="softmax_scale"),
    mask=Name("True where a query may attend to a key", "boolean",
              torch="attn_mask (bool)", jax="mask", onnx="attn_mask (bool)"),
    bias=Name("number added to the scaled, capped scores", "real or -inf", draw=lambda s: 2 * tab(s, 11, 4),
              torch="attn_mask (float)", jax="bias", onnx="attn_mask (float)", fla="attn_bias"),
    slopes=Name("what a step away from the query takes off the score, per head; None: the published ones",
                "real, usually > 0, or None", draw=lambda s: tab(s, 2, 5) + 7 / 8, fla="alibi_slopes"),
    table=Name("biases of every head, to be picked by an index", draw=lambda s: 2 * tab(s, 6, 5)),
    index=Name("row of the table for every query and key", "integers in 0..R-1"),
    max_distance=Name("distances from here on share the last bucket", "integer > the number of exact buckets"),
    bidirectional=Name("half of the buckets are for keys after the query; else those share bucket 0 with its own",
                       "boolean"),
    sink=Name("logit of one more key per head that has no value; -inf means none", "real or -inf",
              draw=lambda s: tab(s, 2, 9)),
    softcap=Name("c in c tanh(s/c), applied to the scaled scores before bias and mask; None is off", "> 0 or None",
                 onnx="softcap (0 is off)", fla="softcap"),
    causal=Name("a query sees no key after its own position", "boolean",
                torch="is_causal", jax="is_causal", onnx="is_causal", fla="causal"),
    anchor=Name("corner of the scores from which the diagonal starts; bottom-right is where a row's keys end",
                "top-left or bottom-right", torch="top-left", jax="top-left",
                onnx="top-left; bottom-right with nonpad_kv_seqlen", fla="bottom-right"),
    left=Name("keys visible before the query's own, in steps of dilation; None is open", "integer >= 0 or None",
              jax="local_window_size[0]", onnx="left_window_size (-1 is open)", fla="window_size[0] (-1 is open)"),
    right=Name("keys visible after the query's own, in steps of dilation; None is open", "integer >= 0 or None",
               jax="local_window_size[1]", onnx="right_window_size (-1 is open)", fla="window_size[1] (-1 is open)"),
    dilation=Name("distance between neighbouring keys of a window", "integer >= 1"),
    q_global=Name("queries of the global tokens, by a projection of their own", draw=lambda s: 3 * tab(s, 4, 7)),
    k_global=Name("keys that global tokens attend to", draw=lambda s: 3 * tab(s, 6, 11)),
    v_global=Name("values that global tokens attend to", draw=lambda s: 4 * tab(s, 9, 4)),
    is_global=Name("True for a token that sees every token and is seen by all", "boolean"),
    keep=Name("True where a token is there; the others are padding, neither keys nor queries", "boolean"),
    random_blocks=Name("random key blocks of every block row, -1 for none", "integers in -1..M-1", torch="rand_attn"),
    global_blocks=Name("True for a block of tokens that see every token and are seen by all", "boolean"),
    block_size=Name("tokens per block; the last block may be shorter", "integer >= 1", torch="block_size"),
    global_tokens=Name("number of tokens in front of the first block that see every token and are seen by all",
                       "integer in 0..T"),
    qk=Name("queries, whose directions are the keys", draw=lambda s: 3 * tab(s, 3, 1)),
    buckets=Name("hash bucket of every token in every round", "integers >= 0"),
    chunk_length=Name("tokens per chunk of a sorted round; a token looks at its own chunk and at the one before",
                      "integer >= 1", torch="lsh_attn_chunk_length"),
    self_penalty=Name("number subtracted from the score of a token with itself, large where it is a last resort"),
    half_window=Name("keys visible on each side of the query's own, in steps of dilation", "integer >= 0"),
    offset=Name("position of query 0 among the keys; Tk - Tq where the last query stands at the last key", "integer",
                torch="0", jax="0", onnx="past length, else 0", fla="Tk - Tq"),
    lengths=Name("number of keys of each batch entry; what follows is padding", "integers in 0..Tk",
                 jax="key_value_seq_lengths", onnx="nonpad_kv_seqlen", fla="cache_seqlens"),
    query_segments=Name("which packed sequence each query belongs to", "integers"),
    key_segments=Name("which packed sequence each key belongs to", "integers"),
    positions=Name("place of each token in its sequence", "integers", onnx="position_ids"),
    rotary=Name("number of channels, the first ones, that are rotated", "even integer in 2..dk",
                onnx="rotary_embedding_dim (0 is dk)"),
    base=Name("b in the frequencies b^(-2t / rotary)", "> 0"),
    layout=Name("which channels are a pair: t and t + rotary/2, or 2t and 2t + 1", "half or interleaved",
                onnx="interleaved (0 or 1)", fla="interleaved (bool)"),
    pos_key=Name("table of distances that queries meet, projected to keys", draw=lambda s: 2 * tab(s, 9, 8)),
    pos_query=Name("table of distances that keys meet, projected to queries", draw=lambda s: 2 * tab(s, 4, 3)),
    p2c=Name("distance at which a key reads pos_query: i - j in released code, j - i in the paper",
             "released or paper"),
    max_position=Name("distances from here on share a log bucket, or lie beyond the table; None: no buckets",
                      "integer >= R/4 + 2 or None"),
    x=Name("token vectors", draw=lambda s: 2 * tab(s, 3, 1)),
    y=Name("token vectors after the operation", onnx="output"),
    z=Name("token vectors of the other sequence, which is attended to", draw=lambda s: 2 * tab(s, 4, 7)),
    w_q=Name("projection to queries, Q = X W_Q", draw=lambda s: tab(s, 5, 2)),
    w_k=Name("projection to keys, K = X W_K", draw=lambda s: tab(s, 7, 3)),
    w_v=Name("projection to values, V = X W_V", draw=lambda s: 2 * tab(s, 8, 5)),
    w_o=Name("projection of the concatenated heads", draw=lambda s: 2 * tab(s, 6, 11)),
    heads=Name("number of heads H", "integer >= 1"),
    past_key=Name("cached keys, before this call", draw=lambda s: 3 * tab(s, 9, 4), onnx="past_key", fla="k_cache"),
    past_value=Name("cached values, before this call", draw=lambda s: values(s) - 3, onnx="past_value", fla="v_cache"),
    past_length=Name("number of tokens that each batch entry has seen before this call", "integers >= 0",
                     onnx="write_indices", fla="cache_seqlens"),
    ring_key=Name("keys of the last W tokens, position p in slot p mod W", draw=lambda s: 3 * tab(s, 9, 4)),
    ring_value=Name("values of the last W tokens, position p in slot p mod W", draw=lambda s: values(s) - 3),
    present_key=Name("cached keys after this call", onnx="present_key"),
    present_value=Name("cached values after this call", onnx="present_value"),
    query_block=Name("rows of a tile, never changes the result", "integer >= 1"),
    key_block=Name("columns of a tile, never changes the result", "integer >= 1"),
    chunk_size=Name("positions per chunk, never changes the result", "integer >= 1",
                    onnx="chunk_size", fla="chunk_size"),
    source=Name("node at which each edge starts: the key", "integers in 0..N-1"),
    target=Name("node at which each edge ends: the query", "integers in 0..N-1"),
    w=Name("projection of every head, h = x W", draw=lambda s: tab(s, 5, 2)),
    w_source=Name("projection of every head for the node at which an edge starts", draw=lambda s: tab(s, 5, 2)),
    w_target=Name("projection of every head for the node at which an edge ends", draw=lambda s: tab(s, 7, 3)),
    a=Name("attention vector of every head", draw=lambda s: 2 * tab(s, 3, 8)),
    a_source=Name("half of the attention vector that meets the node at which an edge starts",
                  draw=lambda s: 2 * tab(s, 3, 8)),
    a_target=Name("half of the attention vector that meets the node at which an edge ends",
                  draw=lambda s: 2 * tab(s, 9, 5)),
    slope=Name("slope of LeakyReLU below 0"),
    spatial_bias=Name("bias of every head for each distance, the last entry for pairs without a path", "real or -inf",
                      draw=lambda s: 2 * tab(s, 11, 4)),
    edge_features=Name("vector of every edge", draw=lambda s: 2 * tab(s, 4, 7)),
    edge_weight=Name("vector of every head that meets the n-th edge of a path", draw=lambda s: 2 * tab(s, 7, 3)),
    distance=Name("number of edges on a shortest path from node i to node j; -1 where there is none", "integers >= -1"),
    path=Name("its edges, from i to j, filled up with -1", "integers in -1..E-1"),
    log_decay=Name("natural log of the gate that decays the state before a token is written", "<= 0, -inf allowed",
                   draw=lambda s: tab(s, 4, 3) / 2 - 0.5, onnx="decay", fla="g"),
    beta=Name("write strength, after its sigmoid", "0..2", draw=lambda s: tab(s, 6, 5) + 0.875,
              onnx="beta", fla="beta"),
    removal_key=Name("what is read from the state to be taken out of it, of length 1", draw=lambda s: tab(s, 8, 7)),
    removal_rate=Name("share of what was read that each channel gives up", "0..1",
                      draw=lambda s: tab(s, 6, 5) / 2 + 0.5),
    initial_state=Name("state before the first token, row c belongs to channel c of the keys",
                       draw=lambda s: tab(s, 9, 4), onnx="past_state", fla="initial_state"),
    final_state=Name("state after the last token", onnx="present_state", fla="final_state"),
    distance_bias=Name("bias of every query and key"),
    bucket=Name("row of the table that a distance reads", "integers in 0..R-1"),
    transform=Name("(I + N)^{-1} diag(beta), from errors to writes; N holds how the keys of tokens meet"),
    writes=Name("what each token writes at its key"),
    removed=Name("what each token reads with its removal key"),
    dt=Name("step size of each token, after softplus and limits", "> 0; 0 leaves the state alone",
            draw=lambda s: tab(s, 6, 5) / 2 + 0.5, fla="dt"),
    A=Name("continuous decay per head: the gate is exp(dt A)", "< 0", draw=lambda s: tab(s, 2, 9) - 0.875, fla="A"),
    B=Name("what each token writes with, the keys of its group of heads", draw=lambda s: 2 * tab(s, 5, 2), fla="B"),
    C=Name("what each token reads with, the queries of its group of heads", draw=lambda s: 2 * tab(s, 3, 1), fla="C"),
    D=Name("weight per head of the token's own x in its output", draw=lambda s: 2 * tab(s, 7, 4), fla="D"),
    w_in=Name("projection to z, to x, B and C, and to dt, side by side", draw=lambda s: tab(s, 5, 2) / 2),
    conv_weight=Name("taps of the causal convolution of each channel, the last for the current token",
                     draw=lambda s: 2 * tab(s, 8, 3), onnx="weight", fla="conv weight (F, 1, W + 1)"),
    conv_bias=Name("bias of the convolution", draw=lambda s: tab(s, 3, 7), onnx="bias"),
    conv_state=Name("what the convolution saw of the last W tokens, the oldest first", draw=lambda s: tab(s, 9, 5),
                    onnx="past_state"),
    final_conv_state=Name("conv_state after the last token", onnx="present_state"),
    dt_bias=Name("added to dt before its softplus", draw=lambda s: tab(s, 4, 9), fla="dt_bias"),
    A_log=Name("log(-A)", draw=lambda s: tab(s, 2, 9), fla="A_log"),
    norm_weight=Name("weight of each channel after the norm", draw=lambda s: tab(s, 7, 4) + 1),
    dt_min=Name("dt is at least this", ">= 0", fla="dt_limit[0]"),
    dt_max=Name("dt is at most this", "> dt_min, inf allowed", fla="dt_limit[1]"),
    scores=Name("scale * q k^T"),
    capped=Name("scores after the soft cap"),
    biased=Name("capped scores plus bias: what is masked and exponentiated"),
    weights=Name("softmax of the biased scores over the allowed keys"),
    place=Name("place of every token when its round is sorted by bucket"),
    round_lse=Name("lse of each round by itself"),
    content=Name("q_i . k_j, not scaled"),
    content_position=Name("q_i . pos_key[row of i - j], not scaled"),
    position_content=Name("k_j . pos_query[row], not scaled"),
    projected=Name("node vectors of every head, h = x W"),
    edge_encoding=Name("mean of the edges on a shortest path, each after its product with a weight"),
    logits=Name("what is exponentiated, where it is no scaled, biased product"),
    concat=Name("what the heads give, side by side, before W_O"),
)


STATES = {"initial_state", "final_state"}                # what one token leaves for the next
INERT = {"query_block", "key_block", "chunk_size"}       # options that never change a result


def draw(name, shape):
    """float64 array of the given shape, drawn as golden cases draw the argument `name`."""
    return NAMES[name].draw(shape)


def draw_cotangent(shape, index):
    """A cotangent that is not constant; index tells the outputs of one call apart."""
    return 2 * tab(shape, 10 - index, 6 + index)
