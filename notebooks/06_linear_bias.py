# %% [markdown]
# # Linear biases (ALiBi)
#
# **One straight line for each head takes the place of position embeddings: a score knows how far apart two tokens stand, and
# never where.**
#
# $$
# \begin{aligned}
# a_{hij} &= scale \thinspace q_{hi} \cdot k_{hj} - m_h \lvert p_i - j \rvert \qquad p_i = i + offset \\
# z_{hi} &= \sum_{j: mask_{ij}} e^{a_{hij}} \qquad lse_{hi} = \log z_{hi} \qquad
# o_{hi} = \sum_{j: mask_{ij}} e^{a_{hij}} v_{hj} / z_{hi}
# \end{aligned}
# \tag{6.1}
# $$
#
# $$
# m_h = 2^{-8 h / H}, \quad h = 1, \dots, H, \quad \text{for } H \text{ a power of two}
# \tag{6.2}
# $$
#
# Nothing is learned. Steep heads see what is near, flat ones see far, and a model trained on short texts runs on longer
# ones, for a distance is a distance wherever it lies.

# %%
import numpy as np

from attention_ref import alibi, flash, load_cases, masks, plot, relative_bias, sdpa
from attention_ref.conformance.numbers import count, round_to
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw

np.set_printoptions(precision=4, suppress=True, linewidth=110)

# %% [markdown]
# ## The contract

# %%
shapes = {name: text or "a number" for name, text in (alibi.INPUTS | alibi.OUTPUTS).items()}
print(table(shapes.items(), ("name", "kind and shape")))
print()
print(table(alibi.CONVENTIONS.items(), ("what", "convention")))

# %% [markdown]
# 1. **Heads.** Head $h$ of $H$ has slope $m_h$, counted from 1: the first head is the steepest where $H$ is a power of two.
# 2. **slopes** is None, or (H,) numbers. None means the published ones, the function `slopes(H)`: for $H$ no power of two
#    they are *interpolated* (below), rounded once from float64.
# 3. **The bias** is added to the scores after these are scaled. It is not scaled itself.
# 4. **Distance** is absolute. Under a causal mask that is $p_i - j$, as in the paper.
# 5. **offset** is the position of query 0, an integer, 0 if not given: with a cache, the number of tokens before the call.
# 6. **mask** is boolean, True = may attend. ALiBi is not causal by itself: causal is a mask like any other.
# 7. **A row without keys** gives $o = 0$, $lse = -\infty$, gradients 0. A key that no query may attend to is never read.
# 8. **scale** is a number without a default.
# 9. **Steps** by name: `distance_bias` (H, Tq, Tk), and `biased`, the scores that are exponentiated (B, H, Tq, Tk).
# 10. **Gradients** exist for q, k, v, and for slopes where they are given.

# %% [markdown]
# ## Three tokens by hand
#
# Two heads, slopes $2^{-4}$ and $2^{-8}$, causal, scale 0.75.

# %%
q = np.array([[[1, 0.5], [-0.5, 2], [1.5, -1]], [[0.5, 1], [2, -1], [-1, 0.5]]])
k = np.array([[[0.5, 1], [2, -1], [-1, 1.5]], [[1, -0.5], [0.5, 0.5], [-1, 2]]])
v = np.array([[[1, -2], [3, 0.5], [-1, 4]], [[2, 1], [0, -1], [1, 3]]])
m, causal = alibi.slopes(2), masks.causal(3, 3)
i, j = np.indices((3, 3))
agree("slopes of two heads", m, [2.0 ** -4, 2.0 ** -8], 0)
o, lse = np.zeros((2, 3, 2)), np.zeros((2, 3))
for h in range(2):
    bias = -m[h] * np.abs(i - j)
    a = np.where(causal, 0.75 * q[h] @ k[h].T + bias, -np.inf)
    lse[h] = np.log(np.exp(a).sum(1))
    p = np.exp(a - lse[h][:, None])
    o[h] = p @ v[h]
    print(f"head {h}: bias", bias, "a", a, "p", p, "o", o[h], sep="\n", end="\n\n")
y = alibi.dense(q[None], k[None], v[None], causal, scale=0.75)
agree("o by hand", o, y[0][0])
agree("lse by hand", lse, y[1][0])

# %% [markdown]
# ## The code

