# %% [markdown]
# # Scaled dot-product attention
#
# **Attention is an average, and one number per row, lse, knows the rest: its gradient is the weights, its second
# derivative is the backward.**
#
# Query $i$ is compared with every key $j$ it may attend to, the comparison becomes a weight, and the output is the
# weighted mean of the values:
#
# $$
# \begin{aligned}
# s_{ij} &= scale \thinspace q_i \cdot k_j &
# a_{ij} &= softcap \tanh(s_{ij} / softcap) + bias_{ij} \\
# z_i &= \sum_{j \text{ with } mask_{ij}} \exp(a_{ij}) + \exp(sink) &
# lse_i &= \log z_i \\
# p_{ij} &= \exp(a_{ij}) / z_i \text{ where } mask_{ij} \text{, else } 0 &
# o_i &= \sum_j p_{ij} v_j
# \end{aligned}
# \tag{1.1}
# $$
#
# The paper (Vaswani et al. 2017, equation 1) has $scale = 1 / \sqrt{d_k}$ and nothing else. The soft cap, the bias,
# the mask, the sink and lse came later, each to a fixed place in this line, and most wrong ports put one of them in
# the wrong place. This chapter is enough to write the function in any language and to pass its golden cases.

# %%
import itertools

import numpy as np

from attention_ref import core, gqa, load_cases, masks, plot, sdpa
from attention_ref.conformance.implementations import judge
from attention_ref.conformance.numbers import UNIT, complex_step, count
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw

np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## The contract
#
# Everything that can be read in two ways is decided here, once. The shapes and the short form stand in the file
# itself (an axis with `?` may be 1 or, in front, missing: it is broadcast). A golden case holds every argument; what
# it does without stands at its neutral value, named below.

# %%
shapes = sdpa.INPUTS | sdpa.OUTPUTS
print(table([(name, text or "a number") for name, text in shapes.items()], ("name", "kind and shape")))
print()
print(table(sdpa.CONVENTIONS.items(), ("what", "convention")))

# %% [markdown]
# 1. **Shapes.** `B` batch entries and `H` heads, all independent of one another. `Tq` queries and `Tk` keys need not
#    be as many, keys `dk` and values `dv` need not be as wide, and `Tk` may be 0. Batch and head come first, then
#    time. The `H?` of a sink means (H,), (1,) or a bare number.
# 2. **Order.** Scale, then cap, then add the bias, then mask, then softmax with the sink in its denominator.
# 3. **scale** is a number without a default. It multiplies $q$ before the product is formed, so that the product
#    stays in range in half precision.
# 4. **softcap** is a finite number above 0, or None: no cap. A number that is not above 0 is a ValueError.
# 5. **bias** is added after the cap. Zero means none. $-\infty$ is allowed and takes the pair out of the sum, though
#    its key is still read; a row of nothing else is a row without keys.
# 6. **mask** is boolean, True = may attend. It selects; it is not added and not multiplied. All True means none.
#    "Causal" is no option but a mask, and whoever builds it says in which corner its diagonal starts.
# 7. **sink** is one logit per head that joins the denominator and has no value. It is not scaled, capped, biased or
#    masked. $-\infty$ means none.
# 8. **A row without keys** has weights 0, $o = 0$ and $lse = -\infty$. With a sink such a row is regular: $o = 0$,
#    $lse = sink$.
# 9. **lse** is the natural logarithm of $z$, of capped and biased scores, the sink included.
# 10. **Never read.** A key no query of its head may attend to, with its value, may hold anything, NaN included, and
#     so may a query that sees no key. A key that some query sees holds numbers. A score, bias or sink of $+\infty$ is
#     out of contract.
# 11. **Types.** $o$ has the type of the inputs, lse may have a wider one. Exponentials are taken of $a - \max a$, so
#     nothing overflows. In half precision a sum of thousands of terms is not taken one by one in half precision.
# 12. **Gradients** exist for $q, k, v$, bias and sink and have the shape of their argument: that of a broadcast bias
#     is summed. The loss may depend on $o$ and on lse. A masked pair sends back exactly 0, and so does a row without
#     keys and without a sink; with a sink such a row still sends its dlse to dsink.
#
# The rest of the chapter is consequence.

# %% [markdown]
# ## Three tokens by hand
#
# Three tokens are known, and the last two ask: `Tq` = 2, `Tk` = 3, the diagonal of the causal mask ends at the bottom
# right. Keys have two channels, values three, and no number is one that hides a mistake (no scale 1, no bias 0, no
# sink 0). The first score is $s_{00} = 0.75 \thinspace (1 \cdot 2 - 0.5 \cdot 1) = 1.125$.

# %%
q = np.array([[1.0, -0.5], [0.5, 2.0]])
k = np.array([[2.0, 1.0], [-1.0, 0.5], [1.5, 1.25]])
v = np.array([[1.0, 2.0, -1.0], [3.0, -2.0, 0.5], [-0.5, 4.0, 2.0]])
bias = np.array([[0.5, -0.25, 1.0], [0.25, 0.75, -0.5]])
mask = np.array([[True, True, False], [True, True, True]])
scale, softcap, sink = 0.75, 2.0, 0.375

scores = scale * q @ k.T
capped = softcap * np.tanh(scores / softcap)
biased = capped + bias
print("scores", scores, "capped", capped, "biased", biased, sep="\n")

# %% [markdown]
# Now the softmax, row by row. The largest logit $m$ of a row, sink included, is subtracted before the exponential and
# put back in lse; masked pairs become $-\infty$ and so have no weight.

# %%
a = np.where(mask, biased, -np.inf)
m = np.maximum(a.max(1), sink)
e = np.exp(a - m[:, None])
z = e.sum(1) + np.exp(sink - m)
p = e / z[:, None]
o = p @ v
lse = m + np.log(z)
print("a", a, "m", m, "exp(a - m)", e, "z exp(-m)", z, "p", p, "o", o, "lse", lse, sep="\n")

