# %% [markdown]
# # Local windows
#
# **Each query sees a band of keys: the work is the number of tokens times the width of the band, and every layer widens
# what a token knows by one more width.**
#
# Query $i$ stands at position $p_i = i + offset$ among the keys. Its window reaches $left$ steps back and $right$ steps
# ahead, each of $D$ keys:
#
# $$
# \begin{aligned}
# N(i) &= \lbrace j = p_i + t D : -left \le t \le right, \thinspace 0 \le j \lt length \rbrace \\
# s_{ij} &= scale \thinspace q_i \cdot k_j \qquad z_i = \sum_{j \in N(i)} e^{s_{ij}} \qquad lse_i = \log z_i \\
# o_i &= \sum_{j \in N(i)} e^{s_{ij}} v_j / z_i
# \end{aligned}
# \tag{9.1}
# $$
#
# It is [chapter 1](01_scaled_dot_product.ipynb) under one more mask of [chapter 2](02_masks.ipynb). What makes it worth a
# chapter is that the pairs outside need never be formed, and that the one word *window* has seven meanings.

# %%
import numpy as np

from attention_ref import load_cases, masked, masks, plot, sdpa, window
from attention_ref.conformance.numbers import count
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw

np.set_printoptions(precision=4, suppress=True, linewidth=110)

# %% [markdown]
# ## The contract

# %%
shapes = {name: text or "a number" for name, text in (window.INPUTS | window.OUTPUTS).items()}
print(table(shapes.items(), ("name", "kind and shape")))
print()
print(table(window.CONVENTIONS.items(), ("what", "convention")))

# %% [markdown]
# 1. **left** and **right** count keys *beside* the query's own, on each side: a window of (2, 0) has three keys. None is
#    open: no limit on that side. 0 is a limit.
# 2. **dilation** $D$ is the distance between neighbouring keys of the window, one number or one for each head. The sides
#    count steps, not tokens: (2, 0) with $D = 3$ sees $p$, $p - 3$ and $p - 6$.
# 3. **offset** says at which key query 0 stands, and has no default: 0 is *top left*, $T_k - T_q$ is *bottom right*, the
#    length of the past in between. It may be negative, and may lie beyond the keys.
# 4. **lengths** (B,): keys from there on are padding.
# 5. **The borders** cut: places before key 0 and from `length` on do not exist. They do not wrap, and they are not zeros
#    that take weight.
# 6. **A row without keys** gives $o = 0$, $lse = -\infty$, and gradients 0.
# 7. **Never read.** A key that no query sees may hold anything, NaN included.
# 8. **scale** is a number without a default. There is no bias and no cap here. Gradients exist for q, k and v.
# 9. **Steps** by name: `scores`, NaN outside the window, and `weights`, each (B, H, Tq, Tk).

# %% [markdown]
# ## Five tokens by hand
#
# Left 1, right 1, and five tokens, so the first and the last have one neighbour. The scale is 0.75.

# %%
q = np.array([[1, 0.5], [0.5, 1], [-1, 2], [2, -0.5], [-0.5, -1]])
k = np.array([[0.5, 1], [1, -1], [-0.5, 1.5], [1.5, 0.5], [1, 1]])
v = np.array([[1, -2], [3, 0.5], [-1, 4], [2, 2], [0.5, -1]])
o, lse = np.zeros((5, 2)), np.zeros(5)
for i in range(5):
    keys = [j for j in (i - 1, i, i + 1) if 0 <= j < 5]
    s = 0.75 * k[keys] @ q[i]
    lse[i] = np.log(np.exp(s).sum())
    p = np.exp(s - lse[i])
    o[i] = p @ v[keys]
    print(f"query {i}: keys {keys}, s {s}, p {p}, o {o[i]}")
