# %% [markdown]
# # Disentangled attention
#
# **A score is the sum of three inner products: what meets what, what meets where, where meets what. Which row of a
# table each of them reads is all that can go wrong, and it does.**
#
# DeBERTa gives every token one vector for its content and gives every *distance* two more, a key and a query, which are
# rows of two small tables. Row $S + d$ belongs to the distance $d = i - j$ of query $i$ from key $j$; the tables have
# $R = 2S$ rows, from $-S$ to $S - 1$, and what lies beyond is clipped. With $K'$ for
# `pos_key` and $Q'$ for `pos_query`:
#
# $$
# \begin{aligned}
# \delta_{ij} &= \mathrm{clip}(i - j + S, \thinspace 0, \thinspace 2S - 1) \\
# s_{ij} &= scale \thinspace \big( q_i \cdot k_j + q_i \cdot K'[\delta_{ij}] + k_j \cdot Q'[row_{ij}] \big) \\
# p_{ij} &= \exp(s_{ij}) / z_i \text{ where } mask_{ij}\text{, else } 0 \qquad z_i = \sum_{j: mask_{ij}} \exp(s_{ij}) \\
# o_i &= \sum_j p_{ij} v_j \qquad lse_i = \log z_i
# \end{aligned}
# \tag{8.1}
# $$
#
# The paper prints $row_{ij} = \delta_{ji}$. The code that was released, and every checkpoint with it, reads
# $row_{ij} = \delta_{ij}$. This chapter shows what that changes, and when it changes nothing.

# %%
import itertools

import numpy as np

from attention_ref import core, deberta, load_cases, masks, plot, relative_bias, sdpa
from attention_ref.conformance.numbers import count
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw

np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## The contract

# %%
shapes = {name: text or "a number" for name, text in (deberta.INPUTS | deberta.OUTPUTS).items()}
print(table(shapes.items(), ("name", "kind and shape")))
print()
print(table(deberta.CONVENTIONS.items(), ("what", "convention")))

# %% [markdown]
# 1. **Sizes.** `B` batch entries, `H` heads, `T` tokens that attend to themselves, keys `dk` and values `dv` wide. `R`
#    is even, and $S = R / 2$. An axis with `?` may be 1 or, in front, missing.
# 2. **The tables** come projected and split into heads, (H, R, dk): one for each head, the same for all batch entries.
#    A term that a model does not have is a table of zeros.
# 3. **p2c** says which row the last term reads: `released` is $\delta_{ij}$, `paper` is $\delta_{ji}$.
# 4. **scale** is a number without a default, and multiplies all three terms. DeBERTa takes $1/\sqrt{d_k (1 + terms)}$,
#    where *terms* counts the tables that are there: $1/\sqrt{3 d_k}$ with both.
# 5. **max_position** is None, or an integer: then distances are put into log buckets before they are clipped (below).
# 6. **mask** is boolean, True = may attend, and selects. A padded token is hidden as a key *and* as a query.
# 7. **A row without keys** gives $o = 0$, $lse = -\infty$ and gradients 0.
# 8. **Never read.** A key that no query may attend to may hold anything, NaN included, and so may its value.
# 9. **Steps** that a port may return beside its outputs, each (B, H, T, T) and not scaled: `content`,
#    `content_position`, `position_content`, and `weights`.
# 10. **Gradients** exist for q, k, v and both tables, those of the tables summed over the batch.

# %% [markdown]
# ## Three tokens by hand
#
# Two channels, $S = 2$, so four rows, for the distances $-2, -1, 0, 1$. The largest distance of three tokens is 2, and
# it has no row of its own: it is clipped to row 3, that of distance 1. Distance $-2$ has one, row 0. The scale is 0.4.

# %%
q = np.array([[1, 0.5], [-0.5, 2], [1.5, -1]])
k = np.array([[0.5, 1], [2, -1], [-1, 1.5]])
v = np.array([[1, -2], [3, 0.5], [-1, 4]])
pos_key = np.array([[0.5, -1], [1, 0.25], [-0.5, 2], [2, 1]])
pos_query = np.array([[-1, 0.5], [0.75, 1], [1.5, -0.5], [-0.25, 2]])
scale, S = 0.4, 2
i, j = np.indices((3, 3))
delta = np.clip(i - j + S, 0, 2 * S - 1)
print("row of query i, key j:", delta, sep="\n")

