# %% [markdown]
# # Linear biases (ALiBi)
#
# **One straight line for each head takes the place of position embeddings: a score knows how far apart two tokens
# stand, and never where.**
#
# Nothing is added to the tokens and nothing is learned. A score loses $m_h$ for every step between query and key:
#
# $$
# \begin{aligned}
# p_i &= i + offset & a_{hij} &= scale \thinspace q_{hi} \cdot k_{hj} - m_h \lvert p_i - j \rvert \\
# z_{hi} &= \sum_{j : mask_{ij}} \exp(a_{hij}) & lse_{hi} &= \log z_{hi} \qquad
# o_{hi} = \sum_{j : mask_{ij}} \exp(a_{hij}) \thinspace v_{hj} / z_{hi}
# \end{aligned}
# \tag{6.1}
# $$
#
# The slopes $m_h$ are fixed, the steepest for heads that look beside themselves, the flattest for heads that look far:
#
# $$
# m_h = 2^{-8 h / H} \qquad h = 1, \dots, H \qquad \text{for } H \text{ a power of two}
# \tag{6.2}
# $$
#
# Under a causal mask this is the bias $m_h (j - p_i)$ of the paper (Press, Smith, Lewis 2022, section 3). This chapter
# says what slopes other numbers of heads have, why the line has to be straight, how far a head sees, and what
# happens when a part of the line is left out because softmax does not notice. It is enough to write the function in
# any language and to pass its golden cases.

# %%
import numpy as np

from attention_ref import alibi, core, flash, load_cases, masks, plot, relative_bias, sdpa, ssd
from attention_ref.conformance.implementations import judge
from attention_ref.conformance.numbers import UNIT, complex_step, count, round_to
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
shapes = alibi.INPUTS | alibi.OUTPUTS
print(table([(name, text or "a number") for name, text in shapes.items()], ("name", "kind and shape")))
print()
print(table(alibi.CONVENTIONS.items(), ("what", "convention")))

# %% [markdown]
# 1. **Shapes.** `B` batch entries and `H` heads, all independent of one another. `Tq` queries and `Tk` keys need not
#    be as many, keys `dk` and values `dv` need not be as wide, and `Tk` may be 0.
# 2. **scale** is a number without a default. It multiplies $q \cdot k$ and not the bias, which is added afterwards.
# 3. **slopes** is one number per head, of any sign, or None: the published ones. Those are (6.2) if $H$ is a power of
#    two. If not, let $n$ be the largest power of two below $H$: the first $n$ heads have the slopes of $n$ heads, and
#    the other $H - n$ have the first, third, fifth ... slope of $2 n$ heads. They are rounded once, from float64, to
#    the type of $q$. In a formula heads count from 1, in an array from 0.
# 4. **Distance** is absolute, $\lvert p_i - j \rvert$: a key after the query loses as much as one as far before it.
#    It is a difference of integers, and becomes a floating-point number only then.
# 5. **offset** is the position of query 0 among the keys, an integer of any sign, 0 if not given. It is not guessed
#    from the shapes and does not touch the mask: "causal" is a mask, and whoever builds it uses the same offset.
# 6. **mask** is boolean, True = may attend; it selects. All True means none.
# 7. **lse** is the natural logarithm of $z$ in (6.1), of scores with their bias, and of this bias: a bias that gives
#    the same weights may give another lse.
# 8. **A row without keys** has $o = 0$ and $lse = -\infty$.
# 9. **Never read.** A key no query of its head may attend to, with its value, may hold anything, NaN included, and so
#    may a query that sees no key.
# 10. **Types.** $o$ has the type of the inputs, lse may have a wider one.
# 11. **Gradients** exist for $q, k, v$, and for slopes if they are given. The loss may depend on $o$ and on lse. A
#     masked pair and a row without keys send back exactly 0.
# 12. **Steps** that a port may return by name: `distance_bias`, (H, Tq, Tk), that is $-m_h \lvert p_i - j \rvert$ for
#     every pair, and `biased`, (B, H, Tq, Tk), that is $a$ where the mask allows.
#
# The rest of the chapter is consequence.

# %% [markdown]
# ## Three tokens by hand
#
# Two heads, with the slopes 1/2 and 1/4 of the first two of eight. Three keys and two queries, the first of which
# stands at key 1: `offset` is 1. Query 0 sees a key on either side of it; query 1 stands at the last key and may not
# see key 0. The first score is $0.75 \thinspace (1 \cdot 0.5 + 0.5 \cdot 1) = 0.75$; key 0 is one step away, so $0.5$
# goes off and $0.25$ is left.

# %%
q = np.array([[[1.0, 0.5], [-0.5, 2.0]], [[0.5, 1.0], [2.0, -1.0]]])
k = np.array([[[0.5, 1.0], [2.0, -1.0], [-1.0, 1.5]], [[1.0, -0.5], [0.5, 0.25], [-1.0, 2.0]]])
v = np.array([[[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0]], [[2.0, 1.0], [0.75, -1.0], [1.0, 3.0]]])
m, scale, offset = np.array([0.5, 0.25]), 0.75, 1
mask = np.array([[True, True, True], [False, True, True]])

distance = np.array([[abs(i + offset - j) for j in range(3)] for i in range(2)])
scores = scale * q @ k.swapaxes(1, 2)
bias = 0 - m[:, None, None] * distance
biased = scores + bias
e = np.where(mask, np.exp(biased), 0)
z = e.sum(-1, keepdims=True)
p, lse = e / z, np.log(z)[..., 0]
o = p @ v
for h in range(2):
    print(f"head {h + 1}, slope {m[h]}", "scores", scores[h], "bias", bias[h], "biased", biased[h], "exp(biased)", e[h],
          f"z {z[h, :, 0]}   lse {lse[h]}", "p", p[h], "o", o[h], "", sep="\n")

x = dict(q=q[None], k=k[None], v=v[None], mask=mask, slopes=m, offset=offset, scale=scale)
o_ref, lse_ref = alibi.dense(**x)
agree("o by hand", o, o_ref[0])
agree("lse by hand", lse, lse_ref[0])

figure, axes = plot.subplots(1, 3, size=(2.6, 2.4))
plot.attention_map(axes[0], scores[0], mask, "scores", signed=True, limit=3)
plot.attention_map(axes[1], bias[0], mask, "bias: 0 at the query's place", signed=True, limit=3)
plot.attention_map(axes[2], p[0], mask, "weights of their sum")
plot.save(figure, "06_linear_bias_by_hand", """Three maps of two queries by three keys, head 1, the pair of query
    1 and key 0 hatched. Scores from -2.25 to 2.62. The bias is 0 at key 1 for query 0 and at key 2 for query 1,
    and -0.5 one step away on either side. The weights of their sum: 0.63 for query 0 on its own key, 1.00 for
    query 1.""")

# %% [markdown]
# ## The code
#
# The definition is the formula. What it takes from the shared core is a softmax that knows masks, and `unread`, which
# puts zeros where nobody looks, because $0 \cdot \mathrm{NaN}$ is NaN.

# %%
plot.show(alibi, "closed_form", "slopes", "distance", "bias", "dense")
plot.show(core, "unread")

# %% [markdown]
# Two more forms. `decode` goes query by query, as with a cache, and holds one line of distances at a time. The loop
# is to be carried to another language: scalars, one head; it makes the bias of a pair when it meets the pair, and
# never holds a bias at all. (`.real` lets a complex step pass through a comparison; with real numbers it does
# nothing.)

# %%
plot.show(alibi, "decode")
plot.show(alibi.one_head)

