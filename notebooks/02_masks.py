# %% [markdown]
# # Masks
#
# **A mask is a set of pairs. Everything else is how you spell it.**
#
# Let $M$ be a set of pairs $(i, j)$: query $i$ may attend to key $j$. Write $M_i$ for the keys of query $i$.
# Attention under the mask is attention with every sum over the keys of the row, and no others:
#
# $$
# z_i = \sum_{j \in M_i} \exp(a_{ij}) \qquad
# p_{ij} = \begin{cases} \exp(a_{ij}) / z_i & j \in M_i \\ 0 & \text{else} \end{cases} \qquad
# o_i = \sum_{j \in M_i} p_{ij} v_j \qquad
# lse_i = \log z_i \tag{2.1}
# $$
#
# with $a_{ij} = scale \cdot q_i \cdot k_j$ (plus soft cap and bias where there are any). Causal, padded, packed,
# local, dilated, block-sparse, hashed and graph attention are all formula (2.1) with another $M$. This chapter
# draws the sets, spells them, counts them, and shows what goes wrong when a spelling is misread.
#
# These are the conventions, stated once:
#
# | what | here |
# |---|---|
# | layout | q (B, H, Tq, dk), k (B, H, Tk, dk), v (B, H, Tk, dv), o (B, H, Tq, dv), lse (B, H, Tq); scale is always given |
# | polarity | a mask is boolean, `True` = this query may attend to this key = the pair is in $M$ |
# | shape | broadcast to (B, H, Tq, Tk): each of the four axes may be 1, leading axes may be missing |
# | order | scale, soft cap, bias, *then* the mask, then softmax |
# | how | the mask selects scores; it is never added to them or multiplied with weights |
# | row without keys | p = 0, o = 0, lse = $-\infty$, and all gradients that come from the row are 0; with a sink, o = 0 and lse = sink |
# | key that no query may see | its k and v are never read: they may be NaN, and their gradients are 0 |
# | query that may see no key | its q is never read, likewise |
# | pair that is hidden, key that others see | its k and v must be finite: the pair has weight 0, and 0 times NaN is NaN |
# | lse | natural logarithm |
# | anchor | the corner from which the diagonal of a rectangle starts: always said, never implied |
# | window | (left, right) = keys *beside* the query's own, in steps of `dilation`; `None` = that side is open |
# | combination | by the operators *and*, *or*, *not* of boolean arrays |

# %%
import numpy as np

from attention_ref import core, load_cases, masked, masks, plot, sdpa
from attention_ref.conformance.numbers import count
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw, tab

# %% [markdown]
# ## Three tokens by hand
#
# Query 0 may attend to keys 0 and 2, query 1 to nothing, query 2 to everything. The set is a Python set, and the
# loop below is formula (2.1) with nothing added: no matrix, no infinity, no trick.

# %%
q = np.array([[1.0, -0.5], [0.25, 2.0], [-1.0, 0.75]])
k = np.array([[0.5, 1.0], [-1.5, 0.25], [2.0, -1.0]])
v = np.array([[3.0, -1.0], [0.5, 2.0], [-2.0, 4.0]])
scale = 0.75
M = {(0, 0), (0, 2), (2, 0), (2, 1), (2, 2)}

o, lse = np.zeros((3, 2)), np.zeros(3)
for i in range(3):
    keys = [j for j in range(3) if (i, j) in M]
    e = {j: np.exp(scale * q[i] @ k[j]) for j in keys}
    z = sum(e.values())
    for j in keys:
        print(f"query {i}, key {j}: a = {scale * q[i] @ k[j]:8.5f}   exp(a) = {e[j]:7.5f}   p = {e[j] / z:.5f}")
        o[i] += e[j] / z * v[j]
    lse[i] = np.log(z) if keys else -np.inf
    print(f"query {i}: z = {z:.5f}, o = {o[i].round(5)}, lse = {lse[i]:.5f}\n")

# %% [markdown]
# Query 1 has an empty sum: z = 0, and the logarithm of 0 is $-\infty$. No term is ever added to its row of o. That
# this is the right answer, and not just the one that falls out, is shown below.
#
# The package takes the same set as a boolean array.

# %%
mask = np.array([[(i, j) in M for j in range(3)] for i in range(3)])
o_dense, lse_dense = sdpa.dense(q[None, None], k[None, None], v[None, None], mask, scale=scale)
print(mask * 1)
agree("o by hand = dense", o_dense[0, 0], o)
agree("lse by hand = dense", lse_dense[0, 0], lse)

# %% [markdown]
# ## The code
#
# All of the handling of masks in the dense form stands in one function and its helper. `np.where` selects, so a
# hidden score is not read, whatever it is; a row whose maximum is $-\infty$ is shifted by 0, because
# $-\infty - (-\infty)$ is NaN; a row whose sum is 0 is divided by 1. The functions after it make the sets; nearly
# each is a comparison of the query position $i$, a column, with the key position $j$, a row.

# %%
plot.show(core, "softmax", "unread")
plot.show(sdpa, "dense")
plot.show(masks, "grid", "diagonal", "causal", "padding", "window", "blocks", "packed", "global_", "graph")

# %% [markdown]
# ## One set, eight spellings
#
# "Each token sees itself and the two before it", written eight ways. Which one is best is a question of what the
# program can skip; which one is *right* is not a question, for they are all the same set.

# %%
T = 6
i, j = masks.grid(T, T)
M = masks.window(T, T, left=2, right=0)
keys_of = [range(max(0, t - 2), t + 1) for t in range(T)]
bias = np.where(M, 0, -np.inf)
spellings = {
    "a predicate of (i, j)": (i - 2 <= j) & (j <= i),
    "the first key and the one past the last": (np.maximum(0, i - 2) <= j) & (j < i + 1),
    "a list of keys for each query": np.array([[t in keys for t in range(T)] for keys in keys_of]),
    "a list of edges (source key, target query)": masks.graph([(s, t) for t in range(T) for s in keys_of[t]], T),
    "causal, but not causal from three keys earlier": masks.causal(T, T) & ~masks.causal(T, T, -3),
    "a pattern of blocks of size 1": masks.blocks(M, 1, T, T),
    "its complement: True = hidden": ~((j < i - 2) | (j > i)),
    "a bias of 0 and -inf": bias > -np.inf,
}
for name, spelling in spellings.items():
    print(f"{name:48} {spelling.sum()} pairs, {(spelling != M).sum()} differ")

x = {name: draw(name, (1, 1, T, 4)) for name in "qkv"}
under_mask, under_bias = sdpa.dense(**x, mask=M, scale=0.5)[0], sdpa.dense(**x, bias=bias, scale=0.5)[0]
agree("o under the mask = o under the bias", under_mask, under_bias)