content = q @ k.T
content_position = np.array([[q[i] @ pos_key[delta[i, j]] for j in range(3)] for i in range(3)])
position_content = np.array([[k[j] @ pos_query[delta[i, j]] for j in range(3)] for i in range(3)])
print("content", content, "content_position", content_position, "position_content", position_content, sep="\n")

# %% [markdown]
# The first number of the second term is $q_0 \cdot K'[2] = 1 \cdot (-0.5) + 0.5 \cdot 2 = 0.5$; its neighbour, one
# key further, reads row 1: $1 \cdot 1 + 0.5 \cdot 0.25 = 1.125$. The third term has keys in place of queries:
# $k_1 \cdot Q'[1] = 2 \cdot 0.75 - 1 \cdot 1 = 0.5$ stands at query 0, key 1.

# %%
s = scale * (content + content_position + position_content)
e = np.exp(s - s.max(1, keepdims=True))
p, lse = e / e.sum(1, keepdims=True), s.max(1) + np.log(e.sum(1))
print("s", s, "p", p, "o", p @ v, "lse", lse, sep="\n")
x = dict(q=q[None, None], k=k[None, None], v=v[None, None], pos_key=pos_key[None], pos_query=pos_query[None],
         scale=scale, p2c="released")
o, l = deberta.dense(**x)
agree("o by hand", p @ v, o[0, 0])
agree("lse by hand", lse, l[0, 0])

# %% [markdown]
# ## The code
#
# The rows, the three products, and then attention as ever.

# %%
plot.show(deberta, "delta", "table_rows", "terms", "dense")

# %% [markdown]
# The three terms and their sum, for eight tokens and a table of eight rows, so $S = 4$. The content term knows nothing
# of places: it is any matrix. Each line of the middle maps reads a table along a slope, so what the table holds shows
# as diagonals, tilted by what the query, or the key, makes of them; beyond the clip a row keeps one value.

# %%
T, R = 8, 8
y = dict(q=draw("q", (1, 1, T, 4)), k=draw("k", (1, 1, T, 4)), v=draw("v", (1, 1, T, 3)), scale=0.25,
         pos_key=draw("pos_key", (1, R, 4)), pos_query=draw("pos_query", (1, R, 4)), p2c="released")
named = dict(zip(deberta.STEPS, deberta.steps(**y)))
panels = {name.replace("_", " to "): named[name][0, 0] for name in ("content", "content_position", "position_content")}
panels["their sum, scaled"] = y["scale"] * sum(named[name] for name in list(named)[:3])[0, 0]
figure = plot.attention_maps(panels, "Three inner products make a score", signed=True)
plot.save(figure, "08_disentangled_terms", """Four maps of eight queries by eight keys on one signed scale. Content: no
    order along diagonals. Content to position: in each row one value repeats in the first columns, where the
    distance is clipped, and changes along the row. Position to content: the same down the columns. Their scaled sum
    holds a quarter of all three.""")
agree("steps add up to what dense exponentiates", panels["their sum, scaled"],
      np.log(named["weights"])[0, 0] + deberta.dense(**y)[1][0, 0][:, None])

# %% [markdown]
# ## Derivation: where three terms come from
#
# Let a token be the sum of what it is and where it is, seen from the other: as a query $a_i + u_{ji}$, where $u_{ji}$
# is the place of query $i$ seen from key $j$, and as a key $b_j + w_{ij}$, where $w_{ij}$ is the place of key $j$ seen
# from query $i$. The score of the sums has four terms, content with content, content with position, position with
# content, position with position:
#
# $$
# (a_i + u_{ji}) \cdot (b_j + w_{ij}) = a_i \cdot b_j + a_i \cdot w_{ij} + u_{ji} \cdot b_j + u_{ji} \cdot w_{ij}
# \tag{8.2}
# $$
#
# The last knows no content: it would be a plain bias of the distance, and the paper leaves it out. In the third, the
# distance is that of key $j$ *from the place of the query*: it is the key that asks how far the query is, which is why
# the paper writes $\delta_{ji}$. With four terms, and vectors that are sums, attention is plain attention:

# %%
place_k, place_q = pos_key[delta], pos_query[delta.T]                     # (3, 3, 2): of key j for query i, and back
four = np.einsum("ijc,ijc->ij", q[:, None] + place_q, k[None] + place_k)
paper = np.stack(deberta.terms(*(a[None, None] for a in (q, k)), pos_key[None], pos_query[None], delta, delta))[:, 0, 0]
agree("(8.2): four terms make the product of the sums", paper.sum(0) + (place_q * place_k).sum(-1), four)