# %% [markdown]
# ## Slopes
#
# The paper says that in general, for any number of heads, the slopes are (6.2). The code of its authors says so for
# powers of two only, and checkpoints come from code: rule 3. In numbers:

# %%
heads = 3, 6, 12
columns = [s for H in heads for s in (alibi.slopes(H), alibi.closed_form(H))]
rows = [(h + 1, *(f"{s[h]:.6f}" if h < len(s) else "" for s in columns)) for h in range(12)]
print(table(rows, ("h", *(f"{name} {H}" for H in heads for name in ("released", "(6.2)")))))
print()
for n in 1, 2, 4, 8, 16:
    agree(f"{n} heads: (6.2)", alibi.slopes(n), alibi.closed_form(n), 0)
for H in heads:
    n = 2 ** (H.bit_length() - 1)
    agree(f"{H} heads: the first {n} are those of {n} heads", alibi.slopes(H)[:n], alibi.closed_form(n), 0)

# %% [markdown]
# The rule has a reason. The slopes of $2n$ heads are those of $n$ heads, at the even places, and one more before each
# of them:
#
# $$
# 2^{-8 (2 h) / (2 n)} = 2^{-8 h / n} \qquad
# 2^{-8 (2 h - 1) / (2 n)} = \sqrt{2^{-8 (h - 1) / n} \thinspace 2^{-8 h / n}}
# \tag{6.3}
# $$
#
# The new ones are geometric means of neighbours, where the neighbour of the first is 1. So a model that grows from
# $n$ heads towards $2n$ keeps what it has and fills gaps, from the steep end. That is also a shorter way to write the
# rule: take $2n$ heads, put the even places in front of the odd ones, and cut off after $H$. MPT comes to its slopes
# that way.

# %%
for H in heads:
    n = 2 ** (H.bit_length() - 1)
    neighbours = np.append(1.0, alibi.closed_form(n))
    agree(f"{H} heads: the last {H - n} are geometric means", np.sqrt(neighbours[:-1] * neighbours[1:])[:H - n],
          alibi.slopes(H)[n:])
twice = [alibi.closed_form(2 ** H.bit_length()) for H in range(1, 65)]
every = [np.append(of_2n[1::2], of_2n[::2])[:H] for H, of_2n in enumerate(twice, 1)]
agree("1 to 64 heads: even places first, cut off", np.concatenate(every), np.concatenate(
    [alibi.slopes(H) for H in range(1, 65)]), 0)
agree("the flattest of 1 to 64 heads is 2^-8", [alibi.slopes(H).min() for H in range(1, 65)], 2.0 ** -8, 0)

