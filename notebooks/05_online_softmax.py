# %% [markdown]
# # Online softmax and flash attention
#
# **Two numbers per row, the running maximum and the running sum, are all that tiles need to remember: the result is
# the same for every tiling, and partial results merge through lse.**
#
# Softmax looks as if it needed the whole row of scores at once: first its maximum, then its sum, then the division.
# It does not. Take the keys tile by tile, in any order, and for every query keep a maximum $m$, a sum $z$ and an
# output $o$. A tile of keys $j$ with scores $s_{ij}$ turns them into
#
# $$
# \begin{aligned}
# m' &= \max(m, \max_j s_{ij}) & c &= \exp(m - m') & p_{ij} &= \exp(s_{ij} - m') \\
# z' &= c \thinspace z + \sum_j p_{ij} & o' &= c \thinspace o + \sum_j p_{ij} v_j
# \end{aligned}
# \tag{5.1}
# $$
#
# (a key that the query may not attend to has $s_{ij} = -\infty$). At the start $m = sink$, $z = 1$, $o = 0$; at the
# end the output is $o / z$ and $lse = m + \log z$. This is no approximation. It gives the attention of
# [chapter 1](01_scaled_dot_product.ipynb), in which no tile occurs,
#
# $$
# s_{ij} = scale \thinspace q_i \cdot k_j \qquad
# lse_i = \log \left( \sum_{j : mask_{ij}} \exp(s_{ij}) + \exp(sink) \right) \qquad
# o_i = \sum_{j : mask_{ij}} \exp(s_{ij} - lse_i) \thinspace v_j
# \tag{5.2}
# $$
#
# and it never holds more than one tile of scores. This chapter shows why, does the same for the backward, counts what
# is saved, and is enough to write flash attention in any language and to pass its golden cases.

# %%
import itertools
import tracemalloc
from functools import reduce

import numpy as np

from attention_ref import check, core, flash, load_cases, masks, plot, sdpa
from attention_ref.conformance.numbers import Numbers, complex_step, count
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw, tab

np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## The contract
#
# The shapes, as the file states them (an axis with `?` may be 1 or, in front, missing: it is broadcast), and what is
# to be read in one way only.

# %%
shapes = flash.INPUTS | flash.OUTPUTS
print(table([(name, text or "a number") for name, text in shapes.items()], ("name", "kind and shape")))
print()
print(table(flash.CONVENTIONS.items(), ("what", "convention")))

# %% [markdown]
# 1. **Shapes.** `B` batch entries and `H` heads, all independent of one another. `Tq` queries and `Tk` keys need not
#    be as many, keys `dk` and values `dv` need not be as wide, and `Tk` may be 0.
# 2. **scale** is a number without a default. It multiplies $q$ before the product is formed.
# 3. **mask** is boolean, True = may attend; it selects. A tiled form may be given a function instead: of query
#    positions $i$, a column, and key positions $j$, a row, that returns the tile. Positions count from the start of
#    the sequence, not of the tile. "Causal" is a mask; in the golden cases $j \leq i + T_k - T_q$ (bottom right).
# 4. **sink** is one logit per head that joins the denominator and has no value. It is not scaled or masked, and it is
#    counted once, however many tiles there are. $-\infty$ means none.
# 5. **query_block, key_block** are the sizes of the tiles, at least 1; they may exceed the lengths. The last tile is
#    short: nothing is filled up. They are in the arguments and not in the result.
# 6. **lse** is the natural logarithm in (5.2), the sink included.
# 7. **A row without keys** has $o = 0$ and $lse = -\infty$; with a sink, $o = 0$ and $lse = sink$. A tile without
#    keys for a row leaves the row as it was.
# 8. **Never read.** A key no query of its head may attend to, with its value, may hold anything, NaN included, and so
#    may a query that sees no key.
# 9. **Parts** that are merged are disjoint sets of keys, each with the natural lse of its own keys. A part without
#    keys has $lse = -\infty$, and its $o$ is not read. A sink belongs to exactly one part.
# 10. **Types.** Outputs have the type of the inputs. In half precision a sum of thousands of terms is not taken one
#     by one in half precision.
# 11. **Gradients** exist for $q, k, v$ and sink. The loss may depend on $o$ and on lse. A masked pair and a row
#     without keys send back nothing: exactly 0.
#
# There is no bias and no soft cap here. They belong to a score before anything in this chapter sees it, and change no
# line of it.

# %% [markdown]
# ## Four keys by hand
#
# One query, four keys in two tiles of two, no sink. The largest score is in the second tile, so that the maximum has
# to move: whoever tries this with the largest score first never needs to rescale, and learns nothing.

# %%
q = np.array([-0.5, 1.25])
k = np.array([[0.25, -0.75], [1.0, 0.0], [-1.0, 0.75], [-0.25, -1.25]])
v = np.array([[1.0, 0.0], [-1.0, 0.75], [-0.25, -1.25], [0.5, -0.5]])
scale = 2 ** -0.5

s = scale * k @ q
print("s", s, "\n")
m, z, o = -np.inf, 1.0, np.zeros(2)
for tile in [0, 1], [2, 3]:
    new = max(m, s[tile].max())
    c, p = np.exp(m - new), np.exp(s[tile] - new)
    m, z, o = new, c * z + p.sum(), c * o + p @ v[tile]
    print(f"keys {tile}: c = {c:.9f}   p = {p[0]:.9f} {p[1]:.9f}")
    print(f"    m = {m:.9f}   z = {z:.9f}   o = {o[0]:.9f} {o[1]:.9f}")
o, lse = o / z, m + np.log(z)
print(f"at the end: o = {o[0]:.9f} {o[1]:.9f}   lse = {lse:.9f}")

# %% [markdown]
# The first $c$ is 0 and wipes the 1 that $z$ started with; the second, 0.254, is the correction: what was gathered in
# the first tile was divided by $e^{-0.354}$, and it should have been divided by $e^{1.016}$.
#
# The same four keys, the other way: each tile attended on its own, by nobody who knows of the other, and then the two
# results merged. A part with the larger lse gets the larger weight.

# %%
o_p, lse_p = [], []
for tile in [0, 1], [2, 3]:
    e = np.exp(s[tile] - s[tile].max())
    o_p.append(e @ v[tile] / e.sum())
    lse_p.append(s[tile].max() + np.log(e.sum()))
    print(f"keys {tile} alone: o = {o_p[-1][0]:.9f} {o_p[-1][1]:.9f}   lse = {lse_p[-1]:.9f}")
total = np.log(np.exp(lse_p[0]) + np.exp(lse_p[1]))
w = np.exp(lse_p - total)
print(f"weights of the parts: {w[0]:.9f} {w[1]:.9f}")
print(f"merged: o = {(w @ o_p)[0]:.9f} {(w @ o_p)[1]:.9f}   lse = {total:.9f}")

four = dict(q=q[None, None, None], k=k[None, None], v=v[None, None], scale=scale)
o_ref, lse_ref = flash.dense(**four)
agree("tile by tile = the definition: o", o, o_ref[0, 0, 0])
agree("... lse", lse, lse_ref[0, 0, 0])
agree("merged = the definition: o", w @ o_p, o_ref[0, 0, 0])
agree("... lse", total, lse_ref[0, 0, 0])

# %% [markdown]
# ## The code
#
# The definition is (5.2) and knows no tiles. `online` is (5.1) with a loop over tiles of queries around it. `tile`
# cuts a tile out of a mask or asks a function for it; `unread` puts zeros where nobody looks, because
# $0 \cdot \mathrm{NaN}$ is NaN; `finite` will be explained below.

# %%
plot.show(flash, "dense", "online", "tile", "tiles", "finite")
plot.show(core, "per_row", "unread")

# %% [markdown]
# The form to carry to another language: scalars, one head, one query at a time, tiles of one key. Here $o$ is
# rescaled only when the maximum moves, since otherwise $c = 1$. (`.real` lets a complex step pass through a
# comparison; with real numbers it does nothing.)

# %%
plot.show(flash.loop)

