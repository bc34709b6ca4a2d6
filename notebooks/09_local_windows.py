# %% [markdown]
# # Local windows
#
# **Each query sees a band of keys around its own position. The work is the number of tokens times the width of the
# band, no longer the number of tokens squared, and layers widen the view.**
#
# Query $i$ stands at position $p_i$ among the keys. It attends to the `left` keys before that position, the key at
# it, and the `right` keys after it, in steps of $D$, the *dilation* of its head; a key counts if it lies among the
# first `length` ones, and what lies behind is padding:
#
# $$
# \begin{aligned}
# N(i) &= \lbrace j = p_i + t D : -left \leq t \leq right, \enspace 0 \leq j \lt length \rbrace & p_i &= i + offset \\
# s_{ij} &= scale \thinspace q_i \cdot k_j & z_i &= \sum_{j \in N(i)} \exp(s_{ij}) \\
# o_i &= \sum_{j \in N(i)} \exp(s_{ij}) \thinspace v_j / z_i & lse_i &= \log z_i
# \end{aligned}
# \tag{9.1}
# $$
#
# It is the attention of [chapter 1](01_scaled_dot_product.ipynb) under one of the masks of
# [chapter 2](02_masks.ipynb). What makes it a chapter is that nobody should build that mask: the scores inside are a
# band, and a band can be stored, multiplied and differentiated as a band.

# %%
import numpy as np

from attention_ref import core, load_cases, longformer, masked, masks, plot, ring_cache, sdpa, window
from attention_ref.conformance import experiments
from attention_ref.conformance.blackbox import Box
from attention_ref.conformance.implementations import judge
from attention_ref.conformance.numbers import UNIT, complex_step, count
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw

np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## The contract
#
# The shapes stand in the file itself (an axis with `?` may be 1 or missing: it is broadcast). Everything that can be
# read in two ways is decided below, once.

# %%
shapes = window.INPUTS | window.OUTPUTS
print(table([(name, text or "a number") for name, text in shapes.items()], ("name", "kind and shape")))

# %% [markdown]
# 1. **Shapes.** Batch and head come first, then time. `Tq` queries and `Tk` keys need not be as many, keys `dk` and
#    values `dv` need not be as wide, and `Tk` may be 0.
# 2. **offset**, one integer for the whole call, is the position of query 0 among the keys: 0 is top left,
#    $T_k - T_q$ bottom right. It may be negative, and a position may lie before key 0 or behind the last key.
# 3. **left and right** count keys beside the query's own, in steps of the dilation. The own key is always one of the
#    places. 0 means none on that side, None means that the side is open; a negative number is a ValueError.
#    Causal is nothing but `right` = 0.
# 4. **dilation** is an integer from 1, for each head, (H,), or for all, (1,) or a number. Gaps are counted from the
#    query's own position, not from key 0. `left` = 2 with dilation 3 reaches 6 tokens back.
# 5. **lengths**, one integer from 0 to `Tk` for each batch entry: keys from there on are padding. They move no
#    position, and queries have no length: one that stands behind the last key is computed like any other, from what
#    its window still holds.
# 6. **The ends.** A place of the window before key 0 or behind the last key is not there. It is no key of zeros,
#    which would have weight, and it does not wrap around.
# 7. **scale** is a number without a default and multiplies $q$ or the product. There is no cap, bias or sink here.
# 8. **A row without keys** has $o = 0$ and $lse = -\infty$.
# 9. **lse** is the natural logarithm of $z$.
# 10. **Never read.** Padding, a key that no window of its head holds, and a query without keys may hold anything, NaN
#     included. A key that some query sees holds numbers.
# 11. **Types.** $o$ has the type of the inputs, lse may have a wider one. Exponentials are taken of $s - \max s$.
# 12. **Gradients** exist for $q$, $k$ and $v$. The loss may depend on $o$ and on lse. A pair outside the window sends
#     back exactly 0, and so does a row without keys.

# %% [markdown]
# ## Three tokens by hand
#
# Three queries, three keys, and a fourth slot that is padding and holds NaN. The offset is 1, so the queries stand at
# 1, 2 and 3; each sees one key before its own and none after. There are two heads with the same numbers, and only the
# dilation differs, 1 and 2. That is enough to meet every border: head 1, query 0 has a place at $-1$, and query 2
# stands on the padding.

# %%
q = np.array([[1.0, -0.5], [0.5, 2.0], [-1.5, 0.25]])
k = np.array([[2.0, 1.0], [-1.0, 0.5], [1.5, 1.25], [np.nan, np.nan]])
v = np.array([[1.0, 2.0, -1.0], [3.0, -2.0, 0.5], [-0.5, 4.0, 2.0], [np.nan, np.nan, np.nan]])
left, right, dilations, offset, length, scale = 1, 0, (1, 2), 1, 3, 0.75

print("scale q k^T", scale * q @ k[:3].T, sep="\n")
P, o, lse = {}, np.zeros((2, 3, 3)), np.zeros((2, 3))
for h, D in enumerate(dilations):
    for i in range(3):
        places = [i + offset + t * D for t in range(-left, right + 1)]
        s = {j: scale * q[i] @ k[j] for j in places if 0 <= j < length}
        m = max(s.values())
        z = sum(np.exp(s[j] - m) for j in s)
        for j in s:
            P[h, i, j] = np.exp(s[j] - m) / z
            o[h, i] += P[h, i, j] * v[j]
        lse[h, i] = m + np.log(z)
        keys = ", ".join(f"key {j}: s = {s[j]:.4f}, P = {P[h, i, j]:.4f}" for j in s)
        print(f"\nhead {h}, query {i} at {i + offset}: places {places}\n  {keys}\n  max s = {m:.4f}, "
              f"z exp(-max s) = {z:.4f}\n  o = {o[h, i]}, lse = {lse[h, i]:.4f}")

# %% [markdown]
# The package says the same, in all its forms.

# %%
x = {name: np.stack([array, array])[None] for name, array in dict(q=q, k=k, v=v).items()}
x |= dict(lengths=np.array([length]), left=left, right=right, dilation=np.array(dilations), offset=offset, scale=scale)
for form in window.FORMS:
    agree(f"{form.__name__}: o", form(**x)[0][0], o)
    agree(f"{form.__name__}: lse", form(**x)[1][0], lse)

# %% [markdown]
# ## The code
#
# The definition makes the set and selects, and costs what dense attention costs.

# %%
plot.show(window, "visible", "dense")

# %% [markdown]
# The second form, `band`, never has a matrix of queries by keys. It holds the scores diagonal by diagonal: `gather`
# fetches, for each query, the key at distance $t D$, and zeros where there is none; the softmax then hides those
# places. This is the form for hardware that likes whole arrays.

# %%
plot.show(window, "shifts", "band_softmax", "band")
plot.show(core, "gather")

# %% [markdown]
# The third is written to be carried to another language: one head, scalars, one query at a time. It visits the keys
# of the window and nothing else. Mind its first line after the position: the first key is not $\max(0, p - left
# \thinspace D)$, but the first one *on the query's own grid*, and that starts at `p % dilation`. In Python this is
# never negative; in C the remainder of a negative position is, and wants `((p % D) + D) % D`.

# %%
plot.show(window.loop)

# %% [markdown]
# The rules that are easiest to break, run:

# %%
basic, gaps, padded, empty, hidden = (load_cases("window", name)[0] for name in (
    "basic", "dilated", "padding", "empty_rows", "never_read"))