figure, axes = plot.subplots(1, 3, size=(3.0, 2.8))
for axis, H in zip(axes, heads):
    h, n = np.arange(1, H + 1), 2 ** (H.bit_length() - 1)
    axis.plot(h, np.log2(alibi.closed_form(H)), "x-", color="0.55", markersize=5, linewidth=1, label="(6.2), not released")
    axis.plot(h[:n], np.log2(alibi.slopes(H)[:n]), "o", markersize=6, label="released: those of n heads")
    axis.plot(h[n:], np.log2(alibi.slopes(H)[n:]), "^", markersize=6, label="released: between them")
    axis.set(xlabel="head h", ylabel="log2 of the slope", title=f"{H} heads", xticks=h[::1 + H // 7],
             yticks=[-8, -6, -4, -2, 0], ylim=(-8.6, 0.3))
    axis.spines[["top", "right"]].set_visible(False)
figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
figure.suptitle("Released slopes are two straight lines, the closed form is one")
plot.save(figure, "06_linear_bias_slopes", """Three plots, for 3, 6 and 12 heads, of the logarithm of the slope
    over the head. Grey crosses, the closed form, fall on one line to -8. Blue discs, the released slopes of the
    first 2, 4 and 8 heads, fall faster and reach -8 at the last of them. Orange triangles, the remaining 1, 2 and
    4 heads, begin again at the top, between the first discs.""")

# %% [markdown]
# With a power of two of heads both rules pass every test, and many models have one. The others are where ports break.
#
# ## Derivation: forward
#
# **Place drops out.** The score of a pair depends on $q_i$, $k_j$ and $p_i - j$. Move all tokens, queries and keys,
# by $t$: nothing in (6.1) changes. So a text may start anywhere: behind padding, behind another text that is hidden,
# or at the position $10^6$ of a text whose beginning was thrown away. Position embeddings that are added to the
# tokens, $(q_i + e_{p_i}) \cdot (k_j + e_j)$, have no such freedom:

# %%
n, t = 6, 9
y = {name: draw(name, (1, 2, n, 4)) for name in "qkv"} | dict(mask=masks.causal(n, n), scale=0.5)
before = {name: np.concatenate([np.full((1, 2, t, 4), np.nan), y[name]], 2) for name in "kv"}
hidden = dict(mask=masks.causal(n, n + t, t) & (np.arange(n + t) >= t), offset=t)
for name, here, moved in zip(alibi.OUTPUTS, alibi.dense(**y), alibi.dense(**y | before | hidden)):
    agree(f"{t} further: the same {name}", moved, here, 0)

embedding = draw("bias", (n + t, 4))
at = lambda t: dict(q=y["q"] + embedding[t:t + n], k=y["k"] + embedding[t:t + n])
change = abs(sdpa.dense(**y | at(t))[0] - sdpa.dense(**y | at(0))[0]).max()
print(f"position embeddings, {t} further: o moves by up to {change:.2f}")

# %% [markdown]
# **Why a straight line.** Any function $f(p_i - j)$ would know the distance only. The line is special because it
# falls apart into a number for the query and a number for the key. Suppose $f(p - j) = g(p) + h(j)$ for all
# $j \leq p$. The pair $(p + 1, j + 1)$ has the same distance, so $g(p + 1) + h(j + 1) = g(p) + h(j)$, or
#
# $$
# g(p + 1) - g(p) = h(j) - h(j + 1)
# \tag{6.4}
# $$
#
# The left side does not know $j$, the right side does not know $p$: both are a constant, call it $-m$. Then
# $g(p) = g(0) - m p$, $h(j) = h(0) + m j$, and $f(d) = f(0) - m d$. A line falls apart, and nothing else does. Softmax
# does not see what all keys of a row have in common, so $g$ may be left out. That is the *key-only* form,
#
# $$
# a_{ij}^\prime = s_{ij} + m j = a_{ij} + m p_i \qquad p_{ij}^\prime = p_{ij} \qquad o_i^\prime = o_i \qquad
# lse_i^\prime = lse_i + m p_i \qquad (j \leq p_i)
# \tag{6.5}
# $$
#
# where $s = scale \thinspace q \cdot k$: one line of $T_k$ numbers for all queries. With keys on both sides the
# distance is $\lvert p - j \rvert$, which is two lines with a kink where they meet, and falls apart no more. Mixed
# differences show it: $f(d + 1) - 2 f(d) + f(d - 1)$ is 0 along a line and $-2m$ at the kink.

# %%
line = alibi.slopes(2)[:, None, None] * np.arange(n)
o, lse = alibi.dense(**y)
o_key, lse_key = sdpa.dense(**y, bias=line)
agree("(6.5) under a causal mask: o", o_key, o)
agree("... lse is larger by m p", lse_key, lse + line[:, 0])
every = y | dict(mask=True)
off = abs(sdpa.dense(**every, bias=line)[0] - alibi.dense(**every)[0]).max()
print(f"without a mask o is off by up to {off:.2f}")
mixed = -np.diff(np.diff(alibi.bias(None, 0, y["q"], y["k"]), axis=1), axis=2)
agree("mixed differences: -2m on the diagonal, else 0", mixed, -2 * alibi.slopes(2)[:, None, None] * np.eye(n - 1))

# %% [markdown]
# **What a line does to weights.** With $\gamma = e^{-m}$, every step multiplies: $e^{a_{ij}} = \gamma^{\lvert p_i - j
# \rvert} e^{s_{ij}}$. A key that is $t$ steps farther must have a score $m t$ higher to weigh the same: one unit of
# score buys $1 / m$ steps, 2 steps for a slope of 1/2 and 256 for 1/256.
#
# **How far a head sees.** Let all scores be equal and let the query see the $n$ keys up to its own. Multiply
# $\sum_{d \lt w} \gamma^d$ by $1 - \gamma$: all terms cancel but the first and the last, so the sum is
# $(1 - \gamma^w) / (1 - \gamma)$. With $w = n$ this is $z$; divided by $z$ it is the share of the $w$ nearest keys:
#
# $$
# lse = \log \frac{1 - \gamma^n}{1 - \gamma} \qquad
# share_w = \frac{1 - \gamma^w}{1 - \gamma^n} \to 1 - e^{-m w} \qquad
# w_\epsilon = \log(1 / \epsilon) / m
# \tag{6.6}
# $$
#
# for a long text, and all but $\epsilon$ of the weight lies on $w_\epsilon$ keys. (For $\epsilon$ = 5 % that is
# $3.0 / m$.) With keys on both sides, all weights within $r$ steps are $1 + 2 \gamma (1 - \gamma^r) / (1 - \gamma)$ to
# the total $1 + 2 \gamma / (1 - \gamma)$:
#
# $$
# share_{\pm r} = \frac{1 + \gamma - 2 \gamma^{r + 1}}{1 + \gamma}
# \tag{6.7}
# $$

# %%
two = dict(q=np.ones((1, 1, 1, 1)), k=np.zeros((1, 1, 9, 1)), v=np.eye(9)[None, None], slopes=np.array([0.125]))
two["k"][0, 0, 0] = 1.0
far_and_near = alibi.dense(**two, mask=np.isin(np.arange(9), [0, 8])[None], offset=8, scale=1.0)[0].ravel()
agree("a slope of 1/8: 8 steps for one unit of score", far_and_near[0], far_and_near[8])

n, slopes = 2048, alibi.slopes(8)
equal = dict(q=np.zeros((1, 8, 1, 4)), k=draw("k", (1, 8, n, 4)), scale=0.5)
w = 2 ** np.arange(12)
inside = np.broadcast_to((n - 1 - np.arange(n))[:, None] < w, (1, 8, n, 12)).astype(float)
share, lse = (y[0, :, 0] for y in alibi.dense(**equal, v=inside, offset=n - 1))
gamma = np.exp(-slopes)[:, None]
formula = (1 - gamma ** w) / (1 - gamma ** n)
agree("(6.6) the share of the w nearest keys", share, formula)
agree("(6.6) lse", lse, np.log((1 - gamma ** n) / (1 - gamma))[:, 0])
r = 2 ** np.arange(10)
inside = np.broadcast_to(abs(1023 - np.arange(n))[:, None] <= r, (1, 8, n, 10)).astype(float)
both_sides = alibi.dense(**equal, v=inside, offset=1023)[0][0, :5, 0]
agree("(6.7) with keys on both sides, heads 1 to 5", both_sides, 1 - 2 * gamma[:5] ** (r + 1) / (1 + gamma[:5]))

most = np.log(20) / slopes
print()
print(table([(h + 1, f"1/{1 / s:.0f}", f"{np.log(2) / s:.1f}", f"{reach:.0f}") for h, (s, reach) in enumerate(zip(
    slopes, most))], ("head", "slope", "weight halves every ... keys", "95 % lie on ... keys")))

# %%
figure, axis = plot.subplots(size=(6.4, 3.4))
shown = 0, 2, 4, 6, 7
for h, colour, marker in zip(shown, plot.COLOURS, plot.MARKERS):
    axis.semilogx(w[::2], share[h, ::2], marker, color=colour, base=2, markersize=5,
                  label=f"head {h + 1}, slope 1/{2 ** (h + 1)}")
    dense_w = 2 ** np.linspace(0, 11, 34)
    axis.semilogx(dense_w, (1 - gamma[h] ** dense_w) / (1 - gamma[h] ** n), color=colour, base=2, linewidth=1)
axis.axhline(0.95, color="0.6", linewidth=0.8, linestyle="--")
axis.set_xticks(w[::2], [str(size) for size in w[::2]])
axis.minorticks_off()
axis.set(xlabel="w nearest keys, of 2048", ylabel="share of the weight",
         title="Equal scores: each head has a window of its own, and they double")
axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
axis.spines[["top", "right"]].set_visible(False)
plot.save(figure, "06_linear_bias_windows", """Share of the weight on the nearest 1 to 2048 keys, a logarithmic
    axis, for heads 1, 3, 5, 7 and 8 of eight. Marks, computed, lie on curves, the formula. Each curve rises from
    near 0 to 1; the curves are copies of one another moved to the right. They cross the dashed line at 95 % near
    6, 24, 96, 384 and 768 keys.""")

# %% [markdown]
# No head of any model is flatter than $2^{-8}$ (above), so no head looks much farther than 768 keys unless a score
# calls for it. This is what lets a model run on texts longer than those it was trained on: what is added at the far
# end weighs next to nothing. How little, for any scores between $-S$ and $S$: the keys from the distance $w$ on have
# at most $e^S (\gamma^w - \gamma^n) / (1 - \gamma)$ of $z$, the others at least $e^{-S} (1 - \gamma^w) / (1 - \gamma)$,
# so if $\epsilon$ is the share of the far ones,
#
# $$
# \frac{\epsilon}{1 - \epsilon} \leq e^{2 S} \frac{\gamma^w - \gamma^n}{1 - \gamma^w} \qquad
# o - o_{near} = \epsilon \thinspace (o_{far} - o_{near})
# \tag{6.8}
# $$
#
# and $o$ changes by no more than $\epsilon$ times the spread of the values if the far keys are dropped.

# %%
n, w = 512, 64
long = dict(q=draw("q", (1, 8, 1, 4)), k=draw("k", (1, 8, n, 4)), v=tab((1, 8, n, 3), 7, 5), scale=0.125)
S = abs(0.125 * long["q"] @ long["k"].swapaxes(2, 3)).max()
last = long | {name: long[name][:, :, n - w:] for name in "kv"}
change = abs(alibi.dense(**long, offset=n - 1)[0] - alibi.dense(**last, offset=w - 1)[0]).max((0, 2, 3))
odds = np.exp(2 * S) * (gamma ** w - gamma ** n) / (1 - gamma ** w)
bound = (odds / (1 + odds))[:, 0] * (long["v"].max() - long["v"].min())
print(f"scores within {S:.2f}; only the last {w} of {n} keys kept:")
print(table([(h + 1, f"{c:.1e}", f"{b:.1e}") for h, (c, b) in enumerate(zip(change, bound))],
            ("head", "o changes by", "bound (6.8)")))
agree("never more than the bound", np.maximum(change - bound, 0), 0)

# %% [markdown]
# ## Forms that agree
#
# Three texts, one formula, five number systems. The table holds the largest error against the certified value, and
# for `balls` the radius that interval arithmetic leaves around the exact value. A form that leaves the budget of a
# type fails the cell ([how to read this book](00_how_to_read.ipynb)); the loop in float16 is shown and not judged,
# because it adds one by one.

# %%
for case in "basic", "before_the_keys", "far":
    print(f"{case}: {load_cases('alibi', case)[0].why}")
    forms_table("alibi", case)
    print()

# %% [markdown]
# ## The weights beside dense softmax
#
# If $v$ is the identity, the output *is* the matrix of weights. The same scores for three heads, of slope 0, which is
# plain attention, 1/8 and 1/2, under a causal mask and with keys on both sides:

# %%
T = 16
heads = {name: np.repeat(draw(name, (1, 1, T, 4)), 3, axis=1) for name in "qk"} | dict(
    v=np.broadcast_to(np.eye(T), (1, 3, T, T)), slopes=np.array([0, 0.125, 0.5]), scale=0.5)
panels, names = {}, ("dense softmax", "slope 1/8", "slope 1/2")
for title, keep in {"causal": masks.causal(T, T), "both sides": masks.full(T, T)}.items():
    weights = alibi.dense(**heads, mask=keep)[0][0]
    panels |= {f"{name}, {title}": (p, keep) for name, p in zip(names, weights)}
    plain = sdpa.dense(heads["q"], heads["k"], heads["v"], keep, scale=0.5)[0]
    agree(f"{title}: slope 0 is dense softmax", weights[0], plain[0, 0])
figure = plot.attention_maps(panels, "The steeper the line, the closer to the diagonal the weight stays")
figure.set_size_inches(8.9, 5.6)
figure.supxlabel("key j")
figure.supylabel("query i")
for axis in figure.axes[:-1]:
    axis.set(xticks=[0, T - 1], yticks=[0, T - 1], xlabel="", ylabel="")
plot.save(figure, "06_linear_bias_weights", """Six maps of sixteen by sixteen weights, above causal, the upper
    triangle hatched, below with keys on both sides. Dense softmax: brighter spots all over the map, near and far.
    Slope 1/8: those far from the diagonal fade. Slope 1/2: nearly all the weight within three keys of the
    diagonal, on one side above, on both below.""")

# %% [markdown]
# ## The same weights, another lse
#
# By (6.5) whoever leaves out $m p_i$ has the same $o$, and the lse of rule 7 no more. In one piece nobody notices. But
# partial results over parts of the keys, tiles, devices, a shared prompt, are merged by their lse
# ([chapter 5](05_online_softmax.ipynb)): a part weighs $\exp(lse_{part} - lse)$, and if one part has measured its
# line from another origin than the next, all its keys weigh $\exp$ of the difference too much. Take the last two of
# eight tokens, and their keys in two parts, 0 to 4 and 5 to 7. In the form of MPT the line is $m (j - T_k + 1)$, 0 at
# the last key; of a part, if it is computed on its own, at the last key of the part.

# %%
x8 = {name: draw(name, (1, 2, 8, 4)) for name in "qkv"}
p8, j8, m8 = np.arange(6, 8)[:, None], np.arange(8), alibi.slopes(2)[:, None, None]
parts = far, near = np.arange(5), np.arange(5, 8)
of_keys = lambda keys: {name: x8[name][:, :, keys] for name in "kv"} | dict(mask=keys <= p8)
at_keys = lambda keys: dict(q=x8["q"][:, :, 6:], scale=0.5) | of_keys(keys)
part = lambda keys, bias: sdpa.dense(**at_keys(keys), bias=bias)
distances = lambda keys: part(keys, -m8 * abs(p8 - keys))
key_only = lambda keys: part(keys, (m8 * keys) + 0 * p8)
from_its_end = lambda keys: part(keys, (m8 * (keys - keys[-1])) + 0 * p8)
right = alibi.dense(**at_keys(j8), offset=6)

rows = []
for title, forms in {"distances, both": (distances, distances), "m j, both": (key_only, key_only),
                     "distances and m j": (distances, key_only), "m (j - Tk + 1), each": (from_its_end,) * 2}.items():
    merged = flash.merge(*zip(*(form(keys) for form, keys in zip(forms, parts))))
    rows.append((title, *(f"{abs(got - y).max():.0e}" for got, y in zip(merged, right))))
print(table(rows, ("forms of the two parts", "error of o", "error of lse")))

o_p, lse_p = zip(*(from_its_end(keys) for keys in parts))
back = [lse - (m8 * (p8 - keys[-1]))[..., 0] for lse, keys in zip(lse_p, parts)]
agree("each lse brought back to distances, then merged: o", flash.merge(o_p, back)[0], right[0])
agree("... lse", flash.merge(o_p, back)[1], right[1])
agree("the far part weighed too much by exp(m times the distance between the ends)",
      np.exp(lse_p[0] - lse_p[1]), np.exp(back[0] - back[1]) * np.exp(m8 * (near[-1] - far[-1]))[..., 0])

# %% [markdown]
# Two parts in the same wrong form merge to the right $o$: the error has to differ between parts. That is why it
# arrives late, when a kernel that splits keys is put under a model that never did.
#
# The key-only form costs digits as well. Its numbers are large where the weights are: at the key $j = p$ it adds
# $m p$, where the distance adds 0. In float16 a score of 500 to 1000 is known to within a quarter.

# %%
rows = []
for T in 16, 128, 1024:
    y = dict(q=draw("q", (1, 1, 1, 4)), k=draw("k", (1, 1, T, 4)), v=tab((1, 1, T, 3), 7, 5), mask=np.array([[True]]),
             slopes=np.array([0.5]), offset=T - 1, scale=0.5)
    half = {name: y[name].astype(np.float16) for name in ("q", "k", "v", "slopes")}
    o = alibi.dense(**y)[0]
    rows.append((T, *(f"{abs(form(y | half)[0] - o).max():.0e}" for form in (
        lambda x: alibi.dense(**x), alibi.BUGS["key_only"][1]))))
print(table(rows, ("keys", "distances, float16: error of o", "m j, float16: error of o")))

# %% [markdown]
# ## With a cache
#
# A query behind a cache stands at $p_i = i + offset$, where offset is the number of tokens before the call. A whole
# text at once, token by token or in chunks: the same rows. And because place drops out, so do the first keys, if
# they are thrown away and offset goes down by their number.

# %%
n = 7
y = {name: draw(name, (1, 3, n, 4)) for name in "qkv"}
whole = alibi.dense(**y, mask=masks.causal(n, n), scale=0.5)


def call(start, stop, first=0):
    cut, offset = dict(q=y["q"][:, :, start:stop]) | {name: y[name][:, :, first:stop] for name in "kv"}, start - first
    return alibi.dense(**cut, mask=masks.causal(stop - start, stop - first, offset), offset=offset, scale=0.5)


for title, sizes in {"token by token": [1] * 7, "chunks of 3, 3 and 1": [3, 3, 1]}.items():
    stops = np.cumsum(sizes)
    for name, got, expected in zip(alibi.OUTPUTS, zip(*(call(b - a, b) for a, b in zip(sizes, stops))), whole):
        agree(f"{title}: {name}", np.concatenate(got, 2), expected)
no_first = dict(mask=masks.causal(2, n, 5) & (np.arange(n) >= 2), offset=5, scale=0.5)
agree("the first two keys thrown away, or hidden", call(5, 7, first=2)[0],
      alibi.dense(y["q"][:, :, 5:], y["k"], y["v"], **no_first)[0])
one = dict(q=np.zeros((1, 1, 1, 4)), k=np.zeros((1, 1, n, 4)), v=np.eye(n)[None, None], mask=np.ones((1, n), bool),
           slopes=np.array([0.5]), offset=n - 1, scale=0.5)
print("\nthe weights of one new token, scores equal:")
print(f"{'right':21}", alibi.dense(**one)[0].ravel().round(3))
for slug in "offset_ignored", "bias_of_query_length":
    print(f"{slug:21}", alibi.BUGS[slug][1](one)[0].ravel().round(3))

# %% [markdown]
# With the offset forgotten the line stands on its head: the new token loves the oldest key. A bias that is built from
# the number of queries is a bias of one number, and softmax does not see it.
#
# ## What it costs
#
# Nothing is stored with the model but $H$ numbers, which a formula gives, where learned positions are a table of
# $T \thinspace D$. A call adds one number per score, as attention with any bias does. If slopes are given, the bias is
# made by one multiplication per head and pair, for all batch entries, and $H$ signs:
#
# $$
# flops = B H \left( 2 \thinspace T_q T_k (d_k + d_v) + 4 \thinspace T_q T_k + T_q d_k + 3 \thinspace T_q \right) +
# H \thinspace T_q T_k + H
# \tag{6.9}
# $$
#
# The first part is (1.4), the cost of dense attention with a bias; the exponentials are the same too.

# %%
def inputs(B, H, Tq, Tk, dk, dv):
    return dict(q=draw("q", (B, H, Tq, dk)), k=draw("k", (B, H, Tk, dk)), v=draw("v", (B, H, Tk, dv)), scale=0.5)


rows = []
for shape in (1, 1, 2, 3, 2, 3), (2, 3, 5, 7, 4, 6), (2, 4, 16, 24, 8, 8):
    B, H, Tq, Tk, dk, dv = shape
    plain, counted = count(sdpa.dense, **inputs(*shape)), count(alibi.dense, **inputs(*shape), slopes=alibi.slopes(H))
    flops = B * H * (2 * Tq * Tk * (dk + dv) + 4 * Tq * Tk + Tq * dk + 3 * Tq) + H * Tq * Tk + H
    rows.append((shape, plain["flops"], counted["flops"], flops, plain["exp"], counted["exp"]))
print(table(rows, ("B, H, Tq, Tk, dk, dv", "dense", "ALiBi", "(6.9)", "exp, dense", "exp, ALiBi")))
agree("(6.9)", [row[2] for row in rows], [row[3] for row in rows], 0)
agree("exponentials", [row[5] for row in rows], [row[4] for row in rows], 0)

# %% [markdown]
# The bias of all pairs is $H T_q T_k$ numbers, and for long texts more than everything else: it passes $q, k, v$ and
# $o$, $4 \thinspace T d$ for each head, at $T = 4 d$. It need not exist. A line of distances serves a query
# (`decode`), and a kernel makes the one number it needs from $i$ and $j$.
#
# And where scores are small, (6.8) is an offer: a head of slope $m$ may read the last $w_\epsilon = \log(1/\epsilon)
# / m$ keys only. A new token behind a cache of $T$ then costs $\min(T, w_\epsilon)$ keys per head in place of $T$: the
# same as dense up to $T = w_\epsilon$, and constant from there. This changes the function, by (6.8); it is not ALiBi
# but what ALiBi nearly is.

# %%
T, d, epsilon = 4 ** np.arange(1, 7), 16, 1e-3
token = lambda t, reach: count(alibi.dense, **inputs(1, 1, 1, min(t, reach), d, d), offset=min(t, reach) - 1)["flops"]
curves = {"all keys": [token(t, t) for t in T]}
for slope in 1 / 2, 1 / 16:
    reach = int(np.ceil(np.log(1 / epsilon) / slope))
    curves[f"slope 1/{1 / slope:.0f}: {reach} keys"] = [token(t, reach) for t in T]
    agree(f"slope 1/{1 / slope:.0f}: {reach} keys and no more", curves[f"slope 1/{1 / slope:.0f}: {reach} keys"],
          [min(t, reach) * (4 * d + 4) + d + 3 for t in T], 0)
figure, axes = plot.subplots(1, 2, size=(4.3, 3.4))
plot.lines(axes[0], T, curves, "keys in the cache T", "flops of one head for one token",
           "Up to its window a head costs what\ndense costs, and no more beyond")
held = {"bias of all pairs": T * T, "q, k, v and o": 4 * T * d, "bias of one query": T}
plot.lines(axes[1], T, held, "tokens T", "numbers held per head",
           "At T = 4 d the bias of all pairs\noutgrows what goes in and out")
axes[1].legend(frameon=False, fontsize=7, loc="upper left")
axes[0].legend(frameon=False, fontsize=7, loc="upper left")
for axis in axes:
    axis.minorticks_off()
axes[1].set_yticks(10.0 ** np.arange(1, 8, 2))
plot.save(figure, "06_linear_bias_cost", """Two log-log plots over 4 to 4096 tokens. Left: flops for one token;
    with all keys a straight rise; heads of slope 1/2 and 1/16 follow it and turn flat at 14 and 111 keys. Right:
    numbers held per head with 16 channels. The bias of all pairs rises with slope two and crosses inputs and
    outputs at 64 tokens; the bias of one query rises with slope one and stays below.""")

# %% [markdown]
# ## Derivation: backward
#
# A loss $L$ depends on $o$ and on lse, and $dX$ is its derivative with respect to $X$. Take one row. From
# $lse = \log \sum_j e^{a_j}$ and $p_l = e^{a_l - lse}$,
#
# $$
# \frac{\partial \thinspace lse}{\partial a_j} = p_j \qquad
# \frac{\partial p_l}{\partial a_j} = p_l \left( [l = j] - p_j \right)
# \tag{6.10}
# $$
#
# With $o = \sum_l p_l v_l$ and so $dp_l = do \cdot v_l$, the two paths from $a_j$ to the loss, through $p$ and
# through lse, add up to
#
# $$
# da_j = p_j \left( dp_j - \sum_l p_l dp_l + dlse \right)
# \tag{6.11}
# $$
#
# The bias is a constant to $q$ and $k$, so their gradients are those of plain attention, at these weights. A slope is
# in every pair of its head, with the factor $-\lvert p_i - j \rvert$, for all batch entries:
#
# $$
# \begin{aligned}
# dq_i &= scale \sum_j da_{ij} k_j & dk_j &= scale \sum_i da_{ij} q_i \\
# dv_j &= \sum_i p_{ij} \thinspace do_i & dm_h &= - \sum_{b, i, j} da_{bhij} \lvert p_i - j \rvert
# \end{aligned}
# \tag{6.12}
# $$
#
# Where mask is False $p = 0$, so $da = 0$, and nothing is sent back.

# %%
plot.show(alibi.vjp)

# %% [markdown]
# By hand, for the three tokens:

# %%
do = np.array([[[0.5, -1.0], [1.5, 0.75]], [[-0.25, 1.0], [0.5, -0.5]]])
dlse = np.array([[0.25, -0.75], [0.5, 1.25]])
dp = do @ v.swapaxes(1, 2)
da = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None])
by_hand = dict(dq=scale * da @ k, dk=scale * da.swapaxes(1, 2) @ q, dv=p.swapaxes(1, 2) @ do,
               dslopes=-(da * distance).sum((1, 2)))
