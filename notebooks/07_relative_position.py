# %% [markdown]
# # Relative positions
#
# **Three ways to let a score depend on how far apart two tokens stand, and on nothing else of where they are: a table of
# biases, buckets of such a table, and a rotation.**
#
# $$
# \begin{aligned}
# \text{table} \quad & a_{hij} = scale \thinspace q_{hi} \cdot k_{hj} + table[h, index_{ij}] \\
# \text{T5} \quad & a_{hij} = scale \thinspace q_{hi} \cdot k_{hj} + table[\mathrm{bucket}(j - p_i), h], \qquad p_i = i + offset \\
# \text{RoPE} \quad & a_{hij} = scale \thinspace (R_{p_i} q_{hi}) \cdot (R_{p_j} k_{hj})
# \end{aligned}
# \tag{7.1}
# $$
#
# The first two add a learned number to a score, the third turns queries and keys before they meet and learns nothing. The
# softmax that follows is that of [chapter 1](01_scaled_dot_product.ipynb). Linear biases, [chapter 6](06_linear_bias.ipynb),
# are a table too, that of a straight line; disentangled attention, [chapter 8](08_disentangled.ipynb), lets the number
# depend on the content.

# %%
import numpy as np

from attention_ref import alibi, core, load_cases, masks, plot, relative_bias, rope, sdpa, t5
from attention_ref.conformance.numbers import count
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw

np.set_printoptions(precision=4, suppress=True, linewidth=110)

# %% [markdown]
# ## The contract

# %%
for variant in relative_bias, t5, rope:
    name = variant.__name__.rsplit(".", 1)[1]
    shapes = {a: text or "a number" for a, text in (variant.INPUTS | variant.OUTPUTS).items()}
    print(table(shapes.items(), (name, "kind and shape")), end="\n\n")
    print(table(variant.CONVENTIONS.items(), ("what", "convention")), end="\n\n")

# %% [markdown]
# 1. **Distance** is key minus query, $j - (i + offset)$, in tables and buckets: keys before the query are negative.
#    `offset` is the position of query 0, the number of tokens before the call where there is a cache.
# 2. **A bias is not scaled.** T5 takes scale 1; here scale is a number without a default.
# 3. **index** of `relative_bias` is an input, (Tq, Tk) rows of the table: `clipped_distance` makes one for a line of tokens,
#    `window_index` one for a window of a picture.
# 4. **The table** is (H, R) in `relative_bias` and (R, H) in `t5`, as the models store it.
# 5. **Buckets.** `bidirectional` splits the R rows into two halves, the upper one for keys *after* the query, the query's
#    own key in the lower. Causal buckets put all keys after the query into row 0; a mask hides them, the bucket does not.
# 6. **RoPE** is a function of its own, x to y: turn queries and keys, not values, by it, then attend. `rotary` channels of
#    each head are turned, the first ones; the rest pass. `layout` says which channels are a pair: neighbours
#    (`interleaved`), or $t$ and $t + rotary / 2$ (`half`). `positions` are integers, for all or for each batch entry.
# 7. **mask** is boolean, True = may attend. A row without keys gives $o = 0$, $lse = -\infty$, gradients 0. A key that no
#    query may attend to is never read, nor is a row of the table that no pair has.
# 8. **Gradients** exist for q, k, v and the table; for x of `rope`.

# %% [markdown]
# ## Three tokens by hand
#
# One head, a table of five numbers for the distances -2 to 2, scale 0.75. Row 2 is distance 0.

# %%
q = np.array([[1, 0.5], [-0.5, 2], [1.5, -1]])
k = np.array([[0.5, 1], [2, -1], [-1, 1.5]])
v = np.array([[1, -2], [3, 0.5], [-1, 4]])
line = np.array([-1, 0.25, 0.5, -0.75, 2])
i, j = np.indices((3, 3))
index = j - i + 2
a = 0.75 * q @ k.T + line[index]
e = np.exp(a - a.max(1, keepdims=True))
p = e / e.sum(1, keepdims=True)
print("index", index, "bias", line[index], "a", a, "p", p, "o", p @ v, sep="\n")
agree("the index of clipped_distance", index, relative_bias.clipped_distance(3, 3, 2), 0)
agree("o by hand", p @ v, relative_bias.dense(q[None, None], k[None, None], v[None, None], line[None], index, scale=0.75)[0][0, 0])