# %% [markdown]
# ## Derivation: forward
#
# **One vector per set of keys.** Fix a query, and let $A$ be any set of keys. Write
#
# $$
# Z_A = \sum_{j \in A} e^{s_j} \qquad O_A = \sum_{j \in A} e^{s_j} v_j
# \tag{5.3}
# $$
#
# Attention to $A$ is $o = O_A / Z_A$ and $lse = \log Z_A$. Both are *sums over keys*, so for sets $A$ and $B$ without
# a common key
#
# $$
# Z_{A \cup B} = Z_A + Z_B \qquad O_{A \cup B} = O_A + O_B
# \tag{5.4}
# $$
#
# Everything in this chapter is (5.4). A sum may be cut anywhere and added up in any order, and so may attention. The
# empty set has $Z = 0$ and $O = 0$; a sink is one more member with $Z = e^{sink}$ and $O = 0$.
#
# **Why there is a maximum.** $e^{s}$ overflows: in half precision at $s = 12$, in single at 89. So the pair $Z, O$ is
# kept the way a computer keeps any number, as an exponent and a mantissa, with one exponent for both:
#
# $$
# Z = e^{m} z \qquad O = e^{m} o
# \tag{5.5}
# $$
#
# The same pair at another exponent $m'$ has the mantissas $c \thinspace z$ and $c \thinspace o$ with
# $c = e^{m - m'}$. To add two numbers with exponents, bring both to one exponent, then add the mantissas. The state
# $(m, z, o)$ at exponent $m'$ is $(c \thinspace z, c \thinspace o)$; a tile at exponent $m'$ is $\sum_j e^{s_j - m'}$
# and $\sum_j e^{s_j - m'} v_j$; their sum is (5.1). At the end the exponent cancels, $O / Z = o / z$, and
# $\log Z = m + \log z$.
#
# **Any exponent is right, and the maximum is safe.** No step asked what $m'$ is. If it is the largest score so far,
# then no exponential is above 1, and the largest term of $z$ is $e^0 = 1$, so that $1 \leq z \leq$ the number of keys
# so far (the sink counts as one): nothing overflows, the division is safe, $\log z \geq 0$.
#
# **The start.** $m = sink$, $z = 1$, $o = 0$ is (5.5) for the sink. If there is none, $m = -\infty$ is (5.5) for the
# empty set, $e^{-\infty} \cdot 1 = 0$, and the first key wipes the 1, with $c = e^{-\infty - m'} = 0$.

# %%
def state(m, keys): return m, np.exp(s[keys] - m).sum(), *(np.exp(s[keys] - m) @ v[keys])
def at(m, a): return m, *(np.exp(a[0] - m) * np.array(a[1:]))
def both(y): return np.concatenate([y[0], y[1][..., None]], axis=-1)


def add(a, b):
    m = max(a[0], b[0])
    return m, *(np.array(at(m, a)[1:]) + at(m, b)[1:])


every, first, second = range(4), [0, 1], [2, 3]
print("m, z, o of all keys:", np.array(state(s.max(), every)))
agree("(5.5) another exponent", at(0.75, state(-2.0, every)), state(0.75, every))
agree("(5.4) tiles add up", add(state(s[:2].max(), first), state(s[2:].max(), second)), state(s.max(), every))
for m in -2.0, 0.75, 5.0:
    _, z, *o = state(m, every)
    agree(f"exponent {m}: o / z is o", np.array(o) / z, o_ref[0, 0, 0])
    agree(f"exponent {m}: m + log z is lse", m + np.log(z), lse_ref[0, 0, 0])

with np.errstate(over="ignore"):
    print("e^12 in float16:", np.exp(np.float16(12)), "  e^89 in float32:", np.exp(np.float32(89)))
x = load_cases("flash", "sink")[0].inputs
logits = np.where(x["mask"], x["scale"] * x["q"] @ x["k"].swapaxes(2, 3), -np.inf)
m = np.maximum(logits.max(-1), x["sink"][:, None])
z = np.exp(flash.dense(**x)[1] - m)
print(f"z of every row lies from {z.min():.2f} to {z.max():.2f}, with 10 to 16 members")
assert (z >= 1).all() and (z <= 1 + x["mask"].sum(-1)).all()

# %% [markdown]
# **The tile without keys.** One hole is left. Under a mask the first tile of a row may be empty, and the second, and
# as long as neither a key nor a sink was met, $m' = m = -\infty$ and $m - m' = -\infty - (-\infty)$ is NaN. But any
# exponent is right, so take 0 for it: $c = e^{-\infty - 0} = 0$ and $p = e^{-\infty - 0} = 0$. That is `finite`. If
# it stays so to the end, $z$ is 0 and is replaced by 1: $o = 0 / 1$, $lse = -\infty + \log 1$, rule 7.

# %%
late = load_cases("flash", "first_tile_masked")[0]
dead = np.array([[not late.inputs["mask"][0, 0, i, j].any() for j in flash.tiles(15, 6)] for i in range(7)])
print("tiles without keys, row by row:", *(f"{i}: {row.sum()}" for i, row in enumerate(dead)))
with np.errstate(invalid="ignore"):
    print("unguarded: exp(-inf + inf) =", np.exp(np.float64(-np.inf) - -np.inf))
    wrong = flash.BUGS["first_tile_nan"][1](late.inputs)[0]
print("rows that it makes NaN:", np.flatnonzero(np.isnan(wrong[0, 0]).all(-1)))
agree("online", flash.online(**late.inputs)[0], late.outputs["o"])
empty = load_cases("flash", "empty_row")[0].inputs
o, lse = flash.online(**empty)
agree("7: no key in any tile: o", o[:, :, 1], 0, 0)
agree("7: ... and lse", lse[:, :, 1], -np.inf, 0)
o, lse = flash.online(**empty | dict(sink=np.array([0.375, -1.0, 2.0])))
agree("7: with a sink: o", o[:, :, 1], 0, 0)
agree("7: ... and lse", lse[:, :, 1], [0.375, -1.0, 2.0], 0)
hidden = load_cases("flash", "masked_nan")[0].inputs
zeros = hidden | {name: np.nan_to_num(hidden[name]) for name in "qkv"}
print("8: NaN among q, k, v:", *(int(np.isnan(hidden[name]).sum()) for name in "qkv"))
agree("8: ... and none is read", both(flash.online(**hidden)), both(flash.online(**zeros)), 0)

# %% [markdown]
# ## A row, tile by tile
#
# At every moment $o / z$ and $m + \log z$ are attention to the keys so far: an answer stands ready after each tile.
# Here are 32 keys in eight tiles. The keys grow, so that the maximum moves often. Where it moves by much, $z$ and the
# unfinished $o$ drop; $m + \log z$ never does, because more keys make a larger sum.

# %%
growing = dict(q=draw("q", (1, 1, 5, 4))[:, :, 4:], k=draw("k", (1, 1, 32, 4)) * np.linspace(0.25, 1.25, 32)[:, None],
               v=draw("v", (1, 1, 32, 3)) / 4, scale=0.5)
scores = (growing["scale"] * growing["q"] @ growing["k"].swapaxes(2, 3)).ravel()
seen = np.arange(4, 36, 4)
so_far = [flash.online(**growing | {name: growing[name][:, :, :n] for name in "kv"}, key_block=4) for n in seen]
m = np.array([scores[:n].max() for n in seen])
lse, o = np.array([y[1].item() for y in so_far]), np.array([y[0][0, 0, 0, 1] for y in so_far])
z = np.exp(lse - m)

print(table([(t, f"{m[t]:.4f}", f"{z[t]:.4f}", f"{lse[t]:.4f}", f"{o[t]:.4f}") for t in range(8)],
            ("tile", "m", "z", "m + log z", "o / z, channel 1")))
o_end, lse_end = flash.dense(**growing)
agree("after the last tile: the definition", [o[-1], lse[-1]], [o_end[0, 0, 0, 1], lse_end.item()])
assert (np.diff(lse) > 0).all() and (np.diff(m) >= 0).all()

figure, axes = plot.subplots(1, 3, size=(3.2, 2.9))
axes[0].plot(np.arange(32) / 4 - 0.375, scores, ".", color=plot.COLOURS[5], label="score s")
axes[0].step(range(8), m, where="mid", color=plot.COLOURS[0], label="m")
axes[0].plot(lse, "s-", color=plot.COLOURS[1], markersize=3.5, label="m + log z")
axes[1].plot(z, "o-", color=plot.COLOURS[2], markersize=4, label="z")
axes[2].plot(z * o, "D--", color=plot.COLOURS[3], markersize=3.5, label="o, unfinished")
axes[2].plot(o, "o-", color=plot.COLOURS[0], markersize=4, label="o / z")
axes[2].axhline(o[-1], color="0.6", linewidth=0.8)
for axis, title in zip(axes, ("m rises in steps,\nm + log z with every tile", "z drops where m rises a lot",
                              "o drops with it; the ratio\nis attention so far")):
    axis.set(title=title, xlabel="tile", xticks=range(0, 8, 2))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
