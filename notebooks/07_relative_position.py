# %% [markdown]
# # Relative position
#
# **There are three ways to make a score depend on the distance alone: a table with a row for every distance, a table
# whose rows are shared by buckets of distances, and a rotation of queries and keys.**
#
# Attention as in [chapter 1](01_scaled_dot_product.ipynb) does not know where a token stands. With $p_i$ for the place
# of query $i$, and keys counted from 0, its score gets a term of $j - p_i$; or both vectors get a turn, each by its place:
#
# $$
# \begin{aligned}
# \text{table} \quad & a_{hij} = scale \thinspace q_{hi} \cdot k_{hj} + table[h, index_{ij}] &
# index_{ij} &= \mathrm{clip}(j - p_i, -S, S) + S \\
# \text{buckets} \quad & a_{hij} = scale \thinspace q_{hi} \cdot k_{hj} + table[bucket(j - p_i), h] &
# bucket &\text{: see (7.2)} \\
# \text{rotation} \quad & a_{hij} = scale \thinspace (R_{p_i} q_{hi}) \cdot (R_{p_j} k_{hj}) &
# R_p &\text{: see (7.3)}
# \end{aligned}
# \tag{7.1}
# $$
#
# and then $z_{hi} = \sum_{j: mask_{ij}} \exp(a_{hij})$, $lse_{hi} = \log z_{hi}$ and
# $o_{hi} = \sum_{j: mask_{ij}} \exp(a_{hij}) v_{hj} / z_{hi}$. The first is Shaw's clip and the bias of Swin
# (`relative_bias`), the second is T5 (`t5`), the third is RoPE (`rope`).

# %%
import numpy as np

from attention_ref import alibi, core, kit, load_cases, plot, relative_bias, rope, sdpa, t5
from attention_ref.conformance.numbers import count
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw

np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## The contract

# %%
for variant in relative_bias, t5, rope:
    print(variant.__name__.split(".")[-1])
    shapes = {name: text or "a number" for name, text in (variant.INPUTS | variant.OUTPUTS).items()}
    print(table(shapes.items(), ("name", "kind and shape")))
    print(table(variant.CONVENTIONS.items(), ("what", "convention")), "\n")

# %% [markdown]
# 1. **Sizes.** `B` batch entries, `H` heads, `Tq` queries, `Tk` keys, 0 of them allowed; keys `dk` wide, values `dv`. An
#    axis with `?` may be 1 or, in front, missing.
# 2. **Distance** is key minus query, $j - p_i$, where $p_i = i + offset$ and $offset$ is the place of the first query.
#    `t5` is given the offset, `relative_bias` the finished index, `rope` the place of every token, query or key.
# 3. **scale** is a number without a default; T5 was published with 1. It multiplies the product and not the bias.
# 4. **Tables** are (H, R) in `relative_bias` and (R, H) in `t5`. One row is a distance or a bucket.
# 5. **index** is (Tq, Tk), integers from 0 to $R - 1$, the same for all heads and batch entries. A row that no pair has
#    is never read: it may be NaN. In a sequence row 0 is for keys $S$ or more before the query, row $2S$ for keys $S$ or
#    more after it, and $R = 2S + 1$. In a window of a picture, $h$ by $w$ tokens taken line by line, the index is
#    $(y_i - y_j + h - 1)(2w - 1) + x_i - x_j + w - 1$, a row for each step from key to query, and
#    $R = (2h - 1)(2w - 1)$. Mind the sign: in a window it is query minus key. Both are as published.
# 6. **Buckets.** With `bidirectional`, $n = \lfloor R/2 \rfloor$ and $d = \lvert j - p_i \rvert$; $n$ is added to the
#    bucket of a key *after* the query. Without, $n = R$ and $d = \max(p_i - j, 0)$, so that all keys after the query
#    share bucket 0 with its own. In both, with $e = \lfloor n/2 \rfloor$, $M$ for `max_distance`, and $M \gt e$,
#
# $$
# bucket = \begin{cases} d & d \lt e \\ \min \Big( n - 1, \thinspace e + \Big\lfloor (n - e)
# \dfrac{\log(d / e)}{\log(M / e)} \Big\rfloor \Big) & d \ge e \end{cases}
# \tag{7.2}
# $$
#
# for real numbers: no rounding may move a bucket.
#
# 7. **Rotation.** The first `rotary` channels of every head are turned, an even number, the rest stay. They make
#    pairs, $t = 0 \ldots rotary/2 - 1$: channels $(2t, 2t + 1)$ if `layout` is interleaved, $(t, t + rotary/2)$ if it is
#    half. Pair $t$ of a token at place $p$ is turned by $p \theta_t$, from its first channel towards its second:
#
# $$
# R_p: (a, b) \mapsto (a \cos p \theta_t - b \sin p \theta_t, \quad b \cos p \theta_t + a \sin p \theta_t)
# \qquad \theta_t = base^{-2t / rotary}
# \tag{7.3}
# $$
#
# 8. **positions** are any integers, negative ones included, in any order, (T,) or one line for each batch entry. Queries
#    and keys are turned, each by a call of `rope`, after the split into heads and all heads alike; values are not.
#    Angles are computed in the number type of $x$.
# 9. **mask** is boolean, True = may attend, and selects. A row without keys gives $o = 0$, $lse = -\infty$ and
#    gradients 0. A key that no query may attend to is never read, and neither is its value. lse is the natural
#    logarithm, of biased scores.
# 10. **Steps** that a port may return: `distance_bias` (H, Tq, Tk) of the table, `bucket` (Tq, Tk) of T5, `biased`
#     (B, H, Tq, Tk) of both, NaN where hidden.
# 11. **Gradients** exist for q, k, v, the tables and x; those of tables are summed over the batch.
#
# ## Three tokens by hand
#
# **The table.** One head, four channels, $S = 1$, so three rows: before, at and after the query.

# %%
q = np.array([[1, 0.5, -0.5, 2], [0.25, -1, 1.5, 0.5], [-0.75, 1, 0.5, -1.5]])
k = np.array([[0.5, 1, 2, -0.25], [-1, 0.5, 0.75, 1], [1.5, -0.5, 1, 0.5]])
v = np.array([[1, -2], [3, 0.5], [-1, 4]])
three_rows, scale, S = np.array([0.75, -0.5, 0.25]), 0.5, 1
i, j = np.arange(3)[:, None], np.arange(3)[None, :]
index = np.clip(j - i, -S, S) + S
a = scale * q @ k.T + three_rows[index]
e = np.exp(a - a.max(1, keepdims=True))
p, lse = e / e.sum(1, keepdims=True), a.max(1) + np.log(e.sum(1))
print("distance", j - i, "index", index, "bias", three_rows[index], "scores", scale * q @ k.T, "a", a, "p", p, "o", p @ v,
      "lse", lse, sep="\n")