# %% [markdown]
# **The scale.** Let all entries be independent with mean 0 and variance 1. An inner product of $d_k$ channels then has
# variance $d_k$, and the sum of $1 + terms$ of them $(1 + terms) \thinspace d_k$: hence the root in the scale. Over *all*
# vectors of signs, it is no estimate:

# %%
signs = np.array(list(itertools.product([-1, 1], repeat=8))).reshape(-1, 4, 2)          # q, k, a row of each table
sums = np.stack([(signs[:, 0] * signs[:, 1]).sum(-1), (signs[:, 0] * signs[:, 2]).sum(-1),
                 (signs[:, 1] * signs[:, 3]).sum(-1)])
for terms in 0, 1, 2:
    agree(f"{terms} tables: variance {1 + terms} dk", sums[:1 + terms].sum(0).var(), (1 + terms) * 2)

# %% [markdown]
# ## Which row
#
# Four readings of the same table, for six tokens and $S = 3$. Where a cell of the second map differs from the first,
# a port reads another vector. $\delta_{ij}$ and $\delta_{ji}$ are transposes of each other, and are not mirror images:
# distance $S$ shares a row with $S - 1$, distance $-S$ does not share with $1 - S$.

# %%
right = deberta.delta(6, 3)
i, j = np.indices((6, 6))
readings = {"right: clip(i - j + S)": right, "the transpose: clip(j - i + S)": right.T,
            "clipped to both ends": np.clip(i - j, -2, 2) + 3, "not clipped, modulo R": (i - j + 3) % 6}
figure, axes = plot.subplots(1, 4, size=(2.25, 2.3))
for axis, (name, rows) in zip(axes, readings.items()):
    plot.group_map(axis, rows, rows, name, labels=("key j", "query i"))
figure.suptitle("The row of a table of six that each pair reads")
plot.save(figure, "08_disentangled_rows", """Four grids of six queries by six keys, a colour and a number for each row of
    a table. Right: 3 on the diagonal, rising below it to 5 and staying 5, falling above it to 0. The transpose: rising
    above the diagonal. Clipped to both ends: row 0 is never read. Modulo: the far corners read the other end.""")
agree("the right one", right, readings["right: clip(i - j + S)"], 0)

# %% [markdown]
# **Released against paper.** For $-S \lt i - j \lt S$, $\delta_{ji} = 2S - \delta_{ij}$: the two readings see the same
# table in opposite directions. So as long as no distance reaches $S$ a model trained with one *is* a model of the other
# with its table turned around. From $T = S + 1$ on it is not: the end rows serve different distances.

# %%
for T in 3, 4, 5, 9:
    y = dict(q=draw("q", (1, 1, T, 4)), k=draw("k", (1, 1, T, 4)), v=draw("v", (1, 1, T, 3)), scale=0.25,
             pos_key=draw("pos_key", (1, 8, 4)), pos_query=draw("pos_query", (1, 8, 4)))
    turned = y["pos_query"][:, (8 - np.arange(8)) % 8]
    released = deberta.dense(**y | dict(pos_query=turned), p2c="released")[0]
    paper = deberta.dense(**y, p2c="paper")[0]
    if T <= 4:
        agree(f"T = {T}, S = 4: paper = released with its table turned", paper, released)
    else:
        print(f"T = {T}, S = 4: they differ by up to {np.abs(paper - released).max():.2f}")
print(f"and with the same table, at T = 9, by up to {np.abs(paper - deberta.dense(**y, p2c='released')[0]).max():.2f}")

# %% [markdown]
# **Log buckets.** Versions 2 and 3 have tables of $S = 256$ for texts of 512 tokens: exact rows for near distances,
# shared ones for far, as in [T5](07_relative_position.ipynb) but rounded *up*, and with both signs in one table. With
# $mid = \lfloor S/2 \rfloor$, distance $r$ stays what it is up to $\lvert r \rvert = mid$, and becomes
# $\mathrm{sign}(r) \thinspace (mid + n)$ beyond, where, with $N$ for `max_position`,
#
# $$
# n = \Big\lceil (mid - 1) \thinspace \frac{\log(\lvert r \rvert / mid)}{\log((N - 1) / mid)} \Big\rceil
# \tag{8.3}
# $$
#
# The edges are where a logarithm is a whole number, and there a float may fall on the wrong side. The package decides
# without rounding: $n$ is the least integer with $\lvert r \rvert^{mid - 1} mid^n \le (N - 1)^n mid^{mid - 1}$,
# which is (8.3) with the logarithms taken away.