# %%
plot.show(alibi, "closed_form", "slopes", "distance", "bias", "dense")

# %% [markdown]
# ### The slopes of any number of heads
#
# The paper prints (6.2) for every $H$. The code of its authors, and every model since, does something else when $H$ is no
# power of two: it takes the slopes of the largest power of two below, $n$, and then every other one of $2n$, the steepest
# first. So 12 heads have the 8 slopes of 8 heads, and four that lie between them.

# %%
for H in 2, 3, 6, 8, 12:
    print(f"H = {H}: released", alibi.slopes(H), "" if H in (2, 8) else f"\n{'':{len(str(H)) + 6}}(6.2)    {alibi.closed_form(H)}")
agree("a power of two: the same", alibi.slopes(8), alibi.closed_form(8), 0)
agree("12 heads: 8, and four between", sorted(alibi.slopes(12)), sorted([*alibi.closed_form(8), *alibi.closed_form(16)[:8:2]]), 0)

figure, axis = plot.subplots(size=(5.4, 3.0))
for H, marker in zip((6, 8, 12), plot.MARKERS):
    axis.semilogy(np.arange(1, H + 1), alibi.slopes(H), marker, markersize=5, label=f"H = {H}, released", base=2)
    axis.semilogy(np.arange(1, H + 1), alibi.closed_form(H), color="0.6", linewidth=0.8, base=2, zorder=0)
axis.set(xlabel="head h", ylabel="slope", title="Released slopes leave the formula (grey)\nwhere H is no power of two")
axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
axis.spines[["top", "right"]].set_visible(False)
plot.save(figure, "06_linear_bias_slopes", """Slopes on a logarithmic axis against the head. For 8 heads the marks lie
    on a straight grey line. For 6 and 12 heads the first four or eight lie on a line of another slope, and the last two or
    four start again near the top.""")

# %% [markdown]
# ### The picture
#
# The bias of three heads of eight over eight tokens, and what it makes of weights that would be equal: a causal row becomes
# a geometric series.

# %%
zero = {name: np.zeros((1, 8, 8, 4)) for name in "qk"}
eight, _ = alibi.dense(**zero, v=np.broadcast_to(np.eye(8), (1, 8, 8, 8)), mask=masks.causal(8, 8), scale=0.5)
panels = {f"head {h + 1}, slope 1/{2 ** (h + 1)}": (eight[0, h], masks.causal(8, 8)) for h in (0, 2, 7)}
figure = plot.attention_maps(panels, "Equal scores: a steep head looks beside itself, a flat one everywhere")
plot.save(figure, "06_linear_bias_heads", """Three causal maps of eight queries by eight keys. Head 1: weights fall by 0.61
    from key to key away from the diagonal. Head 3 falls slowly, head 8 is nearly even along each row.""")

# %% [markdown]
# ## Derivation: how far a head sees
#
# Let all scores be equal and the text long. The weight at distance $d$ is $e^{-m d} / \sum_{n \ge 0} e^{-m n}$, so the
# share of the weight within the nearest $w$ keys is
#
# $$
# 1 - e^{-m w}, \qquad \text{and nine tenths are within } w = \log(10) / m
# \tag{6.3}
# $$
#
# A slope of 1/2 has nine tenths of its weight within 5 keys, one of 1/256 within 590. Since the bias depends on
# $p_i - j$ only, moving all positions changes nothing; and adding $m_h p_i$ to a whole row leaves the weights, for softmax
# does not see what a row has in common:
#
# $$
# -m_h (p_i - j) = m_h j - m_h p_i \quad (j \le p_i): \qquad \text{the bias } m_h j \text{ gives the same } p
# \text{, and } lse + m_h p_i
# \tag{6.4}
# $$

# %%
T, share = 4000, []
for slope in 1 / 2, 1 / 16, 1 / 256:
    weights = np.exp(-slope * np.arange(T))
    w = int(np.ceil(np.log(10) / slope))
    agree(f"(6.3) slope {slope:g}: within {w} keys", weights[:w].sum() / weights.sum(), 1 - np.exp(-slope * w), 1e-6)

x = {name: draw(name, (1, 2, 6, 4)) for name in "qkv"} | dict(mask=masks.causal(6, 6), scale=0.5)
here, shifted = alibi.dense(**x, offset=0), alibi.dense(**x | {"k": np.pad(x["k"], ((0, 0), (0, 0), (9, 0), (0, 0))),
                        "v": np.pad(x["v"], ((0, 0), (0, 0), (9, 0), (0, 0))), "mask": masks.causal(6, 15) & (np.arange(15) > 8)},
                        offset=9)