print("dp", dp, "da", da, sep="\n")
for name, gradient in alibi.vjp(do[None], dlse[None], **x).items():
    print(name, by_hand[name], sep="\n")
    agree(f"{name} by hand", by_hand[name], gradient.reshape(by_hand[name].shape))

# %% [markdown]
# Against a complex step of the definition, along a fixed direction in each input: slopes given, one of them 0 and one
# negative, with padding; a row without keys; and a cache of which some slots are NaN. A complex step has no
# truncation error, so the two agree to rounding.

# %%
for case in "learned_and_padded", "empty_row", "unfilled_cache":
    print(f"{case}: {load_cases('alibi', case)[0].why}")
    gradient_table("alibi", case)
    print()

# %% [markdown]
# **What a slope feels.** Put (6.10) into (6.12): for one row, with $D$ the mean distance $\sum_j p_j \lvert p - j
# \rvert$,
#
# $$
# \frac{\partial \thinspace lse}{\partial m} = -D \qquad
# \frac{\partial o}{\partial m} = - \sum_j p_j \left( \lvert p - j \rvert - D \right) v_j
# \tag{6.13}
# $$
#
# A larger slope moves the output away from the values of far keys towards those of near ones, and lse says how far
# the head looks on average. For equal scores, (6.6) gives it at once: $D = \gamma / (1 - \gamma) - n \gamma^n /
# (1 - \gamma^n)$, nearly $1 / m$ for flat heads and long texts. If all keys of a row are at one distance, a slope
# moves lse and nothing else. And $q$ and $k$ meet in the scores only, whatever the slope, so $q \cdot dq = k \cdot dk$.