plot.save(figure, "05_online_softmax_state", """Three plots over eight tiles of four keys. Left: scattered scores, the
    running maximum m as a staircase with several steps, and m + log z above it, rising at every tile. Middle: z, which
    grows while m stands still and drops where m rises. Right: the unfinished output o, which jumps with z, and the
    ratio o / z, which moves smoothly to its last value, marked by a line.""")

# %% [markdown]
# ## Merging
#
# A finished result is a state, too: $e^{lse} \cdot 1 = Z$ and $e^{lse} \cdot o = O$ is (5.5) with the exponent $lse$
# and $z = 1$. So finished results add up like tiles. For parts $p$ with results $o_p$ and $lse_p$, from (5.4),
#
# $$
# lse = \log \sum_p e^{lse_p} \qquad w_p = e^{lse_p - lse} \qquad o = \sum_p w_p o_p
# \tag{5.6}
# $$
#
# Compare with (5.2): *the merge is attention over the parts*, with logits $lse_p$ and values $o_p$. And since it is
# the addition (5.4) in other words, it is commutative and associative, and a part without keys, $lse_p = -\infty$, is
# its zero. The code is one call of the softmax:

# %%
plot.show(flash, "merge", "parts", "split")

# %%
x = load_cases("flash", "everything")[0].inputs
no_sink = {name: x[name] for name in ("q", "scale")}
part = lambda j: flash.dense(**no_sink, k=x["k"][:, :, j], v=x["v"][:, :, j], mask=x["mask"][..., j])
merge = lambda *parts: flash.merge(*zip(*parts))
a, b, c, whole = part(slice(0, 4)), part(slice(4, 9)), part(slice(9, 15)), part(slice(0, 15))
nothing = part(slice(0, 0))
print("rows without keys in a, b, c:", *(int((y[1] == -np.inf).sum()) for y in (a, b, c)), "of", a[1].size)
agree("commutative: a + b = b + a", both(merge(a, b)), both(merge(b, a)))
agree("associative: (a + b) + c = a + (b + c)", both(merge(merge(a, b), c)), both(merge(a, merge(b, c))))
agree("... = all three at once", both(merge(a, b, c)), both(merge(merge(a, b), c)))
agree("... = attention to all keys", both(merge(a, b, c)), both(whole))
agree("zero: a + nothing = a", both(merge(a, nothing)), both(a), 0)
poisoned = nothing[0] * np.nan, nothing[1]
agree("... whatever its o is", both(merge(poisoned, a)), both(a), 0)
sink = np.zeros_like(a[0]), np.broadcast_to(x["sink"][:, None], a[1].shape)
agree("a sink is a part with o = 0 and lse = sink", both(merge(a, b, c, sink)), both(flash.dense(**x)))
agree("a sink in each of three parts is a larger sink, by log 3",
      both(merge(merge(a, sink), merge(b, sink), merge(c, sink))),
      both(flash.dense(**x | dict(sink=x["sink"] + np.log(3)))))

# %% [markdown]
# The equalities hold for numbers, not for their roundings: machine addition is not associative either, and a kernel
# that merges its parts in the order in which they happen to be ready gives other last digits on every run. Who wants
# the same bits fixes the order, not only the tiles.
#
# Two things are often tried instead. Let one part have $Z = 2$ and value 0, the other $Z = 8$ and value 10; the
# answer is $(2 \cdot 0 + 8 \cdot 10) / 10 = 8$ and $lse = \log 10$. Adding the two lse gives the logarithm of the
# *product*; the average gives every part the same weight, however many keys are behind it; and a lse in base 2 that
# meets a merge in base $e$, or the other way round, gives a number that looks fine.

# %%
Z, values = np.array([2.0, 8.0]), np.array([0.0, 10.0])
o, lse = flash.merge(list(values.reshape(2, 1, 1, 1, 1)), list(np.log(Z).reshape(2, 1, 1, 1)))
print("(0.1 + 0.2) + 0.3 == 0.1 + (0.2 + 0.3):", (0.1 + 0.2) + 0.3 == 0.1 + (0.2 + 0.3))
agree("merged", [o.item(), lse.item()], [8, np.log(10)])
print("exp of the sum of both lse:", np.exp(np.log(Z).sum()))
print("plain average:", values.mean())
mixed = {"lse in base 2, merged with exp": np.exp(np.log2(Z)), "natural lse, merged with exp2": np.exp2(np.log(Z))}
for name, w in mixed.items():
    print(f"{name}: {w @ values / w.sum():.7f}")

# %% [markdown]
# ## Beside dense softmax
#
# With $v$ the identity an output is its row of weights. Softmax within each tile, times softmax over the tiles, is
# softmax:
#
# $$
# p_{ij} = e^{s_{ij} - lse_i} = e^{s_{ij} - lse_{ip}} \thinspace e^{lse_{ip} - lse_i} \qquad j \in p
# \tag{5.7}
# $$
#
# The mask is causal, and a part that the row may not see has nothing in it and weight 0.

# %%
small = dict(q=draw("q", (1, 1, 5, 4))[:, :, 2:], k=draw("k", (1, 1, 8, 4)), v=np.eye(8)[None, None], scale=0.5,
             mask=masks.causal(3, 8)[None, None], sink=np.array([-np.inf]), query_block=2, key_block=3)
keys = flash.tiles(8, 3)
tiled = [flash.dense(small["q"], small["k"][:, :, j], small["v"][:, :, j], small["mask"][..., j], scale=0.5)
         for j in keys]
within = sum(o for o, _ in tiled)[0, 0]
o, lse = (y[0, 0] for y in flash.dense(**small))
over = np.exp(np.stack([lse_p[0, 0] for _, lse_p in tiled], -1) - lse[:, None])
agree("(5.7) within times over = dense softmax", within * np.repeat(over, [3, 3, 2], axis=1), o)
agree("the weights of the parts sum to one", over.sum(1), 1)

figure, axes = plot.subplots(1, 3, size=(3.1, 1.7))
mask = small["mask"][0, 0]
plot.attention_map(axes[0], within, mask, "Within each tile: sums to one per tile")
plot.attention_map(axes[1], over, over > 0, "Over the tiles: w", labels=("part p", "query i"))
plot.attention_map(axes[2], o, mask, "Their product: dense softmax")
for axis in axes[::2]:
    for border in 2.5, 5.5:
        axis.axvline(border, color=plot.COLOURS[1], linewidth=1.5)
plot.save(figure, "05_online_softmax_merge", """Three maps of three queries, the masked pairs hatched. Left, by eight
    keys in tiles of three, three and two: every row sums to one within each tile, so a lone key has weight 1.00.
    Middle, by three parts: the weights of the parts, 0.95 on the first for query 0, which sees nothing of the third,
    and 0.90 and 0.86 on the second for queries 1 and 2. Right: the product, the causal softmax.""")

# %% [markdown]
# ## Every tiling
#
# Six keys can be divided into non-empty parts in 203 ways, 32 of which cut them into runs. All of them, merged, give
# the same numbers:

# %%
six = dict(q=draw("q", (2, 3, 5, 4)), k=draw("k", (2, 3, 6, 4)), v=draw("v", (2, 3, 6, 8)), scale=0.5)
at_keys = lambda j: flash.dense(**six | {name: six[name][:, :, j] for name in "kv"})
labels = [np.array(c) for c in itertools.product(range(6), repeat=6)
          if all(c[j] <= max(c[:j], default=-1) + 1 for j in range(6))]
errors = {}
for label in labels:
    got = merge(*(at_keys(label == p) for p in range(label.max() + 1)))
    error = abs(both(got) - both(flash.dense(**six))).max()
    errors.setdefault(label.max() + 1, []).append((error, (np.diff(label) >= 0).all()))
print(table([(parts, len(found), sum(run for _, run in found), f"{max(e for e, _ in found):.0e}")
             for parts, found in errors.items()], ("parts", "ways", "in runs", "largest error")))
agree("all of them", max(e for found in errors.values() for e, _ in found), 0)
print(len(labels), "ways,", sum(run for found in errors.values() for _, run in found), "in runs")