# %%
plot.show(deberta, "bucket")
r = np.arange(-600, 601)
exact = deberta.bucket(r, 256, 512)
with np.errstate(divide="ignore"):
    up = np.ceil(127 * np.log(np.maximum(abs(r) / 128, 1)) / np.log(511 / 128))
agree("(8.3) in float64, for 256 buckets of 512", exact, np.where(abs(r) <= 128, r, np.sign(r) * (128 + up)), 0)
far = np.array([127, 128, 129, 140, 200, 300, 400, 511, 512])
print(table(zip(far, deberta.bucket(far, 256, 512)), ("distance", "bucket")))

near = np.arange(-40, 41)
figure, axis = plot.subplots(size=(6.5, 2.8))
for name, rows, style in (("clipped, S = 8", np.clip(near, -8, 7), "--"), ("log buckets, S = 8, max_position 32",
                          np.clip(deberta.bucket(near, 8, 32), -8, 7), "-")):
    axis.step(near, rows, style, where="mid", linewidth=1.4, label=name)
axis.set(xlabel="distance i - j", ylabel="row - S", title="Sixteen rows reach eight tokens, or thirty, near ones exactly")
axis.legend(frameon=False)
axis.grid(color="0.9", linewidth=0.5)
plot.save(figure, "08_disentangled_buckets", """Two staircases over distances -40 to 40. The clipped one rises by one at
    every distance from -8 to 7 and is flat beyond. The bucketed one agrees with it up to distance 4 each way, then its
    steps grow wider, and it goes on rising until about 31.""")

# %% [markdown]
# ## Forms that agree
#
# `gathered` lets every query and key meet the *tables* once, and each pair picks its number from that. `loop` is what a
# kernel author copies.

# %%
plot.show(deberta, "gathered")
for case in "basic", "buckets_and_padding":
    print(case)
    forms_table("deberta", case)

# %% [markdown]
# ## Cost
#
# Beside plain attention, the definition adds two inner products for every pair, $4 d_k$ flops, and `gathered` two
# products of all tokens with all rows:
#
# $$
# \text{dense: } 4 d_k T^2 + 3 T^2 - T d_k \qquad \text{gathered: } 4 d_k T R + 2 T^2 - T d_k
# \tag{8.4}
# $$
#
# so gathering pays once $T \gt R$; below, only $2T - 1$ of the rows can be read at all, and released code cuts the table
# to them first.

# %%
def drawn(names, *shape):
    return {name: draw(name, shape) for name in names}


def extra(form, T, R, dk):
    y, tables = drawn("qkv", 1, 1, T, dk) | dict(scale=0.25), drawn(("pos_key", "pos_query"), 1, R, dk)
    return count(form, **y, **tables, p2c="released")["flops"] - count(sdpa.dense, **y)["flops"]


for T, R, dk in (4, 6, 3), (8, 10, 5), (32, 16, 8):
    agree(f"(8.4) dense, T = {T}, R = {R}", extra(deberta.dense, T, R, dk), 4 * dk * T * T + 3 * T * T - T * dk, 0)
    agree("      gathered", extra(deberta.gathered, T, R, dk), 4 * dk * T * R + 2 * T * T - T * dk, 0)

lengths = [16, 32, 64, 128, 256]
figure, axis = plot.subplots(size=(4.6, 3.0))
plot.lines(axis, lengths, {name: [extra(form, T, 64, 16) for T in lengths] for name, form in
                           (("every pair", deberta.dense), ("gathered, R = 64", deberta.gathered))},
           "tokens T", "flops beside plain attention", "Gathering pays once T passes R")
axis.minorticks_off()
plot.save(figure, "08_disentangled_cost", """Two lines on logarithmic axes over 16 to 256 tokens. Every pair rises with
    the square of T; gathered rises with T at first; they cross near T = 64, the number of rows.""")