# %%
named = lambda **y: dict(zip(alibi.OUTPUTS, alibi.dense(**y)))
felt = complex_step(named, x, {"slopes": np.ones(2)})
D = (p * distance).sum(-1)
agree("(6.13) lse", felt["lse"][0], -D)
agree("(6.13) o", felt["o"][0], -(p * (distance - D[..., None])) @ v)

flat = equal | dict(v=np.ones((1, 8, 2048, 1)), offset=2047)
dslopes = alibi.vjp(np.zeros((1, 8, 1, 1)), np.ones((1, 8, 1)), **flat, slopes=slopes)["dslopes"]
g, n = gamma[:, 0], 2048
agree("equal scores: -dslopes is the mean distance", -dslopes, g / (1 - g) - n * g ** n / (1 - g ** n), 1e-10)
print("mean distance of heads 1 to 8:", -dslopes.round(2))

sides = x | dict(mask=distance == 1, do=do[None], dlse=0 * dlse[None])
agree("keys at one distance: nothing reaches the slope through o", alibi.vjp(**sides)["dslopes"], 0)
golden = load_cases("alibi", "learned_and_padded")[0]
gradient = alibi.vjp(**golden.cotangents | golden.inputs)
agree("q . dq = k . dk, head by head", *((golden.inputs[name] * gradient["d" + name]).sum((2, 3)) for name in "qk"))