# %% [markdown]
# And so do the forms of the package, forward and backward, with tiles of every size from 1 to beyond the lengths: 7
# queries, 15 keys, 8 times 16 sizes, with a mask that empties tiles here and there and a sink.

# %%
case = load_cases("flash", "everything")[0]
options = [dict(query_block=i, key_block=j) for i in range(1, 9) for j in range(1, 17)]
right, gradients = flash.dense(**case.inputs), flash.vjp(**case.cotangents | case.inputs)
for form in flash.online, flash.split:
    errors = [abs(got - y).max() for tiling in options for got, y in zip(form(**case.inputs | tiling), right)]
    agree(f"{form.__name__}, {len(options)} tilings", max(errors), 0)
errors = [abs(gradients[name] - dx).max() for tiling in options
          for name, dx in flash.vjp(**case.cotangents | case.inputs | tiling).items()]
agree(f"vjp, {len(options)} tilings", max(errors), 0)

# %% [markdown]
# ## Forms that agree
#
# Four texts, one formula, five number systems. The table holds the largest error against the certified value; `balls`
# is the radius that interval arithmetic leaves around the exact value. A form that leaves the budget of a type fails
# the cell ([how to read this book](00_how_to_read.ipynb)). Only the loop in float16 is shown and not judged: it adds
# one by one, and rule 10 is against it. The last case shows why: of thousands of equal weights its sum counts 2048,
# as beyond that the next float16 is 2 away, and adding 1 changes nothing. Tiles are the cure as well: a tile is
# summed on its own.

# %%
for name in "everything", "falling_scores", "many_keys":
    print(f"{name}: {load_cases('flash', name)[0].why}")
    forms_table("flash", name)
    print()

# %% [markdown]
# ## Which tiles, and in what order
#
# The order is free; what decides it is what one wants to keep at hand. The forward goes along a row of tiles and
# keeps $m, z, o$ of its queries. The backward, as we shall see, goes down a column and keeps $dk, dv$ of its keys.
#
# Under a mask many tiles hold no pair at all. By rule 7 they change nothing: $c = 1$ and $p = 0$. So a program may
# leave them out, and most of the others need no mask, because all their pairs are in it. For queries $i_0 \dots i_1$,
# keys $j_0 \dots j_1$ and a causal mask $j \leq i + offset$,
#
# $$
# \text{skip if } j_0 \gt i_1 + offset \qquad \text{no mask needed if } j_1 \leq i_0 + offset
# \tag{5.8}
# $$
#
# First key against *last* query, last key against *first* query; who takes the other query makes the mistakes
# `diagonal_tile_skipped` and `diagonal_tile_unmasked`. With square tiles and offset 0 only the diagonal of tiles
# needs the mask; with others a band does.

# %%
def kind(mask, i, j):
    part = mask[np.ix_(i, j)]
    return 0 if not part.any() else 1 if not part.all() else 2


Tq, Tk, offset = 12, 18, 6
mask, rows, columns = masks.causal(Tq, Tk), flash.tiles(Tq, 4), flash.tiles(Tk, 3)
kinds = np.array([[kind(mask, i, j) for j in columns] for i in rows])
rule = np.array([[0 if j[0] > i[-1] + offset else 2 if j[-1] <= i[0] + offset else 1 for j in columns] for i in rows])
assert (kinds == rule).all()

figure, axes = plot.subplots(1, 2, size=(4.4, 3.2))
walks = {"Forward: along the rows": np.argwhere(kinds), "Backward: down the columns": np.argwhere(kinds.T)[:, ::-1]}
for axis, (title, walk) in zip(axes, walks.items()):
    shade = np.where(mask, 3, 1) * (kinds.repeat(4, 0).repeat(3, 1) > 0)
    axis.imshow(shade, cmap="Blues", vmin=0, vmax=5)
    for step, (a, b) in enumerate(walk):
        weight = "bold" if kinds[a, b] == 1 else "normal"
        axis.text(3 * b + 1, 4 * a + 1.5, step, ha="center", va="center", fontweight=weight)
    axis.set(title=title, xlabel="key j", ylabel="query i", xticks=np.arange(0, Tk, 3) - 0.5,
             xticklabels=range(0, Tk, 3), yticks=np.arange(0, Tq, 4) - 0.5, yticklabels=range(0, Tq, 4))
    axis.grid(color="black", linewidth=0.8)
figure.suptitle("Dark: attended. Pale: computed and thrown away. White: skipped. Bold: the tile needs a mask")
plot.save(figure, "05_online_softmax_order", """A causal mask of 12 queries and 18 keys, bottom right, cut in tiles of
    four by three, drawn twice. Of 18 tiles 15 are visited and numbered, three at the upper right are skipped, and five
    tiles along the diagonal are partly pale and numbered in bold. Left, numbers run along rows of tiles, 0 to 3, 4 to
    8, 9 to 14; right, they run down columns.""")
skipped = [mask[np.ix_(i, j)].sum() for i in rows for j in columns if j[0] > i[0] + offset]
unmasked = [(~mask[np.ix_(i, j)]).sum() for i in rows for j in columns if j[-1] <= i[-1] + offset]
print(f"with the other query: {sum(skipped)} pairs are lost, or {sum(unmasked)} hidden pairs attended")
print("tiles:", kinds.size, "  visited:", (kinds > 0).sum(), "  in need of a mask:", (kinds == 1).sum())

# %% [markdown]
# Skipping changes no bit. And small tiles waste fewer pairs: a causal mask over $T$ tokens has $T (T + 1) / 2$ pairs,
# square tiles of $b$ compute $T (T + b) / 2$ of them.

# %%
causal = dict(q=draw("q", (1, 1, Tq, 4)), k=draw("k", (1, 1, Tk, 4)), v=draw("v", (1, 1, Tk, 5)), scale=0.5)
everywhere = flash.online(**causal, mask=mask, query_block=4, key_block=3)
for i in rows:
    j = np.arange(min(Tk, i[-1] + offset + 1))
    seen = {"q": causal["q"][:, :, i], "k": causal["k"][:, :, j], "v": causal["v"][:, :, j], "mask": mask[np.ix_(i, j)]}
    skipping = flash.online(**causal | seen, query_block=4, key_block=3)
    agree(f"queries {i[0]} to {i[-1]}, keys 0 to {j[-1]} only", both(skipping), both(everywhere)[:, :, i], 0)