# %% [markdown]
# The package says the same. Rows of $p$ sum to one only together with the weight $\exp(sink - lse)$ that the sink
# took: what it takes is lost to the output.

# %%
x = dict(q=q, k=k, v=v, mask=mask, bias=bias)
x = {name: array[None, None] for name, array in x.items()} | dict(sink=np.array([sink]), scale=scale, softcap=softcap)
o_ref, lse_ref = sdpa.dense(**x)
agree("o by hand", o, o_ref[0, 0])
agree("lse by hand", lse, lse_ref[0, 0])
agree("the weights are exp(a - lse)", np.exp(a - lse[:, None]), p)
agree("with the weight of the sink, rows sum to one", p.sum(1) + np.exp(sink - lse), 1)

figure, axes = plot.subplots(1, 4, size=(2.3, 2.1))
for axis, (title, array) in zip(axes, dict(scores=scores, capped=capped, biased=biased).items()):
    plot.attention_map(axis, array, mask, title, signed=True, limit=4)
plot.attention_map(axes[3], p, mask, "weights p")
plot.save(figure, "01_scaled_dot_product_by_hand", """Four maps of two queries by three keys: the scores,
    the largest 2.44; the capped scores, drawn towards zero, the largest 1.68; the biased scores; and the
    weights. The pair of query 0 and key 2 is hatched in each: masked. The weights of query 0, 0.72 and
    0.05, do not sum to one: the sink holds the rest.""")

# %% [markdown]
# ## The code
#
# The definition is the formula. What it needs from the shared core is a softmax that knows masks and sinks, and
# `unread`, which puts zeros where nobody looks, because $0 \cdot \mathrm{NaN}$ is NaN.

# %%
plot.show(sdpa, "logits", "dense")
plot.show(core, "softmax", "per_row", "unread")

# %% [markdown]
# The second form is written to be carried to another language: scalars, one head, one query at a time. It touches no
# masked pair, so rule 10 costs nothing; it meets a row without keys as $m = -\infty$ and leaves, before
# $-\infty - (-\infty)$ could become NaN. In half precision keep `a`, `z` and `o` in a wider type: the case `many_keys`
# adds 8192 weights of 1, and a float16 sum stops growing at 2048. (`.real` lets a complex step pass through a
# comparison; with real numbers it does nothing. `per_head` broadcasts mask, bias and sink and hands over one head.)

# %%
plot.show(sdpa.loop)

# %% [markdown]
# The rules that are easiest to break, run: the shapes of a sink (1), a cap of 0 (4), a bias of $-\infty$ (5), a row
# without keys (8), what is never read (10), types (11), gradients (12).

# %%
basic = load_cases("sdpa", "basic")[0].inputs
number, one, each = (sdpa.dense(**basic | dict(sink=s))[0] for s in (0.375, np.array([0.375]), np.full(3, 0.375)))
agree("1: a sink as a number, as (1,) and as (H,)", [number, one], each, 0)
try:
    sdpa.dense(**basic | dict(softcap=0.0))
except ValueError as error:
    print("4: ValueError:", error)
low = load_cases("sdpa", "bias_minus_inf")[0].inputs
masked = sdpa.dense(**low | dict(mask=low["bias"] > -np.inf, bias=np.nan_to_num(low["bias"], neginf=0)))
for name, as_bias, as_mask in zip(sdpa.OUTPUTS, sdpa.dense(**low), masked):
    agree(f"5: -inf in bias, or False in mask: the same {name}", as_bias, as_mask, 0)

tall = load_cases("sdpa", "causal_tall")[0]
agree("8: rows 0 and 1 see no key: o", tall.outputs["o"][:, :, :2], 0, 0)
agree("8: ... and lse", tall.outputs["lse"][:, :, :2], -np.inf, 0)
with_sink = sdpa.dense(**tall.inputs | dict(sink=np.array([0.375])))
agree("8: with a sink o is 0 too", with_sink[0][:, :, :2], 0, 0)
agree("8: ... and lse is the sink", with_sink[1][:, :, :2], 0.375, 0)

hidden = load_cases("sdpa", "masked_nan")[0].inputs
zeros = hidden | {name: np.nan_to_num(hidden[name]) for name in "kv"}
print("10: NaN among k and v:", int(np.isnan(hidden["k"]).sum()), "and", int(np.isnan(hidden["v"]).sum()))
for form in sdpa.FORMS:
    agree(f"10: {form.__name__} does not read them", form(**hidden)[0], form(**zeros)[0], 0)

print("11: float16 in,", *(y.dtype for y in sdpa.dense(**tall.in_dtype("float16"))), "out")
agree("11: 8192 ones, added one by one in float16, are 2048", np.add.accumulate(np.ones(8192, np.float16))[-1], 2048, 0)
gradients = sdpa.vjp(**tall.cotangents | tall.inputs)
agree("12: queries without keys get no gradient", gradients["dq"][:, :, :2], 0, 0)
print("12: shapes", *(gradients["d" + name].shape for name in ("q", "k", "v", "bias", "sink")))
assert all(gradients["d" + name].shape == tall.inputs[name].shape for name in ("q", "k", "v", "bias", "sink"))
seen = tall.inputs["mask"].any(-1)
do, dlse = np.where(seen[..., None], 0, tall.cotangents["do"]), np.where(seen, 0, tall.cotangents["dlse"])
to_sink = sdpa.vjp(do, dlse, **tall.inputs | dict(sink=np.array([0.375])))
agree("12: with a sink, rows without keys send it their dlse", to_sink.pop("dsink"), dlse.sum())
agree("12: ... and nothing to anything else", np.concatenate([g.ravel() for g in to_sink.values()]), 0, 0)