# %% [markdown]
# **A turn by hand.** One token of four channels at position 3, base 100, layout `half`: pair 0 is channels 0 and 2, turned
# by 3; pair 1 is channels 1 and 3, turned by $3 / 10$. A pair is a complex number, and a turn a product.

# %%
x = np.array([1.0, 2, 3, 4])
pairs = (x[:2] + 1j * x[2:]) * np.exp(1j * 3 * np.array([1, 0.1]))
print("turned", np.concatenate([pairs.real, pairs.imag]))
agree("y by hand", np.concatenate([pairs.real, pairs.imag]), rope.dense(
    x[None, None, None], np.array([3]), rotary=4, base=100.0, layout="half")[0, 0, 0])

# %% [markdown]
# ## The code

# %%
plot.show(relative_bias, "clipped_distance", "dense")
plot.show(t5, "bucket", "dense")
plot.show(rope, "frequencies", "pairs", "rotate", "dense")

# %% [markdown]
# ## Derivation: buckets
#
# A table for every distance is long, and far distances are rare. T5 keeps near distances apart and shares far ones, by the
# logarithm. With $n$ buckets on a side, $e = n / 2$ of them exact, distance $d \ge e$ goes to
#
# $$
# \min \Big( n - 1, \thinspace e + \Big\lfloor (n - e) \frac{\log(d / e)}{\log(N / e)} \Big\rfloor \Big),
# \qquad N = max\text{-}distance
# \tag{7.2}
# $$
#
# Bucket $e + t$ begins at the least $d$ with $(n - e) \log(d / e) \ge t \log(N / e)$, which without logarithms is
# $d^{n - e} e^t \ge N^t e^{n - e}$: integers, that no rounding can move. `first_distances` finds them so.

# %%
print("32 causal buckets up to 128 begin at", t5.first_distances(32, 128))
print("16 on a side, of 32 bidirectional, at", t5.first_distances(16, 128))
d = np.arange(1, 400)
agree("(7.2) in float64", t5.bucket(-d, 32, 128, False), np.where(
    d < 16, d, np.minimum(31, 16 + np.floor(16 * np.log(d / 16) / np.log(8) + 1e-12))), 0)
slip = np.float32(24) * (np.log(np.float32(54 / 24)) / np.float32(np.log(81 / 24)))
print("48 buckets up to 81, distance 54: exactly 40, in float32", 24 + int(slip), f"for {slip:.7f}")

figure, axis = plot.subplots(size=(6.2, 2.9))
d = np.arange(-60, 61)
for (name, both), style in zip({"bidirectional": True, "causal": False}.items(), ("-", "--")):
    axis.step(d, t5.bucket(d, 16, 40, both), style, where="mid", linewidth=1.4, label=name)
axis.set(xlabel="distance j - i", ylabel="row of the table", title="Sixteen buckets up to distance 40")
axis.legend(frameon=False)
axis.grid(color="0.9", linewidth=0.5)
plot.save(figure, "07_relative_position_buckets", """Two staircases over distances -60 to 60. Bidirectional: from row 7 far
    before the query down to 0 at distance 0, then from 9 up to 15. Causal: from row 15 far before the query down to 0 at
    distance 0, and 0 for all keys after it. Steps are one wide near 0 and wider further out.""")

# %% [markdown]
# ## Derivation: rotation
#
# Let $\rho(\phi)$ turn the plane by $\phi$, so that $\rho(\phi)^T = \rho(-\phi)$ and turns add. For one pair of channels
#
# $$
# (\rho(p \theta) q) \cdot (\rho(s \theta) k) = q^T \rho(-p \theta) \rho(s \theta) k = q^T \rho((s - p) \theta) k
# \tag{7.3}
# $$
#
# which knows $s - p$ only. Pair $t$ turns by $\theta_t = base^{-2t / rotary}$ for each position: the first pair fast, the last
# slowly, so that near distances and far ones are both told apart. $R_p$ does it for all pairs at once.

# %%
golden = load_cases("rope", "basic")[0].inputs
turn = lambda x, p: rope.dense(x, np.asarray(p), rotary=4, base=100.0, layout="half")
q4, k4 = draw("q", (1, 1, 1, 4)), draw("k", (1, 1, 1, 4))
for p, s in (5, 2), (103, 100), (0, -3):
    agree(f"(7.3) positions {p} and {s}", (turn(q4, [p]) * turn(k4, [s])).sum(), (turn(q4, [3]) * turn(k4, [0])).sum())