agree("all positions 9 further: the same o", shifted[0], here[0])
m = alibi.slopes(2)[:, None, None]
key_only = sdpa.dense(**x, bias=m * np.arange(6))
agree("(6.4) the bias m j: the same o", key_only[0], here[0])
agree("      and lse moved by m p", key_only[1], here[1] + m[..., 0] * np.arange(6))

# %% [markdown]
# **Where that bites.** Bloom and MPT add $m j$. As long as a row is computed in one piece nobody sees the difference. But
# partial results over parts of the keys are merged by lse ([chapter 5](05_online_softmax.ipynb)), and a part that measured
# keys from its own start has the wrong one.

# %%
def part(keys, start):
    bias = m * (keys - start)
    return sdpa.dense(x["q"], x["k"][:, :, keys], x["v"][:, :, keys], x["mask"][:, keys], bias, scale=0.5)


# %%
near, far = np.arange(3, 6), np.arange(3)
right = flash.merge(*zip(part(far, 0), part(near, 0)))
wrong = flash.merge(*zip(part(far, 0), part(near, 3)))
agree("parts that agree on where 0 is: merged", right[0], here[0])
print("parts that each start at 0: o is off by up to", np.abs(wrong[0] - here[0]).max().round(3))

# %% [markdown]
# ## Forms that agree
#
# `decode` takes one query after the other, as with a cache: a query needs one line of distances, and the bias of all pairs
# is never stored.

# %%
plot.show(alibi, "decode")
for case in "basic", "causal", "unfilled_cache":
    print(case)
    forms_table("alibi", case)

# %% [markdown]
# ## Cost
#
# The bias depends on no input, so it is made once, (H, Tq, Tk) numbers, or line by line, and costs nothing per call but the
# addition that attention with a bias has anyway. No parameters, no table. Counted, with scores and all:

# %%
rows = []
for T in 8, 32, 128:
    y = {name: draw(name, (1, 4, T, 8)) for name in "qkv"}
    rows.append((T, *(count(form, **y, scale=0.5)["flops"] for form in (sdpa.dense, alibi.dense)), 4 * T * T, 4 * 2 * T))
print(table(rows, ("tokens", "attention with a bias", "ALiBi", "bias stored at once", "line by line")))
agree("not one flop more", [row[2] for row in rows], [row[1] for row in rows], 0)

# %% [markdown]
# ## Backward
#
# The bias is a constant, so q, k and v have the gradients of chapter 1, with $p$ of the biased scores. Slopes that are
# learned meet every pair of their head, with the distance as the factor:
#
# $$
# da_{hij} = p_{hij} \Big( do_{hi} \cdot v_{hj} - \sum_l p_{hil} \thinspace do_{hi} \cdot v_{hl} + dlse_{hi} \Big) \qquad
# dm_h = - \sum_{b, i, j} da_{hij} \lvert p_i - j \rvert
# \tag{6.5}
# $$

# %%
plot.show(alibi.vjp)
for case in "causal", "learned_and_padded":
    print(case)
    gradient_table("alibi", case)
golden = load_cases("alibi", "learned")[0]
g = alibi.vjp(**golden.cotangents | golden.inputs | dict(dlse=0 * golden.cotangents["dlse"]))
y = golden.inputs
i, j = np.indices((y["q"].shape[2], y["k"].shape[2]))
only_rows = y | dict(slopes=y["slopes"] + 0.5, mask=y["mask"] & (np.abs(i + y["offset"] - j) == 1))
agree("all keys at one distance: a slope changes nothing but lse", alibi.dense(**only_rows)[0],
      alibi.dense(**only_rows | dict(slopes=y["slopes"]))[0])

# %% [markdown]
# ## What goes wrong

# %%
named = {slug: text for slug, (text, _) in (alibi.BUGS | alibi.VJP_BUGS).items()}
print(table(named.items(), ("mistake", "what is wrong")))

# %% [markdown]
# Six tokens that see each other, the third of three heads, scores 0. One-hot values show the weights.