# %% [markdown]
# ## Derivation: forward
#
# **Why exp.** A row of weights should prefer large logits $a_j$ and still stay spread out. So maximise the mean logit
# plus the entropy, $F(p) = \sum_j p_j a_j - \sum_j p_j \log p_j$, among all $p_j \gt 0$ that sum to one. With
# $z = \sum_j e^{a_j}$ and $w_j = e^{a_j} / z$, which also sum to one, $a_j = \log z + \log w_j$, and so
#
# $$
# F(p) = \log z + \sum_j p_j \log \frac{w_j}{p_j} \leq \log z + \sum_j p_j \left( \frac{w_j}{p_j} - 1 \right) = \log z
# \tag{1.2}
# $$
#
# because $\log u \leq u - 1$, with equality only at $u = 1$, that is $p = w$. The softmax is the best $p$; lse is the
# best value, *mean logit plus entropy*.
#
# **Why lse knows the weights.** Differentiate $lse = \log \sum_j e^{a_j}$:
#
# $$
# \frac{\partial \thinspace lse}{\partial a_j} = \frac{e^{a_j}}{z} = p_j
# \tag{1.3}
# $$
#
# **Why subtract the maximum.** Adding $t$ to every logit of a row multiplies numerator and denominator by $e^t$: $p$
# stays, lse moves by $t$. With $t = -m$ every exponential is at most 1 and one of them is 1: nothing overflows, and
# the denominator is never 0.
#
# **What a sink is.** One more key, with logit `sink` and value 0. It adds $e^{sink}$ to $z$ and nothing to $o$, so
# (1.2) and (1.3) hold with it. A row whose only key is the sink has $o = 0$ and $lse = sink$; let the sink go to
# $-\infty$, and rule 8 for a row without keys is what remains.

# %%
named = lambda **y: dict(zip(sdpa.OUTPUTS, sdpa.dense(**y)))
slopes = [complex_step(named, x, {"bias": np.eye(3)[j] + 0 * x["bias"]})["lse"][0, 0] for j in range(3)]
agree("(1.3) the gradient of lse is p", np.stack(slopes, -1), p)

p_sink = np.exp(sink - lse)[:, None]
p_all, a_all = np.hstack([p, p_sink]), np.hstack([np.where(mask, biased, 0), sink + 0 * p_sink])
entropy = -(p_all * np.log(np.where(p_all == 0, 1, p_all))).sum(1)
agree("(1.2) lse is mean logit plus entropy", (p_all * a_all).sum(1) + entropy, lse)

moved = named(**x | dict(bias=x["bias"] + 0.625, sink=x["sink"] + 0.625))
agree("a constant on a whole row leaves o", moved["o"], o_ref)
agree("... and moves lse by itself", moved["lse"], lse_ref + 0.625)

fourth = {name: np.insert(x[name], 3, 0.0, axis=2) for name in "kv"} | dict(sink=np.array([-np.inf]))
fourth |= dict(mask=np.insert(x["mask"], 3, True, axis=3), bias=np.insert(x["bias"], 3, sink, axis=3))
agree("a sink is a key with logit sink and value 0", sdpa.dense(**x | fourth)[0], o_ref)

# %% [markdown]
# **Why this scale.** If the channels of $q$ and $k$ are independent with mean 0 and variance 1, the products
# $q_c k_c$ are so too, and the variance of their sum is the number of them: scores grow like $\sqrt{d_k}$, and
# dividing by it keeps the softmax equally soft at every width. All pairs of sign vectors are such a population, and
# it is small enough to be counted out. **Why a cap.** $softcap \tanh(s / softcap)$ is $s$ near 0 and never leaves
# $(-softcap, softcap)$, so no key weighs more than $e^{2 \thinspace softcap}$ times another, bias aside.

# %%
for dk in 2, 4, 6:
    signs = np.array(list(itertools.product([-1.0, 1.0], repeat=dk)))
    agree(f"dk = {dk}: the variance of q.k is dk", (signs @ signs.T).var(), dk)
far_apart = dict(q=np.ones((1, 1, 1, 1)), k=np.array([[[[900.0], [-900.0]]]]), v=np.eye(2)[None, None])
weights = sdpa.dense(**far_apart, scale=1.0, softcap=0.5)[0].ravel()
agree("capped at 0.5, two weights differ by no more than a factor e", weights[0] / weights[1], np.e)

# %% [markdown]
# ## Forms that agree
#
# Two texts, one formula, five number systems. The table holds the largest error against the certified value; in half
# and single precision it is what the type allows, in float64 and complex128 it is rounding. `balls` is the radius
# that interval arithmetic leaves around the exact value, far below the spacing of float64, so there is no doubt about
# the digits. A form that leaves the *budget* of a type fails the cell: element by element, twice what rounding the
# exact value and the steps on the way to it can do ([how to read this book](00_how_to_read.ipynb) says how it is
# measured). Only the loop in float16 is shown and not judged: it adds one by one, and rule 11 is against it.

# %%
for case in "everything", "causal_tall", "large_scores":
    print(f"{case}: {load_cases('sdpa', case)[0].why}")
    forms_table("sdpa", case)
    print()

# %% [markdown]
# Rule 3 is why `large_scores` stands at all in float16. There $q \cdot k$ is over 65504, the largest number of the
# type, and only the scaled product fits. The same formula with the factors in the other order:

# %%
large = load_cases("sdpa", "large_scores")[0]
with np.errstate(all="ignore"):
    print("q k^T, then scaled:", sdpa.BUGS["score_overflow"][1](large.in_dtype("float16"))[0][0, 0, 0])
print("q scaled, then q k^T:", sdpa.dense(**large.in_dtype("float16"))[0][0, 0, 0])
print("exact:", large.outputs["o"][0, 0, 0])

# %% [markdown]
# ## The weights, step by step
#
# If $v$ is the identity, the output *is* the matrix of weights. We look at it while the formula grows, one term at a
# time, in the order of rule 2.

# %%
n = 5
plain = dict(q=draw("q", (1, 1, n, 4)), k=draw("k", (1, 1, n, 4)), v=np.eye(n)[None, None])
far = -0.5 * np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
causal = masks.causal(n, n)
growing = {"scale 1": dict(scale=1.0), "scale 1/sqrt(dk)": dict(scale=0.5), "... capped at 1": dict(softcap=1.0),
           "... bias -|i - j|/2": dict(bias=far), "... causal mask": dict(mask=causal),
           "... sink 0.5": dict(sink=np.array([0.5]))}