y, shift = basic.inputs, basic.inputs["offset"]
later = window.dense(**y | dict(q=y["q"][:, :, 3:], offset=shift + 3))
agree("2: queries from 3 on, with offset + 3, are the rows from 3 on", later[0], basic.outputs["o"][:, :, 3:])
try:
    window.dense(**y | dict(left=-1))
except ValueError as error:
    print("3: ValueError:", error)
own = dict(left=0, right=0, offset=0, lengths=np.array([7, 7]))
agree("3: no key beside the own: o is v", window.dense(**y | own)[0], y["v"][:, :, :7], 0)
number, one, each = (window.dense(**y | dict(dilation=D))[0] for D in (3, np.array([3]), np.full(3, 3)))
agree("4: a dilation as a number, as (1,) and as (H,)", [number, one], each, 0)
reach = window.mask_of(gaps.inputs)[0, :, 4]
print("4: query 4 stands at 6; with dilation 2, 1, 3 it sees", *(np.flatnonzero(row).tolist() for row in reach))
print("4: from 5, two steps of 3 back: on its grid", [*range(5 % 3, 6, 3)], "and not", [*range(max(0, 5 - 6), 6, 3)])
short = padded.inputs["lengths"][1]
cut = {name: padded.inputs[name][1:, :, :short] for name in "kv"} | dict(q=padded.inputs["q"][1:])
alone = window.dense(**padded.inputs | cut | dict(lengths=np.array([short])))[0]
agree("5: padding is as if it were not there, and moves nothing", alone[0], padded.outputs["o"][1])
none = empty.outputs["lse"] == -np.inf
print("8: rows without keys:", none.sum((1, 2)).tolist(), "in the two batch entries")
agree("8: their o", empty.outputs["o"][none], 0, 0)
print("10: NaN among k and v:", *(int(np.isnan(hidden.inputs[name]).sum()) for name in "kv"))
zeros = hidden.inputs | {name: np.nan_to_num(hidden.inputs[name]) for name in "kv"}
for form in window.FORMS:
    agree(f"10: {form.__name__} does not read them", form(**hidden.inputs)[0], form(**zeros)[0], 0)
print("11: float16 in,", *(y.dtype for y in window.band(**basic.in_dtype("float16"))), "out")
gradients = window.vjp(**empty.cotangents | empty.inputs)
agree("12: queries without keys get no gradient", gradients["dq"][none], 0, 0)
agree("12: padding gets none", gradients["dv"][0, :, 6:], 0, 0)

# %% [markdown]
# ## Derivation: forward
#
# **From pairs to places.** In (9.1) let the sum run over the steps $t$ instead of the keys $j$. For a fixed query
# $t \mapsto p_i + t D$ is one to one, since $D \geq 1$; so each key of $N(i)$ is met exactly once, and what is met
# besides lies outside $0 \leq j \lt length$ and is hidden:
#
# $$
# S_{it} = \begin{cases} scale \thinspace q_i \cdot k_j & 0 \leq j \lt length \\ -\infty & \text{else} \end{cases}
# \qquad P_{it} = \exp(S_{it} - lse_i) \qquad
# o_i = \sum_t P_{it} v_j \qquad \text{with } j = p_i + t D
# \tag{9.2}
# $$
#
# ($P$ is the weight, $p_i$ the position.) The matrix $S$ has $T_q$ rows and one column for each step. Column $t$ is a
# diagonal of the full scores.
#
# **Open sides.** An open side needs no infinite number of columns. No place further left than that of key 0 seen
# from the last query is there, and no place further right than that of the last key seen from query 0. So it is
# enough to let $t$ run over
#
# $$
# -\min(left, \max(0, offset + T_q - 1)) \leq t \leq \min(right, \max(0, T_k - 1 - offset)),
# \qquad W = \text{the number of these } t
# \tag{9.3}
# $$
#
# with $left$ or $right = \infty$ for an open side. If nothing is cut, $W = left + 1 + right$.

# %%
Tq, Tk, sides = 4, 6, dict(left=2, right=1, dilation=1, offset=2)
t = np.arange(-2, 2)
i, j = masks.grid(Tq, Tk)
step = j - i - sides["offset"]
seen = masks.window(Tq, Tk, 2, 1, 1, sides["offset"])
key_of, query_of = i + sides["offset"] + t, j.T - sides["offset"] - t
agree("the steps that are needed", window.shifts(Tq, Tk, **sides).ravel(), t, 0)

figure, axes = plot.subplots(1, 3, size=(2.7, 3.3))
plot.group_map(axes[0], np.where(seen, step + 2, 6), np.where(seen, step.astype(str), ""),
               "Scores: a band of diagonals,\neach one step t", labels=("key j", "query i"))
plot.group_map(axes[1], np.where((key_of >= 0) & (key_of < Tk), t + 2, 6), key_of.astype(str),
               "Stored: a column for each step,\nin it the key j = p + t D", labels=("step t", "query i"))
plot.group_map(axes[2], np.where((query_of >= 0) & (query_of < Tq), t + 2, 6), query_of.astype(str),
               "Transposed: the query\ni = j - offset - t D", labels=("step t", "key j"))
for axis in axes[1:]:
    axis.set_xticks(range(4), t)
plot.save(figure, "09_local_windows_diagonals", """Three matrices in which each step t has its colour. Left: four
    queries by six keys, a band of four diagonals, steps -2 to 1, grey outside. Middle: the same pairs stored as
    four queries by four steps, in each cell the number of the key; one cell, key 6 of query 3, is grey: there is
    no such key. Right: six keys by four steps, in each cell the number of the query that sees the key by this
    step; nine cells, with numbers below 0 or above 3, are grey.""")

# %% [markdown]
# **How many pairs.** On the diagonal $t$ the query $i$ is there if $0 \leq i \lt T_q$ and its key if
# $0 \leq i + offset + t D \lt length$; both are bounds on $i$, so
#
# $$
# \lvert N \rvert = \sum_t \max \left( 0, \min(T_q, length - offset - t D) - \max(0, -offset - t D) \right)
# \tag{9.4}
# $$
#
# For one sequence, $T_q = T_k = length = T$ and $offset = 0$, the term is $T - \lvert t \rvert D$; if the window fits,
# $D \max(left, right) \leq T$, the sum over $t$ is
#
# $$
# \lvert N \rvert = T (left + 1 + right) - D \thinspace \frac{left (left + 1) + right (right + 1)}{2}
# \tag{9.5}
# $$
#
# and the second term, what is missing at the two ends, does not grow with $T$.

# %%
for name in "basic", "dilated", "padding", "open_left", "before_key_0", "decode":
    y = load_cases("window", name)[0].inputs
    (Tq, Tk), n = (y["q"].shape[2], y["k"].shape[2]), y["lengths"]
    away = y["offset"] + window.shifts(Tq, Tk, *(y[name] for name in ("left", "right", "dilation", "offset")))
    pairs = np.maximum(0, np.minimum(Tq, n - away) - np.maximum(0, -away)).sum(0).T
    agree(f"(9.4) {name}: pairs by formula {pairs.tolist()}", pairs, window.mask_of(y).sum((2, 3)), 0)