hand = dict(q=q[None, None], k=k[None, None], v=v[None, None], scale=scale)
o, l = relative_bias.dense(**hand, table=three_rows[None], index=index)
agree("o by hand", p @ v, o[0, 0])
agree("lse by hand", lse, l[0, 0])

# %% [markdown]
# **The buckets.** The same three queries stand at the end of seven keys, so `offset` is 4. Causal, $R = 4$ rows, $M = 5$:
# $n = 4$, $e = 2$; distances 0 and 1 have a row each, and $2 + \lfloor 2 \log(d/2) / \log(5/2) \rfloor$ is 2 at
# $d = 2$ and 3, 3 at $d = 4$, and would be 4 at $d = 5$, were it not for the minimum.

# %%
far = np.arange(2, 7)
print("2 log(d/2)/log(5/2), d = 2 to 6:", 2 * np.log(far / 2) / np.log(5 / 2))
i, j = np.arange(3)[:, None] + 4, np.arange(7)[None, :]
d = np.maximum(i - j, 0)
rows = np.array([0, 1, 2, 2, 3, 3, 3])[d]
print("d", d, "bucket", rows, sep="\n")
agree("buckets by hand", rows, t5.bucket(j - i, 4, 5, bidirectional=False), 0)

# %% [markdown]
# **The rotation.** Read a pair of channels as one complex number, $a + \mathrm{i} b$. Turning it by $\varphi$ is
# multiplying it by $e^{\mathrm{i} \varphi}$: the product of $a + \mathrm{i} b$ and
# $\cos \varphi + \mathrm{i} \sin \varphi$ is (7.3). Three tokens at places 2, 3 and 5, $base = 100$, and so
# $\theta = (1, 0.1)$; neighbours make pairs.

# %%
places, theta = np.array([2, 3, 5]), np.array([1, 0.1])
qc, kc = q[:, 0::2] + 1j * q[:, 1::2], k[:, 0::2] + 1j * k[:, 1::2]
turn = np.exp(1j * places[:, None] * theta)
print("angles", places[:, None] * theta, "exp(i angle)", turn, "q as pairs", qc, "q turned", qc * turn, sep="\n")
options = dict(rotary=4, base=100.0, layout="interleaved")
y, z = (rope.dense(x[None, None], places, **options)[0, 0] for x in (q, k))
agree("q turned by hand", np.stack([(qc * turn).real, (qc * turn).imag], -1).reshape(3, 4), y)
apart = np.exp(1j * (places[None, :, None] - places[:, None, None]) * theta)
print("turned scores", y @ z.T, sep="\n")
agree("the score from the distance alone", (qc.conj()[:, None] * kc[None] * apart).sum(-1).real, y @ z.T)

# %% [markdown]
# The last line is the whole idea: the inner product of two pairs is the real part of $\bar q k$, and one turn is
# conjugated, so that they meet as $e^{-\mathrm{i} p \theta} e^{\mathrm{i} s \theta}$:
#
# $$
# (R_p q) \cdot (R_s k) = \mathrm{Re} \sum_t \bar q_t \thinspace k_t \thinspace e^{\mathrm{i} (s - p) \theta_t}
# = \sum_t \lvert q_t \rvert \lvert k_t \rvert \cos \big( (s - p) \theta_t + \arg k_t - \arg q_t \big)
# \tag{7.4}
# $$
#
# ## The code

# %%
plot.show(relative_bias, "clipped_distance", "window_index", "dense")
plot.show(t5, "first_distances", "bucket", "buckets_of", "dense")
plot.show(rope, "frequencies", "angles", "pairs", "rotate", "dense")

# %% [markdown]
# **What is left of content.** Let all queries be one vector and all keys another. Then a score is a function of the
# distance and of nothing else: its map has constant diagonals, and the three ways differ in which function they can be.

# %%
T = 12
same = dict(q=np.broadcast_to(q[0], (1, 1, T, 4)), k=np.broadcast_to(k[0], (1, 1, T, 4)), scale=scale)
every, far = np.ones((1, 1, T, T), bool), np.arange(1 - T, T)
nine = np.array([[-1, -0.5, 0.25, 1, 2, 0.5, 0.75, -0.25, -1.5]])
eight = np.array([[2], [1], [0.25], [-1], [-2], [1.5], [-0.25], [-1.5]])
_, by_table = relative_bias.steps(**same, table=nine, index=relative_bias.clipped_distance(T, T, 4), mask=every)
_, by_bucket = t5.steps(**same, table=eight, bidirectional=True, max_distance=9, mask=every)
y, z = (rope.dense(same[name], np.arange(T), **options) for name in "qk")
maps = {"a table, S = 4": by_table, "8 buckets, M = 9": by_bucket, "a rotation": scale * y @ z.swapaxes(-1, -2)}
figure, axes = plot.subplots(1, 4, size=(2.45, 2.4))
for axis, (name, scores), style in zip(axes, maps.items(), ("-", "--", ":")):
    a = scores[0, 0]
    agree(f"{name}: diagonals are constant", a[1:, 1:], a[:-1, :-1])
    plot.attention_map(axis, a, title=name, signed=True, limit=2.7)
    axes[3].plot(far, np.concatenate([a[::-1, 0], a[0, 1:]]), style, label=name.split(",")[0],
                 drawstyle="default" if style == ":" else "steps-mid")
axes[3].set(xlabel="distance, key minus query", title="score", xticks=[-10, 0, 10], yticks=[-2, 0, 2])
axes[3].legend(frameon=False, fontsize=7)
figure.suptitle("Equal queries, equal keys: a score is a function of the distance")
plot.save(figure, "07_relative_position_functions", """Three maps of twelve queries by twelve keys, each constant along its
    diagonals, and their scores over the distance, -11 to 11. Table: any values from -4 to 4, constant beyond. Buckets:
    any values at distances -1, 0 and 1, then steps that grow wider, each side its own. Rotation: a wave, the sum of two
    cosines.""")