panels, options = {}, {}
for title, more in growing.items():
    options |= more
    panels[title] = sdpa.dense(**plain | options)[0][0, 0], options.get("mask")
figure = plot.attention_maps(panels, "Each term of the formula leaves its mark on the weights")
plot.save(figure, "01_scaled_dot_product_weights", """Six maps of five by five weights. Without scaling rows
    put most of their weight, 0.5 to 0.9, on one key; scaling by a half softens them, the cap softens them
    further, the bias draws weight to the diagonal, the causal mask empties the upper triangle, and the sink
    takes a part of every row, most from the first.""")

full, sunk = (panels[title][0] for title in ("... causal mask", "... sink 0.5"))
lse_sunk = sdpa.dense(**plain | options)[1][0, 0]
agree("without a sink rows sum to one", full.sum(1), 1)
agree("with a sink they sum to 1 - exp(sink - lse)", sunk.sum(1), 1 - np.exp(0.5 - lse_sunk))
agree("... and keep their proportions", sunk / sunk.sum(1, keepdims=True), full)

# %% [markdown]
# ## What it costs
#
# Count one multiply-add as two operations. A head forms two products, $q k^T$ and $p v$:
#
# $$
# flops = B H \left( 2 \thinspace T_q T_k (d_k + d_v) + 4 \thinspace T_q T_k + T_q d_k + 3 \thinspace T_q \right)
# \tag{1.4}
# $$
#
# The small terms, too, have their place in the code: four passes over the scores (bias, minus $m$, sum, division),
# the scaling of $q$, and three numbers per row ($sink - m$, its exponential joining the sum, $m$ joining lse).
# Exponentials and logarithms are counted apart: one per score and two per row. A cap adds a tanh and two operations
# per score.

# %%
def inputs(B, H, Tq, Tk, dk, dv):
    return dict(q=draw("q", (B, H, Tq, dk)), k=draw("k", (B, H, Tk, dk)), v=draw("v", (B, H, Tk, dv)))


rows = []
for shape in (1, 1, 2, 3, 2, 3), (2, 3, 5, 7, 4, 6), (2, 4, 16, 24, 8, 8):
    B, H, Tq, Tk, dk, dv = shape
    counted = count(sdpa.dense, **inputs(*shape), scale=0.5)
    cap_adds = count(sdpa.dense, **inputs(*shape), scale=0.5, softcap=2.0)["flops"] - counted["flops"]
    flops = B * H * (2 * Tq * Tk * (dk + dv) + 4 * Tq * Tk + Tq * dk + 3 * Tq)
    rows.append((shape, counted["flops"], flops, counted["exp"], B * H * (Tq * Tk + 2 * Tq), cap_adds))
print(table(rows, ("B, H, Tq, Tk, dk, dv", "flops counted", "(1.4)", "exp counted", "formula", "cap adds")))
agree("(1.4)", [row[1] for row in rows], [row[2] for row in rows], 0)
agree("exponentials", [row[3] for row in rows], [row[4] for row in rows], 0)

# %% [markdown]
# Work grows with $T_q T_k$, and so does the matrix of weights, which passes everything else in memory as soon as
# $T_q T_k \gt T_q (d_k + d_v) + T_k (d_k + d_v)$, for $T_q = T_k = T$ and $d_k = d_v = d$ at $T = 4 d$. It need not
# be kept: by (1.3) any of its entries is $\exp(a_{ij} - lse_i)$, whenever it is wanted. Flash attention lives on
# that.

# %%
T, d = [16, 32, 64, 128, 256, 512], 16
counts = [dict(count(sdpa.dense, **inputs(1, 1, t, t, d, d), scale=0.25)) for t in T]
figure, axes = plot.subplots(1, 2, size=(3.9, 3.0))
plot.lines(axes[0], T, {"flops": [c["flops"] for c in counts], "exp, log": [c["exp"] for c in counts]},
           "tokens T", "operations", "Four times the work\nfor twice the tokens")
plot.lines(axes[1], T, {"weights p": [t * t for t in T], "q, k, v and o": [4 * t * d for t in T]},
           "tokens T", "numbers held", "At T = 4 d the weights outgrow\nall that goes in and out")
for axis in axes:
    axis.minorticks_off()
plot.save(figure, "01_scaled_dot_product_cost", """Two log-log plots over 16 to 512 tokens with 16 channels.
    Left: counted operations, and counted exponentials about 70 times below them, both rise with the square
    of T. Right: the weights, T squared numbers, cross the straight line of inputs and outputs, 64 T
    numbers, at T = 64.""")
agree("twice the tokens, four times the flops", counts[-1]["flops"] / counts[-2]["flops"], 4, 0.01)

# %% [markdown]
# ## Derivation: backward
#
# A loss $L$ depends on $o$ and on lse; $do$ and $dlse$ are its derivatives, and $dX$ is its derivative with respect
# to any $X$. Take one row. From $p_l = \exp(a_l - lse)$ and (1.3),
#
# $$
# \frac{\partial p_l}{\partial a_j} = p_l \left( [l = j] - p_j \right) = \frac{\partial^2 lse}{\partial a_l \partial a_j}
# \tag{1.5}
# $$
#
# This is the second derivative of lse, symmetric, as second derivatives are. Now $o = \sum_l p_l v_l$, so
# $dp_l = do \cdot v_l$, and the two paths from $a_j$ to the loss, through $p$ and through lse, add up:
#
# $$
# da_j = \sum_l dp_l \thinspace p_l \left( [l = j] - p_j \right) + dlse \thinspace p_j = p_j \left( dp_j - row \right),
# \qquad row = \sum_l p_l dp_l - dlse = do \cdot o - dlse
# \tag{1.6}
# $$
#
# One number per row again. The sink is a key with value 0, so its $dp$ is 0: it is absent from the sum, and its own
# gradient is (1.6) with $dp = 0$. The rest is the chain rule through (1.1), read backwards, with
# $\tanh' = 1 - \tanh^2$:
#
# $$
# \begin{aligned}
# dv_j &= \sum_i p_{ij} \thinspace do_i & dsink &= -\sum_i \exp(sink - lse_i) \thinspace row_i \\
# dbias_{ij} &= da_{ij} & ds_{ij} &= da_{ij} \left( 1 - \tanh^2(s_{ij} / softcap) \right) \\
# dq_i &= scale \sum_j ds_{ij} k_j & dk_j &= scale \sum_i ds_{ij} q_i
# \end{aligned}
# \tag{1.7}
# $$
#
# The gradient of an argument that was broadcast is the sum over the axes along which it was: for a bias per head over
# batch entries, for a sink over batch entries and queries. Where mask is False $p = 0$, so $da = 0$; a row without
# keys is all such pairs. If there is a sink, such a row has $lse = sink$ and $row = -dlse$, and all of its dlse goes to
# the sink. If there is none, $lse_i = -\infty$, and the factor $\exp(sink - lse_i)$ is 0, not NaN.