# %% [markdown]
# The last spelling is the one that travels worst: a boolean says in or out, a float can say anything in between. It
# is a *bias*, and in this package it is called one.
#
# ## The pictures
#
# Twelve sets over eight tokens. Rows are queries, columns are keys, dark is `True`. Hash buckets are numbers that a
# random rotation gives to every token; equal numbers see each other, which is what `packed` says of sequences that
# share a row. Sorted by bucket, the scattered set is block-diagonal: this is all that sorting does in Reformer.

# %%
T = 8
x, rotation = draw("x", (T, 4)), draw("w_v", (4, 2))
bucket = np.argmax(np.concatenate([x @ rotation, -x @ rotation], -1), -1)
order = np.argsort(bucket, kind="stable")
hashed = masks.packed(bucket, bucket)
some = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]], bool)
edges = [(0, 0), (1, 0), (3, 0), (0, 1), (4, 1), (1, 2), (6, 2), (2, 3), (3, 5), (5, 5), (7, 5), (2, 6), (6, 6),
         (0, 7), (4, 7)]
zoo = {
    "none": masks.full(T, T),
    "causal": masks.causal(T, T),
    "padding, 5 keys": masks.padding([5], T)[0, 0] & masks.full(T, T),
    "packed, 3 + 5 tokens": masks.packed([0] * 3 + [1] * 5, [0] * 3 + [1] * 5),
    "window: left 2, right 0": masks.window(T, T, 2, 0),
    "left 0, right 2": masks.window(T, T, 0, 2),
    "left 2, right 1, dilation 2": masks.window(T, T, 2, 1, dilation=2),
    "block-sparse, size 2": masks.blocks(some, 2, T, T),
    "hash buckets": hashed,
    "the same, sorted": hashed[order][:, order],
    "graph": masks.graph(edges, T),
    "global + window": masks.global_(T, T, [0]) | masks.window(T, T, 1, 1),
}
figure, axes = plot.subplots(3, 4, size=(1.75, 1.9))
for axis, (name, pairs) in zip(axes.flat, zoo.items()):
    plot.mask_map(axis, pairs, f"{name}\n{pairs.sum()} pairs")
    axis.title.set_fontsize(8)
    axis.set(xticks=[], yticks=[])
    axis.label_outer()
figure.suptitle("Twelve masks over eight tokens: the same formula, another set of pairs")
plot.save(figure, "02_masks_zoo", """Twelve 8 by 8 grids. No mask fills all 64 cells; causal is the lower triangle
    with 36; padding keeps the first five columns; packing two sequences gives two squares on the diagonal;
    windows are bands below or above the diagonal, with gaps when dilated; block-sparse is made of squares of 2 by
    2; hash buckets are scattered and become squares on the diagonal when tokens are sorted by bucket; a graph is
    irregular, and its row 4 is empty; global plus window is a cross over a band.""")

# %% [markdown]
# Some things to see in it. The graph has a node, 4, at which no edge points: a row without keys is not exotic. A
# padding mask has full columns and knows nothing of queries. Global plus window is Longformer's set; with blocks at
# random added it is BigBird's. A pattern of diagonal blocks is `packed` again, with the number of the block for a
# segment.
#
# ### Where does the diagonal start?
#
# With Tq = Tk there is one causal mask. In a rectangle there are two, and both are in use. *Top left* keeps
# $j \leq i$. *Bottom right* keeps $j \leq i + T_k - T_q$: the queries are the last Tq tokens of the keys, as they
# are whenever keys come from a cache. Both are one formula, $j \leq i + offset$, where the offset is the key
# position at which query 0 stands.

# %%
figure, axes = plot.subplots(2, 3, size=(2.4, 2.0))
for row_of_axes, anchor in zip(axes, masks.ANCHORS):
    for axis, (Tq, Tk) in zip(row_of_axes, [(2, 3), (3, 2), (1, 4)]):
        offset = masks.diagonal(Tq, Tk, anchor)
        plot.mask_map(axis, masks.causal(Tq, Tk, anchor), f"{anchor}, {Tq} x {Tk}, offset {offset}")
        axis.set(xticks=[], yticks=[])
        rows = ["".join(map(str, row)) for row in masks.causal(Tq, Tk, anchor) * 1]
        print(f"{anchor:12} {Tq} x {Tk}, offset {offset:2}: {' / '.join(rows)}")
figure.suptitle("Top left hides keys from the last query; bottom right leaves the first without keys")
plot.save(figure, "02_masks_anchors", """Causal masks anchored top left (upper row) and bottom right (lower row).
    2 by 3: top left is 100, 110; bottom right is 110, 111. 3 by 2: top left is 10, 11, 11; bottom right is 00,
    10, 11, so that query 0 has no keys. 1 by 4, one decoded token: top left sees key 0 alone, bottom right sees
    all four keys.""")

# %% [markdown]
# The right-hand column is the classic bug of decoding: one new query, four keys, and a top-left mask that shows it
# only the very first token.
#
# ### Four shapes, one axis at a time
#
# A mask is stored small and read as (B, H, Tq, Tk). An axis of size 1 means "the same for all". Four shapes cover
# nearly all practice, and their `&` is as large as any of them needs.