# %%
see = dict(q=np.zeros((1, 3, 6, 4)), k=np.zeros((1, 3, 6, 4)), v=np.broadcast_to(np.eye(6), (1, 3, 6, 6)), slopes=None, offset=2,
           mask=np.ones((1, 1, 6, 6), bool), scale=0.5)
shown = "distance_signed", "key_only", "offset_ignored", "slopes_closed_form", "slopes_extra_first"
panels = {"right": alibi.dense(**see)[0][0, 2]}
panels |= {slug: np.asarray(alibi.BUGS[slug][1](see)[0])[0, 2] for slug in shown}
figure = plot.attention_maps(panels, "Query 0 stands at key 2: right and five times wrong")
plot.save(figure, "06_linear_bias_mistakes", """Six maps of six queries by six keys. Right: the largest weight two right of
    the diagonal. Signed distance and key only: the last key is preferred by all. Offset ignored: the largest weight on
    the diagonal. Closed form and extra slopes first: the right pattern, but nearly flat.""")

# %% [markdown]
# **One wrong port, caught live.** It has read the paper, and not the code.

# %%
# exercise
def port(q, k, v, mask, offset, scale):
    H, (Tq, Tk) = q.shape[1], (q.shape[2], k.shape[2])
    m = 2.0 ** (-8 * np.arange(1, H + 1) / H)
    away = np.abs(np.arange(Tq)[:, None] + offset - np.arange(Tk))
    a = np.where(mask, scale * q @ k.swapaxes(-1, -2) - m[:, None, None] * away, -np.inf)
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


for case in "causal", "six_heads", "twelve_heads":
    right = check_exercise("alibi", port, case)

# %% [markdown]
# Two heads are right. A test with a power of two proves nothing about slopes.
#
# ## Where code in the wild differs
#
# - **The key-only form** of Bloom and MPT, (6.4): the same output, another lse.
# - **Falcon** adds the bias before it scales, which divides all slopes by $\sqrt{d_k}$: its checkpoints want
#   `slopes / sqrt(dk)` here.
# - **Positions in bfloat16** have eight bits: from 256 on neighbours collide.
# - **Padding on the left.** Bloom counts real tokens only, so distances survive it; here the mask hides, and positions are
#   those of the array: the distance between two tokens is the same.
# - **A power of two** is what `heads` is in most published models. The others are where ports break.

# %%
far = load_cases("alibi", "far")[0]
off = np.abs(np.asarray(alibi.BUGS["positions_in_bfloat16"][1](far.inputs)[0]) - far.outputs["o"]).max()
print(f"positions in bfloat16: o is off by up to {off:.2f} in {far.id}")
print("bfloat16 of 255 ... 260:", round_to(np.arange(255.0, 261), "bfloat16"))
y = load_cases("alibi", "causal")[0].inputs
dk = y["q"].shape[3]
scores_and_bias = sdpa.dense(y["q"], y["k"], y["v"], y["mask"], alibi.bias(None, y["offset"], y["q"], y["k"]) * dk ** -0.5,
                             scale=y["scale"])
agree("scaled with the scores: slopes / sqrt(dk)", scores_and_bias[0],
      alibi.dense(**y | dict(slopes=alibi.slopes(2) * dk ** -0.5))[0])

# %% [markdown]
# ## Relations

# %%
y = {name: draw(name, (2, 3, 6, 4)) for name in "qkv"} | dict(scale=0.5)
agree("slopes 0: attention", alibi.dense(**y, slopes=np.zeros(3))[0], sdpa.dense(**y)[0])
agree("a bias like any other", alibi.dense(**y)[0], sdpa.dense(**y, bias=alibi.bias(None, 0, y["q"], y["k"]))[0])
index = relative_bias.clipped_distance(6, 6, 5, 0)
line = -alibi.slopes(3)[:, None] * np.abs(np.arange(-5, 6))
agree("a table that is a straight line", alibi.dense(**y)[0], relative_bias.dense(**y, table=line, index=index)[0])
steep = alibi.dense(**y, mask=masks.causal(6, 6), slopes=np.full(3, 1e4))[0]
agree("infinitely steep: o = v", steep, y["v"])
last = y | dict(q=y["q"][:, :, -1:])
agree("the last query alone, with its offset", alibi.dense(**last, offset=5)[0], alibi.dense(**y)[0][:, :, -1:])