# %% [markdown]
# ## Backward
#
# As in [chapter 1](01_scaled_dot_product.ipynb), with $dp_{ij} = do_i \cdot v_j$ the gradient of the bracket in (8.1) is
# $ds_{ij} = scale \thinspace p_{ij} (dp_{ij} - \sum_l p_{il} dp_{il} + dlse_i)$. Each of the three products then hands it
# to both of its factors. A row of a table collects from every pair that read it:
#
# $$
# \begin{aligned}
# dq_i &= \sum_j ds_{ij} \thinspace (k_j + K'[\delta_{ij}]) &
# dK'[r] &= \sum_{b} \sum_{i, j: \thinspace \delta_{ij} = r} ds_{ij} \thinspace q_i \\
# dk_j &= \sum_i ds_{ij} \thinspace (q_i + Q'[row_{ij}]) &
# dQ'[r] &= \sum_b \sum_{i, j: \thinspace row_{ij} = r} ds_{ij} \thinspace k_j
# \end{aligned}
# \tag{8.5}
# $$
#
# The sum over the pairs of one row is a *scatter*, the transpose of the gather. An assignment in its place keeps one
# pair of many: right where nothing is clipped, wrong at both ends of the table.

# %%
plot.show(deberta.vjp)
plot.show(core.scatter)
for case in "basic", "buckets_and_padding":
    print(case)
    gradient_table("deberta", case)

golden = load_cases("deberta", "basic")[0]
g = deberta.vjp(**golden.cotangents | golden.inputs)
agree("<q, dq> - <pos_key, dpos_key> = <k, dk> - <pos_query, dpos_query>", (golden.inputs["q"] * g["dq"]).sum()
      - (golden.inputs["pos_key"] * g["dpos_key"]).sum(),
      (golden.inputs["k"] * g["dk"]).sum() - (golden.inputs["pos_query"] * g["dpos_query"]).sum(), 1e-10)

# %% [markdown]
# In the last line both sides are what content alone collects, the sum of $ds_{ij} \thinspace q_i \cdot k_j$: each term
# is linear in both of its factors, so $q$ collects what $k$ and `pos_key` do, and $k$ what $q$ and `pos_query` do.
#
# ## What goes wrong

# %%
texts = {slug: text for slug, (text, _) in (deberta.BUGS | deberta.VJP_BUGS).items()}
print(table(texts.items(), ("mistake", "what is wrong")))

# %% [markdown]
# Weights can be read off any function that gives $o$ alone: values that are one-hot make $o$ the weights. Six tokens and
# $S = 2$, right and five times wrong. All rows sum to one.

# %%
see = dict(q=draw("q", (1, 1, 6, 4)), k=draw("k", (1, 1, 6, 4)), v=np.eye(6)[None, None], mask=np.ones((1, 1, 6, 6), bool),
           pos_key=draw("pos_key", (1, 4, 4)), pos_query=draw("pos_query", (1, 4, 4)), scale=0.25, p2c="released",
           max_position=None)
shown = "p2c_other_index", "distance_sign", "p2c_not_transposed", "tables_swapped", "clipped_to_both_ends"
panels = {"right": deberta.dense(**see)[0][0, 0]} | {slug: deberta.BUGS[slug][1](see)[0][0, 0] for slug in shown}
figure = plot.attention_maps(panels, "Right, and five readings of the tables that are not")
plot.save(figure, "08_disentangled_mistakes", """Six maps of six queries by six keys. The first four mistakes change every
    row, and move the largest weight of some to another key; clipping to both ends changes rows 0 to 3 alone, in which
    a key stands two or more places ahead.""")
for slug in shown:
    agree(f"rows of {slug} sum to one", panels[slug].sum(1), 1)
agree("clipping to both ends leaves rows 4 and 5", panels["clipped_to_both_ends"][4:], panels["right"][4:])

# %% [markdown]
# **One wrong port, caught live.** Released code computes the last term with keys as rows: it gathers with $\delta$, and
# then transposes. This port has read the paper, and gathers
# by query and key, whatever `p2c` asks for.

# %%
# exercise
def port(q, k, v, pos_key, pos_query, mask, scale, p2c):
    T, S = q.shape[2], pos_key.shape[1] // 2
    i, j = np.indices((T, T))
    delta = np.clip(i - j + S, 0, 2 * S - 1)
    c2p = np.einsum("bhic,hijc->bhij", q, pos_key[:, delta])
    p2c = np.einsum("bhjc,hijc->bhij", k, pos_query[:, delta.T])
    weights, lse = core.softmax(scale * (q @ k.swapaxes(-1, -2) + c2p + p2c), mask)
    return weights @ core.unread(v, mask), lse