x = dict(q=q[None, None], k=k[None, None], v=v[None, None], lengths=np.array([5]), left=1, right=1, offset=0, scale=0.75)
agree("o by hand", o, window.dense(**x)[0][0, 0])
agree("lse by hand", lse, window.dense(**x)[1][0, 0])

# %% [markdown]
# ## The code
#
# The definition is a mask. `band` walks along the diagonals instead: on the diagonal of step $t$ query $i$ meets key
# $p_i + t D$, so one product, channel by channel, makes the scores of all queries on that diagonal.

# %%
plot.show(window, "visible", "dense", "shifts", "band_softmax", "band")

# %% [markdown]
# ### The band, and the band put upright
#
# Left 2, right 1 over ten tokens: the mask, and the same scores as `band` holds them, one column for each step. Nothing is
# lost but the corners, where the window reaches beyond the keys.

# %%
ten = dict(q=draw("q", (1, 1, 10, 4)), k=draw("k", (1, 1, 10, 4)), v=draw("v", (1, 1, 10, 3)))
sides = dict(left=2, right=1, offset=0)
mask = window.visible(10, 10, np.array([10]), dilation=1, **sides)[0, 0]
shift = window.shifts(10, 10, dilation=1, **sides)
upright, _ = window.band_softmax(ten["q"], ten["k"], np.arange(10), shift, np.array([10]), 0.125)
_, weights = window.steps(ten["q"], ten["k"], np.array([10]), **sides, scale=0.125)
_, all_pairs = window.steps(ten["q"], ten["k"], np.array([10]), offset=0, scale=0.125)
figure, axes = plot.subplots(1, 3, size=(2.7, 2.7))
plot.attention_map(axes[0], all_pairs[0, 0], title="dense softmax: 100 pairs")
plot.attention_map(axes[1], weights[0, 0], mask, "window (2, 1): 36 pairs")
image = plot.attention_map(axes[2], upright[0, 0], mask[:, :4] | True, "upright: 40 places", labels=("step t + 2", "query i"))
figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
figure.suptitle("A band has few entries, and can be stored as they are")
plot.save(figure, "09_local_windows_band", """Three maps. Dense softmax fills a square of ten by ten. The window keeps a
    band of four entries a row and hatches the rest. Upright, the same numbers fill a rectangle of ten by four, with
    zeros in two corners.""")
agree("pairs of the band", mask.sum(), 36, 0)
gathered = np.take_along_axis(weights[0, 0], np.clip(np.arange(10)[:, None] + np.arange(-2, 2), 0, 9), 1)
inside = (np.arange(10)[:, None] + np.arange(-2, 2) >= 0) & (np.arange(10)[:, None] + np.arange(-2, 2) < 10)
agree("the same weights", np.where(inside, gathered, 0), upright[0, 0])

# %% [markdown]
# ## Derivation: what a stack of layers sees
#
# After one layer, token $i$ is a mixture of tokens $i - left$ to $i + right$. What those know from the layer before is
# mixed in: after $n$ layers, of tokens $i - n \thinspace left$ to $i + n \thinspace right$. With dilations
# $D_1, \dots, D_n$ the reach is $(D_1 + \dots + D_n) \thinspace left$; if each $D$ is the number of keys seen so far, no
# token is seen twice and none is left out, so the reach grows by a factor with every layer, as in a wavelet.

# %%
T = 33
layer = lambda left, right, D=1: masks.window(T, T, left, right, D).astype(int)
stacks = {"3 layers, (2, 0)": [layer(2, 0)] * 3, "3 layers, (1, 1)": [layer(1, 1)] * 3,
          "dilations 1, 3, 9, (2, 0)": [layer(2, 0, D) for D in (1, 3, 9)]}
figure, axes = plot.subplots(1, 3, size=(2.7, 2.7))
for axis, (name, stack) in zip(axes, stacks.items()):
    ways = np.linalg.multi_dot(stack)
    axis.imshow(np.where(ways, np.minimum(ways, 8), np.nan), cmap="viridis_r", vmin=0, vmax=8)
    axis.set(title=name, xlabel="token j", ylabel="token i", xticks=range(0, T, 8), yticks=range(0, T, 8))