agree("lengths stay", (turn(q4, [77]) ** 2).sum(), (q4 ** 2).sum())
order = np.argsort(np.concatenate(rope.pairs(4, "interleaved")))
inter = rope.dense(q4[..., order], np.array([7]), rotary=4, base=100.0, layout="interleaved")
agree("the layouts: the same turn of permuted channels", inter, turn(q4, [7])[..., order])

# %% [markdown]
# ### The pictures
#
# What each makes of equal content: the bias of a table, of buckets, and the score of one vector with itself, turned, for
# twelve tokens. All are constant along diagonals.

# %%
same = np.broadcast_to(np.array([1.0, 0.5, 1, 0.5]), (1, 1, 12, 4))
turned = turn(same, np.arange(12))[0, 0]
kinds = {"table, clipped at 4": draw("bias", (9,))[relative_bias.clipped_distance(12, 12, 4)],
         "T5, 8 buckets up to 10": draw("bias", (8,))[t5.bucket(np.subtract.outer(np.arange(12), np.arange(12)).T, 8, 10, True)],
         "RoPE, two pairs": turned @ turned.T}
figure = plot.attention_maps(kinds, "Three ways to know the distance, and nothing else", signed=True)
plot.save(figure, "07_relative_position_kinds", """Three maps of twelve queries by twelve keys, each constant along diagonals.
    The table changes from diagonal to diagonal and is flat beyond four. Buckets are flat over wider bands further out. The
    rotation waves: high on the diagonal, low a few tokens away, and symmetric.""")
for name, m in kinds.items():
    agree(f"{name}: constant along diagonals", m[1:, 1:], m[:-1, :-1])

# %% [markdown]
# ## Forms that agree

# %%
for variant, case in (("relative_bias", "basic"), ("t5", "basic"), ("t5", "decoder"), ("rope", "basic")):
    print(variant, case)
    forms_table(variant, case)

# %% [markdown]
# **Angles in a short type.** An angle is a position times a number, and its error grows with the position. In float32 that is
# harmless for thousands of tokens; in bfloat16 it is wrong from a few hundred on.

# %%
p, theta, rows = np.array([10, 100, 1000, 10000, 100000]), 10000.0 ** (-2 * np.arange(32) / 64), []
for n in p:
    error = np.abs(np.cos((np.float32(n) * theta.astype(np.float32)).astype(float)) - np.cos(n * theta)).max()
    rows.append((n, f"{error:.0e}"))
print(table(rows, ("position", "largest error of cos, angles in float32")))

# %% [markdown]
# ## Cost
#
# A table costs nothing but a look-up for each pair. A rotation costs for each *token*: two products and a sum for each
# channel that is turned, three flops, whatever the number of keys.

# %%
for T in 16, 64:
    y, positions = draw("q", (1, 2, T, 8)), np.arange(T)
    turned = rope.rotate(y, np.ones((T, 3)), np.zeros((T, 3)), "half")
    counted = count(lambda x, cos, sin: rope.rotate(x, cos, sin, "half"), x=y, cos=draw("x", (T, 3)), sin=draw("x", (T, 3)))
    agree(f"T = {T}: three flops for each channel turned", counted["flops"], 2 * T * 3 * 6, 0)
shares = [2 * 2 * T * 3 * 64 / (4 * T * T * 64) for T in (64, 512, 4096)]
print("turning q and k, as a share of attention, at T = 64, 512, 4096:", np.round(shares, 4))

# %% [markdown]
# ## Backward
#
# With $da_{hij}$ the gradient of a biased score, as in chapter 1, a row of the table collects from every pair that read it,
# and a turn is undone by turning back:
#
# $$
# dtable[h, r] = \sum_b \sum_{i, j: \thinspace index_{ij} = r} da_{bhij} \qquad dx = R_{-p} \thinspace dy
# \tag{7.4}
# $$

# %%
plot.show(relative_bias.vjp)
plot.show(rope.vjp)
for variant, case in (("relative_bias", "basic"), ("t5", "decoder"), ("rope", "basic")):
    print(variant)
    gradient_table(variant, case)
golden = load_cases("relative_bias", "basic")[0]
g = relative_bias.vjp(**golden.cotangents | golden.inputs | dict(dlse=0 * golden.cotangents["dlse"]))
agree("rows of a table sum to 0: softmax does not see a constant", g["dtable"].sum(1), 0, 1e-12)

# %% [markdown]
# ## What goes wrong