right = check_exercise("deberta", port, "basic")

# %% [markdown]
# ## Where code in the wild differs
#
# - **The index of the last term** is the one above: eq. 4 of the paper against all released code.
# - **A padded query.** The mask of released models hides padding as queries too. Microsoft's softmax then gives 0, as
#   here; a softmax over a row of equal large negative numbers gives the mean over *all* keys, padding included.
# - **The scale** counts tables. A port that always takes $\sqrt{3 d_k}$ is wrong for a model with one of them.
# - **Buckets** belong to versions 2 and 3; version 1 clips.
# - **Projections.** Version 1 projects one table of vectors by matrices of its own; versions 2 and 3 by those of $q$ and
#   $k$, biases included. Both arrive here as `pos_key` and `pos_query`.

# %%
y = load_cases("deberta", "padded_rows")[0].inputs
o, _ = deberta.dense(**y)
uniform = deberta.BUGS["empty_row_uniform"][1](y)[0]
agree("padded queries: 0 here", o[0, :, 3:], 0, 0)
agree("elsewhere: the mean of all values", uniform[0, :, 3:], y["v"][0].mean(1, keepdims=True) + 0 * uniform[0, :, 3:])
one = load_cases("deberta", "queries_meet_a_table")[0].inputs
agree("one table: 1/sqrt(2 dk)", one["scale"], (2 * one["q"].shape[3]) ** -0.5)
print("with sqrt(3 dk) o is off by up to", np.abs(deberta.BUGS["scale_of_three"][1](one)[0] - deberta.dense(**one)[0]).max().round(2))

# %% [markdown]
# ## Relations

# %%
y = load_cases("deberta", "basic")[0].inputs
plain = {name: y[name] for name in ("q", "k", "v", "mask", "scale")}
zero = dict(pos_key=0 * y["pos_key"], pos_query=0 * y["pos_query"])
agree("tables of zeros: attention", deberta.dense(**y | zero)[0], sdpa.dense(**plain)[0])

ones = y | dict(q=np.concatenate([y["q"][..., :3], 0 * y["q"][..., :1] + 1], -1), pos_query=zero["pos_query"])
ones["pos_key"] = ones["pos_key"] * (np.arange(4) == 3)
ones["k"] = ones["k"] * (np.arange(4) < 3)
biased = dict(table=ones["scale"] * ones["pos_key"][..., 3], index=deberta.delta(5, 3))
agree("a channel of q that is 1: a table of biases", deberta.dense(**ones)[0], relative_bias.dense(
    **biased, **{name: ones[name] for name in ("q", "k", "v", "mask", "scale")})[0])

first = load_cases("deberta", "one_token")[0].inputs
agree("one token: o = v", deberta.dense(**first)[0], first["v"], 0)
shifted = [np.roll(y[name], 1, axis=2) for name in "qkv"]
keep = np.zeros((1, 1, 5, 5), bool)
keep[..., 1:, 1:] = True
moved, still = (deberta.dense(*three, y["pos_key"], y["pos_query"], mask, scale=0.25, p2c="released")[0] for three, mask in
                ((shifted, keep), ([y[name] for name in "qkv"], np.roll(keep, -1, (2, 3)))))
agree("all tokens one place further: the same o", moved[:, :, 1:], still[:, :, :-1])

# %% [markdown]
# ## In a box
#
# | | |
# |---|---|
# | formula | $s_{ij} = scale \thinspace (q_i \cdot k_j + q_i \cdot K'[\delta_{ij}] + k_j \cdot Q'[row_{ij}])$, then softmax |
# | shapes | q, k (B, H, T, dk), v (B, H, T, dv), tables (H, 2S, dk) to o (B, H, T, dv), lse (B, H, T) |
# | rows | $\delta_{ij} = \mathrm{clip}(i - j + S, 0, 2S - 1)$; last term $\delta_{ij}$ as released, $\delta_{ji}$ as printed |
# | scale | $1/\sqrt{d_k (1 + terms)}$ |
# | cost | $4 d_k T^2$ flops more than attention, or $4 d_k T R$ and a gather |
# | backward | (8.5): a table collects by scatter-add |
# | when | distances matter beyond their bias: which content goes with which distance |
# | goes wrong | transposed index, sign of the distance, clip at one end, floor for ceil, uncounted scale, padded queries |
#
# ## Exercises
#
# **1. Repair the port**, for both values of `p2c` and for buckets (`deberta.bucket` may be used).