figure.suptitle("Which tokens reach which, and in how many ways (darker: more)")
plot.save(figure, "09_local_windows_reach", """Three bands over 33 tokens. Three layers of (2, 0) reach six tokens back, in
    many ways in the middle and one at the edge; three of (1, 1) three tokens each way; dilations 1, 3, 9 reach 26
    tokens back, each in exactly one way.""")
i, j = np.indices((T, T))
for name, (back, ahead) in dict(zip(stacks, [(6, 0), (3, 3), (26, 0)])).items():
    ways = np.linalg.multi_dot(stacks[name])
    agree(f"{name}: {back} back, {ahead} ahead", ways > 0, (j >= i - back) & (j <= i + ahead), 0)
agree("dilations 1, 3, 9: one way each", np.linalg.multi_dot(stacks["dilations 1, 3, 9, (2, 0)"]).max(), 1, 0)

# %% [markdown]
# ## Forms that agree
#
# `loop` visits the keys of its window and no other; it is what a kernel author copies.

# %%
plot.show(window, "loop")
for case in "basic", "dilated", "before_key_0":
    print(case)
    forms_table("window", case)

# %% [markdown]
# ## Cost
#
# The band has $T (left + right + 1)$ places less the corners, $left (left + 1) / 2 + right (right + 1) / 2$ where $T$ is
# at least as long as the sides. `band` does the same work for each place, so its operations grow with $T$ times the
# width:

# %%
def pairs(T, left, right):
    return T * (left + right + 1) - left * (left + 1) // 2 - right * (right + 1) // 2


for T, left, right in (10, 2, 1), (33, 6, 0), (64, 8, 8):
    agree(f"pairs, T = {T}, ({left}, {right})", masks.window(T, T, left, right).sum(), pairs(T, left, right), 0)

lengths, flops = [32, 64, 128, 256, 512], {"dense": [], "window, 9 keys": [], "window, 33 keys": []}
for T in lengths:
    y = {name: draw(name, (1, 1, T, 8)) for name in "qkv"}
    flops["dense"].append(count(sdpa.dense, **y, scale=0.5)["flops"])
    for keys in 9, 33:
        flops[f"window, {keys} keys"].append(count(window.band, **y, lengths=np.array([T]), left=keys - 1, right=0, offset=0,
                                                   scale=0.5)["flops"])
figure, axis = plot.subplots(size=(5.0, 3.1))
plot.lines(axis, lengths, flops, "tokens T", "flops", "Linear in T: the wide window pays from 32 tokens on")
axis.minorticks_off()
plot.save(figure, "09_local_windows_cost", """Three lines on logarithmic axes over 32 to 512 tokens. Dense rises with the
    square of T; the windows rise with T, the one of 33 keys about four times above the one of 9, and dense crosses it
    near 32 tokens.""")
agree("twice the tokens, twice the flops", [f[-1] / f[-2] for f in list(flops.values())[1:]], 2, 0.01)
per_key = [f[-1] / (512 * keys) for f, keys in zip(list(flops.values())[1:], (9, 33))]
print("flops for each place of the band:", per_key)

# %% [markdown]
# Memory goes the same way: $T (left + right + 1)$ weights in place of $T^2$, and a cache of a decoder need hold no more
# than the last $left + 1$ keys ([chapter 4](04_gqa_and_kv_cache.ipynb), the rolling cache).
#
# ## Backward
#
# Inside a row nothing changes: $ds_{ij} = p_{ij} (do_i \cdot v_j - \sum_l p_{il} \thinspace do_i \cdot v_l + dlse_i)$ for
# $j \in N(i)$, and 0 elsewhere. The transposed band is a band: key $j$ is seen by the queries
#
# $$
# \lbrace i = j - offset - t D : -left \le t \le right \rbrace
# \tag{9.2}
# $$
#
# so a key gathers its gradient as a query gathers its values, with the sides exchanged: what reaches $left$ back looks
# from the key $left$ ahead. No scatter, no atomic additions.
#
# $$
# dq_i = scale \sum_{j \in N(i)} ds_{ij} k_j \qquad dk_j = scale \sum_{i: j \in N(i)} ds_{ij} q_i \qquad
# dv_j = \sum_{i: j \in N(i)} p_{ij} do_i
# \tag{9.3}
# $$