# %%
for variant in relative_bias, t5, rope:
    named = {slug: text for slug, (text, _) in (variant.BUGS | variant.VJP_BUGS).items() if slug not in sdpa.BUGS}
    print(table(named.items(), ("mistake of " + variant.__name__.rsplit(".", 1)[1], "what is wrong")), end="\n\n")

# %% [markdown]
# Weights of the same vector everywhere, turned rightly and wrongly: a port may keep every length, and every row may sum to
# one.

# %%
see = dict(x=np.broadcast_to(np.array([2.0, 0.5, 1, -1, 0.25, 1.5]), (1, 1, 8, 6)), positions=np.arange(8), rotary=4,
           base=100.0, layout="half")
weight = lambda y: core.softmax(0.5 * y[0, 0] @ y[0, 0].T, masks.causal(8, 8))[0]
shown = "layout_swapped", "tail_turned", "exponent_halved", "rotary_ignored", "minus_missing"
panels = {"right": weight(rope.dense(**see))}
panels |= {slug: weight(np.reshape(rope.BUGS[slug][1](see), (1, 1, 8, 6))) for slug in shown}
figure = plot.attention_maps({name: (p, masks.causal(8, 8)) for name, p in panels.items()},
                             "One vector, eight positions: turned rightly, and five times wrongly")
plot.save(figure, "07_relative_position_mistakes", """Six causal maps of eight queries by eight keys. Right: waves along each
    row. The other layout, the tail, halved exponents and all channels: other waves. A missing minus: no constant
    diagonals.""")

# %% [markdown]
# **One wrong port, caught live.** It turns neighbours, as the paper does, and is given `half`.