# %%
plot.show(sdpa.vjp)
plot.show(core.sum_to)

# %% [markdown]
# By hand, for the three tokens, with cotangents that are not constant:

# %%
do, dlse = np.array([[0.5, -1.0, 0.25], [1.5, 0.75, -0.5]]), np.array([0.25, -0.75])
dp, row = do @ v.T, (do * o).sum(1) - dlse
da = p * (dp - row[:, None])
ds = da * (1 - np.tanh(scores / softcap) ** 2)
by_hand = dict(dq=scale * ds @ k, dk=scale * ds.T @ q, dv=p.T @ do, dbias=da, dsink=-(np.exp(sink - lse) @ row))
print("dp", dp, "row", row, "ds", ds, sep="\n")
for name, gradient in sdpa.vjp(do[None, None], dlse[None, None], **x).items():
    print(name, by_hand[name], sep="\n")
    agree(f"{name} by hand", by_hand[name], gradient)

# %% [markdown]
# The picture of (1.5) for query 1 of the three tokens: with $v$ the identity, the derivative of $o$ is the derivative
# of $p$. Raising one logit gives its key weight and takes it from all others, the sink included.

# %%
identity = x | dict(v=np.eye(3)[None, None])
columns = [complex_step(named, identity, {"bias": np.eye(3)[j] + 0 * x["bias"]})["o"][0, 0, 1] for j in range(3)]
jacobian = np.diag(p[1]) - np.outer(p[1], p[1])
agree("(1.5) by complex step", np.stack(columns, 1), jacobian)
agree("it is symmetric", jacobian, jacobian.T, 0)

with_sink = np.diag(p_all[1]) - np.outer(p_all[1], p_all[1])
agree("with the sink its rows sum to zero", with_sink.sum(1), 0)
figure, axes = plot.subplots(1, 2, size=(3.0, 2.8))
seen = np.hstack([mask, np.ones((2, 1), bool)])
plot.attention_map(axes[0], p_all, seen, "Weights p and the sink's share", labels=("key j, 3 is the sink", "query i"))
plot.attention_map(axes[1], with_sink, None, "Query 1: what one weight gains\nthe others lose", signed=True,
                   labels=("logit j, 3 is the sink", "weight l, 3 is the sink"))
plot.save(figure, "01_scaled_dot_product_jacobian", """Left: the weights of two queries on three keys and
    the sink. Right: for query 1, the symmetric four by four matrix diag(p) - p p^T, positive on the
    diagonal, negative elsewhere, rows summing to zero. Its largest entry belongs to key 0, whose weight is
    nearest to one half.""")

# %% [markdown]
# The backward against a complex step of the forward, along a fixed direction in each input, for two golden cases:
# everything at once, and rows without keys. A complex step has no truncation error, so the two agree to rounding.

# %%
for case in "everything", "causal_tall":
    print(f"{case}: {load_cases('sdpa', case)[0].why}")
    gradient_table("sdpa", case)
    print()

# %% [markdown]
# And identities that need no oracle, good to have in every test of a backward. By (1.6) the gradients of all logits
# of a row, the sink's too, sum to its $dlse$: a constant on a row moves lse alone. And $q$ and $k$ meet only in $s$,
# so $\sum q \cdot dq = \sum k \cdot dk = \sum s \thinspace ds$, which is also $scale$ times the gradient of scale.

# %%
golden = load_cases("sdpa", "everything")[0]
y, gradient = golden.inputs, golden.module.vjp(**golden.cotangents | golden.inputs)
every_logit = gradient["dbias"].sum() + gradient["dsink"].sum()
agree("all logits together get dlse", every_logit, golden.cotangents["dlse"].sum())
agree("q . dq = k . dk, head by head", (y["q"] * gradient["dq"]).sum((2, 3)), (y["k"] * gradient["dk"]).sum((2, 3)))

by_scale = complex_step(named, y, {"scale": 1.0})
d_scale = sum((golden.cotangents["d" + name] * by_scale[name]).sum() for name in by_scale)
agree("q . dq = scale times the gradient of scale", (y["q"] * gradient["dq"]).sum(), y["scale"] * d_scale)
only_lse = sdpa.vjp(np.zeros_like(o_ref), np.ones_like(lse_ref), **x)
agree("with L = sum of lse, dbias is p", only_lse["dbias"][0, 0], p)

# %% [markdown]
# It costs five products, $q k^T$ anew, $do \thinspace v^T$, $p^T do$, $ds \thinspace k$ and $ds^T q$, to the
# forward's two: two and a half times as much when $d_k = d_v$.

# %%
for d in 4, 16, 64:
    y = inputs(1, 1, 64, 64, d, d) | dict(scale=d ** -0.5)
    backward = count(sdpa.vjp, do=y["v"], dlse=np.ones((1, 1, 64)), **y)["flops"]
    print(f"d = {d:2}: the backward takes {backward / count(sdpa.dense, **y)['flops']:.2f} times the flops")