# %%
plot.show(window, "vjp")
for case in "basic", "dilated":
    print(case)
    gradient_table("window", case)
golden = load_cases("window", "basic")[0]
x = golden.inputs
g = window.vjp(**golden.cotangents | x)
mask = window.visible(*(x[a].shape[2] for a in "qk"), *(x[a] for a in ("lengths", "left", "right", "dilation", "offset")))
full = sdpa.vjp(**golden.cotangents, q=x["q"], k=x["k"], v=x["v"], mask=mask, scale=x["scale"])
for name in "dq", "dk", "dv":
    agree(f"{name}: the band and the whole matrix", g[name], full[name])

# %% [markdown]
# ## What goes wrong

# %%
named = {slug: text for slug, (text, _) in (window.BUGS | window.VJP_BUGS).items()}
print(table(named.items(), ("mistake", "what is wrong")))

# %% [markdown]
# Values that are one-hot show the weights. Eight tokens, (2, 1), right and five times wrong.

# %%
see = {name: draw(name, (1, 1, 8, 4)) for name in "qk"} | dict(v=np.eye(8)[None, None], lengths=np.array([8]), left=2, right=1,
                                                               dilation=np.array(1), offset=0, scale=0.125)
shown = "window_counts_self", "window_mirrored", "window_in_blocks", "borders_wrap", "borders_weigh"
panels = {"right": window.dense(**see)[0][0, 0]}
panels |= {slug: np.reshape(window.BUGS[slug][1](see)[0], (8, 8)) for slug in shown}
figure = plot.attention_maps(panels, "A window of two back and one ahead, right and five times wrong")
plot.save(figure, "09_local_windows_mistakes", """Six maps of eight queries by eight keys. Right: a band of four. Counting
    the own key: a band of two. Mirrored: one back and two ahead. In blocks: squares and their neighbours. Wrapping:
    entries in the two far corners. Weighing borders: the first rows and the last sum to less than one.""")
print(table([(slug, *np.round(p.sum(1), 2)) for slug, p in panels.items()], ("sum of row", *"01234567")))

# %% [markdown]
# **One wrong port, caught live.** A negative index is no error in Python, it reads from the end, and a remainder
# makes sure of it at the other side.

# %%
# exercise
def port(q, k, v, lengths, left, right, dilation, offset, scale):
    o = np.zeros((*q.shape[:3], v.shape[3]))
    for i in range(q.shape[2]):
        keys = np.arange(i + offset - left, i + offset + right + 1) % k.shape[2]
        s = scale * q[:, :, i, None] @ k[:, :, keys].swapaxes(-1, -2)
        e = np.exp(s - s.max(-1, keepdims=True))
        o[:, :, i] = (e @ v[:, :, keys] / e.sum(-1, keepdims=True))[:, :, 0]
    return o


right = check_exercise("window", port, "top_left")

# %% [markdown]
# ## Where code in the wild differs
#
# The same word, and how many keys a query in the middle of a long text sees. `window.dense` takes them all:

# %%
w = 4
readings = {
    "Longformer, paper; transformers: w/2 each side": dict(left=w // 2, right=w // 2),
    "Longformer, code of the authors: w each side": dict(left=w, right=w),
    "Mistral, text: positions i - w to i": dict(left=w, right=0),
    "transformers, causal: w keys with the own": dict(left=w - 1, right=0),
    "transformers, bidirectional: distance up to w": dict(left=w, right=w),
    "flash-attention, jax, ONNX: (l, r) = (w, 0)": dict(left=w, right=0),
}
rows = [(name, sides["left"], sides["right"], masks.window(33, 33, **sides)[16].sum()) for name, sides in readings.items()]
rows.append(("local-attention, Reformer: own chunk of w and the one before", "", "",
             masks.blocks(masks.window(9, 9, 1, 0), w, 33, 33)[16:20].sum(1).mean().astype(int)))
print(table(rows, ("window = 4 means", "left", "right", "keys seen")))

# %% [markdown]
# - **The anchor.** jax has query 0 at key 0, flash-attention the last query at the last key, ONNX query 0 after the past.
#   With $T_q = T_k$ they agree; with a cache they do not. Here `offset` says which.
# - **Open.** -1 is open in flash-attention and ONNX; here None is, and 0 is a window of one key.
# - **Chunks are no window.** A query at the start of its chunk sees all of the chunk before, one at the end nearly two
#   chunks: `window_in_blocks`. And some code lets the first chunk look at the last, `borders_wrap`.

# %%
case = load_cases("window", "causal_blocks")[0]
for slug in "window_in_blocks", "window_counts_self", "window_top_left":
    off = np.abs(np.asarray(window.BUGS[slug][1](case.inputs)[0]) - case.outputs["o"]).max()
    print(f"{slug}: o is off by up to {off:.2f} in {case.id}")

# %% [markdown]
# ## Relations

# %%
y = {name: draw(name, (2, 3, 6, 4)) for name in "qkv"} | dict(scale=0.5)
whole = np.array([6, 6])
agree("open on both sides: attention", window.dense(**y, lengths=whole, offset=0)[0], sdpa.dense(**y)[0])
agree("(None, 0): causal", window.dense(**y, lengths=whole, right=0, offset=0)[0], sdpa.dense(**y, mask=masks.causal(6, 6))[0])
agree("(0, 0): o = v", window.dense(**y, lengths=whole, left=0, right=0, offset=0)[0], y["v"], 0)
parts = dict(query_segments=np.zeros((2, 6), int), key_segments=np.zeros((2, 6), int), anchor="bottom-right")
agree("the window of chapter 2", window.dense(**y, lengths=whole, left=2, right=1, offset=0)[0],
      masked.dense(**y, **parts, lengths=np.array([6, 6]), left=2, right=1)[0])
one = y | dict(q=y["q"][:, :, -1:])
agree("the last query alone, with its offset", window.dense(**one, lengths=whole, left=2, right=0, offset=5)[0],
      window.dense(**y, lengths=whole, left=2, right=0, offset=0)[0][:, :, -1:])
agree("dilation 2: two interleaved windows", window.dense(**y, lengths=whole, left=1, right=1, dilation=2, offset=0)[0][:, :, ::2],
      window.dense(**{a: y[a][:, :, ::2] for a in "qkv"}, scale=0.5, lengths=np.array([3, 3]), left=1, right=1, offset=0)[0])

# %% [markdown]
# ## In a box
#
# | | |
# |---|---|
# | formula | (9.1): softmax over $j = i + offset + t D$, $-left \le t \le right$ |
# | shapes | q (B, H, Tq, dk), k (B, H, Tk, dk), v (B, H, Tk, dv) to o (B, H, Tq, dv), lse (B, H, Tq) |
# | cost | $T (left + right + 1)$ pairs, work and memory; a cache of $left + 1$ keys |
# | reach | $left$ more with every layer; a factor more if dilations grow |
# | backward | the transposed band is a band with its sides exchanged |
# | when | what matters is near, or layers are many |
# | goes wrong | the own key counted, one side lost, the wrong anchor, borders that wrap or weigh, dilation in tokens |
#
# ## Exercises
#
# **1. Repair the port**, for lengths, dilation and open sides too.

# %%
# exercise
def repaired(q, k, v, lengths, left, right, dilation, offset, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("window", repaired)

# %% [markdown]
# **2. In blocks.** Cut queries into blocks of $b = left + 1$, causal: a block needs its own keys and those of the block
# before, and a mask within. Write it for `right = 0`, $D = 1$ and full lengths, with two products for each block.

# %%
# exercise
def in_blocks(q, k, v, left, right, offset, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("window", in_blocks, "causal_blocks")

# %% [markdown]
# **3. How many layers** of $(w, 0)$ does the last of $T$ tokens need to know of the first?

# %%
# exercise
def layers_needed(T, w):
    raise NotImplementedError("not written yet")


# %% [markdown]
# ## Answers
#
# **1.** Places that do not exist are left out, and a query that has none left gives 0.

# %%
# exercise
def repaired(q, k, v, lengths, left, right, dilation, offset, scale):
    (B, H, Tq, _), Tk = q.shape, k.shape[2]
    o, D = np.zeros((B, H, Tq, v.shape[3])), np.broadcast_to(dilation, H)
    for b, h, i in np.ndindex(B, H, Tq):
        step = (np.arange(lengths[b]) - i - offset) / D[h]
        keys = np.flatnonzero((step == np.round(step)) & (step >= (-np.inf if left is None else -left))
                              & (step <= (np.inf if right is None else right)))
        if len(keys):
            s = scale * k[b, h, keys] @ q[b, h, i]
            e = np.exp(s - s.max())
            o[b, h, i] = e @ v[b, h, keys] / e.sum()
    return o


assert check_exercise("window", repaired)

# %% [markdown]
# **2.** With $b = left + 1$ the oldest key that a block can see is the second of the block before.

# %%
# exercise
def in_blocks(q, k, v, left, right, offset, scale):
    o, b = np.zeros((*q.shape[:3], v.shape[3])), left + 1
    for start in range(0, q.shape[2], b):
        i = np.arange(start, min(start + b, q.shape[2]))
        j = np.arange(max(0, start + offset - left), min(k.shape[2], start + offset + b))
        gap = j - (i + offset)[:, None]
        s = np.where((gap >= -left) & (gap <= right), scale * q[:, :, i] @ k[:, :, j].swapaxes(-1, -2), -np.inf)
        e = np.exp(s - s.max(-1, keepdims=True))
        o[:, :, i] = e @ v[:, :, j] / e.sum(-1, keepdims=True)
    return o


assert check_exercise("window", in_blocks, "causal_blocks")

# %% [markdown]
# **3.** The distance is $T - 1$, and each layer adds $w$.

# %%
# exercise
def layers_needed(T, w):
    return -(-(T - 1) // w)


for T, w in (33, 4), (34, 4), (10, 9), (100, 7):
    hop = lambda n: np.linalg.matrix_power(masks.window(T, T, w, 0).astype(float), n)[-1, 0] > 0
    agree(f"T = {T}, w = {w}: {layers_needed(T, w)} layers, not one less", [hop(layers_needed(T, w)), hop(layers_needed(T, w) - 1)],
          [True, False], 0)

# %% [markdown]
# ## Sources
#
# - Beltagy, Peters, Cohan 2020, *Longformer*, arXiv:2004.05150: section 3.1, sliding window, dilation for each head, reach.
# - Child et al. 2019, *Sparse transformers*, arXiv:1904.10509: section 4.3, local and strided patterns.
# - Jiang et al. 2023, *Mistral 7B*, arXiv:2310.06825: section 2, window and rolling cache, reach over layers.
# - van den Oord et al. 2016, *WaveNet*, arXiv:1609.03499: dilations that grow, each token reached in one way.
# - The comparisons with torch, jax and transformers run in the project's tests: `make peers`.