# %%
B, H, Tq, Tk = 2, 2, 3, 5
segments = np.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
shapes = {
    "causal": masks.causal(Tq, Tk)[None, None],
    "padding": masks.padding([5, 4], Tk),
    "packed": masks.packed(segments[:, -Tq:], segments)[:, None],
    "per head": np.array([[masks.window(Tq, Tk, 2, 2), masks.window(Tq, Tk, 1, 1, dilation=2)]]),
}
shapes["all four"] = shapes["causal"] & shapes["padding"] & shapes["packed"] & shapes["per head"]
figure, axes = plot.subplots(1, 5, size=(2.0, 1.9))
for axis, (name, stored) in zip(axes, shapes.items()):
    print(f"{name:10} stored as {stored.shape}: {stored.size:3} booleans, read as {B * H * Tq * Tk}")
    tiles = np.broadcast_to(stored, (B, H, Tq, Tk)).swapaxes(1, 2).reshape(B * Tq, H * Tk)
    plot.mask_map(axis, tiles, f"{name}\n{stored.shape}")
    axis.axhline(Tq - 0.5, color=plot.COLOURS[1])
    axis.axvline(Tk - 0.5, color=plot.COLOURS[1])
    axis.set(xticks=[Tk // 2 - 0.5, Tk + Tk // 2 - 0.5], xticklabels=["head 0", "head 1"], xlabel="",
             yticks=[Tq // 2 - 0.5, Tq + Tq // 2 - 0.5], yticklabels=["batch 0", "batch 1"], ylabel="")
    axis.label_outer()
figure.suptitle("An axis of size 1 repeats: which of the four tiles are equal tells the shape")
plot.save(figure, "02_masks_shapes", """Five masks, each as two by two tiles: batch entries down, heads across, a
    tile being three queries by five keys. Causal, stored as (1, 1, 3, 5), has four equal tiles. Padding, (2, 1,
    1, 5), has full columns and differs between batch entries. Packed, (2, 1, 3, 5), differs between batch entries
    too. Per head, (1, 2, 3, 5), differs between heads: a window, and a dilated one. The four combined with and,
    (2, 2, 3, 5), differ in every tile.""")

# %% [markdown]
# A mask of *queries*, (B, 1, Tq, 1), is missing on purpose. Padding is a property of keys. What comes out of a
# padded query is nobody's business as long as nobody reads it: hide the keys, and leave padded queries out of the
# loss. The same goes for tests: compare the rows that are real.
#
# ### `&`, `|`, `~`, and brackets
#
# Sets compose, and so do their arrays. The one thing to think about is what stands outside the brackets: a global
# token opens its row to the future, so causal has to come last.

# %%
T = 6
W, G, C = masks.window(T, T, 1, 1), masks.global_(T, T, [0]), masks.causal(T, T)
panels = {"W: one key each side": W, "G: token 0 is global": G, "C: causal": C,
          "(W | G) & C": (W | G) & C, "(W & C) | G: the future leaks": (W & C) | G, "~C": ~C}
figure, axes = plot.subplots(2, 3, size=(2.3, 2.2))
for axis, (name, pairs) in zip(axes.flat, panels.items()):
    plot.mask_map(axis, pairs, name)
    axis.set(xticks=[], yticks=[])
    axis.label_outer()
figure.suptitle("Where the bracket stands decides whether token 0 sees the future")
plot.save(figure, "02_masks_compose", """Six 6 by 6 masks. Above: a band of width three, the cross of a global
    token 0, the lower triangle. Below: window or global, then causal, which is a band with a full first column
    below the diagonal; window and causal, then global, in which the first row is full and query 0 sees five
    future keys; and the strict upper triangle.""")

hidden = ~((W | G) & C)
print("De Morgan:", (hidden == ((~W & ~G) | ~C)).all())
print("distributive:", (((W | G) & C) == ((W & C) | (G & C))).all())
print("future keys of query 0:", ((W | G) & C)[0, 1:].sum(), "and", ((W & C) | G)[0, 1:].sum())

# %% [markdown]
# ## The derivation
#
# ### Forward: three laws of sets
#
# **Restriction.** Write $p_{ij}$ for the weights without a mask and $lse_i$ for their log-sum. Since
# $\exp(a_{ij}) = p_{ij} \exp(lse_i)$, a sum over $M_i$ alone is $z^M_i = \exp(lse_i) \sum_{l \in M_i} p_{il}$, and
# so
#
# $$
# p^M_{ij} = \frac{p_{ij}}{\sum_{l \in M_i} p_{il}} \qquad
# lse^M_i = lse_i + \log \sum_{l \in M_i} p_{il} \tag{2.2}
# $$
#
# Masking is conditioning: the weights that remain keep their ratios and are scaled up to sum to one. Masking
# *after* the softmax forgets the division.
#
# **Union.** If $M$ and $N$ have no pair in common, the sums add, $z^{M \cup N}_i = z^M_i + z^N_i$, and with them
# the numerators:
#
# $$
# lse^{M \cup N}_i = \log \left( \exp(lse^M_i) + \exp(lse^N_i) \right) \qquad
# o^{M \cup N}_i = \exp(lse^M_i - lse^{M \cup N}_i) \thinspace o^M_i
#                 + \exp(lse^N_i - lse^{M \cup N}_i) \thinspace o^N_i \tag{2.3}
# $$
#
# **The empty set.** Its sum is 0 and its lse is $\log 0 = -\infty$: the one value that (2.3) passes over without a
# trace, since $\exp(-\infty) = 0$. What is its o? Formula (2.1) has no answer, 0/0, but three demands leave one.
# Joining nothing to $M$ must change nothing, so o is not NaN (0 times NaN is NaN). A key that the query may not
# attend to must not be read, so o is not the mean of V or anything else made of values. And it must scale with V,
# as every row of attention does, so it is not a constant other than 0.

# %%
x = {name: draw(name, (2, 3, 5, 4 if name != "v" else 6)) for name in "qkv"} | dict(scale=0.5)
full, causal = masks.full(5, 5), masks.causal(5, 5)
odd = masks.graph([(0, 0), (3, 0), (0, 2), (1, 2), (4, 2), (4, 3)], 5)
p, p_causal = (sdpa.steps(**x, mask=m)[-1] for m in (full, causal))
inside = (p * causal).sum(-1, keepdims=True)
agree("restriction: weights", p_causal, p * causal / inside)
agree("restriction: lse", sdpa.dense(**x, mask=causal)[1], sdpa.dense(**x)[1] + np.log(inside[..., 0]))

parts = [sdpa.dense(**x, mask=m) for m in (odd & causal, odd & ~causal)]
whole = sdpa.dense(**x, mask=odd)
print("keys per query in the parts:", (odd & causal).sum(-1), "and", (odd & ~causal).sum(-1))
agree("union: lse", np.logaddexp(parts[0][1], parts[1][1]), whole[1])
weight = [np.exp(lse - np.where(whole[1] == -np.inf, 0, whole[1]))[..., None] for _, lse in parts]
agree("union: o", sum(w * o for w, (o, _) in zip(weight, parts)), whole[0])

# %% [markdown]
# Query 3 is empty in one of the parts, queries 1 and 4 in both. Nothing was written for them but the rule: 0 and
# $-\infty$.
#
# ### Backward: a pair that is not in the set is not in the formula
#
# Let $do_i$ and $dlse_i$ be the gradients that arrive. From (2.1), for keys $j, l$ of the same set $M_i$,
#
# $$
# \frac{\partial p_{ij}}{\partial a_{il}} = p_{ij} (\delta_{jl} - p_{il}) \qquad
# \frac{\partial \thinspace lse_i}{\partial a_{il}} = p_{il} \tag{2.4}
# $$
#
# With $dp_{ij} = do_i \cdot v_j$ the chain rule gives the gradient of a score, and the products $q \cdot k$ and
# $p v$ give the rest:
#
# $$
# da_{il} = p_{il} \left( dp_{il} - \sum_{j \in M_i} p_{ij} dp_{ij} + dlse_i \right) \quad (i, l) \in M,
# \qquad da_{il} = 0 \quad \text{else} \tag{2.5}
# $$
#
# $$
# dq_i = scale \sum_{j \in M_i} da_{ij} k_j \qquad
# dk_j = scale \sum_{i : j \in M_i} da_{ij} q_i \qquad
# dv_j = \sum_{i : j \in M_i} p_{ij} do_i \tag{2.6}
# $$
#
# The mask itself has no gradient. Since $p = 0$ off the set, the dense code needs no second mask in the backward:
# the factor $p$ in (2.5) is one. And the empty rows take care of themselves, provided that nothing that is
# multiplied by p = 0 is infinite or NaN. Sum (2.5) over a row: the first two terms cancel and the row of da sums to
# $dlse_i$ if the row has keys, to 0 if not.
# ### What a row without keys gives and sends
#
# The golden case `empty_row` has five queries over six keys, and query 1 may attend to none of them.

# %%
case = load_cases("sdpa", "empty_row")[0]
x, do = case.inputs, case.cotangents
o, lse = sdpa.dense(**x)
gradients = sdpa.vjp(**do, **x)
print("keys per query:", x["mask"][0, 0].sum(-1), "  lse of batch 0, head 0:", lse[0, 0].round(3))
agree("o of the empty row is 0", o[:, :, 1], 0)
agree("its lse is -inf", lse[:, :, 1], -np.inf)
agree("its dq is 0", gradients["dq"][:, :, 1], 0)
da = sdpa.vjp(**do, **x | dict(bias=np.zeros((2, 3, 5, 6))))["dbias"]
with_keys = x["mask"][0, 0].any(-1)
agree("rows of da sum to dlse, that of the empty row to 0", da.sum(-1), np.where(with_keys, do["dlse"], 0))

loud = dict(do=np.where(with_keys[:, None], do["do"], 100), dlse=np.where(with_keys, do["dlse"], 100))
other = sdpa.vjp(**loud, **x | dict(q=np.where(with_keys[:, None], x["q"], np.nan)))
agree("do and dlse of 100 there, and q NaN: the same dk", other["dk"], gradients["dk"])
agree("... the same dv", other["dv"], gradients["dv"])

sink = dict(sink=np.array([0.5, -1.0, 2.0]))
agree("with a sink the empty row is regular: o = 0", sdpa.dense(**x | sink)[0][:, :, 1], 0)
agree("and lse = sink", sdpa.dense(**x | sink)[1][:, :, 1], sink["sink"])

# %% [markdown]
# ## Forms that agree
#
# `sdpa` takes the set as an array. `masked` takes it as parameters, which is how most kernels want it:
#
# $$
# \begin{aligned}
# keep_{ij} &= [j \lt length] \thinspace [segment_i = segment_j] \thinspace [\text{not } causal \text{ or } j \leq p_i]
#   \thinspace [-left \cdot D \leq j - p_i \leq right \cdot D] \thinspace [D \mid j - p_i] \\
# p_i &= i + offset, \qquad offset = 0 \text{ (top left) or } length - T_q \text{ (bottom right)}
# \end{aligned} \tag{2.7}
# $$
#
# $length$ is that of the batch entry, from 0 to $T_k$; $D$ is the dilation, and $D \mid j - p_i$ says that it divides the
# distance, which may be negative, as $p_i$ may be. All conditions are joined by *and*. Positions run on through a row of
# packed segments, and a padded query is computed like any other. The definition makes the set and selects; the loop
# never has a mask, but works out the first key, the last and the step. (In Python `p % dilation` is never negative. In C
# it can be.)

# %%
plot.show(masked, "conditions", "keep", "loop")

# %%
forms_table("sdpa", "causal_and_padding")
print()
forms_table("masked", "causal_padding_window_segments_bottom_right")

# %% [markdown]
# ## Beside dense softmax
#
# The same scores, three sets. Read any row from panel to panel: where a key stays, its weight grows, and the ratios
# among those that stay do not change. That is law (2.2).

# %%
T = 5
x = {name: draw(name, (1, 1, T, 4)) for name in "qkv"} | dict(scale=0.25)
sets = {
    "no mask": masks.full(T, T),
    "(token 0 | left 1) & causal": (masks.global_(T, T, [0]) | masks.window(T, T, 1)) & masks.causal(T, T),
    "causal, two keys earlier": masks.causal(T, T, -2),
}
weights = {name: sdpa.steps(**x, mask=m)[-1][0, 0] for name, m in sets.items()}
for name, m in sets.items():
    agree(f"{name}: rows with keys sum to 1, rows without to 0", weights[name].sum(-1), m.any(-1))
panels = {name: (weights[name], m) for name, m in sets.items()}
figure = plot.attention_maps(panels, "What stays is scaled up until the row is one")
for axis in figure.axes[:-1]:
    axis.set(xticks=[], yticks=[])
plot.save(figure, "02_masks_weights", """Three 5 by 5 weight matrices from the same scores, hidden cells hatched:
    no mask; a causal window with a global first token; and a causal mask that starts two keys earlier, whose
    first two rows are empty. In every row that has keys the visible weights keep their ratios and sum to one.""")

# %% [markdown]
# ## What it costs
#
# The dense form computes all $T_q T_k$ scores and then hides some: its count does not depend on the set. A program
# that visits the pairs of the set alone pays for $\lvert M \rvert$ of them,
#
# $$
# flops = \lvert M \rvert \thinspace (2 d_k + 2 d_v + 4) + T_q \thinspace (d_k + 3) \tag{2.8}
# $$
#
# (a multiply-add is two; the four are adding the bias, subtracting the maximum, adding up and dividing; the three
# belong to the sink and the logarithm). Below, each query is given its own keys and no others, and the operations
# are counted as they happen.

# %%
T, dk, dv = 12, 4, 6
x = dict(q=draw("q", (1, 1, T, dk)), k=draw("k", (1, 1, T, dk)), v=draw("v", (1, 1, T, dv)))
rows = []
for name, m in {"none": masks.full(T, T), "causal": masks.causal(T, T), "left 2": masks.window(T, T, 2, 0)}.items():
    everything = count(sdpa.dense, **x, mask=m, scale=0.5)["flops"]
    visits = [dict(q=x["q"][:, :, [t]], k=x["k"][:, :, m[t]], v=x["v"][:, :, m[t]]) for t in range(T)]
    o = np.concatenate([sdpa.dense(**x_t, scale=0.5)[0] for x_t in visits], axis=2)
    agree(f"{name}: visiting gives the same o", o, sdpa.dense(**x, mask=m, scale=0.5)[0])
    counted = sum(count(sdpa.dense, **x_t, scale=0.5)["flops"] for x_t in visits)
    rows.append((name, m.sum(), everything, counted, m.sum() * (2 * dk + 2 * dv + 4) + T * (dk + 3)))
print(table(rows, ("mask", "pairs", "dense, counted", "visited, counted", "formula (2.8)")))

# %% [markdown]
# So the cost of a mask is the size of its set, and a picture of sizes is a picture of costs. Causal halves, a
# window is linear in T, buckets divide by their number. The crossover is where the set stops being all of causal: a
# window with `left` = 127 costs exactly what causal costs up to T = 128, and less from there on.

# %%
lengths = [32, 64, 128, 256, 512, 1024]
sizes = {
    "none": [masks.full(T, T).sum() for T in lengths],
    "causal": [masks.causal(T, T).sum() for T in lengths],
    "8 buckets": [masks.packed(np.arange(T) % 8, np.arange(T) % 8).sum() for T in lengths],
    "left 127": [masks.window(T, T, 127, 0).sum() for T in lengths],
    "left 15 + token 0": [(masks.window(T, T, 15, 0) | masks.global_(T, T, [0])).sum() for T in lengths],
}
formula = [T * T for T in lengths], [T * (T + 1) // 2 for T in lengths], [T * T // 8 for T in lengths], \
    [sum(min(t + 1, 128) for t in range(T)) for T in lengths], [16 * T - 120 + (T - 1) + (T - 16) for T in lengths]
agree("pairs counted = pairs by formula", np.array([*sizes.values()]), np.array(formula))
agree("left 127 = causal up to T = 128", sizes["left 127"][:3], sizes["causal"][:3])
figure, axis = plot.subplots(size=(5.2, 3.4))
plot.lines(axis, lengths, sizes, "tokens T", "pairs in the set", "A window leaves the causal curve at T = left + 1")
axis.set_yticks([], minor=True)
plot.save(figure, "02_masks_cost", """Pairs in the set against tokens, both logarithmic. No mask and causal rise
    with slope two, causal at half the height; eight buckets are parallel at one eighth. A window with 127 keys on
    the left lies on the causal curve up to 128 tokens and continues with slope one. A window of 15 with one
    global token has slope one throughout.""")

# %% [markdown]
# ## Backward
#
# The hand-derived gradients against a complex step through the definition, with empty rows among the others. 0 in
# both is agreement too: the masked pairs send nothing.

# %%
gradient_table("sdpa", "causal_and_padding")
print()
gradient_table("masked", "causal_padding_window_segments_bottom_right")

# %% [markdown]
# ## What goes wrong
#
# A trick to see the weights of code that does not return them: give it the identity as V. Then o *is* p. Here is
# one case, five queries over three keys from the bottom right, through five of the mistakes that the package knows
# by name.

# %%
x = {name: draw(name, (1, 1, n, 4)) for name, n in dict(q=5, k=3, v=3).items()}
x |= dict(v=np.eye(3)[None, None], mask=masks.causal(5, 3)[None, None], bias=0.0 * draw("bias", (1, 1, 1, 1)),
          sink=np.array([-np.inf]), scale=0.25, softcap=None)
panels = {"right": (sdpa.dense(**x)[0][0, 0], x["mask"][0, 0])}
for slug in "causal_top_left", "mask_polarity", "mask_added_as_0_1", "mask_after_softmax", "empty_row_uniform":
    sentence, wrong = sdpa.BUGS[slug]
    p = wrong(x)[0][0, 0]
    panels[slug] = p, p > 0
    print(f"{slug}: {sentence}\n    rows sum to {p.sum(-1).round(2)}")
figure = plot.attention_maps(panels, "Right, and five misreadings of the same mask (V = identity, so o = p)")
for axis in figure.axes[:-1]:
    axis.set(xticks=[], yticks=[])
plot.save(figure, "02_masks_mistakes", """Weights of five queries over three keys. Weights that are 0 are hatched.
    Right: two empty rows, then a triangle. Top left: no empty row, the triangle starts at query 0. Polarity: the
    complement, full in the first rows and empty in the last. Added as 0 and 1: every cell is positive. After
    softmax: the right cells, but too small, so that rows sum to less than one. Uniform: right, but the two empty
    rows hold a third everywhere.""")

# %% [markdown]
# ### Sentinels: large numbers that stand for minus infinity
#
# Much code has no infinity in it but a large negative number, because $-\infty - (-\infty)$ once gave somebody a
# NaN. It works for every row that keeps a key. For a row that keeps none it gives, depending on the spelling and
# the number type, the mean of the values, the *unmasked* softmax, or the very NaN that it was meant to avoid. One
# row of three keys, all hidden; right is 0 0 0:

# %%
def weights(a): e = np.exp(a - a.max()); return (e / e.sum()).round(3)
billion = lambda s: np.float64(-1e9).astype(s.dtype)
spellings = {
    "scores replaced by -1e9": lambda s, lowest: 0 * s + billion(s),
    "-1e9 added": lambda s, lowest: s + billion(s),
    "scores replaced by the lowest number": lambda s, lowest: 0 * s + lowest,
    "lowest number added": lambda s, lowest: s + lowest,
    "lowest number added, scores 32 lower": lambda s, lowest: s - 32 + lowest,
    "lowest number added twice": lambda s, lowest: s + lowest + lowest,
    "-inf, no guard": lambda s, lowest: s - np.inf,
}
rows = []
with np.errstate(all="ignore"):
    for name, spell in spellings.items():
        scores = [np.array([-1, 0.5, 2], dtype) for dtype in ("float16", "float32", "float64")]
        rows.append((name, *(str(weights(spell(s, np.finfo(s.dtype).min))) for s in scores)))
    print("-1e9 as float16:", np.float64(-1e9).astype(np.float16), "\n")
print(table(rows, ("three keys, all hidden; right is 0 0 0", "float16", "float32", "float64")))
no_mask = weights(np.array([-1, 0.5, 2]))
print("\nwithout any mask:", no_mask)
print(f"spacing of numbers at 1e9: {np.spacing(np.float32(1e9)):.0f} in float32, {np.spacing(1e9):.0e} in float64")

# %% [markdown]
# Read the second line. In float16, -1e9 does not fit and is $-\infty$: NaN. In float32 the spacing of numbers near
# 1e9 is 64, the scores are swallowed, and the row is uniform. In float64 the scores survive the addition to a
# ten-millionth, and after the maximum is subtracted nothing is left of the mask at all. One line of code, three
# answers. The cure is in `core.softmax`: select, shift an all-hidden row by 0, divide an empty sum by 1.
#
# ### A wrong port, caught
#
# Somebody writes `masked` anew, with one place of query 0 for the whole batch. Bottom right is $T_k - T_q$, as
# everybody remembers it.

# %%
# exercise
def place_of_query_0(lengths, Tq, Tk, anchor):
    return Tk - Tq if anchor == "bottom-right" else 0


def port(q, k, v, lengths, query_segments, key_segments, anchor, causal, left, right, dilation, scale):
    Tq, Tk = q.shape[2], k.shape[2]
    ahead = np.arange(Tk) - np.arange(Tq)[:, None] - place_of_query_0(lengths, Tq, Tk, anchor)
    keep = (np.arange(Tk) < lengths[:, None, None]) & (query_segments[:, :, None] == key_segments[:, None])
    keep = keep & ((ahead <= 0) | (not causal)) & (ahead % dilation == 0)
    keep = keep & (ahead >= (-np.inf if left is None else -left * dilation))
    keep = keep & (ahead <= (np.inf if right is None else right * dilation))
    p, lse = core.softmax(scale * q @ core.unread(k, keep[:, None]).swapaxes(-1, -2), keep[:, None])
    return p @ core.unread(v, keep[:, None]), lse


check_exercise("masked", port)

# %% [markdown]
# The last lines of the report are the point of named mistakes: not only *that* it is wrong, but where the
# difference first shows and what to look for. Wherever all lengths are Tk the port is right, and a test without
# padding passes.
#
# ## Where code in the wild differs
#
# ### Polarity
#
# | `True` or 1 means | where |
# |---|---|
# | attend | torch `scaled_dot_product_attention` and flex attention, jax, ONNX, the 2-D `attention_mask` of transformers (1 = a real token), this package |
# | hidden | both masks of torch `nn.MultiheadAttention`, `key_padding_mask` in the fairseq tradition |
# | neither, it is added | any *float* mask in torch and ONNX: a bias, in which a mask of ones and zeros is nearly nothing |
#
# ### A row without keys
#
# Measured with torch 2.13, jax 0.10.2, onnx 1.23.2, onnxruntime 1.32 and transformers 5.24; flash-attention was
# read in its CUDA source.
#
# | implementation | o | lse |
# |---|---|---|
# | torch `scaled_dot_product_attention`, boolean mask or $-\infty$ added | 0, gradients 0 | 0 from the CPU flash operator |
# | the same with the lowest number added | mean of V | finite |
# | torch flex attention | 0 | $-\infty$ |
# | torch `nn.MultiheadAttention`, weights asked for, or its fast path | NaN | |
# | jax `dot_product_attention`, boolean mask | mean of V | $-2.38 \cdot 10^{38}$ |
# | the same with $-\infty$ in the bias | NaN | $-\infty$ |
# | onnx reference, onnxruntime | 0 | |
# | flash-attention | 0 | $+\infty$, and $-\infty$ in a partial result |
# | transformers, eager and sdpa | mean of V and 0 | |
#
# So "compare with another library" is no test for such rows until both sides say what they do. Each habit is a
# named mistake here, and law (2.3) shows which of them hurts. Merge an empty row, in each spelling, with a row that
# has keys:

# %%
x = load_cases("masked", "length_zero")[0].inputs
right = masked.dense(**x)
b, _, i = np.argwhere(right[1] == -np.inf)[0]
o_keys, lse_keys = np.arange(1.0, 7.0), 0.5
rows = []
with np.errstate(all="ignore"):
    for slug in "none", "empty_row_nan", "empty_row_uniform", "empty_row_lse_zero", "empty_row_lse_infinite":
        y = masked.BUGS[slug][1](x) if slug in masked.BUGS else right
        o, lse = y[0][b, 0, i], (y + right[1:])[1][b, 0, i]
        both = np.logaddexp(lse, lse_keys)
        merged = np.exp(lse - both) * o + np.exp(lse_keys - both) * o_keys
        rows.append((slug, o.round(2)[:3], lse, merged.round(2)[:3], both.round(2)))
print("merged with a row that has keys: o = 1 2 3 ..., lse = 0.5\n")
print(table(rows, ("mistake", "o of the row without keys", "lse", "o merged", "lse merged")))

# %% [markdown]
# The first line leaves the other row as it was. An lse of 0 claims one key's worth of weight that is not there;
# $+\infty$ claims all of it. (Flash-attention writes $+\infty$ on purpose, so that $\exp(a - lse)$ is 0 in its
# backward; its partial results, which are merged, hold $-\infty$.) The mean of V survives the merge, having weight
# 0, but to make it hidden values were read.
#
# ### Anchors
#
# | anchor | who |
# |---|---|
# | top left | torch `is_causal`, jax `is_causal`, ONNX without a cache |
# | bottom right | flash-attention since 2.1, torch `causal_lower_right` |
# | an offset | ONNX with a cache (its length), transformers (positions of the cache) |
# | bottom right of each batch entry's true length | flash-attention with padding, ONNX `nonpad_kv_seqlen`, `masked` here |
#
# Decoding is the case to remember: one query, the keys of the past. And with padding the corner is where the *real*
# keys end, entry by entry, as the port above did not know.

# %%
x = {name: draw(name, (2, 3, 1 if name == "q" else 6, 4)) for name in "qkv"}
x |= dict(query_segments=np.zeros((2, 1), int), key_segments=np.zeros((2, 6), int), lengths=np.array([6, 4]))
decode = lambda anchor: masked.dense(**x, anchor=anchor, causal=True, scale=0.5)[0]
agree("decoding from the top left: o is v of key 0, whatever the query", decode("top-left"), x["v"][:, :, :1])
all_real = sdpa.dense(x["q"], x["k"], x["v"], masks.padding([6, 4], 6), scale=0.5)[0]
agree("bottom right: the query sees all real keys", decode("bottom-right"), all_real)

real, true_place = masks.padding([6, 4], 6), np.array([6, 4])[:, None, None, None] - 3
print("three queries, lengths 6 and 4 in a row of 6; keys per query by")
print("  the padded length:", (masks.causal(3, 6) & real).sum(-1)[:, 0].tolist())
print("  the true length:  ", (masks.causal(3, 6, true_place) & real).sum(-1)[:, 0].tolist())

# %% [markdown]
# ### Windows: the same word, seven meanings
#
# What each source says about $(i, j)$, and our (left, right). The two are compared pair by pair, then the keys of a
# query in the middle are counted. With the same number, 4, the windows hold from 4 to 9 keys. Below the table, what
# `masked` calls it when one is taken for the other.

# %%
T, w, (l, r) = 16, 4, (3, 1)
i, j = masks.grid(T, T)
seven = [
    ("Longformer, paper and transformers: w / 2 each side", abs(i - j) <= w // 2, (w // 2, w // 2)),
    ("Longformer, own code: w each side", abs(i - j) <= w, (w, w)),
    ("Mistral 7B, text: W before the own", (i - w <= j) & (j <= i), (w, 0)),
    ("transformers sliding_window, GPT-Neo: w with the own", (i - w < j) & (j <= i), (w - 1, 0)),
    ("transformers, bidirectional: w each side", abs(i - j) <= w, (w, w)),
    ("flash-attention, jax, ONNX: l before, r after", (i - l <= j) & (j <= i + r), (l, r)),
]
rows = []
for who, theirs, (left, right) in seven:
    ours = masks.window(T, T, left, right)
    rows.append((who, str((left, right)), ours[8].sum(), (theirs != ours).sum()))
chunk = (j // w == i // w) | (j // w == i // w - 1)
tiles = masks.blocks(masks.window(T // w, T // w, 1, 0), w, T, T)
who = "local-attention, Reformer: own chunk and one before"
rows.append((who, "none fits", tiles[8].sum(), (chunk != tiles).sum()))
print(table(rows, ("w = 4; l, r = 3, 1", "(left, right)", "keys of query 8", "pairs that differ")))
print("\nin chunks, keys before the own of queries 8 to 11:", [int(tiles[t, :t].sum()) for t in range(8, 12)])
x = {name: draw(name, (1, 1, T, 4)) for name in "qkv"}
agree("W = 1 with the own = (0, 0): o = v", sdpa.dense(**x, mask=masks.window(T, T, 0, 0), scale=0.5)[0], x["v"])
for slug in "window_one_more", "window_halved", "window_symmetric", "window_in_blocks", "window_zero_is_open":
    print(f"{slug}: {masked.BUGS[slug][0]}")

# %% [markdown]
# The last row is not a window. What a token sees depends on where it stands in its chunk, so it is a block mask,
# and no (left, right) converts it. (The Reformer class in transformers also wraps around: without causal, its first
# chunk attends to the last.) And three traps in small print: jax counts its window from the top left while
# flash-attention and ONNX follow the offset; 0 means no keys on that side, *not* no limit, which is -1 in
# flash-attention and ONNX and `None` here; a dilated window counts steps, so (left, right) = (2, 2) with dilation 3
# reaches 6 tokens each way.
#
# ### Padding and packing
#
# Sequences of unequal length are either padded to a rectangle or packed end to end into one row. Packed rows come
# with the borders, `cu_seqlens` = 0, 3, 5, 9: exclusive, one more than there are sequences. Equal segment numbers
# and causal, and the row computes what each sequence computes alone. Causal alone leaks across borders.

# %%
borders = np.array([0, 3, 5, 9])
segment = np.repeat(np.arange(3), np.diff(borders))
x = {name: draw(name, (1, 2, 9, 4)) for name in "qkv"}
alone = [sdpa.dense(**{n: a[:, :, s:e] for n, a in x.items()}, mask=masks.causal(e - s, e - s), scale=0.5)[0]
         for s, e in zip(borders, borders[1:])]
row = sdpa.dense(**x, mask=masks.packed(segment, segment) & masks.causal(9, 9), scale=0.5)[0]
agree("packed = one by one", row, np.concatenate(alone, axis=2))
leak = sdpa.dense(**x, mask=masks.causal(9, 9), scale=0.5)[0]
print("rows that causal alone gets wrong:", np.flatnonzero(abs(leak - row).max((0, 1, 3)) > 1e-12).tolist())

rest = dict(q=np.full((1, 2, 2, 4), 7.0), k=np.full((1, 2, 2, 4), np.nan), v=np.full((1, 2, 2, 4), np.nan))
padded = {name: np.concatenate([x[name][:, :, :3], rest[name]], axis=2) for name in x}
agree("padded to five, hidden keys NaN: the real rows are those of the sequence alone",
      sdpa.dense(**padded, mask=masks.causal(5, 5) & masks.padding([3], 5), scale=0.5)[0][:, :, :3], alone[0])
left_padded = masks.causal(5, 5) & masks.padding([3], 5)[..., ::-1]
print("padding on the left, causal: keys per query", left_padded[0, 0].sum(-1).tolist())

# %% [markdown]
# Padding on the left is how batches are generated from, and its padded queries are rows without keys: this is where
# two back ends of one library differ, one with 0, the other with the mean of V, in rows that nobody should read.
# Positions must be counted from the first real token, not from the slot; for a set that does not matter, for rotary
# or linear position biases it does.
#
# ## Relations
#
# Most masks are special cases of one another, and all of them of a bias.

# %%
T = 9
x = {name: draw(name, (2, 3, T, 4)) for name in "qkv"} | dict(scale=0.5)
some = masks.graph([(0, 0), (4, 0), (1, 2), (2, 2), (8, 3), (3, 5), (7, 8)], T)
attend = lambda m, **more: sdpa.dense(**x | more, mask=m)[0]
agree("mask = bias of 0 and -inf", attend(some), attend(True, bias=np.where(some, 0, -np.inf)))
agree("window, open left, 0 right = causal", attend(masks.window(T, T, None, 0)), attend(masks.causal(T, T)))
agree("window, both open = none", attend(masks.window(T, T)), attend(True))
agree("every token global = none", attend(masks.global_(T, T, range(T))), attend(True))
back, third = [(s, t) for t in range(T) for s in range(t + 1)], np.arange(T) // 3
agree("graph with all edges back = causal", attend(masks.graph(back, T)), attend(masks.causal(T, T)))
tiles = masks.blocks(np.eye(3, dtype=bool), 3, T, T)
agree("diagonal blocks = packed by their number", attend(tiles), attend(masks.packed(third, third)))
agree("no pair at all = 0", attend(~masks.full(T, T)), 0)

order = np.array([4, 0, 7, 2, 8, 5, 1, 3, 6])
shuffled = {name: x[name][:, :, order] for name in "qkv"}
agree("tokens and set permuted = o permuted", attend(some[order][:, order], **shuffled), attend(some)[:, :, order])

twice = {name: np.concatenate([x[name], x[name][:, :, :1]], 2) for name in "kv"}
log_2 = np.log(2.0) * (np.arange(T) == 0)
agree("key 0 listed twice = a bias of log 2 on it", attend(True, **twice), attend(True, bias=log_2))

# %% [markdown]
# The last line is where a set ends. Block-sparse code that keeps *lists* of key blocks counts a block twice if it
# is listed twice: every duplicate adds $\log 2$, and the result is no mask any more. In a set a pair is in or out.
#
# ### What is not a mask
#
# Two neighbours of these pictures in any survey are not sets of pairs.
#
# - **Low-rank projection** (Linformer) replaces the keys by $E k$ with fewer rows, each a mixture of *all* keys;
#   there is no pair $(i, j)$ left that could be taken out.
# - **Disentangled attention** (DeBERTa) adds terms of content and position to the scores; it changes $a_{ij}$ and
#   leaves the set full.
#
# Move the last value, and see whether the first query notices:

# %%
E, causal, corner = tab((3, T), 5, 2), masks.causal(T, T), masks.causal(T, 3, "top-left")
low_rank = lambda v: attend(corner, k=E @ x["k"], v=E @ v)
moved = x["v"] + (np.arange(T)[:, None] == T - 1)
moves = abs(attend(causal, v=moved) - attend(causal)), abs(low_rank(moved) - low_rank(x["v"]))
print("causal: query 0 moves by", moves[0][:, :, 0].max())
print("3 mixed keys, a triangle over them: query 0 moves by", moves[1][:, :, 0].max())
added = sdpa.steps(**x, bias=draw("bias", (1, 1, T, T)))[-1]
print(f"terms added to the scores: smallest weight {added.min():.0e}, no pair has left")

# %% [markdown]
# ## Summary
#
# | | |
# |---|---|
# | formula | (2.1): softmax and mean over the keys $M_i$ of the row, for each query |
# | shapes | mask boolean, (B, H, Tq, Tk), each axis 1 or whole; `True` = may attend |
# | where | after scale, soft cap and bias, before the softmax; by selection |
# | row without keys | p = 0, o = 0, $lse = -\infty$, no gradient in or out; with a sink, lse = sink |
# | laws | restriction (2.2), union (2.3), empty set: 0 and $-\infty$ |
# | backward | (2.5) and (2.6): as without a mask, p = 0 does the hiding |
# | cost | all pairs if the code is dense, (2.8) with the size of the set if it skips |
# | parameters | (2.7): lengths, segments, anchor, causal, left, right, dilation |
# | when | causal to generate; padding, packing to batch; windows, blocks, buckets, global tokens to be cheaper; graphs to follow a structure |
# | what goes wrong | polarity, anchor, windows that count the own key, floats for booleans, mask after the softmax, sentinels, rows without keys, one condition forgotten on one path |
#
# ## Exercises
#
# Each stub runs as it is and says that nothing was checked. Write the body, run the cell again, and read the hint
# if there is one.
#
# **1. Repair the port.** The port above asked one function for the place of query 0. Write that function so that
# all 53 cases pass.

# %%
# exercise
def place_of_query_0(lengths, Tq, Tk, anchor):
    raise NotImplementedError("lengths is (B,); return something that broadcasts with (B, Tq, Tk)")


check_exercise("masked", port)

# %% [markdown]
# **2. Lists of keys.** Write attention without a single hidden score: for every batch entry, head and query take
# the list of its keys and compute with those alone. No `np.where`, no infinity. What must be said about a row
# without keys?

# %%
# exercise
def by_lists(q, k, v, mask, scale):
    raise NotImplementedError("return o (B, H, Tq, dv)")


check_exercise("sdpa", by_lists)

# %% [markdown]
# **3. No infinity to be had.** A shading language has no infinities and no NaN to rely on: neither may be made on
# the way, not even to be thrown away, and no sentinel may be added. Write the dense form in finite numbers.

# %%
# exercise
def finite(q, k, v, mask, scale):
    raise NotImplementedError("return o (B, H, Tq, dv)")


check_exercise("sdpa", finite)

# %% [markdown]
# ## Sources
#
# - Vaswani et al. 2017, arXiv:1706.03762: equation 1; section 3.2.3, the causal mask as $-\infty$ at the input of
#   the softmax.
# - Child et al. 2019, arXiv:1904.10509: section 4.2, attention over sets $S_i$ of indices.
# - Kitaev et al. 2020, arXiv:2001.04451 (Reformer): equation 2 with the set $P_i$, equation 4 with equal hash
#   buckets.
# - Beltagy et al. 2020, arXiv:2004.05150 (Longformer): section 3.1, windows, dilation, global tokens.
# - Zaheer et al. 2020, arXiv:2007.14062 (BigBird): section 2, attention on a directed graph given by an adjacency
#   matrix.
# - Veličković et al. 2018, arXiv:1710.10903 (GAT): equations 2 and 3, softmax over the neighbours of a node.
# - Jiang et al. 2023, arXiv:2310.06825 (Mistral 7B): section 2, the window W.
# - Rabe and Staats 2021, arXiv:2112.05682; Dao 2023, arXiv:2307.08691, section 3.1.1: lse, and partial results
#   merged by it.
# - Wang et al. 2020, arXiv:2006.04768 (Linformer): equation 7. He et al. 2021, arXiv:2006.03654 (DeBERTa):
#   equations 3 and 4.
# - Gemma 2, arXiv:2408.00118, section 2 (soft cap); gpt-oss, arXiv:2508.10925 (sink).
#
# ## Answers
#
# **1.** Bottom right is where the keys of the *entry* end.

# %%
# exercise
def place_of_query_0(lengths, Tq, Tk, anchor):
    return lengths[:, None, None] - Tq if anchor == "bottom-right" else 0


check_exercise("masked", port)

# %% [markdown]
# **2.** Nothing is said at all: the row is never visited and keeps its zeros.

# %%
# exercise
def by_lists(q, k, v, mask, scale):
    (B, H, Tq, _), Tk = q.shape, k.shape[2]
    mask, o = np.broadcast_to(mask, (B, H, Tq, Tk)), np.zeros((B, H, Tq, v.shape[3]))
    for b, h, i in np.argwhere(mask.any(-1)):
        keys = np.flatnonzero(mask[b, h, i])
        a = scale * k[b, h, keys] @ q[b, h, i]
        e = np.exp(a - a.max())
        o[b, h, i] = e @ v[b, h, keys] / e.sum()
    return o


check_exercise("sdpa", by_lists)

# %% [markdown]
# **3.** Hidden scores become the lowest score of their row, which cannot raise the maximum; the exponential is
# taken of numbers that are never positive, and hidden ones are then selected away; an empty sum, 0, is divided by
# 1.

# %%
# exercise
def finite(q, k, v, mask, scale):
    k, v = core.unread(k, mask), core.unread(v, mask)
    s = scale * q @ k.swapaxes(-1, -2)
    low = s.min(-1, keepdims=True, initial=0)
    m = np.where(mask, s, low).max(-1, keepdims=True, initial=-1e30)
    e = np.where(mask, np.exp(np.minimum(s - m, 0)), 0)
    z = e.sum(-1, keepdims=True)
    return e @ v / np.where(z == 0, 1, z)


check_exercise("sdpa", finite)