# %% [markdown]
# ## What goes wrong
#
# Each of these is a mistake someone made, written as code in `sdpa.BUGS` and `sdpa.VJP_BUGS`. Each is caught by a
# golden case, and each is told from all others by its numbers alone.

# %%
mistakes = sdpa.BUGS | sdpa.VJP_BUGS
print(table([(slug, sentence) for slug, (sentence, _) in mistakes.items()], ("mistake", "what is wrong")))

# %% [markdown]
# Again with $v$ the identity, so that each mistake shows its weights. Four queries, three keys, a causal mask at the
# bottom right (query 0 sees nothing), a cap, a bias and a sink.

# %%
small = dict(q=draw("q", (1, 1, 4, 4)), k=draw("k", (1, 1, 3, 4)), v=np.eye(3)[None, None],
             mask=masks.causal(4, 3)[None, None], bias=draw("bias", (1, 1, 4, 3)), sink=np.array([-0.5]), scale=0.5,
             softcap=1.0)
shown = ("softmax_over_queries", "mask_after_softmax", "mask_added_as_0_1", "softcap_after_mask",
         "softcap_after_bias", "causal_top_left", "empty_row_uniform", "sink_not_shifted")
with np.errstate(all="ignore"):
    panels = {slug: sdpa.BUGS[slug][1](small)[0][0, 0] for slug in shown}
figure = plot.attention_maps({"right": (sdpa.dense(**small)[0][0, 0], small["mask"][0, 0])} | panels,
                             "One formula, eight mistakes: the weights they give")
plot.save(figure, "01_scaled_dot_product_mistakes", """Nine maps of four queries by three keys. Right: a
    staircase, row 0 empty. Softmax over queries: columns, not rows, sum to one. Mask after softmax: rows
    too light. Mask added as 0 and 1 and cap after mask: weight above the staircase. Cap after bias: other
    proportions. Top left: the staircase is one key wider. Empty row uniform: row 0 holds 0.33 everywhere.
    Sink not shifted: rows sum to another number.""")

# %% [markdown]
# **One wrong port, caught live.** This is how the function is often written: mask and bias are both "added to the
# scores", so they go together, and the cap comes last. It looks fine and is fine, in every case without a cap. It
# also returns its intermediates, by their names in `STEPS`, and so the report can say where the error began.

# %%
# exercise
def port(q, k, v, mask=True, bias=0.0, sink=-np.inf, *, scale, softcap=None):
    scores = scale * q @ k.swapaxes(-1, -2)
    biased = scores + bias
    if softcap is not None:
        biased = softcap * np.tanh(biased / softcap)
    weights, lse = core.softmax(biased, mask, np.reshape(sink, (-1, 1, 1)))
    return dict(scores=scores, biased=biased, weights=weights, o=weights @ core.unread(v, mask), lse=lse)


right = check_exercise("sdpa", port)

# %% [markdown]
# ## Where code in the wild differs
#
# A row without keys has as many answers as there are libraries. What was measured or read:
#
# | $o$ of the row | lse of the row | where |
# |---|---|---|
# | 0 | $-\infty$ | here; torch `flex_attention` |
# | 0 | not returned | torch 2.13 `scaled_dot_product_attention`; ONNX 1.23 reference, onnxruntime 1.32 |
# | 0 | 0 | the CPU flash operator inside torch 2.13 |
# | 0 | $+\infty$ | flash-attention's CUDA source, so that $\exp(s - lse)$ is 0 in its backward |
# | mean of all values | finite | jax 0.10 with a boolean mask; whoever adds the lowest finite number instead of masking |
# | NaN | $-\infty$ or NaN | jax with a bias of $-\infty$; torch `nn.MultiheadAttention` when it also returns the weights |
#
# The named mistakes reproduce the column of outputs, so a port that inherits one is told which:

# %%
empty = load_cases("sdpa", "empty_row")[0]
slugs = "empty_row_nan", "empty_row_uniform", "empty_row_lse_zero", "minus_inf_minus_inf"
readings = {"here": sdpa.dense(**empty.inputs)} | {slug: sdpa.BUGS[slug][1](empty.inputs) for slug in slugs}
for name, outputs in readings.items():
    print(f"{name:20} o = {outputs[0][0, 0, 1, :4]}", *(f"lse = {lse[0, 0, 1]}" for lse in outputs[1:]))

# %% [markdown]
# The cap once stood after the mask in the text of an ONNX operator, and a masked $-\infty$ became $-softcap$. For
# logits 3, 2 and a masked one, at a cap of 5, the masked key gets weight; one in three thousand, which no plot and no
# loss curve shows.

# %%
three = dict(q=np.ones((1, 1, 1, 1)), k=np.array([3.0, 2.0, 1.0]).reshape(1, 1, 3, 1), v=np.eye(3)[None, None],
             mask=np.array([[[[True, True, False]]]]), bias=np.zeros((1, 1, 1, 1)), sink=np.array([-np.inf]), scale=1.0,
             softcap=5.0)
print("cap, then mask:", sdpa.dense(**three)[0].ravel())
print("mask, then cap:", sdpa.BUGS["softcap_after_mask"][1](three)[0].ravel())

# %% [markdown]
# Other differences are not mistakes but other words for the same numbers, and translate. Layout: jax, flash-attention
# and the paper kernels keep (B, T, H, d). Mask: True means *masked* in torch `nn.MultiheadAttention`, unlike in torch
# `scaled_dot_product_attention`, jax and ONNX. Additive masks: 0 and $-\infty$ in place of True and False. Base 2:
# kernels take `exp2` and must then scale everything that is exponentiated, scores, cap, bias and sink, by $\log_2 e$,
# and their lse is ours times $\log_2 e$. Scale: ONNX multiplies both $q$ and $k$ by its root, equal but for rounding.
# Off by one: "softmax plus one" is a sink of 0. And two things share a name: the *sinks* of StreamingLLM are first
# tokens kept in a cache, not logits.