# %%
rows = []
for shape in (1, 2, 16, 16, 8, 8), (2, 4, 16, 24, 8, 8):
    B, H, Tq, Tk, dk, dv = shape
    y = inputs(*shape) | dict(do=tab((B, H, Tq, dv), 2, 5), dlse=tab((B, H, Tq), 4, 3))
    fixed, learned = (count(alibi.vjp, **y, **s)["flops"] for s in ({}, dict(slopes=alibi.slopes(H))))
    rows.append((shape, fixed, learned - fixed, 2 * B * H * Tq * Tk + H * Tq * Tk + 2 * H,
                 f"{fixed / count(alibi.dense, **inputs(*shape))['flops']:.2f}"))
print(table(rows, ("B, H, Tq, Tk, dk, dv", "backward", "learned slopes add", "formula", "backward / forward")))
agree("a product, a sum and the bias", [row[2] for row in rows], [row[3] for row in rows], 0)

# %% [markdown]
# ## What goes wrong
#
# Each of these is a mistake someone made, written as code in `alibi.BUGS` and `alibi.VJP_BUGS`. Each is caught by a
# golden case, and each is told from all others by its numbers alone.

# %%
mistakes = alibi.BUGS | alibi.VJP_BUGS
print(table([(slug, sentence) for slug, (sentence, _) in mistakes.items()], ("mistake", "what is wrong")))

# %% [markdown]
# In pictures: one row of weights each, right in grey, wrong in orange. The query stands at key 3 of ten and sees them
# all, scores are equal, and the head is the fifth of six, whose slope is 1/2.

# %%
small = dict(q=np.zeros((1, 6, 4, 4)), k=np.zeros((1, 6, 10, 4)), v=np.broadcast_to(np.eye(10), (1, 6, 10, 10)),
             mask=np.ones((1, 1, 4, 10), bool), slopes=None, offset=3, scale=0.5)
shown = ("distance_signed", "bias_sign", "offset_ignored", "offset_bottom_right", "slopes_closed_form",
         "bias_before_scale", "bias_added_twice", "softmax_over_queries")
right = alibi.dense(**small)[0][0, 4, 0]
figure, axes = plot.subplots(2, 4, size=(2.3, 1.8))
for axis, slug in zip(axes.flat, shown):
    axis.fill_between(np.arange(10), right, step="mid", color="0.8", linewidth=0)
    wrong = alibi.BUGS[slug][1](small)[0][0, 4, 0]
    axis.step(np.arange(10), wrong, color=plot.COLOURS[1], where="mid", linewidth=1.5)
    axis.set(title=slug, xticks=[3], yticks=[], ylim=(0, 0.65))
    axis.spines[["top", "right"]].set_visible(False)
figure.supxlabel("key j")
figure.supylabel("weight, 0 to 0.65")
figure.suptitle("One line, eight mistakes: the weights of a query at key 3")
plot.save(figure, "06_linear_bias_mistakes", """Eight plots of weights over ten keys. Right, grey in each: a peak
    of 0.27 at key 3 that falls off on both sides. Wrong, orange. Signed distance: rises to the last key. Sign:
    highest at key 9, lowest at key 3. Offset ignored: the peak is at key 0; bottom right: at key 6. Closed form:
    flat. Bias before scale: a lower peak; added twice: a higher one, 0.47. Softmax over queries: 0.46 on the
    first four keys, 0.10 on the last.""")
signed, key_only = (alibi.BUGS[slug][1](small)[0] for slug in ("distance_signed", "key_only"))
agree("signed and key-only: the same weights", signed, key_only)

# %% [markdown]
# **One wrong port, caught live.** It is the line of (6.5) without the query, with the right slopes, as Bloom has it.

# %%
# exercise
def port(q, k, v, mask, offset, scale):
    line = alibi.slopes(q.shape[1])[:, None, None] * np.arange(k.shape[2])
    p, lse = core.softmax(scale * q @ core.unread(k, mask).swapaxes(-1, -2) + line, mask)
    return p @ core.unread(v, mask), lse


right = check_exercise("alibi", port)
print()
for case in (load_cases("alibi", name)[0] for name in ("causal", "decode", "unfilled_cache", "before_the_keys")):
    taken = {name: case.inputs[name] for name in ("q", "k", "v", "mask", "offset", "scale")}
    agree(f"{case.name}: o is right", port(**taken)[0], case.outputs["o"])

# %% [markdown]
# As long as nobody looks at lse and no query sees a key after it, no test can find this. It fails the first time it
# is used in an encoder, or under a merge.
#
# ## Where code in the wild differs
#
# | what | where |
# |---|---|
# | slopes (6.2) for every $H$ | the sentence in the paper, and ports made from it |
# | released slopes, rule 3 | the authors' code; Bloom, MPT and Falcon in transformers 5.24 |
# | $m j$, lse larger by $m p$ | Bloom |
# | $m (j - T_k + 1)$ | MPT |
# | distance, offset always $T_k - T_q$ | flash-attention: $-m \lvert i + T_k - T_q - j \rvert$ |
# | bias scaled with the scores, $m j$, in bfloat16 | Falcon |
# | the same, added twice | Falcon without fused attention, in transformers 5.24 |
#
# All of it translates, but for what rounding has lost. A scaled bias is one with other slopes, and so is a double one.
# An offset that is too large is (6.5) once more, as long as no key after the query is seen: lse moves, $o$ does not.