T, lines = 64, []
for b in 1, 4, 16, 64:
    found = np.array([[kind(masks.causal(T, T), i, j) for j in flash.tiles(T, b)] for i in flash.tiles(T, b)])
    computed = (found > 0).sum() * b * b
    assert computed == T * (T + b) // 2
    lines.append((b, found.size, (found > 0).sum(), (found == 1).sum(), computed, T * (T + 1) // 2))
print(table(lines, ("tile", "tiles", "visited", "masked", "pairs computed", "pairs attended")))

# %% [markdown]
# ## What it costs
#
# **Operations: the same products.** Per pair of query and key the products take $2 (d_k + d_v)$, as in the dense
# form, a subtraction and the sum 2 more. Per row and tile, scaling $q$, moving $z$ and $o$ and adding to them take
# $d_k + 2 d_v + 3$. With $n_k$ tiles of keys:
#
# $$
# flops = B H \thinspace T_q \left( T_k (2 d_k + 2 d_v + 2) + n_k (d_k + 2 d_v + 3) + 2 \right)
# \tag{5.9}
# $$
#
# and $B H \thinspace T_q (T_k + n_k + 1)$ exponentials and logarithms. The dense form needs
# $T_k (2 d_k + 2 d_v + 3) + d_k + 3$ per row: it divides $T_k$ weights by the sum where the online form divides $d_v$
# outputs. So from tiles of about $d_k + 2 d_v + 3$ keys the online form is even the cheaper one.

# %%
def inputs(B, H, Tq, Tk, dk, dv):
    return dict(q=draw("q", (B, H, Tq, dk)), k=draw("k", (B, H, Tk, dk)), v=draw("v", (B, H, Tk, dv)), scale=0.5)


lines = []
for shape, b in ((1, 1, 2, 3, 2, 3), 2), ((2, 3, 5, 7, 4, 6), 3), ((2, 4, 16, 24, 8, 8), 8), ((2, 4, 16, 24, 8, 8), 24):
    B, H, Tq, Tk, dk, dv = shape
    dense, online = count(flash.dense, **inputs(*shape)), count(flash.online, **inputs(*shape), key_block=b)
    tiles = -(-Tk // b)
    flops = B * H * Tq * (Tk * (2 * dk + 2 * dv + 2) + tiles * (dk + 2 * dv + 3) + 2)
    agree(f"{shape}, tiles of {b}: (5.9) and the exponentials", [*online.values()],
          [flops, B * H * Tq * (Tk + tiles + 1)], 0)
    agree("... and the dense form", dense["flops"], B * H * Tq * (Tk * (2 * dk + 2 * dv + 3) + dk + 3), 0)
    lines.append((shape, b, dense["flops"], online["flops"], dense["exp"], online["exp"]))
print()
print(table(lines, ("B, H, Tq, Tk, dk, dv", "key_block", "flops, dense", "online", "exp, dense", "online")))

# %% [markdown]
# **Memory: linear.** Count the elements of the largest array that is made on the way. The dense form makes $T_q T_k$
# scores. The online form makes tiles, whatever the length (beside its outputs), and its backward the gradients it
# returns. The last line lets the interpreter itself count every byte that lives at the same time.

# %%
class Sized(Numbers):
    def finish(self, y):
        return made.append(np.size(y)) or super().finish(y)


def watch(kind, x, *names): return {n: y.view(kind) if n in names else y for n, y in x.items()}


d, small_tiles = 16, dict(mask=lambda i, j: j <= i, query_block=16, key_block=16)
lengths, largest = [32, 128, 512], {"dense": [], "backward": [], "online": []}
for T in lengths:
    x = watch(Sized, inputs(1, 1, T, T, d, d), "q", "k", "v")
    cotangents = watch(Sized, dict(do=tab((1, 1, T, d), 2, 5), dlse=tab((1, 1, T), 4, 3)), "do", "dlse")
    calls = dict(dense=lambda: flash.dense(**x), online=lambda: flash.online(**x, **small_tiles),
                 backward=lambda: flash.vjp(**cotangents, **x, **small_tiles))
    for name, call in calls.items():
        made = []
        call()
        largest[name].append(max(made))
print(table([(name, *sizes) for name, sizes in largest.items()], ("largest array, T =", *map(str, lengths))))
agree("dense: T^2", largest["dense"], np.square(lengths), 0)
agree("online: one tile of scores or of o", largest["online"], 16 * 16, 0)
agree("backward: T d, a gradient", largest["backward"], np.array(lengths) * d, 0)

peaks = {}
for T in 512, 1024:
    x = inputs(1, 1, T, T, d, d)
    for name, call in dict(dense=lambda: flash.dense(**x), online=lambda: flash.online(**x, **small_tiles)).items():
        tracemalloc.start()
        call()
        peaks.setdefault(name, []).append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
print("bytes alive at once, twice the tokens:", *(f"{name} {b / a:.0f} times" for name, (a, b) in peaks.items()))

# %% [markdown]
# **Reading: the point of it all.** A chip computes on a small fast memory and reads from a large slow one. A tile of
# queries stays in the fast one while all keys and values pass by, so that the $n_q$ tiles of queries read
#
# $$
# n_q \thinspace T_k (d_k + d_v)
# \tag{5.10}
# $$
#
# numbers of keys and values: the larger the tile, the fewer. A program that keeps its scores writes $T_q T_k$ of them
# and reads them again; with $d_k = d_v = d$ that is more as soon as a tile has more than $d$ queries. This is where
# flash attention gets its speed, and none of it shows in its numbers.

# %%
class Read(np.ndarray):
    def __getitem__(self, place):
        return made.append(np.size(super().__getitem__(place))) or super().__getitem__(place)


T, blocks, numbers = 256, [1, 4, 16, 64, 256], []
for b in blocks:
    made = []
    flash.online(**watch(Read, inputs(1, 1, T, T, d, d), "k", "v"), query_block=b)
    numbers.append(sum(made))
print(table([("numbers read", *numbers)], ("queries in a tile", *map(str, blocks))))
agree("(5.10)", numbers, [T // b * T * 2 * d for b in blocks], 0)

# %%
T, tile_sizes = 256, [4, 16, 64, 256]
ratios = {f"d = {d}": [count(flash.online, **inputs(1, 1, T, T, d, d), query_block=T, key_block=b)["flops"] / count(
    flash.dense, **inputs(1, 1, T, T, d, d))["flops"] for b in tile_sizes] for d in (4, 16, 64)}
figure, axes = plot.subplots(1, 3, size=(3.4, 3.1))
plot.lines(axes[0], lengths, largest, "tokens T", "elements of the largest array",
           "Dense: quadratic. Backward: linear.\nOnline: one tile")
plot.lines(axes[1], tile_sizes, ratios, "keys in a tile", "flops, online / dense",
           "Rescaling costs little, and nothing\nfrom about 3 d keys on")
axes[1].set_yscale("linear")
axes[1].axhline(1, color="black", linewidth=0.8)
plot.lines(axes[2], blocks, {"keys and values, read": numbers, "scores, written and read": [2 * T * T] * 5},
           "queries in a tile", "numbers moved", "The more queries share a tile of keys,\nthe less is read")
for axis in axes[::2]:
    axis.minorticks_off()
plot.save(figure, "05_online_softmax_cost", """Three plots. Left, elements of the largest array over 32 to 512 tokens,
    both logarithmic: dense rises with slope two, backward with slope one, online is flat at 256. Middle, flops of
    online over flops of dense for tiles of 4 to 256 keys: falls from less than 1.2 to just under 1, the sooner the
    narrower the heads. Right, numbers moved for tiles of 1 to 256 queries, both logarithmic: keys and values fall with
    slope minus one and cross the flat line of scores, written and read, at 16 queries.""")
x = inputs(1, 1, T, T, 16, 16)
cheaper = [b for b in range(40, 65) if count(flash.online, **x, query_block=T, key_block=b)["flops"] < count(
    flash.dense, **x)["flops"]]
print(f"d = 16: fewer flops than dense from tiles of {min(cheaper)} keys on; d_k + 2 d_v + 3 = {16 + 32 + 3}")

# %% [markdown]
# **A mask that is a function.** Linear memory is lost if the mask is an array of $T_q T_k$ booleans. A rule needs no
# array, and gives the same bits. Here are 4096 tokens and 8 million pairs under a causal rule, asked for tile by
# tile. If all queries are the same, row $i$ is a running mean, which can be had without attention:

# %%
agree("rule = array", both(flash.online(**causal, mask=lambda i, j: j <= i + offset, query_block=4, key_block=3)),
      both(everywhere), 0)
T = 4096
line = dict(q=np.full((1, 1, T, 2), 0.75), k=draw("k", (1, 1, T, 2)), v=tab((1, 1, T, 3), 7, 5), scale=0.5)
made = []
rule = lambda i, j: (made.append((i.size, j.size)), j <= i)[1]
o, lse = flash.online(**line, mask=rule, query_block=256, key_block=512)
e = np.exp(0.5 * 0.75 * line["k"].sum(-1, keepdims=True))
agree("o is the running mean", o, np.add.accumulate(e * line["v"], 2) / np.add.accumulate(e, 2))
agree("lse is the log of the running sum", lse, np.log(np.add.accumulate(e, 2))[..., 0])
print(f"{len(made)} tiles of {made[0]} booleans were asked for, one at a time; the whole mask has {T * T}")

# %% [markdown]
# ## Derivation: backward
#
# A loss $L$ depends on $o$ and lse; $dX$ is its derivative with respect to $X$. Take one row and write
# $p_j = e^{s_j - lse}$, so that $o = \sum_j p_j v_j$. From $lse = \log \sum_j e^{s_j}$,
#
# $$
# \frac{\partial \thinspace lse}{\partial s_l} = p_l \qquad
# \frac{\partial p_j}{\partial s_l} = p_j \left( [j = l] - p_l \right)
# \tag{5.11}
# $$
#
# The loss feels $s_l$ through all $p_j$, with $dp_j = do \cdot v_j$, and through lse:
#
# $$
# ds_l = \sum_j dp_j \thinspace p_j \left( [j = l] - p_l \right) + dlse \thinspace p_l = p_l \left( dp_l - D \right)
# \qquad D = \sum_j p_j dp_j - dlse
# \tag{5.12}
# $$
#
# Two things in it seem to need the whole row. The weight needs its denominator, but that is one number, lse, kept by
# the forward. And $D$ is a sum over all keys, but
#
# $$
# D = \sum_j p_j (do \cdot v_j) - dlse = do \cdot \sum_j p_j v_j - dlse = do \cdot o - dlse
# \tag{5.13}
# $$
#
# and that is one number again, known before the first tile. So the forward keeps $o$ and lse and forgets the weights;
# the backward makes each tile of them anew, $p_{ij} = \exp(s_{ij} - lse_i)$, and no tile has to know of another:
#
# $$
# \begin{aligned}
# ds_{ij} &= p_{ij} \left( do_i \cdot v_j - D_i \right) & dv_j &= \sum_i p_{ij} \thinspace do_i \\
# dq_i &= scale \sum_j ds_{ij} k_j & dk_j &= scale \sum_i ds_{ij} q_i \\
# dsink &= - \sum_i \exp(sink - lse_i) \thinspace D_i
# \end{aligned}
# \tag{5.14}
# $$
#
# The sink is a key with value 0, so its $dp$ is 0; it has no tile. The sums for $dq$ run over tiles of keys, those
# for $dk$ and $dv$ over tiles of queries. In a row without keys $lse = -\infty$, and $\exp(-\infty - (-\infty))$ is
# NaN again; here the cure is $lse = +\infty$, with which $p = \exp(-\infty) = 0$.

# %%
plot.show(flash, "for_backward", "backward", "vjp")

# %% [markdown]
# By hand, for the query and the four keys from above, in the same two tiles:

# %%
do, dlse = np.array([0.75, -0.5]), 0.25
o, lse = o_ref[0, 0, 0], lse_ref[0, 0, 0]
D = do @ o - dlse
dq, dk, dv = np.zeros(2), np.zeros((4, 2)), np.zeros((4, 2))
print(f"D = {D:.6f}")
for tile in [0, 1], [2, 3]:
    p, dp = np.exp(s[tile] - lse), v[tile] @ do
    ds = p * (dp - D)
    dq += scale * ds @ k[tile]
    dk[tile], dv[tile] = scale * np.outer(ds, q), np.outer(p, do)
    print(f"keys {tile}: p = {p}   dp = {dp}   ds = {ds}   dq so far = {dq}")
print("dk", dk, "dv", dv, sep="\n")
by_hand = dict(dq=dq, dk=dk, dv=dv)
gradients = flash.vjp(do[None, None, None], np.array([[[dlse]]]), **four)
for name in by_hand:
    agree(f"{name} by hand", by_hand[name], gradients[name])

# %% [markdown]
# The backward against a complex step of the definition (which has no tiles), along a fixed direction in each input:
# for tiles that are emptied here and there, for a row without keys, and for a whole tile of queries that sees
# nothing.

# %%
for name in "everything", "empty_row", "causal_tall":
    print(f"{name}: {load_cases('flash', name)[0].why}")
    gradient_table("flash", name)
    print()

# %% [markdown]
# Five products, $q k^T$ anew, $do \thinspace v^T$, $p^T do$, $ds \thinspace k$ and $ds^T q$, where the forward has
# two: with $d_k = d_v$ two and a half times as many flops, and the small terms move that little. In all, with tiles
# of queries and of keys $n_q$ and $n_k$,
#
# $$
# flops = B H \left( T_q T_k (6 d_k + 4 d_v + 5) + 2 \thinspace n_k T_q d_k + n_q T_k (d_k + d_v) \right)
# \tag{5.15}
# $$

# %%
for d in 4, 16, 64, 256:
    y = inputs(1, 1, 64, 64, d, d)
    o, lse = flash.dense(**y)
    given = dict(do=o, D=(o * o).sum(-1), lse=lse, mask=True, query_block=16, key_block=16)
    flops = count(flash.backward, **given, **y)["flops"]
    agree(f"d = {d}: (5.15)", flops, 64 * 64 * (10 * d + 5) + 2 * 4 * 64 * d + 4 * 64 * 2 * d, 0)
    print(f"    {flops / count(flash.dense, **y)['flops']:.2f} times the dense forward")

# %% [markdown]
# **Through a merge.** A merge is attention over parts, so (5.12) and (5.13) are its backward, with $w_p$ for the
# weights and $o_p$ for the values:
#
# $$
# do_p = w_p \thinspace do \qquad dlse_p = w_p \left( do \cdot o_p - D \right) \qquad D = do \cdot o - dlse
# \tag{5.16}
# $$
#
# A worker that gets these two back has for its own row term $do_p \cdot o_p - dlse_p = w_p D$. Everything it computes
# is proportional to $w_p$, and $w_p$ times its own weights are the weights of the whole (5.7): its gradients are
# exactly those of its tiles. Workers need not exchange anything but what they merged.

# %%
case = load_cases("flash", "first_tile_masked")[0]
x, do = case.inputs, case.cotangents
pieces = [slice(0, 4), slice(4, 9), slice(9, 15)]
parts = [{name: x[name][:, :, j] for name in "kv"} | dict(mask=x["mask"][..., j]) for j in pieces]
parts = [dict(q=x["q"], scale=x["scale"]) | part for part in parts]
o_p, lse_p = zip(*(flash.online(**part) for part in parts))
back = flash.merge_vjp(do["do"], do["dlse"], o_p, lse_p)

directions = [draw("q", o_p[0].shape), draw("k", o_p[0].shape), draw("v", o_p[0].shape)]
moved = complex_step(lambda a, b, c: dict(zip(("o", "lse"), flash.merge([a, b, c], list(lse_p)))),
                     dict(zip("abc", o_p)), dict(zip("abc", directions)))
agree("merge_vjp against a complex step in o_p", sum((do["d" + name] * moved[name]).sum() for name in moved),
      sum((g * y).sum() for g, y in zip(back["do"], directions)))
alive = [np.where(lse == -np.inf, 0, tab(lse.shape, 4, 3)) for lse in lse_p]
moved = complex_step(lambda a, b, c: dict(zip(("o", "lse"), flash.merge(list(o_p), [a, b, c]))),
                     dict(zip("abc", lse_p)), dict(zip("abc", alive)))
agree("... and in lse_p", sum((do["d" + name] * moved[name]).sum() for name in moved),
      sum((g * y).sum() for g, y in zip(back["dlse"], alive)))

whole = flash.vjp(**do, **x)
workers = [flash.vjp(do_p, dlse_p, **part) for do_p, dlse_p, part in zip(back["do"], back["dlse"], parts)]
agree("dq of the whole is the sum over workers", sum(y["dq"] for y in workers), whole["dq"])
for name in "dk", "dv":
    agree(f"{name} of the whole, worker by worker", np.concatenate([y[name] for y in workers], 2), whole[name])
D = (do["do"] * case.outputs["o"]).sum(-1) - do["dlse"]
for part in range(3):
    w = np.exp(lse_p[part] - case.outputs["lse"])
    agree(f"row term of worker {part} is w D", (back["do"][part] * o_p[part]).sum(-1) - back["dlse"][part], w * D)

# %% [markdown]
# ## What goes wrong
#
# Each of these is a mistake someone made, written as code in `flash.BUGS` and `flash.VJP_BUGS`. Each is caught by a
# golden case, and each is told from all others by its numbers alone.

# %%
mistakes = flash.BUGS | flash.VJP_BUGS
print(table([(slug, sentence) for slug, (sentence, _) in mistakes.items()], ("mistake", "what is wrong")))

# %% [markdown]
# Five of them in pictures: $v$ the identity, the small causal example from above, tiles of three keys. Query 0 has
# its largest score in the first tile, the other two have it in the second.

# %%
shown = ("o_not_rescaled", "weights_normalised_per_tile", "merge_by_average", "merge_base_2_lse",
         "mask_positions_in_tile")
panels = {"right": (flash.dense(**small)[0][0, 0], small["mask"][0, 0])}
with np.errstate(all="ignore"):
    for slug in shown:
        weights = flash.BUGS[slug][1](small)[0][0, 0]
        panels[slug] = weights, weights > 0
        print(f"{slug:28} rows sum to {weights.sum(-1).round(2)}")
figure = plot.attention_maps(panels, "Right, and five mistakes of tiles: the weights they give")
figure.set_size_inches(8.9, 3.2)
for axis in figure.axes[:-1]:
    axis.set(xticks=[], yticks=[])
    for border in 2.5, 5.5:
        axis.axvline(border, color=plot.COLOURS[1], linewidth=1.5)
plot.save(figure, "05_online_softmax_mistakes", """Six maps of three queries by eight keys, tiles of three keys apart by
    lines, weights of 0 hatched. Right: a causal softmax. o not rescaled: query 0 is right, for queries 1 and 2 the
    first tile is too heavy, 0.45 instead of 0.04. Normalised per tile: every tile sums to one. Merge by average: every
    tile to a third. Base-2 lse: the heavy tile is heavier, the light ones are lighter. Mask positions counted in the
    tile: keys of the future have weight.""")

# %% [markdown]
# Query 0 of `o_not_rescaled` is *right*: where the first tile holds the maximum, $c = 1$ ever after. A test on such
# data passes. So does one with a single tile. And two of the five have rows that sum to one; no look at the sums
# finds them.
#
# **One wrong port, caught live.** The rescaling of $z$ is remembered, that of $o$ is not.

# %%
# exercise
def start(q, v, sink):
    """m (B, H, Tq, 1), z and o (B, H, Tq, dv) before the first key."""
    return np.broadcast_to(np.reshape(sink, (-1, 1, 1)), (*q.shape[:3], 1)), 1.0, np.zeros((*q.shape[:3], v.shape[3]))


def score_tiles(q, k, v, mask, scale, key_block):
    """Tile by tile the scores (B, H, Tq, n), -inf where hidden, and the values (B, H, n, dv)."""
    mask = np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))
    for j in flash.tiles(k.shape[2], key_block):
        keep = mask[..., j]
        k_j, v_j = core.unread(k[:, :, j], keep), core.unread(v[:, :, j], keep)
        yield np.where(keep, scale * q @ k_j.swapaxes(-1, -2), -np.inf), v_j


def port(q, k, v, mask, sink, scale, key_block):
    m, z, o = start(q, v, sink)
    for s, v_j in score_tiles(q, k, v, mask, scale, key_block):
        new = np.maximum(m, s.max(-1, keepdims=True))
        shift = np.where(new == -np.inf, 0, new)
        p = np.exp(s - shift)
        z = np.exp(m - shift) * z + p.sum(-1, keepdims=True)
        o = o + p @ v_j
        m = new
    z = np.where(m == -np.inf, 1, z)
    return o / z, (m + np.log(z))[..., 0]


by_name = {case.name: case for case in load_cases("flash")}
taken = {name: {n: case.inputs[n] for n in case.inputs if n != "query_block"} for name, case in by_name.items()}
passed = [name for name, case in by_name.items() if check(case, port(**taken[name])).passed]
print(len(passed), "of", len(by_name), "cases right:", ", ".join(passed), "\n")
right = check_exercise("flash", port, "causal_wide")

# %% [markdown]
# The cases it passes are those with one tile, or none, and those whose first tile holds the maximum. They are also
# the tests that come to mind first.
#
# ## Where code in the wild differs
#
# **The lse of a row without keys.** For a result that is final it is a matter of taste, for one that is merged it is
# not.
#
# | lse | where |
# |---|---|
# | $-\infty$ | here; torch `flex_attention`; flash-attention's CUDA source for partial results, the zero of the merge |
# | $+\infty$ | flash-attention's CUDA source for final results, so that $\exp(s - lse)$ is 0 in its backward |
# | 0 | the CPU flash operator inside torch 2.13 |
#
# Merged with a part that has keys, 0 claims the weight of a key with score 0, and $+\infty$ ends in
# $\infty - \infty$:

# %%
alive = np.array([[[[1.0, 2.0, 3.0]]]]), np.array([[[0.5]]])
for lse_of_none in -np.inf, 0.0, np.inf:
    with np.errstate(invalid="ignore"):
        o, lse = flash.merge([np.zeros_like(alive[0]), alive[0]], [np.full((1, 1, 1), lse_of_none), alive[1]])
    print(f"part without keys, lse = {lse_of_none:4}: merged o = {o.ravel()}, lse = {lse.item():.4f}")
print("\nas named mistakes:")
for slug in "empty_row_lse_zero", "empty_row_lse_plus_inf", "empty_part_lse_zero", "empty_part_lse_plus_inf":
    print(f"{slug}: {flash.BUGS[slug][0]}")

# %% [markdown]
# **The base of lse.** Processors have an instruction for $2^x$, so kernels multiply the scores, and the sink, by
# $\log_2 e$ and run (5.1) with `exp2`. Inside, nothing else changes. What leaves must be translated: $lse$ in base 2
# is $lse \cdot \log_2 e$. FlashInfer returns it as it is, flash-attention and FlashMLA return the natural one, and
# servers that merged the one by the formula of the other were wrong by a little on every row (the 7.233 and 8.808
# above).

# %%
x = load_cases("flash", "everything")[0].inputs
log2e, LN2 = 1 / float(np.log(2)), float(np.log(2))
o_p, lse_p = zip(*flash.parts(x["q"], x["k"], x["v"], x["mask"], x["sink"], x["scale"], x["key_block"]))
base_2 = np.stack(lse_p, -1) * log2e
m = flash.finite(base_2.max(-1, keepdims=True))
total = m[..., 0] + np.log2(np.exp2(base_2 - m).sum(-1))
o = sum(np.exp2(base_2[..., p] - total)[..., None] * o_p[p] for p in range(len(o_p)))
agree("merged with exp2 and log2: o", o, flash.dense(**x)[0])
agree("lse in base 2, times log 2", total * LN2, flash.dense(**x)[1])

# %% [markdown]
# **When to divide.** FlashAttention (2022, algorithm 1) keeps $o$ normalised: after every tile it divides by the new
# $z$ and multiplies the old $o$ by the old $z$ first. FlashAttention-2 (2023, algorithm 1) divides once, at the end.
# The first is to merge each tile into what there is by (5.6); the second is (5.1). Same numbers, fewer operations.
#
# **In pairs.** Code for rings of devices writes the merge of two in terms of the logistic function
# $\sigma(t) = 1 / (1 + e^{-t})$. It is (5.6) for two parts, because $w_b = \sigma(lse_b - lse_a)$:
#
# $$
# o = o_a - \sigma(lse_b - lse_a) \left( o_a - o_b \right) \qquad lse = lse_a - \log \sigma(lse_a - lse_b)
# \tag{5.17}
# $$
#
# If neither has keys it takes $-\infty - (-\infty)$, so it has to be kept from such rows.

# %%
def first_flash(q, k, v, mask, sink, scale, key_block):
    return reduce(merge, flash.parts(q, k, v, mask, sink, scale, key_block))


x = {name: y for name, y in x.items() if name != "query_block"}
agree("normalised after every tile = divided once", both(first_flash(**x)), both(flash.online(**x)))
y = inputs(1, 1, 16, 64, 16, 16) | dict(mask=np.ones((16, 64), bool), sink=np.array([0.5]), key_block=8)
print("flops, normalised after every tile:", count(first_flash, **y)["flops"],
      "  divided once:", count(flash.online, **y)["flops"])

sigma = lambda t: 1 / (1 + np.exp(-t))
(o_a, lse_a), (o_b, lse_b) = flash.dense(**six), at_keys([1, 4])
pair = o_a - sigma(lse_b - lse_a)[..., None] * (o_a - o_b), lse_a - np.log(sigma(lse_a - lse_b))
agree("(5.17) = (5.6)", both(pair), both(merge((o_a, lse_a), (o_b, lse_b))))

# %% [markdown]
# Other differences translate. Where the causal diagonal starts, top left or bottom right, if $T_q \neq T_k$
# ([chapter 2](02_masks.ipynb)): flash-attention moved it to the bottom right in its version 2.1. Layout: (B, T, H, d)
# in flash-attention. Fill: kernels round the last tile up and must hide what they filled in, or a key of zeros enters
# with score 0 (`tail_not_masked`). Half precision: kernels sum in float32 and cast $p$ to half before the product
# with $v$; that is rounding, not a mistake.
#
# ## Relations

# %%
x = load_cases("flash", "sink")[0].inputs
named = {name: x[name] for name in ("q", "k", "v", "mask", "sink", "scale")}
agree("flash = scaled dot-product attention", both(flash.online(**x)), both(sdpa.dense(**named)))
agree("one tile = dense", both(flash.online(**named, query_block=99, key_block=99)), both(flash.dense(**x)))
ones = dict(query_block=1, key_block=1)
agree("tiles of one key = the loop of 2018", both(flash.online(**named, **ones)), both(flash.loop(**x)))

ring = [[(rank + turn) % 3 for turn in range(3)] for rank in range(3)]
turns = [reduce(merge, (at_keys([2 * r, 2 * r + 1]) for r in order)) for order in ring]
for order, y in zip(ring, turns):
    agree(f"a ring of three devices, keys in the order {order}", both(y), both(flash.dense(**six)))

prompt, own = (dict(k=draw("k", (n, 3, 4, 4)), v=draw("v", (n, 3, 4, 8))) for n in (1, 2))
stacked = np.concatenate(list(six["q"]), axis=1)[None]
o, lse = flash.dense(stacked, **prompt, scale=0.5)
shared = np.stack(np.split(o[0], 2, axis=1)), np.stack(np.split(lse[0], 2, axis=1))
together = {name: np.concatenate([np.repeat(prompt[name], 2, axis=0), own[name]], axis=2) for name in "kv"}
agree("a prompt shared by two texts, attended once for both, merged with what is their own",
      both(merge(shared, flash.dense(six["q"], **own, scale=0.5))), both(flash.dense(six["q"], **together, scale=0.5)))

old, new = {name: six[name][:, :, :5] for name in "kv"}, {name: six[name][:, :, 5:] for name in "kv"}
one = six["q"][:, :, :1]
agree("a cache and a new token: its lse is its score", both(merge(
    flash.dense(one, **old, scale=0.5), (new["v"], (0.5 * one * new["k"]).sum(-1)))),
    both(flash.dense(**six | dict(q=one))))

# %% [markdown]
# The state is one *per query*. It remembers the keys of the past for this query and no other; the next query has to
# go through them again. Attention that gives up the exponential between $q$ and $k$ has a state that serves all
# queries, and that is another family of chapters.
#
# ## In a box
#
# | | |
# |---|---|
# | formula | (5.1) tile by tile, (5.6) to merge |
# | state | $m$, $z$ and $o$ per query: the sums $Z = e^m z$ and $O = e^m o$ with one exponent |
# | start, end | $(sink, 1, 0)$; $o / z$ and $m + \log z$, with $z = 1$ where $m = -\infty$ |
# | shapes | q (B, H, Tq, dk), k (B, H, Tk, dk), v (B, H, Tk, dv) to o (B, H, Tq, dv) and lse (B, H, Tq) |
# | backward | $p = \exp(s - lse)$ anew, $D = do \cdot o - dlse$, (5.14); lse of an empty row is $+\infty$ there |
# | through a merge | $do_p = w_p \thinspace do$, $dlse_p = w_p (do \cdot o_p - D)$ |
# | cost | flops of dense attention, (5.9); backward 2.5 times; memory of inputs, outputs and one tile |
# | use it | whenever the scores are too many to keep; the merge to split long keys, share prompts, go round a ring |
# | goes wrong | $o$ or $z$ not rescaled; $-\infty - (-\infty)$; tails; positions in the tile; averages; base 2; sinks |
#
# ## Exercises
#
# Write each function in place of the line that raises, and run the cell. `check_exercise` runs it on all golden cases
# and says where it is wrong and, if it is a mistake others made, which. `start` and `score_tiles` from the port above
# may be used.
#
# **1. One number will do.** Keep no $m$ and no $z$: let $o$ be attention to the keys so far, and let lse be all else
# that you remember.

# %%
# exercise
def one_number(q, k, v, mask, sink, scale, key_block):
    raise NotImplementedError("return o (B, H, Tq, dv) and lse (B, H, Tq)")


right = check_exercise("flash", one_number)

# %% [markdown]
# **2. The lazy maximum.** Any exponent is right. Rescaling $o$ is the work that (5.1) adds, so move $m$ only if the
# new maximum is more than 8 above it. How large can $z$ become? And what must be special about the first key?

# %%
# exercise
def lazy(q, k, v, mask, sink, scale, key_block):
    raise NotImplementedError("return o (B, H, Tq, dv) and lse (B, H, Tq)")


right = check_exercise("flash", lazy)

# %% [markdown]
# **3. A tree of workers.** Each tile is attended by a worker of its own; then neighbours merge, two by two, until one
# is left. Write the merge of two yourself, for rows in which neither has keys as well, and let the sink in once.

# %%
# exercise
def tree(q, k, v, mask, sink, scale, key_block):
    raise NotImplementedError("return o (B, H, Tq, dv) and lse (B, H, Tq)")


right = check_exercise("flash", tree)

# %% [markdown]
# ## Answers
#
# **1.** (5.6) for two parts, what there is and the tile, whose keys are exponentiated at the exponent of the *new*
# lse: then $z$ is 1 after every tile. The sink is where it starts, with $o = 0$.

# %%
# exercise
def one_number(q, k, v, mask, sink, scale, key_block):
    lse, _, o = start(q, v, sink)
    for s, v_j in score_tiles(q, k, v, mask, scale, key_block):
        new = np.logaddexp.reduce(np.concatenate([lse, s], -1), -1, keepdims=True)
        shift = np.where(new == -np.inf, 0, new)
        o = np.exp(lse - shift) * o + np.exp(s - shift) @ v_j
        lse = new
    return o, lse[..., 0]


assert check_exercise("flash", one_number)

# %% [markdown]
# **2.** A score may now be up to 8 above $m$, so $z$ may reach $e^8$, about 3000, times the number of keys: no danger
# in single precision. From $m = -\infty$ any key is more than 8 away, and the comparison says so by itself.
# FlashAttention-4 is reported to do this.

# %%
# exercise
def lazy(q, k, v, mask, sink, scale, key_block):
    m, z, o = start(q, v, sink)
    for s, v_j in score_tiles(q, k, v, mask, scale, key_block):
        high = s.max(-1, keepdims=True)
        new = np.where(high > m + 8, high, m)
        shift = np.where(new == -np.inf, 0, new)
        c, p = np.exp(m - shift), np.exp(s - shift)
        moves.append(((c != 1) & (m > -np.inf)).sum())
        m, z, o = new, c * z + p.sum(-1, keepdims=True), c * o + p @ v_j
    z = np.where(m == -np.inf, 1, z)
    return o / z, (m + np.log(z))[..., 0]


moves = []
assert check_exercise("flash", lazy)
print("rows rescaled, in all cases together:", sum(moves))

# %% [markdown]
# **3.** Two parts without keys meet at $lse = -\infty$; the shift is then 0, both weights are 0, and so is $o$. The
# sink is one more leaf. That the number of leaves is odd now and then does not matter: the last one waits.

# %%
# exercise
def two(a, b):
    lse = np.logaddexp(a[1], b[1])
    shift = np.where(lse == -np.inf, 0, lse)
    return np.exp(a[1] - shift) * a[0] + np.exp(b[1] - shift) * b[0], lse


def tree(q, k, v, mask, sink, scale, key_block):
    lse, _, o = start(q, v, sink)
    leaves = [(o, lse)]
    for s, v_j in score_tiles(q, k, v, mask, scale, key_block):
        p, lse = core.softmax(s)
        leaves.append((p @ v_j, lse[..., None]))
    while len(leaves) > 1:
        leaves = [two(*leaves[n:n + 2]) if n + 1 < len(leaves) else leaves[n] for n in range(0, len(leaves), 2)]
    return leaves[0][0], leaves[0][1][..., 0]


assert check_exercise("flash", tree)

# %% [markdown]
# ## Sources
#
# - Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv:1805.02867: algorithm 3, (5.1) for
#   $m$ and $z$ with tiles of one; section 3.1, that it is associative and commutative.
# - Rabe and Staats 2021, *Self-attention does not need $O(n^2)$ memory*, arXiv:2112.05682: $o$ is carried along.
# - Dao et al. 2022, *FlashAttention*, arXiv:2205.14135: algorithm 1, the forward with $o$ normalised after every
#   tile; algorithm 4, the backward, (5.13) and (5.14); theorem 2, the numbers read and written.
# - Dao 2023, *FlashAttention-2*, arXiv:2307.08691: algorithm 1, one division and lse only, section 3.1.1; algorithm
#   2, the backward by columns.
# - Dao, Haziza, Massa and Sizov 2023, *Flash-Decoding*: the split over keys and its merge (5.6).
# - Liu et al. 2023, *Ring Attention*, arXiv:2310.01889: tiles that travel round the devices.
# - gpt-oss model card 2025, arXiv:2508.10925: the sink in the denominator.