# %%
case = load_cases("sdpa", "everything")[0].inputs
o, lse = sdpa.dense(**case)
bthd = {name: np.ascontiguousarray(case[name].swapaxes(1, 2)) for name in "qkv"}
agree("views of (B, T, H, d) memory", sdpa.dense(**case | {name: bthd[name].swapaxes(1, 2) for name in bthd})[0], o)
agree("an additive mask of 0 and -inf is a bias", sdpa.dense(
    **case | dict(mask=np.array(True), bias=case["bias"] + np.where(case["mask"], 0, -np.inf)))[0], o)

log2e = 1 / float(np.log(2))
*_, logits = sdpa.logits(case["q"], case["k"], case["bias"] * log2e, case["scale"] * log2e, case["softcap"] * log2e)
z = np.where(case["mask"], np.exp2(logits), 0).sum(-1) + np.exp2(case["sink"].reshape(-1, 1) * log2e)
agree("lse in base 2 is lse times log2(e)", np.log2(z), lse * log2e)

root = case["scale"] ** 0.5
by_root = sdpa.dense(**case | dict(q=root * case["q"], k=root * case["k"], scale=1.0))[0]
agree("the root of scale on both sides", by_root, o)
print("... to the last bit?", bool((by_root == o).all()))

# %% [markdown]
# ## Relations
#
# What the formula becomes at its borders, and what it may be cut into. The last one is the reason lse is an output:
# two halves of the keys, each attended to alone, are put together by their lse, and the sink belongs to exactly one
# of them.

# %%
basic = load_cases("sdpa", "basic")[0].inputs
o, lse = sdpa.dense(**basic)
flat = sdpa.dense(**basic | dict(scale=0.0))
agree("scale 0: the mean of the values", flat[0], basic["v"].mean(2, keepdims=True))
agree("scale 0: lse is the log of the number of keys", flat[1], np.log(basic["k"].shape[2]))
one = dict(k=basic["k"][:, :, :1], v=basic["v"][:, :, :1], mask=basic["mask"][..., :1])
agree("one key: its value", sdpa.dense(**basic | one)[0], one["v"], 0)
agree("a cap of 10^9 is no cap", sdpa.dense(**basic | dict(softcap=1e9))[0], o)
order = np.array([3, 0, 5, 1, 4, 2])
agree("keys and values in any order", sdpa.dense(**basic | {name: basic[name][:, :, order] for name in "kv"})[0], o)
grouped = gqa.dense(**{name: basic[name] for name in gqa.INPUTS})
agree("as many kv heads as heads: grouped-query attention", grouped[0], o)

o, lse = sdpa.dense(**case)
halves = slice(0, 3), slice(3, None)
cut = [dict(k=case["k"][:, :, half], v=case["v"][:, :, half], mask=case["mask"][..., half],
            bias=case["bias"][..., half]) for half in halves]
(o1, lse1), (o2, lse2) = sdpa.dense(**case | cut[0]), sdpa.dense(**case | cut[1] | dict(sink=np.array([-np.inf])))
both = np.logaddexp(lse1, lse2)
agree("two halves, merged: lse", both, lse)
agree("two halves, merged: o", np.exp(lse1 - both)[..., None] * o1 + np.exp(lse2 - both)[..., None] * o2, o)

# %% [markdown]
# ## In a box
#
# | | |
# |---|---|
# | formula | $o_i = \sum_j p_{ij} v_j$ with $p_{ij} = \exp(a_{ij} - lse_i)$ where the mask allows, else 0 |
# | logits | $a$ = softcap tanh(scale $q \cdot k$ / softcap) + bias |
# | lse | $\log \left( \sum_j \exp a_{ij} + \exp sink \right)$, natural, over the allowed keys |
# | shapes | q (B, H, Tq, dk), k (B, H, Tk, dk), v (B, H, Tk, dv) to o (B, H, Tq, dv) and lse (B, H, Tq) |
# | backward | $da = p \thinspace (do \cdot v - row)$, $row = do \cdot o - dlse$, then (1.7) |
# | cost | forward $2 B H T_q T_k (d_k + d_v)$ flops and $B H T_q T_k$ exponentials; backward 2.5 times that |
# | memory | $B H T_q T_k$ weights, or $B H T_q$ numbers lse if they are rebuilt |
# | use it | when any pair of tokens may matter and work that grows with $T_q T_k$ can be paid |
# | goes wrong | order of cap, bias, mask; rows without keys; mask polarity; hidden scale; base of lse; scaled or unshifted sink |
#
# ## Exercises
#
# Write each function, in place of the line that raises, and run the cell. `check_exercise` passes arguments by name
# and leaves out the cases that need arguments you do not take; if something is wrong it says where, and, if it is a
# mistake others made, which. The same from a shell, for a function in your own file and in half precision, is
# `attention-ref verify sdpa --impl mymodule:attention --dtype float16`. It holds the first output to rule 11. For
# bfloat16, which NumPy has not, it hands over float32 arrays, wants float32 back and judges by the budget of bfloat16.
# For other languages see [how to read this book](00_how_to_read.ipynb).
#
# **1. The plain function.** Queries, keys, values, mask and scale; $o$ and lse. Mind the rows without keys, and the
# keys nobody sees.