# %%
y = load_cases("alibi", "causal")[0].inputs
for slug, factor in dict(bias_before_scale=y["scale"], bias_added_twice=2).items():
    translated = alibi.dense(**y | dict(slopes=factor * alibi.slopes(2)))
    for name, got, expected in zip(alibi.OUTPUTS, alibi.BUGS[slug][1](y), translated):
        agree(f"{slug}: slopes times {factor}, {name}", got, expected)
bottom_right = alibi.BUGS["offset_bottom_right"][1]
agree("offset Tk - Tq, where the last query stands at the last key", bottom_right(y)[0], alibi.dense(**y)[0], 0)
unfilled = load_cases("alibi", "unfilled_cache")[0]
o, lse = bottom_right(unfilled.inputs)
agree("offset 4 in place of 2, slots still free behind the last query: the same o", o, unfilled.outputs["o"])
agree("... and lse less by 2 m", lse, unfilled.outputs["lse"] - 2 * alibi.slopes(3)[:, None])
basic = load_cases("alibi", "basic")[0]
off = abs(bottom_right(basic.inputs)[0] - basic.outputs["o"]).max()
print(f"offset 1 in place of 0, keys on both sides: o is off by up to {off:.2f}")

# %% [markdown]
# **Padding on the left.** Bloom and Falcon count real tokens, so that the first real one is 0 however much padding is
# before it. Here positions are those of the array. Both are right, because place drops out; what is wrong is to count
# one way for keys and the other way for queries.

# %%
texts = {name: draw(name, (2, 3, 6, 4)) for name in "qkv"}
real = np.arange(6) >= np.array([[0], [2]])
keep = masks.causal(6, 6) & real[:, None, None]
counted = np.where(real, real.cumsum(1) - 1, 0)[:, None, None]
by_count = sdpa.dense(**texts, mask=keep, bias=alibi.slopes(3)[:, None, None] * counted, scale=0.5)[0]
by_place = alibi.dense(**texts, mask=keep, scale=0.5)[0]
agree("real tokens counted, or places of the array", by_count, by_place)
alone = {name: texts[name][1:, :, 2:] for name in "qkv"}
unpadded = alibi.dense(**alone, mask=masks.causal(4, 4), scale=0.5)[0]
agree("the padded text, without its padding", by_place[1:, :, 2:], unpadded)

# %% [markdown]
# **Positions in bfloat16.** The type has eight bits: from 256 on only even numbers, from 512 on every fourth.
# Subtract after rounding, and up to three neighbours share a distance that is true of one of them. Subtract first, in
# integers, and round the distance: then it is exact up to 256, and beyond, where hardly any weight is left, off by no
# more than one part in 256. This is what rule 4 is for.

# %%
n, p_i, slope = 401, 400, 0.25
d = p_i - np.arange(n)
rounded = abs(round_to(float(p_i), "bfloat16") - round_to(np.arange(float(n)), "bfloat16"))
first = round_to(d.astype(float), "bfloat16")
weights = {"exact": d, "positions rounded": rounded, "distance rounded": first}
weights = {name: np.exp(-slope * a) / np.exp(-slope * a).sum() for name, a in weights.items()}
agree("distances up to 256, rounded", first[d <= 256], d[d <= 256], 0)
agree("... beyond, the relative error", first / np.maximum(d, 1), d / np.maximum(d, 1), 2.0 ** -8)
agree("weights, distance rounded", weights["distance rounded"], weights["exact"], 1e-12)
print("... positions rounded: off by up to", abs(weights["positions rounded"] - weights["exact"]).max().round(3))
case = load_cases("alibi", "far")[0]
off = abs(alibi.BUGS["positions_in_bfloat16"][1](case.inputs)[0] - case.outputs["o"]).max()
print(f"{case.name}: {case.why}: o is off by up to {off:.2f}")

figure, axis = plot.subplots(size=(5.2, 2.9))
near = np.arange(386, 401)
for (name, p), marker in zip(list(weights.items())[:2], "os"):
    axis.plot(near, p[near], marker + "-", markersize=4, linewidth=1, label=name)
axis.set(xlabel="key j", ylabel="weight of query 400, slope 1/4", xticks=near[::2],
         title="Positions in bfloat16: the geometric series\nbecomes a staircase")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
plot.save(figure, "06_linear_bias_bfloat16", """Weights of query 400 on keys 386 to 400. Exact positions: a smooth
    rise to 0.22 at key 400. Rounded positions: steps of one or three keys of the same weight, 0.08 at keys 395 to
    397, 0.13 at key 398, 0.21 at both 399 and 400.""")

# %% [markdown]
# ## Relations
#
# What ALiBi is at its borders. The last one looks ahead: with equal scores both sums of (6.1) are running sums,
# $z_p = \gamma z_{p - 1} + 1$, and need no pairs. A state that decays by $e^{-m}$ at every token is what the
# recurrent half of this book is about, and Mamba-2's, with fixed steps, is this one.

# %%
y = {name: draw(name, (2, 3, 6, 4)) for name in "qkv"} | dict(scale=0.5)
o = alibi.dense(**y, offset=1)[0]
agree("slopes 0: scaled dot-product attention", alibi.dense(**y, slopes=np.zeros(3))[0], sdpa.dense(**y)[0])
agree("a bias like any other", o, sdpa.dense(**y, bias=alibi.bias(None, 1, y["q"], y["k"]))[0])
line = -alibi.slopes(3)[:, None] * abs(np.arange(-6, 7))
index = relative_bias.clipped_distance(6, 6, 6, offset=1)
agree("a table of relative biases that is a line", relative_bias.dense(**y, table=line, index=index)[0], o)
causal = y | dict(mask=masks.causal(6, 6))
agree("infinitely steep: its own value", alibi.dense(**causal, slopes=np.full(3, 1e4))[0], y["v"])
mirrored = {name: y[name][:, :, ::-1] for name in "qkv"}
agree("with keys on both sides, the text backwards gives the output backwards",
      alibi.dense(**mirrored, scale=0.5)[0], alibi.dense(**y)[0][:, :, ::-1])

m3 = alibi.slopes(3)
flat = causal | dict(q=0 * y["q"])
state = dict(dt=np.ones((2, 3, 6)), A=-m3, B=np.ones((2, 1, 6, 1)), C=np.ones((2, 1, 6, 1)), D=np.zeros(3))
sums = [ssd.recurrent(values, **state, initial_state=np.zeros((2, 3, 1, values.shape[3])))[0]
        for values in (y["v"], np.ones((2, 3, 6, 1)))]
agree("equal scores: two decaying running sums", sums[0] / sums[1], alibi.dense(**flat)[0])