# %%
# exercise
def disentangled(q, k, v, pos_key, pos_query, mask, scale, p2c, max_position):
    raise NotImplementedError("not written yet")


right = check_exercise("deberta", disentangled)

# %% [markdown]
# **2. Without an index matrix.** Both tables meet all tokens in one product each. Write the gather with
# `np.take_along_axis`, and mind which axis belongs to the keys.

# %%
# exercise
def by_products(q, k, v, pos_key, pos_query, mask, scale, p2c):
    raise NotImplementedError("not written yet")


right = check_exercise("deberta", by_products)

# %% [markdown]
# **3. The bucket edge.** Without logarithms and without floats: write the bucket of one distance as a loop over
# integers, and compare it with `deberta.bucket` for every distance up to 600.

# %%
# exercise
def my_bucket(r, buckets, max_position):
    raise NotImplementedError("not written yet")


# %% [markdown]
# ## Answers
#
# **1.** The last term gathers with keys as rows. As released, row $j$ and column $i$ read $\delta_{ij}$, which is the
# transpose of `delta`; as printed they read $\delta_{ji}$, which is `delta` itself.

# %%
# exercise
def disentangled(q, k, v, pos_key, pos_query, mask, scale, p2c, max_position):
    T, S = q.shape[2], pos_key.shape[1] // 2
    i, j = np.indices((T, T))
    distance = i - j if max_position is None else deberta.bucket(i - j, S, max_position)
    delta = np.clip(distance + S, 0, 2 * S - 1)
    row = delta if p2c == "released" else delta.T
    k = core.unread(k, mask)
    c2p = np.einsum("bhic,hijc->bhij", q, pos_key[:, delta])
    p2c = np.einsum("bhjc,hijc->bhij", k, pos_query[:, row])
    weights, lse = core.softmax(scale * (q @ k.swapaxes(-1, -2) + c2p + p2c), mask)
    return weights @ core.unread(v, mask), lse


assert check_exercise("deberta", disentangled)

# %% [markdown]
# **2.** In the product of keys with `pos_query` the keys are rows, so the index is that of (key, query), and the
# result is transposed.

# %%
# exercise
def by_products(q, k, v, pos_key, pos_query, mask, scale, p2c):
    delta = deberta.delta(q.shape[2], pos_key.shape[1] // 2)
    row = (delta.T if p2c == "released" else delta)[None, None]
    k = core.unread(k, mask)
    s = q @ k.swapaxes(-1, -2) + np.take_along_axis(q @ pos_key.swapaxes(-1, -2), delta[None, None], -1)
    s = s + np.take_along_axis(k @ pos_query.swapaxes(-1, -2), row, -1).swapaxes(-1, -2)
    weights, lse = core.softmax(scale * s, mask)
    return weights @ core.unread(v, mask), lse


assert check_exercise("deberta", by_products)

# %% [markdown]
# **3.** The least $n$ of the text, found by counting.

# %%
# exercise
def my_bucket(r, buckets, max_position):
    mid, n, a = buckets // 2, 0, abs(r)
    if a <= mid:
        return r
    while a ** (mid - 1) * mid ** n > (max_position - 1) ** n * mid ** (mid - 1):
        n += 1
    return (1 if r > 0 else -1) * (mid + n)


agree("every distance up to 600", [my_bucket(int(r), 32, 128) for r in range(-600, 601)],
      deberta.bucket(np.arange(-600, 601), 32, 128), 0)

# %% [markdown]
# ## Sources
#
# - He, Liu, Gao, Chen 2020, *DeBERTa: decoding-enhanced BERT with disentangled attention*, arXiv:2006.03654: eq. 2 is
#   (8.2), eq. 3 the clip, eq. 4 the score, algorithm 1 the gathered form.
# - He, Gao, Chen 2021, *DeBERTaV3*, arXiv:2111.09543: the tables of version 3.
# - Log buckets are in released code only, not in the papers.
# - Raffel et al. 2020, arXiv:1910.10683: buckets of distances, with floor where this has ceil.
# - The comparisons with the modules of transformers run in the project's tests: `make peers`.