# %% [markdown]
# ## Derivation
#
# **The table.** A bias $b_{ij}$ that stays when query and key move by one together, $b_{i+1, j+1} = b_{ij}$, is constant
# along diagonals, and so is a function of $j - i$: $T_q + T_k - 1$ numbers. A table *is* such a function, and the clip
# makes it finite: what lies beyond $S$ looks like $S$.
#
# **The buckets.** For $d \ge e$ and a whole $t \lt n - e$, the bucket is at least $e + t$ when the fraction in (7.2) is
# at least $t$. All logarithms there are of numbers $\ge 1$; multiply out, take the exponential, clear the fractions:
#
# $$
# (n - e) \log \frac{d}{e} \ge t \log \frac{M}{e}
# \quad \Leftrightarrow \quad \Big( \frac{d}{e} \Big)^{n - e} \ge \Big( \frac{M}{e} \Big)^t
# \quad \Leftrightarrow \quad d^{\thinspace n - e} e^t \ge M^t e^{n - e}
# \tag{7.5}
# $$
#
# Whole numbers on both sides: no rounding is left to decide. In reals bucket $e + t$ begins at
# $e \thinspace (M/e)^{t / (n - e)}$, a geometric progression from $e$ to $M$; its first distance is that, rounded up. For
# the 32 buckets of T5 the progression is $8 \cdot 2^{t/2}$, and every other edge is a whole number:

# %%
t = np.arange(8)
print("8 (128/8)^(t/8):", 8 * 16 ** (t / 8))
print("first distances:", t5.first_distances(16, 128))
n, e, M = 16, 8, 128
first = [min(d for d in range(e, M) if d ** (n - e) * e ** u >= M ** u * e ** (n - e)) for u in range(n - e)]
agree("(7.5): the least d for every t", t5.first_distances(n, M), [*range(e), *first], 0)
d = np.arange(600)
with np.errstate(divide="ignore"):
    floats = np.minimum(n - 1, e + np.floor((n - e) * np.log(d / e) / np.log(M / e)))
agree("(7.2) in float64, for these 16 buckets a side", t5.bucket(-d, 32, M, True), np.where(d < e, d, floats), 0)