# %% [markdown]
# ## In a box
#
# | | |
# |---|---|
# | formula | $a_{hij} = scale \thinspace q_{hi} \cdot k_{hj} - m_h \lvert i + offset - j \rvert$, then softmax over the keys that mask allows |
# | slopes | $2^{-8h/H}$; else those of $n$ heads, then the first, third ... of $2n$, $n$ the largest power of two below $H$ |
# | shapes | q (B, H, Tq, dk), k (B, H, Tk, dk), v (B, H, Tk, dv) to o (B, H, Tq, dv) and lse (B, H, Tq) |
# | reach | all but $\epsilon$ of the weight on $\log(1/\epsilon) / m$ keys; one unit of score is $1/m$ steps |
# | key-only | $m j$: the same $o$ under a causal mask, $lse + m p$ |
# | backward | as without a bias; learned slopes: $dm_h = -\sum da \lvert p_i - j \rvert$ |
# | cost | that of dense attention with a bias; no parameters; the bias need not be stored |
# | use it | for texts longer than those trained on, where near tokens matter most |
# | goes wrong | slopes of 3, 6, 12 heads; scaled or double bias; the offset; keys after the query; lse; bfloat16 positions |
#
# ## Exercises
#
# Write each function in place of the line that raises, and run the cell. `check_exercise` passes arguments by name,
# runs all golden cases, and says where you are wrong and, if it is a mistake others made, which.
#
# **1. The whole function**, slopes included; slopes may be None. Take nothing from the package.

# %%
# exercise
def linear_bias(q, k, v, mask, slopes, offset, scale):
    raise NotImplementedError("return o (B, H, Tq, dv) and lse (B, H, Tq)")


right = check_exercise("alibi", linear_bias)

# %% [markdown]
# **2. Two lines, no distance.** $\lvert p - j \rvert$ does not fall apart, but each of its halves does. Attend to the
# keys up to the query with the line $m j$ and to those after it with another line, each without the position of the
# query, and put the halves together. What must happen to their lse first? (`flash.merge` merges.) If the case `far`
# is off by a little, think about where the lines should be 0.

# %%
# exercise
def two_lines(q, k, v, mask, slopes, offset, scale):
    raise NotImplementedError("return o (B, H, Tq, dv) and lse (B, H, Tq)")


right = check_exercise("alibi", two_lines)

# %% [markdown]
# **3. The backward.** A function that takes `do` and `dlse` is checked as a backward: return `dict(dq=..., dk=...,
# dv=...)`, and `dslopes` if slopes are given. Call no softmax: take $o$ and lse from `alibi.dense`.

# %%
# exercise
def backward(do, dlse, q, k, v, mask, slopes, offset, scale):
    raise NotImplementedError("return a dict of gradients")


right = check_exercise("alibi", backward)

# %% [markdown]
# ## Answers
#
# **1.** Slopes by the shorter rule, with $n$ twice the one of rule 3, in float64 and then rounded to the type of $q$. A
# row without keys has its maximum replaced by 0 and its denominator by 1.

# %%
# exercise
def linear_bias(q, k, v, mask, slopes, offset, scale):
    H, Tq, Tk = q.shape[1], q.shape[2], k.shape[2]
    if slopes is None:
        n = 2 ** H.bit_length()
        slopes = 2.0 ** (-8 * np.arange(1, n + 1) / n)
        slopes = np.append(slopes[1::2], slopes[::2])[:H]
    distance = abs(np.arange(Tq)[:, None] + offset - np.arange(Tk)).astype(q.dtype)
    seen = mask.any(-2)[..., None]
    k, v = np.where(seen, k, 0), np.where(seen, v, 0)
    a = scale * q @ k.swapaxes(-1, -2) - slopes.astype(q.dtype)[:, None, None] * distance
    a = np.where(mask, a, -np.inf)
    top = a.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(a - np.where(top == -np.inf, 0, top))
    z = e.sum(-1, keepdims=True)
    return e / np.where(z == 0, 1, z) @ v, (top + np.log(np.where(z == 0, 1, z)))[..., 0]


assert check_exercise("alibi", linear_bias)

# %% [markdown]
# **2.** After the query the distance is $j - p$, so the line is $-m j$ and its lse is short of $m p$, where the other
# is $m p$ too large. Lines that are 0 at key `offset`, where query 0 stands, keep the numbers small near the queries;
# then $i$ takes the place of $p_i$. Positions are compared and subtracted as integers (rule 4).

# %%
# exercise
def two_lines(q, k, v, mask, slopes, offset, scale):
    m = (alibi.slopes(q.shape[1]) if slopes is None else slopes).astype(q.dtype)[:, None, None]
    i, j = masks.grid(q.shape[2], k.shape[2])
    s, v = scale * q @ core.unread(k, mask).swapaxes(-1, -2), core.unread(v, mask)
    halves = []
    for side, sign in (j <= i + offset, 1), (j > i + offset, -1):
        p, lse = core.softmax(s + sign * m * (j - offset).astype(q.dtype), mask & side)
        halves.append((p @ v, lse - (sign * m * i.astype(q.dtype))[..., 0]))
    return flash.merge(*zip(*halves))


assert check_exercise("alibi", two_lines)

# %% [markdown]
# **3.** $p = e^{a - lse}$, and by (6.11) the sum over the row is $do \cdot o$. An lse of $-\infty$ is replaced by 0: $a$
# is $-\infty$ all along that row. Half precision is computed in float32, or lse would lose the digits that $p$ lives
# on.

# %%
# exercise
def backward(do, dlse, q, k, v, mask, slopes, offset, scale):
    dtype, wide = q.dtype, np.result_type(q, np.float32)
    given = alibi.slopes(q.shape[1]) if slopes is None else slopes
    do, dlse, q, k, v, m = (y.astype(wide) for y in (do, dlse, q, k, v, given))
    o, lse = alibi.dense(q, k, v, mask, m, offset, scale=scale)
    q = np.where(mask.any(-1)[..., None], q, 0)
    k, v = (np.where(mask.any(-2)[..., None], y, 0) for y in (k, v))
    distance = alibi.distance(offset, q, k)
    a = scale * q @ k.swapaxes(-1, -2) - m[:, None, None] * distance
    p = np.exp(np.where(mask, a, -np.inf) - np.where(lse == -np.inf, 0, lse)[..., None])
    da = p * (do @ v.swapaxes(-1, -2) - ((do * o).sum(-1) - dlse)[..., None])
    found = dict(dq=scale * da @ k, dk=scale * da.swapaxes(-1, -2) @ q, dv=p.swapaxes(-1, -2) @ do)
    if slopes is not None:
        found["dslopes"] = -(da * distance).sum((0, 2, 3))
    return {name: y.astype(dtype) for name, y in found.items()}


assert check_exercise("alibi", backward)

# %% [markdown]
# In every type that `verify` knows:

# %%
rows = []
for answer in linear_bias, two_lines, backward:
    asked = {dtype: [r for r in judge(answer, load_cases("alibi"), dtype)[0] if not r.unsupported] for dtype in UNIT}
    rows.append((answer.__name__, *(f"{sum(r.passed for r in found)} of {len(found)}" for found in asked.values())))
    assert all(r.passed for found in asked.values() for r in found)
print(table(rows, ("answer", *UNIT)))

# %% [markdown]
# ## Sources
#
# - Press, Smith and Lewis 2022, *Train short, test long: attention with linear biases enables input length
#   extrapolation*, arXiv:2108.12409: section 3, the bias (its display, without a number), the slopes of 8 and 16
#   heads and the sentence on $n$ heads; figure 3. A footnote of section 3: the bias is not scaled.
# - Their code, `attention_with_linear_biases`: the function `get_slopes`, which interpolates, and the key-only form.
# - Le Scao et al. 2022, *BLOOM*, arXiv:2211.05100; Almazrouei et al. 2023, *The Falcon series*, arXiv:2311.16867; the
#   MPT models of MosaicML 2023: models that have linear biases, as transformers implements them.
# - Dao 2023, *FlashAttention-2*, and its package: the argument `alibi_slopes`.
# - Dao and Gu 2024, arXiv:2405.21060, equation 16: the decaying state of the last relation.
# - The comparisons with Bloom, MPT and Falcon run in the project's tests: `make peers`.