for T, l, r, D in (20, 3, 1, 1), (20, 3, 1, 4), (20, 0, 5, 4):
    agree(f"(9.5) T = {T}, left {l}, right {r}, dilation {D}",
          T * (l + 1 + r) - D * (l * (l + 1) + r * (r + 1)) // 2, masks.window(T, T, l, r, D).sum(), 0)

# %% [markdown]
# ## Beside dense softmax
#
# With the identity for $v$ the output *is* the matrix of weights. The same scores, without a window, with one, and
# with one that has gaps. Let $P$ and $o$ be the weights and the output of dense attention, $\bar P$ and $\bar o$ those
# of the window, $o'$ the output of all other keys by themselves, and $a_i$ the share of the dense weights that falls
# into the window. The window keeps the ratios and divides by $a_i$, and dense attention is the mixture of the two:
#
# $$
# a_i = \sum_{j \in N(i)} P_{ij} \qquad
# \bar P_{ij} = \frac{P_{ij}}{a_i} \text{ for } j \in N(i) \qquad
# o_i = a_i \thinspace \bar o_i + (1 - a_i) \thinspace o'_i
# \tag{9.6}
# $$
#
# So what a window gives up is $1 - a_i$, the weight it does not see.

# %%
T = 12
alike = dict(q=draw("q", (1, 1, T, 4)), k=draw("k", (1, 1, T, 4)), v=np.eye(T)[None, None], lengths=np.array([T]),
             offset=0, scale=0.25)
views = {"dense": {}, "left 2, right 1": dict(left=2, right=1), "... dilation 3": dict(left=2, right=1, dilation=3)}
panels = {name: (window.band(**alike | view)[0][0, 0], masks.window(T, T, **view)) for name, view in views.items()}
dense = panels["dense"][0]
for name, (weights, mask) in panels.items():
    a = (dense * mask).sum(1, keepdims=True)
    agree(f"(9.6) {name}: dense weights, the rest divided", weights, np.where(mask, dense / a, 0))
    others = sdpa.dense(*(alike[name] for name in "qkv"), mask=~mask, scale=0.25)[0][0, 0]
    agree("    ... and dense is the mixture", a * weights + (1 - a) * others, dense)
    print(f"    share seen by the rows: {a.min():.2f} to {a.max():.2f}")
figure = plot.attention_maps(panels, "A window cuts a band out of the dense weights and scales its rows up to one")
for axis in figure.axes[:-1]:
    axis.set(xticks=[], yticks=[])
plot.save(figure, "09_local_windows_weights", """Three maps of twelve by twelve weights from the same scores. Dense:
    weight everywhere, most of it below 0.3. Left 2, right 1: a band of four diagonals, the cells in it brighter than
    before, hatching elsewhere. Dilation 3: the four diagonals stand three apart.""")

# %% [markdown]
# ## Layers widen the view
#
# A sequence attends to itself, $T_q = T_k$ and $offset = 0$. In one layer token $i$ hears token $j$ if $j \in N(i)$. In
# two it hears whom its keys have heard: there is an $m$ with $m \in N(i)$ and $j \in N(m)$. That is the product of the
# boolean matrices, *or* of *ands*, and distances along the way add up. After $n$ equal layers
#
# $$
# N^n(i) = \lbrace i + t D : -n \thinspace left \leq t \leq n \thinspace right \rbrace
# \quad \text{has } n (left + right) + 1 \text{ keys, as far as they exist}
# \tag{9.7}
# $$
#
# The view grows by the same amount with each layer. With $D \gt 1$ in every layer it grows faster, but stays on the
# grid of the query: a fraction $1 / D$ of all tokens is ever seen, and the grids never talk. Two ways out. *Another
# dilation in each layer*: 1, 3, 9 with one key on each side are the digits of balanced ternary numbers, so three
# layers reach each of 27 distances, and each in exactly one way. *Another dilation in each head*, which is why the
# argument is one per head: one layer sees the union, and the heads meet when their outputs are mixed.

# %%
T = 27
stacks = {"dilation 1": [(1,)] * 3, "dilation 3": [(3,)] * 3, "dilation 1, 3, 9": [(1,), (3,), (9,)],
          "heads of 1 and 3": [(1, 3)] * 3}
options = dict(lengths=np.array([T]), left=1, right=1, offset=0, scale=0.25)


def through(x, stack):
    for D in stack: x = window.dense(*[x.repeat(len(D), 1)] * 3, dilation=np.array(D), **options)[0].mean(1)[:, None]
    return dict(x=x)


figure, axes = plot.subplots(2, 4, size=(2.1, 2.2))
for column, (name, stack) in zip(axes.T, stacks.items()):
    heard, paths, y = np.eye(T, dtype=bool), np.eye(T, dtype=int), dict(x=draw("x", (1, 1, T, 4)), stack=stack)
    for n, D in enumerate(stack, 1):
        one = np.logical_or.reduce([masks.window(T, T, 1, 1, d) for d in D])
        heard, paths = one @ heard, one.astype(int) @ paths
        print(f"{name}, layer {n}: token 13 hears {heard[13].sum()} tokens, by at most {paths[13].max()} paths")
        if n != 2:
            plot.mask_map(column[n // 2], heard, f"{name}\nlayer {n}: {heard[13].sum()} keys")
            column[n // 2].axhline(13, color=plot.COLOURS[1], linewidth=0.7)
    moves = [complex_step(through, y, {"x": np.eye(T)[m][:, None] + 0 * y["x"]})["x"][0, 0] for m in range(T)]
    agree("    the output moves with exactly these tokens", (np.stack(moves, 1) != 0).any(2), heard, 0)
for axis in axes.flat:
    axis.set(xticks=[], yticks=[])
    axis.label_outer()
figure.suptitle("Three layers of three keys: 7 tokens, 7 with gaps, or all 27")
plot.save(figure, "09_local_windows_layers", """Eight boolean maps of 27 by 27 tokens, the middle query marked: four
    stacks, after one layer above, after three below. One key each side: a band of 3, then of 7 keys. Dilation 3 in each
    layer: as many, but every third diagonal only. Dilation 1, 3 and 9: a band of 3, then the middle query sees all 27.
    Two heads of dilation 1 and 3: 5 keys, then 17, with a gap before the outermost diagonals.""")

# %% [markdown]
# The check under each stack is not about masks. It runs the layers and differentiates the output by every input
# token: what the boolean product calls unseen has derivative 0, to the last bit, and what it calls seen has not. The
# notches in the third stack are the price of one way each: where it leads across an end, there is no other.
#
# **Two layers are enough for everything.** Child et al. give one head (or layer) the last $l$ keys and another every
# $l$-th key before the own, open to the left. Every distance back is $a + l b$ with $0 \leq a \lt l$ in exactly one
# way, so two such layers see all that causal attention sees. They touch about $T l + T^2 / (2 l)$ pairs, which is
# $1.5 \thinspace T \sqrt{T}$ at $l = \sqrt{T}$.

# %%
for T, l in (16, 4), (64, 8), (256, 16):
    near, far = masks.window(T, T, l - 1, 0), masks.window(T, T, None, 0, l)
    agree(f"T = {T}: paths of two layers, one for each causal pair", near.astype(int) @ far, masks.causal(T, T), 0)
    both = near.sum() + far.sum()
    print(f"    {both} pairs, {both / T ** 1.5:.2f} T sqrt(T); causal has {masks.causal(T, T).sum()}")

# %% [markdown]
# **Seen is not the same as heard well.** Let all scores be equal, so that a layer is a moving average over $W = left +
# 1 + right$ keys. The distance of the token that ends up in the output is then a sum of $n$ independent, uniform
# steps. One such step has mean $\mu = (right - left) / 2$ and variance $(W^2 - 1) / 12$ and so
#
# $$
# \text{reach: } n \thinspace left \text{ back}, \quad n \thinspace right \text{ ahead} \qquad
# \text{weight: mean } n \thinspace \frac{right - left}{2}, \quad
# \text{standard deviation } \sqrt{n \thinspace \frac{W^2 - 1}{12}}
# \tag{9.8}
# $$
#
# The reach grows like $n$, what arrives spreads like $\sqrt{n}$. Equal scores are one example of weights and no law;
# but "32 layers of 4096 keys see 131 thousand tokens" is a statement about the reach, and about nothing else.

# %%
T, middle, distance = 97, 48, np.arange(97) - 48
flat = dict(q=np.zeros((1, 1, T, 4)), k=draw("k", (1, 1, T, 4)), lengths=np.array([T]), offset=0, scale=0.5)
figure, axis = plot.subplots(size=(5.6, 3.0))
depths = np.array([1, 2, 4, 8])
for l, r in (3, 3), (6, 0):
    average, W = window.steps(**flat, left=l, right=r)[1][0, 0], l + 1 + r
    shares = [np.linalg.matrix_power(average, n)[middle] for n in depths]
    means = np.array([weight @ distance for weight in shares])
    deviations = [np.sqrt(weight @ (distance - mean) ** 2) for weight, mean in zip(shares, means)]
    ends = [[distance[weight > 0].min(), distance[weight > 0].max()] for weight in shares]
    agree(f"left {l}, right {r}, 1, 2, 4 and 8 layers: means {means.round(2)}", means, depths * (r - l) / 2)
    agree(f"    ... deviations {np.round(deviations, 2)}", deviations, np.sqrt(depths * (W * W - 1) / 12))
    agree(f"    ... reach {np.array(ends).tolist()}", ends, np.outer(depths, [-l, r]), 0)
    for n, weight, colour, line in zip(depths, shares, plot.COLOURS[:3] + plot.COLOURS[6:], ("-", "--", "-.", ":")):
        if l == r:
            there = abs(distance) <= n * l + 1
            axis.step(distance[there], weight[there], where="mid", color=colour, linewidth=1.4, linestyle=line,
                      label=f"layers: {n}, reach {n * l}")
axis.set(title="The reach grows with the number of layers,\nwhat arrives spreads with its root",
         xlabel="distance j - i of the token (left 3, right 3)", ylabel="its share in the output")
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False)
print(f"32 layers of 4096 keys with the own reach {32 * 4095} back, of 4096 before the own {32 * 4096};")
print(f"with equal scores the mean is {32 * 4095 / 2:.0f} back, the deviation {np.sqrt(32 * (4096 ** 2 - 1) / 12):.0f}")
plot.save(figure, "09_local_windows_spread", """Share of a token in the output against its distance, for equal scores
    and three keys on each side. One layer: a box of height one seventh. Two: a triangle out to 6. Four and eight: bells
    around 0, lower and wider; after eight layers the reach is 24 on each side, but the bell is nearly 0 beyond 15.""")

# %% [markdown]
# ## Forms that agree
#
# Three texts, one formula, number system by number system: the largest error against the certified value. `balls` is
# the radius that interval arithmetic leaves around the exact value. A form that leaves the *budget* of a type fails
# the cell ([how to read this book](00_how_to_read.ipynb)); only the loop in float16, which adds one by one, is shown
# and not judged.

# %%
for name in "dilated", "padding", "never_read":
    print(f"{name}: {load_cases('window', name)[0].why}")
    forms_table("window", name)
    print()

# %% [markdown]
# ## What it costs
#
# A multiply-add is two operations. For each place of the window `band` spends $2 d_k$ on the product and its sum, 1
# on the scale, 3 in the softmax (minus $m$, sum, division), $2 d_v$ on the values; and 3 for each row ($z$ and lse).
# Exponentials and logarithms are counted apart:
#
# $$
# flops = B H T_q \left( W (2 d_k + 2 d_v + 4) + 3 \right) \qquad exps = B H T_q (W + 2)
# \tag{9.9}
# $$
#
# with the $W$ of (9.3), against $B H \left( 2 T_q T_k (d_k + d_v) + 3 T_q T_k + T_q d_k + 3 T_q \right)$ of the dense
# form. The loop touches no place that is not there: its pairs are $\lvert N \rvert$ of (9.4). An array that notes
# what is read says so.

# %%
def inputs(B, H, Tq, Tk, dk, dv, **more):
    x = dict(q=draw("q", (B, H, Tq, dk)), k=draw("k", (B, H, Tk, dk)), v=draw("v", (B, H, Tk, dv)), scale=0.5, offset=0)
    return x | dict(lengths=np.full(B, Tk)) | more


class Watched(np.ndarray):
    def __getitem__(self, place): return reads.append(place[0]) or super().__getitem__(place)


rows = []
several = {(1, 1, 12, 12, 3, 5): dict(left=2, right=1), (2, 3, 7, 9, 4, 5): dict(left=1, right=2, dilation=3),
           (2, 1, 40, 40, 4, 4): dict(left=7, right=0), (1, 1, 16, 16, 2, 2): dict(right=0, dilation=4)}
for shape, sides in several.items():
    (B, H, Tq, Tk, dk, dv), y, reads = shape, inputs(*shape, **sides), []
    band, dense = count(window.band, **y), count(window.dense, **y)
    W = len(window.shifts(Tq, Tk, *(y.get(name, default) for name, default in dict(
        left=None, right=None, dilation=1, offset=0).items())))
    one = inputs(1, 1, *shape[2:]) | dict(left=None, right=None, dilation=1) | sides
    one = {name: a[0, 0] if name in "qkv" else a for name, a in one.items()} | dict(lengths=Tk)
    window.loop.__wrapped__(**one | dict(k=one["k"].view(Watched)))
    flops, exps = B * H * Tq * (W * (2 * dk + 2 * dv + 4) + 3), B * H * Tq * (W + 2)
    whole = B * H * (2 * Tq * Tk * (dk + dv) + 3 * Tq * Tk + Tq * dk + 3 * Tq)
    counted = band["flops"], band["exp"], dense["flops"]
    agree(f"W = {W}: (9.9), its exponentials, dense", counted, [flops, exps, whole], 0)
    agree("    ... keys read by the loop", len(reads) / dk, masks.window(Tq, Tk, **sides, anchor="top-left").sum(), 0)
    rows.append((shape, W, dense["flops"], band["flops"], Tq * Tk, Tq * W, len(reads) // dk))
print(table(rows, ("B, H, Tq, Tk, dk, dv", "W", "dense flops", "band flops", "pairs a head", "band", "loop")))

# %% [markdown]
# The last line is a warning: with an open side and a large dilation most of the band's $W$ places lie outside, and
# the band costs more than the square. It steps as far as `Tk` allows, not as far as `Tk` / $D$. Whoever has open,
# dilated windows takes the loop, or the tokens of one grid at a time (see the relations).
#
# Growth and crossover: 16 keys on each side, $W = 33$, $d_k = d_v = 16$. Per row, dense costs $67 \thinspace T + 19$
# and the band $68 \thinspace W + 3$, so the band is cheaper from $T = W + 1$ on. Up to $T = 17$ the window hides
# nothing, and the band, which has $2 T - 1$ columns, computes nearly every pair twice over for nothing.

# %%
T, w, d = [8, 16, 32, 64, 128, 256, 512], 16, 16
work = lambda form, t: count(form, **inputs(1, 1, t, t, d, d, left=w, right=w))["flops"]
dense, band = ([work(form, t) for t in T] for form in (window.dense, window.band))
columns = [2 * min(w, t - 1) + 1 for t in T]
touched = [int(masks.window(t, t, w, w).sum()) for t in T]
cheaper = [t for t in range(2, 48) if work(window.band, t) < work(window.dense, t)]
hides = [t for t in range(2, 48) if not masks.window(t, t, w, w).all()]
agree("the band is cheaper from T = W + 1 on", cheaper, np.arange(2 * w + 2, 48), 0)
agree("the window hides something from T = w + 2 on", hides, np.arange(w + 2, 48), 0)
agree("twice the tokens: four times the work for dense", dense[-1] / dense[-2], 4, 0.01)
agree("... and twice for the band", band[-1] / band[-2], 2, 0)
agree("(9.5) pairs", touched[2:], [t * 33 - w * (w + 1) for t in T[2:]], 0)
y = inputs(1, 1, 64, 64, d, d)
held = window.band_softmax(y["q"], y["k"], np.arange(64), window.shifts(64, 64, w, w, 1, 0), y["lengths"], 0.5)[0].size
agree("T = 64: weights that the band holds, T W", held, 64 * 33, 0)
print(f"at T = 512: {dense[-1] / band[-1]:.1f} times fewer flops, {T[-1] ** 2 / touched[-1]:.1f} times fewer pairs")

figure, axes = plot.subplots(1, 2, size=(4.1, 3.2))
plot.lines(axes[0], T, dict(dense=dense, band=band), "tokens T", "flops counted", "Cheaper from T = W + 1 on")
plot.lines(axes[1], T, {"dense: T T": [t * t for t in T], "band: T W": [t * c for t, c in zip(T, columns)],
                        "loop: |N|": touched}, "tokens T", "places touched", "A straight line once the window fits")
for axis in axes:
    axis.axvline(2 * w + 1, color="0.6", linewidth=0.8, linestyle="--")
    axis.text(2 * w + 1, 0.02, " T = W", color="0.35", transform=axis.get_xaxis_transform())
    axis.minorticks_off()
plot.save(figure, "09_local_windows_cost", """Two log-log plots over 8 to 512 tokens for a window of 16 keys on each
    side. Left, counted flops: dense rises with the square of T, the band starts above it, crosses it at T = W, marked
    by a dashed line, and goes on with slope one. Right, places touched: the loop lies on the dense curve up to 17
    tokens and leaves it below the band, which it approaches as T grows.""")

# %% [markdown]
# Memory follows the same numbers: the band keeps $T_q W$ weights in place of $T_q T_k$, and during generation only
# the last $left \cdot D$ keys and values need to be kept at all. That is the ring of
# [chapter 4](04_gqa_and_kv_cache.ipynb).
#
# ## Derivation: backward
#
# Take one row. From $P_l = \exp(s_l - lse)$ and $\partial \thinspace lse / \partial s_j = \exp(s_j) / z = P_j$ follows
# $\partial P_l / \partial s_j = P_l ([l = j] - P_j)$. A loss that depends on $o = \sum_l P_l v_l$ and on lse, with
# derivatives $do$ and $dlse$, therefore has $dP_l = do \cdot v_l$ and, for keys of $N(i)$,
#
# $$
# ds_{ij} = \sum_{l \in N(i)} dP_{il} P_{il} ([l = j] - P_{ij}) + dlse_i P_{ij}
# = P_{ij} \left( dP_{ij} - \sum_{l \in N(i)} P_{il} dP_{il} + dlse_i \right)
# \tag{9.10}
# $$
#
# All sums are over the row's own places, so this is as wide as the band. Queries gather as in the forward:
#
# $$
# dq_i = scale \sum_t ds_{it} \thinspace k_{p_i + t D}
# \tag{9.11}
# $$
#
# Keys and values collect from the queries that see them. Which are those? $j = i + offset + t D$ says
# $i = j - offset - t D$: on each diagonal exactly one query, or none. So what looks like a scatter is a gather again,
#
# $$
# dk_j = scale \sum_t ds_{it} \thinspace q_i \qquad
# dv_j = \sum_t P_{it} \thinspace do_i \qquad \text{with } i = j - offset - t D
# \tag{9.12}
# $$
#
# and zeros where that query does not exist: no two threads ever add to the same place. Seen from the keys, it is a
# window with left and right exchanged and the offset negative: the transpose of a band is a band.

# %%
plot.show(window.vjp)
for Tq, Tk, l, r, D, shift in (5, 7, 2, 1, 1, 2), (6, 4, 1, 3, 2, -3), (8, 8, None, 1, 3, 0):
    agree(f"transposed: left {l}, right {r}, dilation {D}, offset {shift}",
          masks.window(Tq, Tk, l, r, D, shift).T, masks.window(Tk, Tq, r, l, D, -shift), 0)

# %% [markdown]
# By hand, for the three tokens, pair by pair, with cotangents that are not constant:

# %%
do, dlse = np.array([[0.5, -1.0, 0.25], [1.5, 0.75, -0.5], [-0.25, 1.25, 2.0]]), np.array([0.25, -0.75, 1.5])
by_hand = dict(dq=np.zeros((2, 3, 2)), dk=np.zeros((2, 4, 2)), dv=np.zeros((2, 4, 3)))
for h, i, j in P:
    row = sum(P[h, i, l] * do[i] @ v[l] for l in range(3) if (h, i, l) in P) - dlse[i]
    ds = P[h, i, j] * (do[i] @ v[j] - row)
    print(f"head {h}, query {i}, key {j}: dP = {do[i] @ v[j]:7.4f}, row = {row:7.4f}, ds = {ds:7.4f}")
    by_hand["dq"][h, i] += scale * ds * k[j]
    by_hand["dk"][h, j] += scale * ds * q[i]
    by_hand["dv"][h, j] += P[h, i, j] * do[i]
for name, gradient in window.vjp(np.stack([do, do])[None], np.stack([dlse, dlse])[None], **x).items():
    print(f"{name} of head 1", by_hand[name][1], sep="\n")
    agree(f"{name} by hand, both heads", by_hand[name], gradient[0])

# %% [markdown]
# Query 2 of either head has one key, so its weight is 1 whatever the score: of $ds$ only dlse is left. Now against a
# complex step of the definition along a fixed direction in each input, for gaps, padding and rows without keys; and
# three identities that need no oracle.

# %%
for name in "dilated", "padding", "empty_rows":
    print(f"{name}: {load_cases('window', name)[0].why}")
    gradient_table("window", name)
    print()
y, gradient = gaps.inputs, window.vjp(**gaps.cotangents | gaps.inputs)
agree("q . dq = k . dk, head by head", (y["q"] * gradient["dq"]).sum((2, 3)), (y["k"] * gradient["dk"]).sum((2, 3)))
agree("rows sum to one: as much dv as do", gradient["dv"].sum(2), gaps.cotangents["do"].sum(2))
constant = window.vjp(**gaps.cotangents | y | dict(k=y["k"] * 0 + y["k"][:, :, :1], dlse=0 * gaps.cotangents["dlse"]))
agree("equal keys: moving q moves no weight, dq = 0", constant["dq"], 0)

# %% [markdown]
# Its cost, counted like the forward's: the weights anew, $dP$, five operations for $ds$, and three gathers that
# multiply and add, of which those for keys and values add up over $T_k$. For $d_k = d_v$ it is two and a half forwards,
# as in dense attention.
#
# $$
# flops = B H \left( T_q \left( W (5 d_k + 3 d_v + 9) + d_k + 3 \right) + T_k \left( W (d_k + d_v) + d_k \right) \right)
# \tag{9.13}
# $$

# %%
for shape in list(several)[:2]:
    (B, H, Tq, Tk, dk, dv), y, W = shape, inputs(*shape, **several[shape]), 4
    counted = count(window.vjp, do=np.ones((B, H, Tq, dv)), dlse=np.ones((B, H, Tq)), **y)["flops"]
    flops = B * H * (Tq * (W * (5 * dk + 3 * dv + 9) + dk + 3) + Tk * (W * (dk + dv) + dk))
    agree(f"(9.13) {flops} flops", counted, flops, 0)
for d in 4, 16, 64:
    y = inputs(1, 1, 64, 64, d, d, left=8, right=8)
    backward = count(window.vjp, do=y["v"], dlse=np.ones((1, 1, 64)), **y)["flops"]
    print(f"d = {d:2}: the backward takes {backward / count(window.band, **y)['flops']:.2f} times the flops")

# %% [markdown]
# ## What goes wrong
#
# Each of these is a mistake someone made, written as code in `window.BUGS` and `window.VJP_BUGS`. Each is caught by a
# golden case, and each is told from all others by its numbers alone.

# %%
mistakes = window.BUGS | window.VJP_BUGS
print(table([(slug, sentence) for slug, (sentence, _) in mistakes.items()], ("mistake", "what is wrong")))

# %% [markdown]
# With the identity for $v$ each mistake shows its weights. Nine queries over eleven keys from the bottom right, three
# steps to the left, one to the right, dilation 2, equal scores.

# %%
small = inputs(1, 1, 9, 11, 4, 11, left=3, right=1, dilation=np.array([2]), offset=2)
small |= dict(q=0 * small["q"], v=np.eye(11)[None, None])
shown = ("window_counts_self", "window_mirrored", "window_top_left", "window_in_blocks", "dilation_in_tokens",
         "dilation_from_key_0", "borders_wrap", "borders_weigh")
panels = {"right": (window.dense(**small)[0][0, 0], window.mask_of(small)[0, 0])}
for slug in shown:
    weights = window.BUGS[slug][1](small)[0][0, 0]
    panels[slug] = weights, weights > 0
    print(f"{slug:20} keys per query {(weights > 0).sum(1)}, smallest row sum {weights.sum(1).min():.2f}")
figure = plot.attention_maps(panels, "One window, eight mistakes: the weights they give")
for axis in figure.axes[:-1]:
    axis.set(xticks=[], yticks=[])
    axis.label_outer()
plot.save(figure, "09_local_windows_mistakes", """Nine maps of nine queries by eleven keys, all scores equal. Right:
    five diagonals two apart, from three steps before the own key to one after it. Counts self: only three. Mirrored:
    the long side is after the own key. Top left: the band stands two keys further left. In blocks: solid steps
    without gaps. In tokens: two diagonals, the own and one before. From key 0: columns, the keys with even numbers,
    so in odd rows the query's own key is missing. Wrap: more diagonals in the corners. Borders weigh: the right
    cells, too light in the first and the last rows.""")

# %% [markdown]
# A comfortable test sees little of this. Below, the mistakes that give the *right* answer on one: eight tokens attend
# to themselves, two keys each side, no gaps, no padding. Then one thing at a time is made harder, then all.

# %%
easy = inputs(2, 2, 8, 8, 4, 5, left=2, right=2, dilation=np.array([1]))
left3, dilated, moved = dict(left=3), dict(dilation=np.array([2, 1])), dict(offset=1)
short = dict(lengths=np.array([8, 5]))
tests = {"comfortable": {}, "left 3": left3, "dilation 2 and 1": dilated, "offset 1": moved, "lengths 8 and 5": short,
         "all of these": left3 | dilated | moved | short}
rows = []
for name, change in tests.items():
    y = easy | change
    passed = [slug for slug, (_, wrong) in window.BUGS.items() if all(map(np.allclose, wrong(y), window.dense(**y)))]
    rows.append((name, len(passed), ", ".join(passed[:5]) + (", ..." if len(passed) > 5 else "")))
print(table(rows, ("test", "pass", f"of {len(window.BUGS)} mistakes, the right answer")))

# %% [markdown]
# The last ones want a side of 0, more tokens than whole windows, a window longer than the sequence, and NaN in the
# padding. The golden cases have all of it.
#
# **One wrong port, caught live.** The condition of a dilated window, as it is read off a picture: "no further than
# left and right, and a multiple of the dilation". It is right for every head with dilation 1.

# %%
# exercise
def port(q, k, v, lengths, left, right, dilation, offset, scale):
    away = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] - offset
    keep = (away % np.reshape(dilation, (-1, 1, 1)) == 0) & masks.padding(lengths, k.shape[2])
    keep = keep & (away >= (-np.inf if left is None else -left)) & (away <= (np.inf if right is None else right))
    p, lse = core.softmax(scale * q @ core.unread(k, keep).swapaxes(-1, -2), keep)
    return p @ core.unread(v, keep), lse


right = check_exercise("window", port)

# %% [markdown]
# ## Where code in the wild differs
#
# **One word, seven meanings.** "A window of 4" is, depending on who says it, one of the seven sets below. Each line is
# run three times: the predicate of the source as a mask, our window with the translated sides, and a probe that is
# given the function and no mask, and finds out what it sees by calling it. A chunk is not a window: what a query sees
# depends on where in its chunk it stands, and no pair of sides translates it.

# %%
T, w, l, r = 20, 4, 3, 1
readings = [
    ("Longformer's paper, transformers: w / 2 each side", lambda i, j: abs(i - j) <= w // 2, (w // 2, w // 2)),
    ("Longformer's code, transformers bidirectional: w each side", lambda i, j: abs(i - j) <= w, (w, w)),
    ("text of Mistral 7B: w before the own", lambda i, j: (i - w <= j) & (j <= i), (w, 0)),
    ("transformers sliding_window, GPT-Neo: w with the own", lambda i, j: (i - w < j) & (j <= i), (w - 1, 0)),
    ("flash-attention, jax, ONNX: (l, r) = (3, 1)", lambda i, j: (i - l <= j) & (j <= i + r), (l, r)),
    ("local-attention, Reformer: own chunk and its neighbours", lambda i, j: abs(i // w - j // w) <= 1, None),
    ("transformers, chunked: own chunk, causal", lambda i, j: (i // w == j // w) & (j <= i), None)]
rows, sets = [], []
for who, theirs, ours in readings:
    box = Box(lambda q, k, v: sdpa.dense(q, k, v, theirs(*masks.grid(q.shape[2], k.shape[2])), scale=0.5)[0])
    assert experiments.linear(box).value == "yes"
    found, mask = experiments.support(box).value.removesuffix(", anchor top-left"), theirs(*masks.grid(T, T))
    rows.append((who, ours or "none", *(int(mask[row].sum()) for row in (0, 9, 19)), found))
    sets.append(mask)
    if ours:
        agree(f"{who}: ours is {ours}", masks.window(T, T, *ours), mask, 0)
print()
print(table(rows, ("reading of w = 4", "(left, right)", "keys of query 0", "9", "19", "a probe says")))

figure, axes = plot.subplots(2, 4, size=(2.1, 2.2))
names = ("w / 2 each side", "w each side", "w before the own", "w with the own", "l before, r after",
         "chunk, neighbours", "own chunk, causal")
for n, (axis, mask, name) in enumerate(zip(axes.flat, sets, names)):
    plot.mask_map(axis, mask, f"{n + 1}: {name}")
    axis.axhline(9, color=plot.COLOURS[1], linewidth=0.8)
    axis.title.set_fontsize(9)
    axis.set(xticks=[], yticks=[])
    axis.label_outer()
seen = [int(mask[9].sum()) for mask in sets]
axes[1, 3].barh(range(1, 8), seen, color=plot.COLOURS[0])
for n, keys in enumerate(seen, 1):
    axes[1, 3].text(keys + 0.3, n, keys, va="center")
axes[1, 3].set(xlabel="keys of query 9", ylabel="reading", yticks=range(1, 8), xlim=(0, 14.5))
axes[1, 3].invert_yaxis()
axes[1, 3].spines[["top", "right"]].set_visible(False)
figure.suptitle("The same number, 4: a query in the middle sees from 2 to 12 keys")
plot.save(figure, "09_local_windows_meanings", """Seven masks of 20 by 20 tokens, query 9 marked, and a bar chart of the
    keys it sees. Half of w each side: a band of 5. w each side: a band of 9. w before the own: 5, below the diagonal. w
    with the own: 4. Three before and one after: 5. Chunk and neighbours: overlapping squares of 12. Own chunk, causal:
    five small triangles, 2 keys for query 9.""")

# %% [markdown]
# Taken for one another, the readings are named mistakes, so a port that inherits one is told which. Each line has the
# (left, right) that was meant, and the mistake that turns it into another reading.

# %%
meant = inputs(1, 1, T, T, 4, 4, dilation=1)
taken = {1: ((w, w), "window_halved"), 2: ((w, 0), "window_symmetric"), 3: ((w - 1, 0), "window_one_more"),
         4: ((w, 0), "window_counts_self"), 6: ((w, w), "window_in_blocks")}
for n, (sides, slug) in taken.items():
    wrong = window.BUGS[slug][1](meant | dict(zip(("left", "right"), sides)))[0]
    under = sdpa.dense(*(meant[name] for name in "qkv"), mask=sets[n - 1], scale=0.5)[0]
    agree(f"{sides} meant, {slug}: reading {n}", wrong, under)

# %% [markdown]
# More differences; the cell below runs the first for a decoding step with nine keys, and the last.
#
# | what | here | elsewhere |
# |---|---|---|
# | offset | given | 0 in jax, whatever the sizes; the length of the past in ONNX; $T_k - T_q$ in flash-attention |
# | an open side | None | $-1$ in flash-attention and ONNX; here a negative number raises |
# | one number | both sides are named | in jax one number is both sides, `(w, w)` |
# | gaps | one per head | one per head in the kernel of Longformer's authors; none in transformers, jax, ONNX |
# | the ends | places are not there | the local attention of Reformer in transformers wraps around, if not causal |
#
# The offset is the costly one. A decoded token that stands at 0 sees the very first key, and nothing fails.

# %%
decode = inputs(1, 1, 1, 9, 4, 4, left=2, right=0, dilation=1) | dict(v=np.eye(9)[None, None])
for who, shift in {"jax: 0": 0, "flash-attention: Tk - Tq": 8, "ONNX, with a past of 8 keys": 8}.items():
    print(f"{who}: keys", np.flatnonzero(window.dense(**decode | dict(offset=shift))[0][0, 0, 0]))
agree("the first is a named mistake of the second", window.BUGS["window_top_left"][1](decode | dict(offset=8))[0],
      window.dense(**decode)[0], 0)
ends = inputs(1, 1, 6, 6, 4, 6, left=1, right=0, dilation=np.array([1])) | dict(v=np.eye(6)[None, None])
for slug in "borders_wrap", "borders_weigh":
    print(f"{slug}: weights of query 0", window.BUGS[slug][1](ends)[0][0, 0, 0])
print("right: weights of query 0", window.dense(**ends)[0][0, 0, 0])

# %% [markdown]
# ## Relations
#
# What a window becomes at its borders, whose special case it is, and how it may be cut.

# %%
T = 9
y = inputs(2, 3, T, T, 4, 5)
plain = {name: y[name] for name in ("q", "k", "v", "scale")}
view = lambda **more: window.band(**y | more)
agree("both sides open: scaled dot-product attention", view()[0], sdpa.dense(**plain)[0])
agree("open left, nothing right: causal", view(right=0)[0], sdpa.dense(**plain, mask=masks.causal(T, T))[0])
agree("as wide as the sequence: all of it", view(left=T - 1, right=T - 1)[0], sdpa.dense(**plain)[0])
agree("scale 0: lse is the log of the number of keys", view(left=2, right=1, scale=0.0)[1],
      np.broadcast_to(np.log(masks.window(T, T, 2, 1).sum(1)), (2, 3, T)))
one_segment = dict(query_segments=np.zeros((2, T), int), key_segments=np.zeros((2, T), int))
agree("masked attention with no other condition", view(left=2, right=1, dilation=2)[0], masked.dense(
    **plain, **one_segment, lengths=y["lengths"], anchor="top-left", left=2, right=1, dilation=2)[0])
none = dict(is_global=np.zeros((2, T), bool), keep=np.ones((2, T), bool))
agree("Longformer without global tokens", view(left=2, right=2)[0], longformer.dense(
    **plain, **{f"{name}_global": plain[name] for name in "qkv"}, **none, half_window=2)[0])
rings = {f"ring_{name}": np.zeros((2, 3, 4, y[short].shape[3])) for name, short in dict(key="k", value="v").items()}
agree("a ring of 4 slots: left 3, right 0", view(left=3, right=0)[0],
      ring_cache.dense(**plain, **rings, past_length=np.array([0, 0]))[0])

gapped, D = view(left=1, right=1, dilation=2)[0], 2
for grid in range(D):
    tokens = {name: y[name][:, :, grid::D] for name in "qkv"}
    alone = view(**tokens, lengths=np.full(2, tokens["k"].shape[2]), left=1, right=1)[0]
    agree(f"dilation 2 is dilation 1 on every other token, from {grid} on", gapped[:, :, grid::D], alone)
heads = view(left=2, right=1, dilation=np.array([2, 1, 3]))[0]
for h, D in enumerate((2, 1, 3)):
    alone = view(**{name: y[name][:, [h]] for name in "qkv"}, left=2, right=1, dilation=D)[0]
    agree(f"a dilation for each head: head {h} is as alone, with {D}", heads[:, [h]], alone)

whole, pieces = view(left=2, right=1)[0], []
for start in 0, 3, 6:
    low, high = max(0, start - 2), min(T, start + 3 + 1)
    piece = dict(q=y["q"][:, :, start:start + 3], k=y["k"][:, :, low:high], v=y["v"][:, :, low:high])
    pieces.append(view(**piece, lengths=np.full(2, high - low), offset=start - low, left=2, right=1)[0])
agree("cut into calls of three queries, each with the keys it needs", np.concatenate(pieces, 2), whole)

# %% [markdown]
# The last one is why the offset is an argument. A block of $n$ queries needs $n + (left + right) D$ keys and an offset
# that says where it stands among them, and then knows nothing of the rest of the sequence: long texts are processed
# so, and devices that hold a piece each need no more of their neighbours than $(left + right) D$ keys.
#
# ## In a box
#
# | | |
# |---|---|
# | formula | softmax over $j = i + offset + t D$, $-left \leq t \leq right$, $0 \leq j \lt length$ |
# | band | $S_{it} = scale \thinspace q_i \cdot k_j$, $j = p_i + t D$, places that do not exist hidden |
# | shapes | q (B, H, Tq, dk), k (B, H, Tk, dk), v (B, H, Tk, dv) to o (B, H, Tq, dv), lse (B, H, Tq); dilation (H,) |
# | backward | $ds = P (dP - \sum P \thinspace dP + dlse)$; keys gather from $i = j - offset - t D$ |
# | cost | $2 B H T_q W (d_k + d_v)$ flops, $W = left + 1 + right$; backward 2.5 times that; pays from $T = W + 1$ on |
# | memory | $B H T_q W$ weights; in generation the last $left \cdot D$ keys and values |
# | view | $n (left + right) + 1$ tokens after $n$ layers; all $3^n$ with dilations 1, 3, 9, ... |
# | use it | when what matters is near, or in most layers of a deep stack, with some dense or global ones between |
# | goes wrong | what $w$ counts; offset; dilation in tokens, from key 0; ends that weigh or wrap; rows without keys |
#
# ## Exercises
#
# Write each function, in place of the line that raises, and run the cell. `check_exercise` passes arguments by name
# and leaves out the cases that need arguments you do not take; if something is wrong it says where, and, if it is a
# mistake others made, which. From a shell the same is `attention-ref verify window --impl mymodule:attention`.
#
# **1. The definition.** Any way you like, a mask of queries by keys included. Mind the padding, the rows without keys
# and the keys that nobody sees.

# %%
# exercise
def windowed(q, k, v, lengths, left, right, dilation, offset, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("window", windowed)

# %% [markdown]
# **2. Without the square.** No array may have $T_q T_k$ entries. Go through the steps $t$ of the window, one at a
# time, and keep for every query a running maximum, a running sum and a running output, as in
# [chapter 5](05_online_softmax.ipynb). How far do you have to go on an open side?

# %%
# exercise
def streaming(q, k, v, lengths, left, right, dilation, offset, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("window", streaming)

# %% [markdown]
# **3. The backward, without a scatter.** A function that takes `do` and `dlse` is checked as a backward. Return
# `dict(dq=..., dk=..., dv=...)`, or some of them. `window.shifts`, `core.gather` and `core.softmax` may help, and
# `core.gather` is all that (9.12) asks for.

# %%
# exercise
def backward(do, dlse, q, k, v, lengths, left, right, dilation, offset, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("window", backward)

# %% [markdown]
# ## Answers
#
# **1.** Whole steps and their rest, so that gaps are counted from the query. `divmod` rounds down, for negative
# distances too.

# %%
# exercise
def windowed(q, k, v, lengths, left, right, dilation, offset, scale):
    Tq, Tk = q.shape[2], k.shape[2]
    t, rest = np.divmod(np.arange(Tk) - np.arange(Tq)[:, None] - offset, np.reshape(dilation, (-1, 1, 1)))
    keep = (rest == 0) & (np.arange(Tk) < lengths[:, None, None, None])
    keep = keep if left is None else keep & (t >= -left)
    keep = keep if right is None else keep & (t <= right)
    seen = keep.any(-2)[..., None]
    s = np.where(keep, scale * q @ np.where(seen, k, 0).swapaxes(-1, -2), -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(m == -np.inf, 0, m))
    z = e.sum(-1, keepdims=True)
    z, none = np.where(z == 0, 1, z), z == 0
    return e / z @ np.where(seen, v, 0), np.where(none, -np.inf, m + np.log(z))[..., 0]


assert check_exercise("window", windowed)

# %% [markdown]
# **2.** A place that does not exist is read at key 0 and then hidden by $-\infty$; the values are selected, not
# multiplied by 0, for key 0 may be padding. On an open side the distance of the farthest key is far enough. The sums
# are float64, whatever comes in.

# %%
# exercise
def streaming(q, k, v, lengths, left, right, dilation, offset, scale):
    (B, H, Tq, _), Tk, D = q.shape, k.shape[2], np.resize(dilation, q.shape[1])[:, None]
    p = np.arange(Tq) + offset
    before, after = max(0, offset + Tq - 1), max(0, Tk - 1 - offset)
    m, z, o = np.full((B, H, Tq), -np.inf), np.zeros((B, H, Tq)), np.zeros((B, H, Tq, v.shape[3]))
    first, last = before if left is None else min(left, before), after if right is None else min(right, after)
    for t in range(-first, last + 1):
        j = p + t * D
        there = (0 <= j) & (j < lengths[:, None, None])
        if not there.any():
            continue
        key, value = (np.take_along_axis(x, np.where(there, j, 0)[..., None], 2) for x in (k, v))
        a = np.where(there, (scale * q * key).sum(-1), -np.inf)
        higher = np.maximum(m, a)
        shift = np.where(higher == -np.inf, 0, higher)
        old, new = np.exp(m - shift), np.exp(a - shift)
        z = z * old + new
        o = o * old[..., None] + np.where(there[..., None], new[..., None] * value, 0)
        m = higher
    z, none = np.where(z == 0, 1, z), z == 0
    return (o / z[..., None]).astype(q.dtype), np.where(none, -np.inf, m + np.log(z))


assert check_exercise("window", streaming)

# %% [markdown]
# **3.** Each diagonal is read twice, from the queries and from the keys. Half precision is computed in float32.

# %%
# exercise
def backward(do, dlse, q, k, v, lengths, left, right, dilation, offset, scale):
    dtype, wide = q.dtype, np.result_type(q, np.float32)
    do, dlse, q, k, v = (y.astype(wide) for y in (do, dlse, q, k, v))
    real = masks.padding(lengths, k.shape[2]).swapaxes(-1, -2)
    k, v = np.where(real, k, 0), np.where(real, v, 0)
    away = window.shifts(q.shape[2], k.shape[2], left, right, dilation, offset)
    places = [np.arange(q.shape[2]) + offset + d for d in away]
    S = np.stack([(scale * q * core.gather(k, j)).sum(-1) for j in places], -1)
    P, lse = core.softmax(S, np.stack([(0 <= j) & (j < lengths[:, None, None]) for j in places], -1))
    q = np.where(lse[..., None] == -np.inf, 0, q)
    dP = np.stack([(do * core.gather(v, j)).sum(-1) for j in places], -1)
    ds = scale * P * (dP - (P * dP).sum(-1, keepdims=True) + dlse[..., None])
    dq, dk, dv = (np.zeros_like(y) for y in (q, k, v))
    for t, (d, j) in enumerate(zip(away, places)):
        i = np.arange(k.shape[2]) - offset - d
        dq += ds[..., [t]] * core.gather(k, j)
        dk += core.gather(ds[..., [t]] * q, i)
        dv += core.gather(P[..., [t]] * do, i)
    return dict(dq=dq.astype(dtype), dk=dk.astype(dtype), dv=dv.astype(dtype))


assert check_exercise("window", backward)

# %% [markdown]
# The three pass in every type that `verify` knows:

# %%
rows = []
for answer in windowed, streaming, backward:
    verdicts = {dtype: judge(answer, load_cases("window"), dtype)[0] for dtype in UNIT}
    asked = {dtype: [r for r in results if not r.unsupported] for dtype, results in verdicts.items()}
    rows.append((answer.__name__, *(f"{sum(r.passed for r in found)} of {len(found)}" for found in asked.values())))
    assert all(r.passed for found in asked.values() for r in found)
print(table(rows, ("answer", *UNIT)))

# %% [markdown]
# ## Sources
#
# - Beltagy et al. 2020, *Longformer*, arXiv:2004.05150: section 3.1, the window of $w / 2$ keys each side, its
#   dilation per head, and the receptive field of stacked layers.
# - Child et al. 2019, *Sparse transformers*, arXiv:1904.10509: section 4.3, the last $l$ keys and every $l$-th.
# - Jiang et al. 2023, *Mistral 7B*, arXiv:2310.06825: section 2, the window in words and the claim of 131 thousand
#   tokens.
# - Dao 2023, *FlashAttention-2*, arXiv:2307.08691, and its code: `window_size`, $-1$ is open, bottom right.
# - The local attention of Reformer (Kitaev et al. 2020, arXiv:2001.04451) and the sliding windows of GPT-Neo and
#   others as transformers 5.24 has them.
# - The comparisons with torch (`flex_attention` among them), jax and transformers run in the project's tests:
#   `make peers`.