# %%
# exercise
def plain_attention(q, k, v, mask, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("sdpa", plain_attention)

# %% [markdown]
# **2. The whole function, one key at a time.** Bias, cap and sink too, but never hold a row of scores: look at each
# key once, and keep for every query only a running maximum, a running sum and a running output. What must happen to
# the sum and the output when a new key raises the maximum?

# %%
# exercise
def streaming_attention(q, k, v, mask, bias, sink, scale, softcap):
    raise NotImplementedError("not written yet")


right = check_exercise("sdpa", streaming_attention)

# %% [markdown]
# **3. The backward, from lse.** A function that takes `do` and `dlse` is checked as a backward: it gets the cotangents
# of every case that has gradients, and returns `dict(dq=..., dk=..., dv=..., dbias=..., dsink=...)`, or some of them.
# Take $o$ and lse from `sdpa.dense`, but call no softmax: lse is all you need of it.

# %%
# exercise
def backward(do, dlse, q, k, v, mask, bias, sink, scale, softcap):
    raise NotImplementedError("not written yet")


right = check_exercise("sdpa", backward)

# %% [markdown]
# ## Answers
#
# **1.** The maximum of a row without keys is replaced by 0 and its denominator by 1; keys that nobody sees by zeros.

# %%
# exercise
def plain_attention(q, k, v, mask, scale):
    seen = mask.any(-2)[..., None]
    k, v = np.where(seen, k, 0), np.where(seen, v, 0)
    s = np.where(mask, scale * q @ k.swapaxes(-1, -2), -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(m == -np.inf, 0, m))
    z = e.sum(-1, keepdims=True)
    return e / np.where(z == 0, 1, z) @ v, (m + np.log(np.where(z == 0, 1, z)))[..., 0]


assert check_exercise("sdpa", plain_attention)

# %% [markdown]
# **2.** Everything gathered so far was divided by $e^m$. When the maximum becomes $m'$ it must be divided by
# $e^{m' - m}$ more, sum and output alike. The sink is where the row starts: $m = sink$, sum 1, or 0 if there is none.
# This is the online softmax, and with blocks of keys instead of single ones it is flash attention. The sums are
# float64, whatever comes in, and the scale meets $q$ before $k$ does: half precision asks for both.

# %%
# exercise
def streaming_attention(q, k, v, mask, bias, sink, scale, softcap):
    B, H, Tq, _ = q.shape
    mask, bias = (np.broadcast_to(y, (B, H, Tq, k.shape[2])) for y in (mask, bias))
    m = np.broadcast_to(np.reshape(sink, (-1, 1)), (B, H, Tq))
    z, o = np.where(m == -np.inf, 0.0, 1.0), np.zeros((B, H, Tq, v.shape[3]))
    for j in range(k.shape[2]):
        s = (scale * q * k[:, :, j, None]).sum(-1)
        a = (s if softcap is None else softcap * np.tanh(s / softcap)) + bias[..., j]
        a = np.where(mask[..., j], a, -np.inf)
        higher = np.maximum(m, a)
        shift = np.where(higher == -np.inf, 0, higher)
        old, new = np.exp(m - shift), np.exp(a - shift)
        z = z * old + new
        o = o * old[..., None] + np.where(mask[..., j, None], new[..., None] * v[:, :, j, None], 0)
        m = higher
    z = np.where(z == 0, 1, z)
    return (o / z[..., None]).astype(q.dtype), m + np.log(z)


assert check_exercise("sdpa", streaming_attention)

# %% [markdown]
# **3.** By (1.3) the weights are $\exp(a - lse)$. An lse of $-\infty$ is replaced by 0: $a$ is $-\infty$ all along that
# row, and so is `sink`. Half precision is computed in float32, or lse would lose the digits that $p$ lives on.

# %%
# exercise
def backward(do, dlse, q, k, v, mask, bias, sink, scale, softcap):
    dtype, wide = q.dtype, np.result_type(q, np.float32)
    do, dlse, q, k, v, bias, sink = (y.astype(wide) for y in (do, dlse, q, k, v, bias, sink))
    o, lse = sdpa.dense(q, k, v, mask, bias, sink, scale=scale, softcap=softcap)
    q = np.where(mask.any(-1)[..., None], q, 0)
    k, v = (np.where(mask.any(-2)[..., None], y, 0) for y in (k, v))
    capped, slope = scale * q @ k.swapaxes(-1, -2), 1
    if softcap is not None:
        t = np.tanh(capped / softcap)
        capped, slope = softcap * t, 1 - t ** 2
    lse = np.where(lse == -np.inf, 0, lse)
    p = np.exp(np.where(mask, capped + bias, -np.inf) - lse[..., None])
    row = (do * o).sum(-1) - dlse
    da = p * (do @ v.swapaxes(-1, -2) - row[..., None])
    dsink = -(np.exp(sink[:, None] - lse) * row).sum((0, 2))
    found = dict(dq=scale * (da * slope) @ k, dk=scale * (da * slope).swapaxes(-1, -2) @ q, dv=p.swapaxes(-1, -2) @ do,
                 dbias=core.sum_to(da, bias.shape), dsink=core.sum_to(dsink, sink.shape))
    return {name: y.astype(dtype) for name, y in found.items()}


assert check_exercise("sdpa", backward)

# %% [markdown]
# The three pass in every type that `verify` knows:

# %%
rows = []
for answer in plain_attention, streaming_attention, backward:
    verdicts = {dtype: judge(answer, load_cases("sdpa"), dtype)[0] for dtype in UNIT}
    asked = {dtype: [r for r in results if not r.unsupported] for dtype, results in verdicts.items()}
    rows.append((answer.__name__, *(f"{sum(r.passed for r in found)} of {len(found)}" for found in asked.values())))
    assert all(r.passed for found in asked.values() for r in found)
print(table(rows, ("answer", *UNIT)))

# %% [markdown]
# ## Sources
#
# - Vaswani et al. 2017, *Attention is all you need*, arXiv:1706.03762: equation 1 and section 3.2.1, the scale; its
#   footnote on the variance of $q \cdot k$.
# - Bello et al. 2016, arXiv:1611.09940, and Gemma 2, arXiv:2408.00118, section 2: the soft cap.
# - gpt-oss model card 2025, arXiv:2508.10925: the sink in the denominator. Xiao et al. 2023, arXiv:2309.17453: the
#   other sinks, kept tokens.
# - Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3: the online softmax of exercise 2.
# - Rabe and Staats 2021, arXiv:2112.05682, and Dao 2023, *FlashAttention-2*, arXiv:2307.08691, section 3.1.1: lse as
#   what is kept for merging and for the backward.
# - The comparisons with torch, jax and ONNX run in the project's tests: `make peers`.