# %%
figure, axes = plot.subplots(2, 1, size=(7.6, 2.6))
for axis, both in zip(axes, (True, False)):
    edges = t5.first_distances(16 if both else 32, 128)
    starts = np.concatenate([-edges[::-1], edges[1:] if both else []]).astype(int)
    near, shown = np.arange(-135, 136 if both else 11), starts[(abs(starts) >= edges.size // 2) | (starts == 0)]
    rows = t5.bucket(near, 32, 128, both)
    begin = np.flatnonzero(np.diff(rows, prepend=-1))
    axis.stairs(rows[begin], [*(near[begin] - 0.5), near[-1] + 0.5], baseline=None, linewidth=1.2)
    axis.plot(shown, t5.bucket(shown, 32, 128, both), "o", markersize=2.5)
    axis.set_xticks(shown, shown, rotation=90, fontsize=6.5)
    axis.set(title="bidirectional: 16 rows a side" if both else "causal: 32 rows behind", ylabel="bucket", xmargin=0.02)
axes[1].set_xlabel("distance, key minus query; a dot is the first distance of its bucket")
figure.suptitle("32 rows: near distances one by one, far ones in steps that widen")
plot.save(figure, "07_relative_position_staircase", """Two staircases over the distance. Bidirectional: to the left of 0 it
    rises one by one up to 8, then in widening steps at 8, 12, 16, 23, 32, 46, 64 and 91 to 15; to the right it starts at
    17 and rises in the same steps to 31. Causal: it rises to the left one by one to 16, then in widening steps to 31
    at 113 and beyond, and is 0 for every key after the query.""")

# %% [markdown]
# **The rotation: there is no other.** Let $x$ at place $p$ become $A_p x$, linearly, and ask that
# $(A_p q) \cdot (A_s k)$ depends on $s - p$ only, for all $q$ and $k$. Then $A_p^T A_s = G_{s - p}$.
#
# 1. $A_p^T A_p = G_0$ at every $p$. If no vector is lost, $G_0 = L^T L$ with an invertible $L$, and $O_p = A_p L^{-1}$ is
#    orthogonal. The factor $L$ joins the projection that made $q$ and $k$.
# 2. $O_p^T O_s$ depends on $s - p$ only. So does $(O_0^T O_p)^T (O_0^T O_s)$, the same product: let $O_0 = 1$.
# 3. Then $O_0^T O_s = O_s$ names the function: $O_p^T O_s = O_{s - p}$, or $O_s = O_p O_{s - p}$, and so $O_p = O_1^p$.
# 4. An orthogonal matrix is, in some orthonormal basis, made of rotations of planes by angles $\theta_t$ and of single 1s
#    and -1s. The 1s are channels that stay, two -1s a plane turned by $\pi$. The basis joins the projection too.
#
# What remains is to choose the angles; (7.3) takes a geometric progression from 1 down. Wavelengths
# $2 \pi / \theta_t$ then reach from six tokens to nearly $2 \pi \thinspace base$. Written out as a matrix:

# %%
plot.show(rope.matrix)
eye, six = np.eye(6)[None, None], dict(rotary=6, base=100.0, layout="half")
R = [rope.matrix(eye, np.full(6, p), **six)[0, 0].T for p in range(6)]
agree("R_1 to the fifth is R_5", np.linalg.matrix_power(R[1], 5), R[5])
agree("R_p^T R_s = R_(s - p)", R[2].T @ R[5], R[3])
agree("orthogonal", R[4].T @ R[4], np.eye(6))
for base in 1e4, 5e5:
    theta = rope.frequencies(eye, 128, base)
    print(f"base {base:.0f}: 64 wavelengths from {2 * np.pi / theta[0]:.2f} to {2 * np.pi / theta[-1]:.0f} tokens")

# %% [markdown]
# And as an equality: move all tokens by any number of places, or give queries and keys any places that are as far
# apart.

# %%
q5, k5 = draw("q", (2, 3, 5, 8)), draw("k", (2, 3, 5, 8))
turned = lambda x, p, **other: rope.dense(x, np.asarray(p), **six | other)
score = lambda p, s, **other: turned(q5, p, **other) @ turned(k5, s, **other).swapaxes(-1, -2)
here = np.arange(5)
for layout in "half", "interleaved":
    agree(f"{layout}: 100 places on", score(here + 100, here + 100, layout=layout), score(here, here, layout=layout))
agree("no turn at all where places are equal", score(here * 0 + 7, here * 0 + 7), q5 @ k5.swapaxes(-1, -2))
agree("lengths stay", (turned(q5, here) ** 2).sum(-1), (q5 ** 2).sum(-1), 1e-10)

# %% [markdown]
# ## Two layouts, a part of the channels, a picture
#
# Which channels make a pair is a convention, and two of them are in use. The permutation $\pi$ that takes channel $2t$ to
# $t$ and channel $2t + 1$ to $t + rotary/2$ links them. If `order` lists, for interleaved channels, where they lie among
# halves, turning neighbours is: sort into halves, turn, sort back. It may be applied to the rows of the projections once
# and for all, and that is what converters of Llama weights do.

# %%
order = np.array([0, 3, 1, 4, 2, 5, 6, 7])          # channel c of interleaved is channel order[c] of half; 6 and 7 stay
halves = np.argsort(order)
agree("interleaved = sort, turn halves, sort back", turned(q5, here, layout="interleaved"),
      turned(q5[..., halves], here)[..., order], 0)
W, X = draw("w", (8, 8)), draw("x", (1, 1, 5, 8))
a, b = turned(X @ W[halves].T, here), turned(X @ W.T, here, layout="interleaved")
agree("... or the rows of W sorted once: the same scores", a @ a.swapaxes(-1, -2), b @ b.swapaxes(-1, -2), 1e-9)
print("the wrong layout is off by up to", np.abs(turned(q5, here) - turned(q5, here, layout="interleaved")).max().round(2))
agree("rotary = 6 of 8: channels 6 and 7 stay", turned(q5, here)[..., 6:], q5[..., 6:], 0)
agree("... and the others are a narrower head", turned(q5, here)[..., :6], turned(q5[..., :6], here), 0)

pair = np.array([[0, 0, 1, 1, 2, 2, 6, 6], [0, 1, 2, 0, 1, 2, 6, 6]])
names = np.where(pair < 3, np.array([list("abababxx"), list("aaabbbxx")]), "stays")
window = relative_bias.window_index(2, 3)
down = window // 5
figure, axes = plot.subplots(1, 2, size=(3.7, 3.0))
plot.group_map(axes[0], pair, names, "A colour for each pair (a, b)", labels=("channel", ""))
axes[0].set_yticks([0, 1], ["inter-\nleaved", "half"])
plot.group_map(axes[1], down, window, "A window of 2 by 3 tokens:\nthe row of each pair, coloured by step down",
               labels=("key j", "query i"))
plot.save(figure, "07_relative_position_layouts", """Left: eight channels in two layouts; interleaved pairs neighbours, half
    pairs channel t with t + 3; the last two belong to no pair. Right: six queries by six keys of a window of two lines of
    three tokens, each cell with its row of a table of 15, 7 on the diagonal, 0 and 14 in the far corners. Colours form
    four blocks of three by three, in which rows are constant along diagonals.""")

# %% [markdown]
# **A picture** has two distances, and rule 5 makes one number of them. A block of the map is one step down, $y_i - y_j$,
# and in it each step across, $x_i - x_j$, has its diagonal: a table of tables, as wide as there are steps across.

# %%
y, x = np.divmod(np.arange(6), 3)
agree("the index of a window", (y[:, None] - y + 1) * 5 + x[:, None] - x + 2, window, 0)
agree("the other sign reads the table from its end", window.T, 14 - window, 0)

# %% [markdown]
# **An offset is a position.** Whoever decodes with a cache asks with the last tokens alone; they stand where they stand,
# and rows are the same as in one call. RoPE keeps *turned* keys in its cache: an old key is never turned again.

# %%
tables = t5.bucket(np.arange(8) - np.arange(8)[:, None], 8, 5, False)
agree("T5: two queries behind six", t5.bucket(np.arange(8) - np.arange(2)[:, None] - 6, 8, 5, False), tables[6:], 0)
agree("clipped: the same", relative_bias.clipped_distance(2, 8, 3, 6), relative_bias.clipped_distance(8, 8, 3)[6:], 0)
agree("RoPE: two tokens at 3 and 4", turned(q5[:, :, 3:], [3, 4]), turned(q5, here)[:, :, 3:], 0)
agree("two sequences in one row: places begin again", turned(q5, [0, 1, 2, 0, 1])[:, :, 3:],
      turned(q5[:, :, 3:], [0, 1]), 0)

# %% [markdown]
# ## Forms that agree
#
# `rowwise` never stores the bias of all pairs. `by_distance` buckets each of the $T_q + T_k - 1$ distances once: a line
# of the bias is a run of one line of numbers. `matrix` is (7.3) as the paper prints it. The loops, last of each, are
# what a kernel author copies.

# %%
plot.show(t5.by_distance)
plot.show(rope.one_head)
for variant, case in (("relative_bias", "basic"), ("relative_bias", "window"), ("t5", "basic"), ("t5", "decoder"),
                      ("rope", "basic"), ("rope", "neighbours")):
    print(variant, case)
    forms_table(variant, case)
    print()

# %% [markdown]
# ## The mixing matrix
#
# Ten tokens, the same queries and keys in all three maps. Without positions the weights of a query are the same in
# whatever order the keys come.

# %%
see = dict(q=draw("q", (1, 1, 10, 4)) / 1.5, k=draw("k", (1, 1, 10, 4)) / 1.5, scale=0.5)
eye = np.eye(10)[None, None]
at = lambda x: rope.dense(x, np.arange(10), **options)
weights = {"no position": sdpa.dense(**see, v=eye),
           "a table, S = 4": relative_bias.dense(
               **see, v=eye, table=nine, index=relative_bias.clipped_distance(10, 10, 4)),
           "a rotation": sdpa.dense(at(see["q"]), at(see["k"]), eye, scale=0.5)}
figure = plot.attention_maps({name: o[0, 0] for name, (o, _) in weights.items()}, "Content, and what distance adds to it")
plot.save(figure, "07_relative_position_weights", """Three maps of ten queries by ten keys on one scale. Without position,
    rows have no common structure. A table adds a ridge along the diagonal, the same bias at every place. A rotation
    moves weight from key to key without a ridge, for what it adds depends on the content as well.""")
shuffle = np.array([5, 2, 7, 0, 9, 3, 6, 1, 8, 4])
agree("no position: keys in any order", sdpa.dense(see["q"], see["k"][:, :, shuffle], eye[:, :, shuffle], scale=0.5)[0],
      weights["no position"][0])
moved, _ = sdpa.dense(at(see["q"]), at(see["k"][:, :, shuffle]), eye[:, :, shuffle], scale=0.5)
print("with a rotation o changes by up to", np.abs(moved - weights["a rotation"][0]).max().round(2))

# %% [markdown]
# ## Cost
#
# A bias is the addition that chapter 1 already has: one flop for each pair and head, $H T^2$, and as many numbers picked
# from a table. A rotation takes four products and two sums for a pair of channels, so $3 \thinspace rotary$ flops for a
# vector, and once for all heads the angles, their cosines and sines, counted as one flop each:
#
# $$
# \text{attention with a bias: } H \big( 2 T^2 (d_k + d_v) + 4 T^2 + T d_k + 3 T \big)
# \qquad \text{one turn: } 3 \thinspace rotary \thinspace (H T + T/2 + 1/2)
# \tag{7.6}
# $$

# %%
tensors = lambda H, T, dk, dv: {name: draw(name, (1, H, T, d)) for name, d in (("q", dk), ("k", dk), ("v", dv))}
for T, dk, dv, H, r in (4, 3, 2, 1, 2), (9, 8, 7, 2, 6), (24, 8, 5, 3, 4):
    y = tensors(H, T, dk, dv) | dict(scale=0.5)
    biased = y | dict(table=draw("table", (H, 5)), index=relative_bias.clipped_distance(T, T, 2))
    flops = count(relative_bias.dense, **biased)["flops"]
    agree(f"T = {T}: table", flops, H * (2 * T * T * (dk + dv) + 4 * T * T + T * dk + 3 * T), 0)
    agree("       ... as many as chapter 1, whose bias is 0", flops, count(sdpa.dense, **y)["flops"], 0)
    turn = count(rope.dense, x=y["q"], positions=np.arange(T), rotary=r, base=100.0, layout="half")["flops"]
    agree("       one turn", turn, 3 * r * (H * T + T / 2 + 0.5), 0)

# %%
lengths = [16, 64, 256, 1024]
wide = dict(rotary=16, base=1e4, layout="half")
both = lambda T: 2 * count(rope.dense, x=draw("q", (1, 4, T, 16)), positions=np.arange(T), **wide)["flops"]
figure, axis = plot.subplots(size=(4.8, 3.2))
plot.lines(axis, lengths, {"all of attention": [4 * (64 * T * T + 4 * T * T + 19 * T) for T in lengths],
                           "adding a bias": [4 * T * T for T in lengths], "turning q and k": [both(T) for T in lengths]},
           "tokens T", "flops", "Four heads of 16: the bias grows with T squared,\nthe rotation with T")
axis.minorticks_off()
plot.save(figure, "07_relative_position_cost", """Three lines on logarithmic axes over 16 to 1024 tokens. All of attention
    and adding a bias are parallel, a factor of about 70 apart. Turning q and k is less steep; it starts above the
    bias and falls below it at about 110 tokens.""")
more = [both(T) - 4 * T * T for T in (108, 109)]
agree("turning costs more at T = 6 rotary (1 + 1/2H) = 108, less at 109", np.sign(more), [1, -1], 0)
m = count(rope.matrix, x=draw("q", (1, 4, 16, 16)), positions=np.arange(16), **wide)["flops"]
print(f"the matrix form takes {2 * m / both(16):.1f} times the flops of pairs, at 16 channels")

# %% [markdown]
# The crossover counts arithmetic. In a fused kernel a bias costs most in what it reads; a rotation reads nothing new
# for a pair, and so no kernel for attention need know of it.
#
# ## Backward
#
# Chapter 1 derives the gradient of a biased score:
# $da_{ij} = p_{ij} \big( do_i \cdot v_j - \sum_l p_{il} \thinspace do_i \cdot v_l + dlse_i \big)$.
# A row of the table was copied to all pairs that have it; what was copied, collects. And a rotation is orthogonal: the
# transpose of $R_p$ is its inverse, the turn back.
#
# $$
# dtable[h, r] = \sum_b \sum_{i, j: \thinspace index_{ij} = r} da_{bhij} \qquad dx_i = R_{p_i}^T dy_i = R_{-p_i} dy_i
# \tag{7.7}
# $$
#
# For T5 the index is the bucket, and the table lies the other way. Where attention follows a rotation, $dy$ is its
# $dq$ or $dk$, and the turn back makes the gradient, too, see distances only:
# $dq_i = scale \sum_j da_{ij} R_{-p_i} R_{p_j} k_j = scale \sum_j da_{ij} R_{p_j - p_i} k_j$.

# %%
plot.show(relative_bias.vjp)
plot.show(core.scatter)
plot.show(rope.vjp)
for variant, case in ("relative_bias", "window"), ("t5", "decoder"), ("rope", "basic"):
    print(variant, case)
    gradient_table(variant, case)

# %% [markdown]
# By hand: a loss that is the sum of all lse has $da = p$, so each row of the table collects weights. The two pairs before
# and the one pair twice before share row 0. An assignment in place of the addition keeps one of the three.

# %%
index3 = np.clip(np.arange(3) - np.arange(3)[:, None], -1, 1) + 1
g = relative_bias.vjp(np.zeros((1, 1, 3, 2)), np.ones((1, 1, 3)), **hand, table=three_rows[None], index=index3)
print("p", p, "index", index3, "dtable", g["dtable"][0], sep="\n")
agree("row 0 collects three weights", g["dtable"][0, 0], p[1, 0] + p[2, 1] + p[2, 0])
added, kept = np.zeros(3), np.zeros(3)
np.add.at(added, index3, p)
kept[index3] = p
agree("np.add.at adds", added, g["dtable"][0])
print("kept[index] = p keeps one of each:", kept)

golden = load_cases("relative_bias", "basic")[0]
g = relative_bias.vjp(**golden.cotangents | golden.inputs)
agree("a constant in the whole table moves lse alone: dtable sums to dlse", g["dtable"].sum(1),
      golden.cotangents["dlse"].sum((0, 2)))
golden = load_cases("rope", "basic")[0]
agree("x . dx = y . dy, token by token", (golden.inputs["x"] * rope.vjp(**golden.cotangents | golden.inputs)["dx"]).sum(-1),
      (golden.outputs["y"] * golden.cotangents["dy"]).sum(-1), 1e-10)

g = [rope.vjp(sdpa.vjp(q5, np.ones((2, 3, 5)), turned(q5, p), turned(k5, p), q5, scale=0.25)["dq"], q5, p, **six)["dx"]
     for p in (here, here + 100)]
agree("dq of attention does not see where tokens begin", g[1], g[0])

# %% [markdown]
# ## What goes wrong

# %%
for variant in relative_bias, t5, rope:
    own = {slug: text for slug, (text, _) in (variant.BUGS | variant.VJP_BUGS).items()
           if variant is relative_bias or slug not in relative_bias.BUGS | relative_bias.VJP_BUGS}
    print(table(own.items(), (f"mistake of {variant.__name__.split('.')[-1]}", "what is wrong")), "\n")

# %% [markdown]
# Drawn as functions of the distance. Above, the table holds its own row numbers and all scores are 0, so that
# $\log o + lse$ is the row that a pair reads (values are one-hot: $o$ is the weights). Below, equal queries and equal
# keys are turned, all of them by the same mistake.

# %%
zero = dict(q=0 * same["q"], k=0 * same["k"], v=np.eye(12)[None, None], scale=1.0, mask=every,
            table=np.arange(8.0)[:, None], bidirectional=True, max_distance=9, offset=0)
line = lambda a: np.concatenate([a[::-1, 0], a[0, 1:]])
row = lambda o, lse: line(np.log(o[0, 0]) + lse[0, 0][:, None])
turning = options | dict(positions=np.arange(12))
wave = lambda f: line((scale * f(dict(x=same["q"], **turning)) @ f(dict(x=same["k"], **turning)).swapaxes(-1, -2))[0, 0])
figure, axes = plot.subplots(2, 2, size=(3.3, 2.1))
for slug, axis in zip(("distance_sign", "not_clamped"), axes[0]):
    axis.step(far, row(*t5.dense(**zero)), where="mid", color="0.6", linewidth=3, label="right")
    axis.step(far, row(*t5.BUGS[slug][1](zero)), where="mid", color=plot.COLOURS[1], linewidth=1.2, label="wrong")
    axis.set(title=slug, ylabel="row of the table", xticks=[-10, 0, 10], yticks=[0, 3, 4, 7])
for slug, axis in zip(("layout_swapped", "turned_backwards"), axes[1]):
    axis.plot(far, wave(lambda x: rope.dense(**x)), color="0.6", linewidth=3, label="right")
    axis.plot(far, wave(rope.BUGS[slug][1]), color=plot.COLOURS[1], linewidth=1.2, label="wrong")
    axis.set(title=slug, xlabel="distance", ylabel="turned score", xticks=[-10, 0, 10], yticks=[-2, 0, 2])
axes[0, 0].legend(frameon=False, fontsize=7)
figure.suptitle("What each distance reads: two mistakes of buckets, two of a rotation")
plot.save(figure, "07_relative_position_mistakes", """Four small plots over the distance, right in grey and wrong in orange.
    Top, rows of a table of eight: distance sign exchanges rows 1 to 3 with 5 to 7; without a clamp, distances from 9 on
    read row 4 before the query and row 0 after it. Bottom, turned scores: swapped layouts give another wave, turning
    backwards gives its mirror image.""")
agree("all rows are whole", row(*t5.dense(**zero)), t5.bucket(far, 8, 9, True))
agree("backwards is the mirror image", wave(rope.BUGS["turned_backwards"][1]), wave(lambda x: rope.dense(**x))[::-1])

# %% [markdown]
# **A test that is too weak.** "Scores depend on the distance only" is the property everyone tests a rotation by. It
# cannot see most mistakes, as long as they are made with queries and keys alike. Scores at places 3 to 8 and 10 to 15,
# each mistake against itself, and against the right ones:

# %%
q6, k6 = draw("q", (1, 1, 6, 8)) / 4, draw("k", (1, 1, 6, 8)) / 4
wrongly = lambda f, p: f(dict(x=q6, positions=p, **six)) @ f(dict(x=k6, positions=p, **six)).swapaxes(-1, -2)
right = wrongly(lambda x: rope.dense(**x), np.arange(6) + 3)
off = {slug: [np.abs(wrongly(f, np.arange(6) + 3) - other).max() for other in (wrongly(f, np.arange(6) + 10), right)]
       for slug, (_, f) in rope.BUGS.items()}
found = [(slug, "yes" if moved < 1e-9 else "no", f"{wrong:.4f}") for slug, (moved, wrong) in off.items() if wrong > 1e-9]
print(table(found, ("mistake", "still relative?", "scores off by up to")))
agree("backwards is relative: distances are reversed", wrongly(rope.BUGS["turned_backwards"][1], np.arange(6)),
      wrongly(lambda x: rope.dense(**x), -np.arange(6)))

# %% [markdown]
# So a port is compared with numbers. **One wrong port, caught live.** It has the half layout in mind, splits the channels
# into halves, and repeats each angle twice in a row, as neighbours would want it.

# %%
# exercise
def port(x, positions, rotary, base, layout):
    theta = base ** (-np.arange(0, rotary, 2) / rotary)
    angle = np.repeat(np.atleast_2d(positions)[:, None, :, None] * theta, 2, axis=-1)
    turned = x[..., :rotary]
    first, second = np.split(turned, 2, axis=-1)
    other = np.concatenate([-second, first], -1)
    return np.concatenate([turned * np.cos(angle) + other * np.sin(angle), x[..., rotary:]], -1)


caught = check_exercise("rope", port, "basic")

# %% [markdown]
# ## Where code in the wild differs
#
# - **Sign.** Shaw and T5 count key minus query, Swin query minus key; Swin stores its table as (R, H).
# - **T5 in float32** takes two logarithms and a floor. Where (7.5) is an equality the quotient may just miss a whole
#   number. For 32 buckets up to 128 it does not; for 48 up to 81 it does, at distance 54, for
#   $54^{24} \cdot 24^{16} = 81^{16} \cdot 24^{24}$.
# - **T5 has no scale**: it is in the initialisation. Its first layer owns the table, all layers of a stack use it, and
#   the attention of a decoder to an encoder has none.
# - **One-hot products** in place of a gather read every row.
# - **RoPE layouts.** Interleaved: the paper, Llama as Meta released it, GPT-J. Half: GPT-NeoX, Llama in transformers.
# - **Long contexts** change frequencies: linear scaling divides all angles by a factor, NTK-aware scaling takes a larger
#   base. Both are arguments here.

# %%
d, n, e, M = 54, 48, 24, 81
agree("an edge that is a whole number", d ** (n - e) * e ** 16 == M ** 16 * e ** (n - e), True, 0)
short = np.floor(np.float32(np.log(d / e)) / np.float32(np.log(M / e)) * 24)
logs = [np.float32(np.log(x)) for x in (np.maximum(np.arange(600), 16) / 16, 128 / 16)]
agree("32 buckets up to 128 in float32: none moves", np.minimum(31, 16 + np.floor(logs[0] / logs[1] * 16))[16:],
      t5.bucket(-np.arange(600), 32, 128, False)[16:], 0)
print("48 buckets up to 81, distance 54:", t5.bucket(np.array([-54]), 48, 81, False)[0], "and in float32", int(24 + short))
wild = ((relative_bias, "window", "index_mirrored"), (relative_bias, "basic", "table_read_as_rows"),
        (t5, "basic", "distance_sign"), (t5, "scale_1", "scale_of_width"),
        (t5, "whole_edge_in_float32", "bucket_in_float32"), (rope, "basic", "layout_swapped"),
        (rope, "one_new_token", "positions_ignored"), (rope, "far", "angles_in_bfloat16"))
off = lambda got, case: np.abs((got[0] if isinstance(got, tuple) else got) - next(iter(case.outputs.values()))).max()
cases = [load_cases(module.__name__.split(".")[-1], name)[0] for module, name, _ in wild]
found = [(slug, case.id, f"{off(module.BUGS[slug][1](case.inputs), case):.2f}")
         for (module, _, slug), case in zip(wild, cases)]
print(table(found, ("reading", "case", "output off by up to")))
unread = load_cases("relative_bias", "irregular")[0].inputs
gathered, by_one_hot = relative_bias.dense(**unread)[0], relative_bias.BUGS["unread_row_poison"][1](unread)[0]
print("NaN in rows 2 and 4 of a table, which no pair has; in o:", int(np.isnan(gathered).sum()), "by gather,",
      int(np.isnan(by_one_hot).sum()), "by one-hot product")
theta = rope.frequencies(q5, 8, 100.0)
fourth = 4 * here[:, None] * (theta / 4)
slower = rope.rotate(q5, np.cos(fourth), np.sin(fourth), "half")
agree("linear scaling by 4: place 4p turns as p did", slower, turned(q5, here, rotary=8))
scaled = rope.frequencies(q5, 8, rope.ntk_base(100.0, 8, 4))
agree("NTK-aware by 4: the slowest pair 4 times slower, the fastest as before", scaled[[0, -1]], theta[[0, -1]] / [1, 4])

# %% [markdown]
# **Angles drift.** A float32 angle $p \thinspace \theta_t$ has 24 bits, the integer turns included: at place $p$ it is off
# by about $p \thinspace 2^{-24}$, and the sine with it. A table made in bfloat16, with 8 bits, is useless past a hundred
# tokens, one in float16 past a thousand. Below: base 10000, 64 pairs, the largest error of a cosine
# over a run of 16 places; frequencies and angles are rounded, cosines are not.

# %%
places = np.array([16, 128, 1024, 8192, 65536])
runs = places[:, None] + np.arange(16)
theta = rope.frequencies(q5, 128, 1e4)
exact = np.cos(runs[..., None] * theta)
drift = {name: np.abs(np.cos(kit.rounded(runs[..., None] * kit.rounded(theta, bits), bits)) - exact).max((1, 2))
         for name, bits in (("bfloat16", 8), ("float16", 11), ("float32", 24))}
print(table([(p, *(f"{drift[name][n]:.1e}" for name in drift)) for n, p in enumerate(places)], ("place", *drift)))
figure, axis = plot.subplots(size=(4.8, 3.2))
plot.lines(axis, places, drift, "place in the sequence", "largest error of a cosine",
           "An angle loses a bit whenever the place doubles")
axis.set_xticks(places, [f"{p}" if p < 1024 else f"{p // 1024}k" for p in places])
axis.minorticks_off()
plot.save(figure, "07_relative_position_drift", """Three lines on logarithmic axes over places 16 to 65536. The error in
    float32 rises in proportion to the place, from about 1e-6 to about 4e-3. Those of float16 and bfloat16 rise in
    parallel, higher, until they saturate near 2, the largest error a cosine can have.""")
agree("the type of float32 is what is rounded to", kit.rounded(theta, 24), theta.astype(np.float32).astype(float), 0)

# %% [markdown]
# ## Relations

# %%
x = load_cases("t5", "basic")[0].inputs
plain = {name: x[name] for name in ("q", "k", "v", "mask", "scale")}
index = t5.bucket(np.arange(6) - np.arange(5)[:, None], 8, 5, True)
agree("T5 is a table, with buckets as its index", t5.dense(**x)[0],
      relative_bias.dense(**plain, table=x["table"].T, index=index)[0])
agree("a table of zeros: attention", t5.dense(**x | dict(table=0 * x["table"]))[0], sdpa.dense(**plain)[0])

m = np.array([0.5, 0.25, 0.125])
line = -m[:, None] * abs(np.arange(-5, 6))
agree("ALiBi is a table that falls along a line", relative_bias.dense(
    **plain, table=line, index=relative_bias.clipped_distance(5, 6, 5))[0], alibi.dense(**plain, slopes=m, offset=0)[0])

wave = np.cos(np.arange(-5, 6) * 0.1)[None] * 0.75 * plain["scale"] * np.ones((3, 1))
tail = lambda y, a: np.concatenate([y, np.full((*y.shape[:3], 1), a), np.zeros((*y.shape[:3], 1))], -1)
angle = lambda y: 0.1 * np.arange(y.shape[2])[:, None]
turn2 = lambda y: rope.rotate(y[..., -2:], np.cos(angle(y)), np.sin(angle(y)), "half")
slow = lambda y: np.concatenate([y[..., :-2], turn2(y)], -1)
agree("a pair that is constant and turned: a table of cosines", sdpa.dense(
    **plain | dict(q=slow(tail(plain["q"], 0.75)), k=slow(tail(plain["k"], 1))))[0],
    relative_bias.dense(**plain, table=wave, index=relative_bias.clipped_distance(5, 6, 5))[0])

attend = lambda p, s: sdpa.dense(turned(q5, p), turned(k5, s), q5, scale=0.25)[0]
agree("attention of turned tokens does not see where they begin", attend(here + 1000, here + 1000), attend(here, here))
agree("turning twice is turning twice as far", turned(turned(q5, here), here), turned(q5, 2 * here))

# %% [markdown]
# The fourth line is the bridge between the ways: a channel pair that does not depend on content turns a rotation into a
# table, one that can hold sums of cosines only.
#
# ## In a box
#
# | | |
# |---|---|
# | table | $scale \thinspace q_i \cdot k_j + table[h, \mathrm{clip}(j - p_i, -S, S) + S]$, table (H, 2S + 1) |
# | buckets | $scale \thinspace q_i \cdot k_j + table[bucket(j - p_i), h]$, table (R, H), edges by (7.5) |
# | rotation | $scale \thinspace (R_{p_i} q_i) \cdot (R_{p_j} k_j)$, no parameters, (B, H, T, dk) to the same |
# | cost | a bias: $H T^2$ flops and a gather; a rotation: $6 \thinspace rotary \thinspace H T$ for q and k |
# | backward | a table collects by scatter-add; a rotation turns back |
# | beyond training | a table repeats its last row; buckets put all past M into one; a rotation meets unseen angles |
# | when | pictures and short windows: a table; encoders of any length: buckets; decoders with fused kernels: a rotation |
# | goes wrong | sign of the distance, forgotten offset, floor and its float, layout of pairs, turning twice, short angles |
#
# ## Exercises
#
# **1. The table, backward.** `check_exercise` gives cotangents to a function that takes `do` and `dlse`. Return
# `dict(dtable=...)`; take lse from `relative_bias.dense`, and mind that many pairs share a row.

# %%
# exercise
def table_gradient(do, dlse, q, k, v, table, index, mask, scale):
    raise NotImplementedError("not written yet")


solved = check_exercise("relative_bias", table_gradient)

# %% [markdown]
# **2. T5 without a logarithm.** Both directions; whole numbers decide where a bucket begins.

# %%
# exercise
def bucketed_attention(q, k, v, table, mask, bidirectional, max_distance, offset, scale):
    raise NotImplementedError("not written yet")


solved = check_exercise("t5", bucketed_attention)

# %% [markdown]
# **3. RoPE by complex numbers**, both layouts, part of the channels. No cosine, no sine: one `np.exp`.

# %%
# exercise
def complex_rope(x, positions, rotary, base, layout):
    raise NotImplementedError("not written yet")


solved = check_exercise("rope", complex_rope)

# %% [markdown]
# ## Answers
#
# **1.** The weights are $\exp(a - lse)$, 0 in a row without keys, whose lse is $-\infty$.

# %%
# exercise
def table_gradient(do, dlse, q, k, v, table, index, mask, scale):
    o, lse = relative_bias.dense(q, k, v, table, index, mask, scale=scale)
    a = scale * q @ core.unread(k, mask).swapaxes(-1, -2) + table[:, index]
    seen = np.broadcast_to(mask, a.shape)
    p = np.exp(np.where(seen, a - np.where(lse > -np.inf, lse, 0)[..., None], -np.inf))
    dp = do @ core.unread(v, mask).swapaxes(-1, -2)
    da = p * (dp - (do * o).sum(-1, keepdims=True) + dlse[..., None])
    dtable = np.zeros_like(table)
    for h in range(len(table)):
        np.add.at(dtable[h], np.broadcast_to(index, da[:, h].shape), da[:, h])
    return dict(dtable=dtable)


assert check_exercise("relative_bias", table_gradient)

# %% [markdown]
# **2.** Count, for each distance, the edges that it has passed.

# %%
# exercise
def bucketed_attention(q, k, v, table, mask, bidirectional, max_distance, offset, scale):
    n = len(table) // 2 if bidirectional else len(table)
    e, M = n // 2, int(max_distance)
    bias = np.zeros((table.shape[1], q.shape[2], k.shape[2]))
    for i in range(q.shape[2]):
        for j in range(k.shape[2]):
            r = j - i - offset
            d = abs(r) if bidirectional else max(-r, 0)
            passed = sum(d ** (n - e) * e ** t >= M ** t * e ** (n - e) for t in range(1, n - e))
            row = d if d < e else e + passed
            bias[:, i, j] = table[row + (n if bidirectional and r > 0 else 0)]
    weights, lse = core.softmax(scale * q @ core.unread(k, mask).swapaxes(-1, -2) + bias, mask)
    return weights @ core.unread(v, mask), lse


assert check_exercise("t5", bucketed_attention)

# %% [markdown]
# **3.** A view of the channels as (first, second) of each pair, made complex, turned, and written back.

# %%
# exercise
def complex_rope(x, positions, rotary, base, layout):
    t = np.arange(rotary // 2)
    first, second = (2 * t, 2 * t + 1) if layout == "interleaved" else (t, t + rotary // 2)
    angle = np.atleast_2d(positions)[:, None, :, None] * base ** (-2 * t / rotary)
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)
    y = x.copy()
    y[..., first], y[..., second] = z.real, z.imag
    return y


assert check_exercise("rope", complex_rope)

# %% [markdown]
# ## Sources
#
# - Shaw, Uszkoreit, Vaswani 2018, *Self-attention with relative position representations*, arXiv:1803.02155, section
#   3.2: the clip. There rows are vectors; a row of numbers is the case of this chapter, vectors are chapter
#   [8](08_disentangled.ipynb).
# - Liu et al. 2021, *Swin transformer*, arXiv:2103.14030, section 3.2, eq. 4: the bias of a window.
# - Raffel et al. 2020, *Exploring the limits of transfer learning*, arXiv:1910.10683, section 2.1: buckets; (7.2) is in
#   its released code.
# - Su et al. 2021, *RoFormer*, arXiv:2104.09864, eq. 13 to 16: (7.3), with neighbours as pairs; eq. 34 as computed.
# - The comparisons with ONNX and with the modules of transformers run in the project's tests: `make peers`.