# %% [markdown]
# ## In a box
#
# | | |
# |---|---|
# | formula | $a_{hij} = scale \thinspace q_{hi} \cdot k_{hj} - m_h \lvert i + offset - j \rvert$, then softmax |
# | slopes | $2^{-8h/H}$; $H$ no power of two: those of $n$, then every other one of $2n$ |
# | shapes | q (B, H, Tq, dk), k (B, H, Tk, dk), v (B, H, Tk, dv) to o (B, H, Tq, dv), lse (B, H, Tq) |
# | cost | the addition of a bias; no parameters |
# | reach | nine tenths of the weight within $\log(10) / m$ keys |
# | backward | as without a bias; a learned slope: (6.5) |
# | when | texts longer than those trained on; nothing to store or to learn |
# | goes wrong | slopes of 3, 6, 12 heads; a scaled bias; the offset; the sign for later keys; bfloat16 positions; lse |
#
# ## Exercises
#
# **1. The slopes** of any number of heads, without a power table: `math.log2` may be used, and beware of 1.

# %%
# exercise
def my_slopes(heads):
    raise NotImplementedError("not written yet")


# %% [markdown]
# **2. Repair the port**, for given slopes and rows without keys too.

# %%
# exercise
def repaired(q, k, v, mask, slopes, offset, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("alibi", repaired)

# %% [markdown]
# **3. A running sum.** With scores 0 and a causal mask, $z_i = 1 + e^{-m} z_{i-1}$: compute $o$ without any pair, in one pass.

# %%
# exercise
def running(v, slope):
    raise NotImplementedError("not written yet")


# %% [markdown]
# ## Answers
#
# **1.** The largest power of two first, then every other one of the next.

# %%
# exercise
def my_slopes(heads):
    n = 1
    while 2 * n <= heads:
        n *= 2
    return [2 ** (-8 * h / n) for h in range(1, n + 1)] + [2 ** (-4 * h / n) for h in range(1, 2 * (heads - n), 2)]


for heads in range(1, 41):
    assert np.array_equal(my_slopes(heads), alibi.slopes(heads))
print("1 to 40 heads: the same")

# %% [markdown]
# **2.** `alibi.slopes` where none are given; a row whose maximum is $-\infty$ is shifted by 0 and divided by 1.

# %%
# exercise
def repaired(q, k, v, mask, slopes, offset, scale):
    H, (Tq, Tk) = q.shape[1], (q.shape[2], k.shape[2])
    m = alibi.slopes(H) if slopes is None else slopes
    away = np.abs(np.arange(Tq)[:, None] + offset - np.arange(Tk))
    seen = np.broadcast_to(mask, (len(q), H, Tq, Tk))
    hidden = ~seen.any(2)[..., None]
    k, v = np.where(hidden, 0, k), np.where(hidden, 0, v)
    a = np.where(seen, scale * q @ k.swapaxes(-1, -2) - m[:, None, None] * away, -np.inf)
    top = a.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(a - np.where(top == -np.inf, 0, top))
    z = e.sum(-1, keepdims=True)
    return e / np.where(z == 0, 1, z) @ v


assert check_exercise("alibi", repaired)

# %% [markdown]
# **3.** Both sums decay by $e^{-m}$ from one query to the next. Weights that fall by a constant factor need no pairs: this is
# a moving average.

# %%
# exercise
def running(v, slope):
    z, total, o = 0.0, 0.0, np.zeros_like(v)
    for i, value in enumerate(v):
        z, total = 1 + np.exp(-slope) * z, value + np.exp(-slope) * total
        o[i] = total / z
    return o


values = draw("v", (8, 3))
flat = dict(q=np.zeros((1, 1, 8, 2)), k=np.zeros((1, 1, 8, 2)), v=values[None, None], mask=masks.causal(8, 8))
agree("one pass", running(values, 0.25), alibi.dense(**flat, slopes=np.array([0.25]), scale=1.0)[0][0, 0])

# %% [markdown]
# ## Sources
#
# - Press, Smith, Lewis 2022, *Train short, test long: attention with linear biases enables input length extrapolation*,
#   arXiv:2108.12409: section 3, the bias and the slopes, figure 3.
# - Le Scao et al. 2022, *BLOOM*, arXiv:2211.05100: a model that has them.
# - The comparisons with Bloom, MPT and Falcon of transformers run in the project's tests: `make peers`.