# %%
# exercise
def port(x, positions, rotary, base, layout):
    theta = base ** (-2 * np.arange(rotary // 2) / rotary)
    angle = np.asarray(positions)[..., None, :, None] * theta
    y, a, b = x.copy(), x[..., 0:rotary:2], x[..., 1:rotary:2]
    y[..., 0:rotary:2] = a * np.cos(angle) - b * np.sin(angle)
    y[..., 1:rotary:2] = b * np.cos(angle) + a * np.sin(angle)
    return y


right = check_exercise("rope", port, "basic")
right = check_exercise("rope", port, "neighbours")

# %% [markdown]
# ## Where code in the wild differs
#
# - **Layout.** The paper of RoPE, GPT-J and Meta's Llama have neighbours; GPT-NeoX and the Llama of transformers have halves,
#   with the rows of $W_Q$ and $W_K$ permuted. A checkpoint read with the other layout runs, and writes nonsense.
# - **T5 does not scale.** $1 / \sqrt{d_k}$ is in the initialisation.
# - **The sign of the distance.** Key minus query in T5 and here; DeBERTa has query minus key.
# - **One table for all layers** in T5, and none in attention of a decoder to an encoder.
# - **Swin** has the two-dimensional index: a row for each step down and across.

# %%
index = relative_bias.window_index(2, 3)
print("window of 2 by 3: rows of a table of", 3 * 5, index, sep="\n")
for slug, case in (("distance_sign", "basic"), ("scale_of_width", "scale_1")):
    golden = load_cases("t5", case)[0]
    off = np.abs(np.asarray(t5.BUGS[slug][1](golden.inputs)[0]) - golden.outputs["o"]).max()
    print(f"t5.{slug}: o is off by up to {off:.2f} in {case}")

# %% [markdown]
# ## Relations

# %%
y = {name: draw(name, (2, 3, 6, 4)) for name in "qkv"} | dict(scale=0.5)
index = relative_bias.clipped_distance(6, 6, 5)
agree("a table of zeros: attention", relative_bias.dense(**y, table=np.zeros((3, 11)), index=index)[0], sdpa.dense(**y)[0])
agree("a straight line: ALiBi", relative_bias.dense(**y, table=-alibi.slopes(3)[:, None] * abs(np.arange(-5, 6)), index=index)[0],
      alibi.dense(**y)[0])
rows = draw("table", (8, 3))
buckets = t5.bucket(np.arange(6) - np.arange(6)[:, None], 8, 10, True)
agree("T5 is a table with a coarse index", t5.dense(**y, table=rows, bidirectional=True, max_distance=10)[0],
      relative_bias.dense(**y, table=rows.T, index=buckets)[0])
still = turn(y["q"], np.zeros(6, int))
agree("position 0: no turn", still, y["q"], 0)
far = [sdpa.dense(turn(y["q"], np.arange(6) + n), turn(y["k"], np.arange(6) + n), y["v"], scale=0.5)[0] for n in (0, 1000)]
agree("all tokens 1000 further: the same o", far[1], far[0], 1e-11)

# %% [markdown]
# ## In a box
#
# | | |
# |---|---|
# | formula | (7.1) |
# | shapes | q (B, H, Tq, dk), k (B, H, Tk, dk), v (B, H, Tk, dv), table (H, R) or (R, H) to o, lse; x (B, H, T, dk) to y |
# | buckets | exact up to half of a side, logarithmic to `max_distance`, the last one open |
# | rotation | pairs $(a, b) \to (a \cos \phi - b \sin \phi, b \cos \phi + a \sin \phi)$, $\phi = p \thinspace base^{-2t / rotary}$ |
# | cost | a look-up for each pair; three flops for each channel of each token |
# | backward | scatter-add into the table; turn back |
# | when | tables where texts have a fixed length; rotation with caches, for keys are turned once, when they are written |
# | goes wrong | sign, offset, floor, scale, halves; layout, base, exponent, positions |
#
# ## Exercises
#
# **1. Buckets** with integers only, for one distance.

# %%
# exercise
def my_bucket(distance, buckets, max_distance, bidirectional):
    raise NotImplementedError("not written yet")


# %% [markdown]
# **2. Repair the port** for both layouts.

# %%
# exercise
def turned_pairs(x, positions, rotary, base, layout):
    raise NotImplementedError("not written yet")


right = check_exercise("rope", turned_pairs)

# %% [markdown]
# **3. T5 attention**, with `t5.bucket`, for any offset and rows without keys.

# %%
# exercise
def bucketed(q, k, v, table, mask, bidirectional, max_distance, offset, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("t5", bucketed)

# %% [markdown]
# ## Answers
#
# **1.** Count up while the next bucket has begun.

# %%
# exercise
def my_bucket(distance, buckets, max_distance, bidirectional):
    n = buckets // 2 if bidirectional else buckets
    d, e = abs(distance) if bidirectional else max(-distance, 0), n // 2
    row = d if d < e else e
    while d >= e and row + 1 < n and d ** (n - e) * e ** (row + 1 - e) >= max_distance ** (row + 1 - e) * e ** (n - e):
        row += 1
    return row + n * (bidirectional and distance > 0)


for both in True, False:
    agree(f"bidirectional = {both}", [my_bucket(d, 32, 128, both) for d in range(-200, 201)],
          t5.bucket(np.arange(-200, 201), 32, 128, both), 0)

# %% [markdown]
# **2.** Only the choice of channels differs.

# %%
# exercise
def turned_pairs(x, positions, rotary, base, layout):
    t = np.arange(rotary // 2)
    a, b = (t, t + rotary // 2) if layout == "half" else (2 * t, 2 * t + 1)
    turn = np.exp(1j * np.asarray(positions)[..., None, :, None] * base ** (-2 * t / rotary))
    z, y = (x[..., a] + 1j * x[..., b]) * turn, x.copy()
    y[..., a], y[..., b] = z.real, z.imag
    return y


assert check_exercise("rope", turned_pairs)

# %% [markdown]
# **3.** The bias of a pair is one row of the table, all heads at once.

# %%
# exercise
def bucketed(q, k, v, table, mask, bidirectional, max_distance, offset, scale):
    distance = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] - offset
    bias = np.moveaxis(table[t5.bucket(distance, len(table), max_distance, bidirectional)], -1, 0)
    k, v = core.unread(k, mask), core.unread(v, mask)
    weights, lse = core.softmax(scale * q @ k.swapaxes(-1, -2) + bias, mask)
    return weights @ v, lse


assert check_exercise("t5", bucketed)

# %% [markdown]
# ## Sources
#
# - Shaw, Uszkoreit, Vaswani 2018, arXiv:1803.02155: relative positions, clipped.
# - Raffel et al. 2020, *T5*, arXiv:1910.10683: section 2.1, buckets; the formula is in its code.
# - Su et al. 2021, *RoFormer*, arXiv:2104.09864: eq. 13 to 16, and 34 for the form that is computed.
# - Liu et al. 2021, *Swin transformer*, arXiv:2103.14030: the index of a window.
# - The comparisons with the modules of transformers and the node cases of ONNX run in the project's tests: `make peers`.
