# %% [markdown]
# # Multi-head and cross-attention
#
# **Heads are columns of one projection, and what they find adds up. Cross-attention is the same formula, asked by one
# sequence and answered by another.**
#
# $X$ holds the tokens that ask, one a row, and $Z$ the tokens that are read. Head $h$ has four matrices: it makes
# queries from $X$, keys and values from $Z$, attends as in [chapter 1](01_scaled_dot_product.ipynb), and writes what
# it found back to the width of $X$. With $Z = X$ this is multi-head self-attention:
#
# $$
# \begin{aligned}
# q_h &= X W_Q^h & k_h &= Z W_K^h & v_h &= Z W_V^h \\
# s_h &= scale \thinspace q_h k_h^T & p_h &= \mathrm{softmax}(s_h \text{ where } mask) & head_h &= p_h v_h \\
# o &= [head_0 \dots head_{H-1}] \thinspace W_O = \sum_h head_h W_O^h
# \end{aligned}
# \tag{3.1}
# $$
#
# Nobody stores the matrices of a head apart. They are stored side by side, $W_Q = [W_Q^0 \dots W_Q^{H-1}]$, one
# product makes the queries of all heads, and the only thing left to get wrong is which number belongs to whom. That is
# what most wrong ports get wrong.

# %%
import numpy as np

from attention_ref import core, cross, gqa, load_cases, masks, multi_head, plot, sdpa
from attention_ref.conformance.numbers import count
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw

np.set_printoptions(precision=4, suppress=True)
WEIGHTS = "w_q", "w_k", "w_v", "w_o"

# %% [markdown]
# ## The contract
#
# Two functions, one set of conventions. `multi_head` is `cross` with $Z = X$: `T` for `Tq` and `Tk`, `D` for `Dz`.
# (An axis with `?` may be 1 or, in front, missing: it is broadcast.)

# %%
shapes = {name: text or "a number" for name, text in (cross.INPUTS | cross.OUTPUTS).items()}
alone = {name: text or "a number" for name, text in (multi_head.INPUTS | multi_head.OUTPUTS).items()}
print(table([(name, text, alone.get(name, "is x")) for name, text in shapes.items()], ("name", "cross", "multi_head")))
print()
print(table(multi_head.CONVENTIONS.items(), ("what", "convention")))

# %% [markdown]
# 1. **Sizes.** `B` batch entries, independent of one another. `H` heads, keys `dk` and values `dv` wide: neither need
#    be the model width `D` divided by `H`, and neither need be equal to the other. `Z` has its own length `Tk`, which
#    may be 0, and its own width `Dz`.
# 2. **Orientation.** Tokens are rows and weights are (in, out): $Q = X W_Q$.
# 3. **Heads are contiguous.** Head $h$ owns columns $h \thinspace d_k$ to $(h+1) d_k - 1$ of $W_Q$ and $W_K$, columns
#    $h \thinspace d_v$ to $(h+1) d_v - 1$ of $W_V$, and the rows of the same numbers of $W_O$.
# 4. **heads** is an integer without a default. Widths that it does not divide are an error.
# 5. **scale** is a number without a default; the paper takes $1/\sqrt{d_k}$, of the *head*. It multiplies $q$ before
#    the product with $k$.
# 6. **mask** is boolean, True = may attend, and broadcasts to (B, H, Tq, Tk): heads may have masks of their own. It
#    selects. All True means none. Nothing is causal unless a mask says so, and between two sequences none should.
# 7. **A query without keys** in some head gets 0 from that head; in all heads, $o = 0$.
# 8. **Never read.** A token that attends to nothing in any head, and that no token attends to in any head, may hold
#    anything, NaN included. Of two sequences: a token of $Z$ that no query attends to, a token of $X$ that has no key.
# 9. **Biases** are not arguments. A bias is one more row of a weight, for a feature that is 1 (below).
# 10. **Nothing else.** No bias on scores, no cap, no sink, no lse: they have their places inside each head
#     (chapter 1). Outputs have the type of the inputs, and exponentials are taken of $s - \max s$.
# 11. **Steps** that a port may return beside `o`, by these names: `q`, `k`, `v`, `scores` and `weights` of every head,
#     (B, H, ...), and `concat` (B, Tq, H dv), the heads side by side.
# 12. **Gradients** exist for $X$, $Z$ and the four weights, each in the shape of its argument, summed over batch and
#     tokens. What is masked or never read gets exactly 0.

# %% [markdown]
# ## Three tokens, two heads, by hand
#
# Three tokens of two features, causal. Two heads, keys 2 wide and values 3, so $W_Q$ and $W_K$ are (2, 4), $W_V$ is
# (2, 6) and $W_O$ is (6, 2). The scale is 0.75, which is no root of anything here. The first score of head 0 will be
# $0.75 \thinspace (1.25 \cdot 0.125 + 0.25 \cdot 1.25) = 0.3516$.

# %%
x = np.array([[1, -0.5], [0.5, 2], [-1, 1.5]])
w_q = np.array([[1, 0.25, -0.5, 1], [-0.5, 1, 0.5, 0.5]])
w_k = np.array([[0.5, -1, 1, -0.5], [0.75, 0.5, -0.5, 0.5]])
w_v = np.array([[1, -1, 2, 0.5, 3, -2], [0.5, 2, -1, -1.5, 1, 0.25]])
w_o = np.array([[1, 0.5], [-1, 2], [0.5, -0.5], [2, 1], [-0.5, 1.5], [1, -2]])
mask, scale, heads = masks.causal(3, 3), 0.75, 2
q, k, v = x @ w_q, x @ w_k, x @ w_v
print("q", q, "k", k, "v", v, sep="\n")

# %% [markdown]
# One product each, for both heads. Columns 0 and 1 of $q$ are the queries of head 0, columns 2 and 3 those of head 1;
# rows 0 to 2 of $W_O$ are where head 0 writes, rows 3 to 5 are where head 1 does.

# %%
columns = {}
for letter, w, d in ("Q", w_q, 2), ("K", w_k, 2), ("V", w_v, 3):
    columns[f"$W_{letter}$"] = np.broadcast_to(np.arange(w.shape[1]) // d, w.shape), w
columns["$W_O$"] = np.broadcast_to(np.arange(6)[:, None] // 3, w_o.shape), w_o
figure, axes = plot.subplots(1, 4, size=(2.2, 2.1))
for axis, (name, (head, numbers)) in zip(axes, columns.items()):
    plot.group_map(axis, head, numbers, name, labels=("out", "in"))
    axis.set_aspect("auto")
figure.suptitle("Head 0 (blue) and head 1 (orange): columns of three weights, rows of the fourth")
plot.save(figure, "03_multi_head_and_cross_columns", """Four weight matrices, cells coloured by head. In W_Q and W_K,
    two rows by four columns, the left two columns belong to head 0 and the right two to head 1; in W_V, two by six,
    three columns each; in W_O, six rows by two columns, the upper three rows belong to head 0, the lower three to
    head 1.""")

# %% [markdown]
# From here on the heads do not know of each other, until their contributions are added.

# %%
o = np.zeros((3, 2))
for h in range(heads):
    of_k, of_v = slice(2 * h, 2 * h + 2), slice(3 * h, 3 * h + 3)
    s = scale * q[:, of_k] @ k[:, of_k].T
    a = np.where(mask, s, -np.inf)
    e = np.exp(a - a.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    head = p @ v[:, of_v]
    o += head @ w_o[of_v]
    print(f"head {h}: scores", s, "weights", p, "head", head, "adds to o", head @ w_o[of_v], sep="\n", end="\n\n")
print("o", o, sep="\n")

# %% [markdown]
# The package concatenates first and multiplies once. Token 2 reads mostly itself in head 0 and mostly token 0 in
# head 1: one query, two answers.

# %%
w = dict(w_q=w_q, w_k=w_k, w_v=w_v, w_o=w_o, heads=heads, scale=scale)
agree("o by hand", o, multi_head.dense(x[None], mask=mask, **w)[0])
*_, concat = multi_head.steps(x[None], mask=mask, **w)
print("concat", concat[0], sep="\n")
agree("concat @ W_O is the sum over heads", concat[0] @ w_o, o)

# %% [markdown]
# **Now with two sequences.** $Z$ has two tokens of three features, so $W_K$ and $W_V$ have three rows. The queries are
# the same as before, and so is every line but one: there is no mask, for nothing in $Z$ is later than something in $X$.

# %%
z = np.array([[2, -1, 0.5], [-0.5, 1, 1.5]])
w_kz = np.array([[0.5, 0.25, -1, 0.5], [-0.5, 0.5, 0.75, 1], [1, -0.5, 0.5, -0.25]])
w_vz = np.array([[1, 2, -1, 0.5, -0.5, 3], [-2, 1, 0.5, 1, 2, -1], [0.5, -1, 1, 2, -1, 1]])
k, v, o_across = z @ w_kz, z @ w_vz, np.zeros((3, 2))
print("k", k, "v", v, sep="\n", end="\n\n")
for h in range(heads):
    of_k, of_v = slice(2 * h, 2 * h + 2), slice(3 * h, 3 * h + 3)
    s = scale * q[:, of_k] @ k[:, of_k].T
    e = np.exp(s - s.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    o_across += p @ v[:, of_v] @ w_o[of_v]
    print(f"head {h}: scores", s, "weights", p, "head", p @ v[:, of_v], sep="\n", end="\n\n")
print("o", o_across, sep="\n")
agree("o by hand", o_across, cross.dense(x[None], z[None], **w | dict(w_k=w_kz, w_v=w_vz))[0])
agree("to itself, it is self-attention", cross.dense(x[None], x[None], mask=mask, **w)[0], o)

# %% [markdown]
# ## The code
#
# Three projections, one split, plain attention, one merge, one projection.

# %%
plot.show(cross, "project", "dense")
plot.show(core, "split_heads", "merge_heads")

# %% [markdown]
# ### The split, drawn
#
# All the danger is in two reshapes. Above, the four columns of $q$ for three tokens, each number coloured by the head
# that takes it under three readings; the text says for which token the head takes it. Only the first reading gives a
# head neighbouring columns, and only the first two leave a row one token. Below, the way back: which head and which
# token a number of `concat` comes from.

# %%
B, H, T, d = 1, 2, 3, 2
head, token = (np.broadcast_to(a, (B, H, T, d)) for a in (np.arange(H)[:, None, None], np.arange(T)[:, None]))
readings = {"right": (core.split_heads, core.merge_heads), "interleaved": (cross.interleaved, cross.merge_interleaved),
            "by view": (cross.by_view, cross.merge_by_view)}
figure, axes = plot.subplots(2, 3, size=(2.6, 1.9))
for column, (name, (split, merge)) in zip(axes.T, readings.items()):
    where = np.argsort(split(np.arange(T * H * d).reshape(B, T, H * d), H).ravel()).reshape(T, H * d)
    plot.group_map(column[0], head.ravel()[where], np.char.add("t", token.ravel()[where].astype(str)),
                   f"split, {name}", labels=("column", "row of q"))
    plot.group_map(column[1], merge(head)[0], np.char.add("t", merge(token)[0].astype(str)),
                   f"merge, {name}", labels=("column", "row of concat"))
    for axis in column:
        axis.set(xticks=[], yticks=[])
figure.suptitle("A view mixes tokens; interleaving mixes heads; both have the right shape")
plot.save(figure, "03_multi_head_and_cross_split", """Six grids of three rows by four columns, coloured by head, marked
    with tokens. Right, split and merge alike: the left two columns are head 0, the right two head 1, and row t is
    token t. Interleaved: columns alternate between the heads, rows are tokens. By view: head 0 takes the first six
    numbers, row 0 as its tokens 0 and 1 and half of row 1 as its token 2, head 1 the rest; merging by view, row 0
    holds tokens 0 and 1 of head 0.""")

numbers = draw("v", (2, 5, 12))
for name, (split, merge) in readings.items():
    agree(f"{name}: the merge undoes the split", merge(split(numbers, 3)), numbers, 0)

# %% [markdown]
# Each merge undoes its split, so a test that goes there and back proves nothing. Worse, a model *trained* with
# interleaved heads is a good model: its weights have their columns in another order. It is wrong only with weights
# that came from elsewhere. The view is another matter: it hands a head numbers of the wrong tokens, and no order of
# the weights' columns makes that right.
#
# ## Derivation: forward
#
# **Columns.** A product with matrices side by side is the products side by side. And a row of heads times a stack of
# matrices is a sum. That is all there is to "multi-head":
#
# $$
# X \thinspace [W^0 \dots W^{H-1}] = [X W^0 \dots X W^{H-1}] \qquad
# [head_0 \dots head_{H-1}] \begin{bmatrix} W_O^0 \\ \vdots \\ W_O^{H-1} \end{bmatrix} = \sum_h head_h W_O^h
# \tag{3.2}
# $$
#
# **Two matrices a head.** Put (3.1) together for one head, without naming $q$, $k$, $v$:
#
# $$
# s_h = scale \thinspace X A_h Z^T, \quad A_h = W_Q^h (W_K^h)^T \qquad
# o = \sum_h p_h \thinspace Z B_h, \quad B_h = W_V^h W_O^h
# \tag{3.3}
# $$
#
# $A_h$ ($D$ by $D_z$) says who looks at whom, $B_h$ ($D_z$ by $D$) what is passed on; their ranks are at most $d_k$
# and $d_v$. Keys and values need not exist. This is the *absorbed* form. It also says what the four matrices of a
# head do *not* determine: for any invertible $G$, $W_Q^h G$ and $W_K^h G^{-T}$ give the same $A_h$. Nothing that a
# single channel of $q$ or $k$ holds has a meaning of its own.

# %%
case = load_cases("cross", "basic")[0]
y, o = case.inputs, case.outputs["o"]
four = list(cross.of_each_head(*(y[name] for name in WEIGHTS), y["heads"]))
for name, wide, w in zip("qkv", cross.project(*(y[a] for a in ("x", "z", *WEIGHTS[:3])), y["heads"]), zip(*four)):
    tokens = y["x" if name == "q" else "z"]
    agree(f"(3.2) {name}: head by head = all at once", np.stack([tokens @ m for m in w], 1), wide)
p = dict(zip(cross.STEPS, cross.steps(**y)))["weights"]
agree("(3.3) o = sum of p_h Z B_h", sum(p[:, h] @ y["z"] @ wv @ wo for h, (*_, wv, wo) in enumerate(four)), o)

G = np.eye(4) + 0.5 * draw("w_q", (4, 4))
turned = [np.hstack(blocks) for blocks in zip(*((wq @ G, wk @ np.linalg.inv(G).T) for wq, wk, *_ in four))]
agree("turned by G, the same o", cross.dense(**y | dict(w_q=turned[0], w_k=turned[1])), o)
print("but other queries: they move by up to", np.abs(y["x"] @ (turned[0] - y["w_q"])).max().round(1))

# %% [markdown]
# **Biases are one more row.** Give every token a feature that is 1. Then the row of $W$ that it meets is added to
# every query, key or value: it *is* the bias, and nothing in (3.1) changes. Two of the biases are easy to follow
# through to the end. Write $k_j + b_K$ and $v_j + b_V$ in head $h$:
#
# $$
# s_{ij} = scale \thinspace (q_i \cdot k_j + q_i \cdot b_K) \qquad
# \sum_j p_{ij} (v_j + b_V) = \Big( \sum_j p_{ij} v_j \Big) + b_V
# \tag{3.4}
# $$
#
# The first adds the same number to the whole row $i$, and softmax does not see it: $b_K$ moves nothing, and its
# gradient is 0. (Whisper, for one, has no $b_K$.) The second holds because a row of weights sums to one: $b_V$ adds
# the constant $b_V W_O$ to every output, and could as well be part of an output bias $b_O$, which is added to $o$ at
# the very end. Both need a row that has keys; one that has none stays 0. Only $b_Q$ does something: it adds
# $b_Q \cdot k_j$, a preference for certain keys whoever asks.

# %%
t = load_cases("multi_head", "left_padding")[0].inputs
t = t | dict(x=np.concatenate([t["x"], np.ones((2, 5, 1))], 2), w_o=np.insert(t["w_o"], 8, 0, axis=1))
bias = dict(w_q=draw("q", (1, 12)), w_k=draw("k", (1, 12)), w_v=draw("v", (1, 21)))
with_rows = lambda *names: t | {n: np.vstack([t[n], bias[n] if n in names else 0 * bias[n]]) for n in WEIGHTS[:3]}
o, o_k, o_v, o_q = (multi_head.dense(**with_rows(*names)) for names in ((), ("w_k",), ("w_v",), ("w_q",)))
has_keys = t["mask"].any(-1).swapaxes(1, 2)
agree("b_K moves nothing", o_k, o)
agree("b_V adds b_V W_O where there are keys", o_v, o + has_keys * (bias["w_v"] @ t["w_o"]))
agree("... and nothing where there are none", o_v[1, :2], 0, 0)
db = multi_head.vjp(draw("x", o.shape), **with_rows("w_q", "w_k", "w_v"))
agree("the gradient of b_K is 0", db["dw_k"][-1], 0)
print("b_Q moves o by up to", np.abs(o_q - o).max().round(2), "and has the gradient", db["dw_q"][-1, :4], "...")

# %% [markdown]
# ## Forms that agree
#
# Three more texts of the same formula. The first concatenates nothing, the second has neither keys nor values, the
# third is in scalars, for other languages; `per_head` broadcasts the mask and hands over one batch entry with all its
# heads. The loop of self-attention is that of cross-attention, called with one sequence twice.

# %%
plot.show(multi_head, "dense", "per_head_sum")
plot.show(cross, "of_each_head", "absorbed", "loop")

# %% [markdown]
# The largest errors against the certified values, in each number system; `balls` is the radius that interval
# arithmetic leaves around them.

# %%
for variant, name in ("multi_head", "causal_and_padding"), ("cross", "mask_per_head"), ("cross", "large_scores"):
    print(f"{variant}/{name}: {load_cases(variant, name)[0].why}")
    forms_table(variant, name)
    print()

# %% [markdown]
# ## The weights of each head
#
# Four tokens, three heads, and beside them what is not a head: the mean of the three maps, which torch returns when
# asked for weights, and one head of all twelve channels. With one head the *scores* of the three add up, before the
# softmax; with three their *outputs* do, after it. The last map is head 1 again, for the same tokens in another order.

# %%
tokens = dict(x=draw("x", (1, 4, 8)), heads=3, scale=0.5) | {n: draw(n, (8, 12)) for n in WEIGHTS[:3]}
tokens |= dict(w_o=draw("w_o", (12, 8)))
steps_of = lambda **x: dict(zip(multi_head.STEPS, multi_head.steps(**x)))
order = np.array([3, 0, 2, 1])
shuffled = tokens | dict(x=tokens["x"][:, order])
p, one = steps_of(**tokens)["weights"][0], steps_of(**tokens | dict(heads=1))["weights"][0, 0]
panels = {f"head {h}": p[h] for h in range(3)} | {"mean of the three": p.mean(0), "one head, 12 channels": one}
panels["head 1, tokens shuffled"] = steps_of(**shuffled)["weights"][0, 1]
figure = plot.attention_maps(panels, "Three heads ask three questions; no one map is their sum")
for axis in figure.axes[:5]:
    axis.set(xticks=[], yticks=[])
figure.axes[5].set(xticklabels=order, yticklabels=order)
plot.save(figure, "03_multi_head_and_cross_heads", """Six maps of four by four weights. Head 0 is spread out, head 1 has
    two queries that look past keys 1 and 2, head 2 looks at keys 1 and 2. Their mean lies between 0.19 and 0.33
    everywhere. One head of all twelve channels is as sharp as any and looks elsewhere. Head 1 for tokens 3 0 2 1 holds
    the numbers of head 1, rows and columns in that order.""")

o, x3 = multi_head.dense(**tokens), tokens["x"]
agree("one head: the scores of the three, added", steps_of(**tokens | dict(heads=1))["scores"][0, 0],
      steps_of(**tokens)["scores"][0].sum(0))
OV = [wv @ wo for *_, wv, wo in cross.of_each_head(*(tokens[n] for n in WEIGHTS), 3)]
agree("three heads: their outputs, added", sum(p[h] @ x3 @ OV[h] for h in range(3)), o)
print("with the mean map for each: off by", np.abs(p.mean(0) @ x3 @ sum(OV) - o).max().round(1))

# %% [markdown]
# There is no mixing matrix $M$ with $o = M X$ any more, nor one with $o = M X B$: each head mixes tokens with its
# $p_h$ and features with its $B_h$. It is a sum of $H$ such pairs, and a map that leaves out the $B_h$, as the mean
# does, tells less than it seems to.
#
# **Order does not exist.** Let $\Pi$ be a permutation matrix: $\Pi X$ has the tokens in another order. Then $q$, $k$,
# $v$ are permuted, $s$ becomes $\Pi s \Pi^T$, softmax works row by row and keeps that, and since $\Pi^T \Pi = 1$,
#
# $$
# o(\Pi X) = \sum_h (\Pi p_h \Pi^T)(\Pi v_h) W_O^h = \Pi \thinspace o(X) \qquad
# o(\Pi_X X, \Pi_Z Z) = \Pi_X \thinspace o(X, Z)
# \tag{3.5}
# $$
#
# Self-attention is *equivariant*: tokens may come in any order and take their outputs with them. Across two sequences
# the order of $Z$ does not matter at all. All that a model knows of order it is told by masks, by biases on the
# scores, or in the tokens. A mask must be permuted along, rows and columns.

# %%
agree("the maps are permuted", steps_of(**shuffled)["weights"][0], p[:, order][:, :, order])
agree("(3.5) self: o is permuted", multi_head.dense(**shuffled), o[:, order])
agree("(3.5) cross: the order of z is nothing", cross.dense(z=shuffled["x"], **tokens), o)
causal = masks.causal(4, 4)
under, left = multi_head.dense(**tokens, mask=causal), multi_head.dense(**shuffled, mask=causal)
agree("with the mask permuted along", multi_head.dense(**shuffled, mask=causal[order][:, order]), under[:, order])
print("with the mask left as it was: off by", np.abs(left - under[:, order]).max().round(1))

# %% [markdown]
# ## Two sequences
#
# In an encoder-decoder $Z$ is what the encoder made of the source, once. So are its keys and values: they are the
# same for every token that the decoder makes, and are kept. Nothing is causal here. That the decoder cannot see its
# own future is the business of its self-attention; in (3.1) row $i$ of $o$ depends on row $i$ of $X$ and on no other,
# so a token at a time gives what all at once give.

# %%
n = dict(B=2, H=3, Tq=4, Tk=6, D=8, Dz=5, dk=4, dv=7)
y = {name: draw(name, [int(np.prod([n[s] for s in axis.split("*")])) for axis in cross.INPUTS[name].split()])
     for name in ("x", "z", *WEIGHTS)} | dict(mask=masks.padding([6, 4], 6), heads=3, scale=0.5)
o = cross.dense(**y)
k, v = (core.split_heads(y["z"] @ y[name], 3) for name in ("w_k", "w_v"))     # once
made = []
for t in range(4):                                                           # a token at a time
    q = core.split_heads(y["x"][:, t:t + 1] @ y["w_q"], 3)
    made.append(core.merge_heads(sdpa.dense(q, k, v, y["mask"], scale=0.5)[0]) @ y["w_o"])
agree("token by token, K and V computed once", np.concatenate(made, 1), o)

padded = y | dict(z=np.where(y["mask"][:, 0, 0, :, None], y["z"], np.nan))
agree("NaN in the padding of z is not read", cross.dense(**padded), o, 0)
entry = y | dict(x=y["x"][1:], z=y["z"][1:, :4], mask=np.array(True))
agree("padded to six = alone, with four", cross.dense(**entry), o[1:])
mute = y | dict(x=y["x"].copy(), mask=y["mask"] & (np.arange(4)[:, None] != 2))
mute["x"][:, 2] = np.nan
agree("NaN in a query without keys is not read: o = 0", cross.dense(**mute)[:, 2], 0, 0)
agree("nothing to read: o = 0", cross.dense(**y | dict(z=y["z"][:, :0], mask=np.array(True))), 0, 0)

# %% [markdown]
# The mask of cross-attention is the padding of *the other* sequence, (B, 1, 1, Tk), and two things are done to it
# that should not be. To see them, choose inputs that make the output show the weights: let the tokens of $Z$ be the
# unit vectors, every $W_V^h$ the identity, and $W_O$ the identity of full width. Then $head_h = p_h$, and $o$ is the
# maps of the heads side by side. Query 2 is itself padding.

# %%
see = dict(x=draw("x", (1, 3, 8)), z=np.eye(4)[None], w_q=draw("w_q", (8, 8)), w_k=draw("w_k", (4, 8)),
           w_v=np.tile(np.eye(4), 2), w_o=np.eye(8), heads=2, scale=0.5,
           mask=masks.padding([3], 4) & masks.padding([2], 3).swapaxes(-1, -2))
panels = {"right": (cross.dense(**see)[0], np.tile(see["mask"][0, 0], 2))}
for slug in "causal_across", "padding_of_wrong_side":
    panels[slug] = np.reshape(cross.BUGS[slug][1](see), (3, 8))
figure = plot.attention_maps(panels, "The mask between two sequences is the padding of the one that is read",
                             labels=("keys 0 to 3 of head 0, then of head 1", "query i"))
figure.set_size_inches(8.9, 1.8)
for axis in figure.axes[:-1]:
    axis.axvline(3.5, color="white", linewidth=1.5)
    axis.set(xticks=[], yticks=[])
plot.save(figure, "03_multi_head_and_cross_across", """Three maps of three queries by two times four keys, the maps of
    two heads side by side. Right: queries 0 and 1 see keys 0 to 2, the last key is padding, query 2 sees nothing.
    Causal across: query 0 sees key 0 alone and query 1 two keys. Padding of the wrong side: all see two keys, as many
    as there are real queries.""")

# %% [markdown]
# ## What it costs
#
# A multiply-add is two operations. Four projections, and in each head what chapter 1 counted, (1.4), without its bias:
#
# $$
# \begin{aligned}
# projections &= 2B \left( T_q D H d_k + T_k D_z H (d_k + d_v) + T_q H d_v D \right) \\
# attention &= B H \left( 2 \thinspace T_q T_k (d_k + d_v) + 4 \thinspace T_q T_k + T_q d_k + 3 \thinspace T_q \right)
# \end{aligned}
# \tag{3.6}
# $$
#
# With one sequence of $T$ tokens and the paper's widths, $d_k = d_v = D/H$, this is $8 B T D^2$ and, without the small
# terms, $4 B T^2 D$. They meet at $T = 2D$: up to twice as many tokens as features, a layer of "attention" mostly
# projects. $H$ has gone: more heads of less width cost no more products, and have no more parameters. They cost
# exponentials, $B H T^2$.

# %%
def sized(Tq, Tk, D, Dz, H, dk, dv, B=1):
    shapes = dict(x=(B, Tq, D), z=(B, Tk, Dz), w_q=(D, H * dk), w_k=(Dz, H * dk), w_v=(Dz, H * dv), w_o=(H * dv, D))
    return {name: draw(name, shape) for name, shape in shapes.items()} | dict(heads=H, scale=0.5)


rows = []
for B, Tq, Tk, D, Dz, H, dk, dv in (2, 5, 8, 10, 9, 3, 4, 7), (1, 3, 3, 8, 8, 2, 4, 4), (2, 24, 16, 12, 20, 4, 8, 3):
    counted = count(cross.dense, **sized(Tq, Tk, D, Dz, H, dk, dv, B))
    projections = 2 * B * (Tq * D * H * dk + Tk * Dz * H * (dk + dv) + Tq * H * dv * D)
    attention = B * H * (2 * Tq * Tk * (dk + dv) + 4 * Tq * Tk + Tq * dk + 3 * Tq)
    rows.append(((B, Tq, Tk, D, Dz, H, dk, dv), counted["flops"], projections + attention, projections, attention))
print(table(rows, ("B, Tq, Tk, D, Dz, H, dk, dv", "flops counted", "(3.6)", "projections", "attention")))
agree("(3.6)", [row[1] for row in rows], [row[2] for row in rows], 0)
for H in 1, 2, 4, 8:
    counted = count(cross.dense, **sized(64, 64, 32, 32, H, 32 // H, 32 // H))
    parameters = sum(w.size for name, w in sized(1, 1, 32, 32, H, 32 // H, 32 // H).items() if name in WEIGHTS)
    print(f"H = {H}: {counted['flops']} flops, {counted['exp']:6} exponentials and logarithms, {parameters} weights")

# %% [markdown]
# And between two sequences: what keeping $K$ and $V$ saves, and what the absorbed form is for. It keeps $Z$ alone,
# $D_z$ numbers a token in place of $H(d_k + d_v)$, makes no keys, and pays with products as wide as $Z$ in each head.
# That is a bargain for few queries, or where $D_z$ is small: DeepSeek's latent attention is built on it.

# %%
T, D, H = [32, 64, 128, 256, 512], 64, 4
flops = {name: [] for name in ("projections", "attention in the heads")}
for t in T:
    y = sized(t, t, D, D, H, D // H, D // H)
    q, k, v = cross.project(*(y[name] for name in ("x", "z", *WEIGHTS[:3])), H)
    flops["attention in the heads"].append(count(sdpa.dense, q=q, k=k, v=v, scale=0.5)["flops"])
    flops["projections"].append(count(cross.dense, **y)["flops"] - flops["attention in the heads"][-1])
made = [1, 4, 16, 64]
one = sized(1, 64, D, D, H, D // H, D // H)
anew, absorbed = count(cross.dense, **one)["flops"], count(cross.absorbed, **one)["flops"]
figure, axes = plot.subplots(1, 2, size=(4.0, 3.1))
plot.lines(axes[0], T, flops, "tokens T", "operations", f"D = {D}: attention overtakes\nthe projections near T = 2D")
axes[0].axvline(2 * D, color="0.6", linewidth=0.8, linestyle=":")
plot.lines(axes[1], made, {
    "K, V anew for every token": [m * anew for m in made], "absorbed, only Z kept": [m * absorbed for m in made],
    "K, V computed once": [count(cross.dense, **sized(m, 64, D, D, H, D // H, D // H))["flops"] for m in made]},
    "tokens made", "operations", "Reading 64 tokens of Z,\none query at a time")
for axis in axes:
    axis.set_yticks([], minor=True)
plot.save(figure, "03_multi_head_and_cross_cost", """Two log-log plots of counted operations. Left, for 64 features
    and four heads: projections grow with T, attention with its square, and the lines cross just before T = 128,
    twice the features. Right, for a decoder that reads 64 tokens: computing keys and values anew for every token
    made is dearest; computed once, the cost is nearly flat at first; the absorbed form is cheaper than that for fewer
    than 16 tokens.""")
near = np.interp(0, np.log(np.divide(flops["attention in the heads"], flops["projections"])), np.log(T))
print(f"they cross at T = {np.exp(near):.0f}, a little before 2D = {2 * D}: the small terms of (3.6)")

# %% [markdown]
# ## Derivation: backward
#
# **A product.** Write $\langle A, B \rangle$ for the sum of all products of entries, so that
# $dL = \langle dY, \delta Y \rangle$ for any change $\delta Y$. For $Y = X W$ the change is
# $\delta X \thinspace W + X \thinspace \delta W$, and a factor moves across by transposition:
#
# $$
# \langle dY, \delta X \thinspace W \rangle = \langle dY \thinspace W^T, \delta X \rangle \qquad
# \langle dY, X \thinspace \delta W \rangle = \langle X^T dY, \delta W \rangle
# \tag{3.7}
# $$
#
# so $dX = dY \thinspace W^T$ and $dW = X^T dY$, the second summed over the batch, for every entry uses the same $W$.
#
# **Backwards through (3.1).** $W_O$ first, then each head as in chapter 1, equations (1.6) and (1.7), then the
# projections:
#
# $$
# \begin{aligned}
# dW_O &= concat^T do & dhead_h &= do \thinspace (W_O^h)^T \\
# dp_h &= dhead_h \thinspace v_h^T & ds_h &= p_h \odot (dp_h - row), \quad row_i = \sum_j p_{ij} dp_{ij} \\
# dq_h &= scale \thinspace ds_h k_h & dk_h &= scale \thinspace ds_h^T q_h \qquad dv_h = p_h^T dhead_h \\
# dW_Q &= X^T dq & dW_K &= Z^T dk \qquad dW_V = Z^T dv
# \end{aligned}
# \tag{3.8}
# $$
#
# **Three paths.** $L$ reads the tokens in three places, $L = F(X_q, X_k, X_v)$ with $X_q = X$ and $X_k = X_v = Z$. The
# derivative is the sum over the places that a matrix stands in:
#
# $$
# dX = dq \thinspace W_Q^T \qquad dZ = dk \thinspace W_K^T + dv \thinspace W_V^T \qquad
# Z = X: \quad dX = dq \thinspace W_Q^T + dk \thinspace W_K^T + dv \thinspace W_V^T
# \tag{3.9}
# $$
#
# A forgotten path leaves a gradient of the right shape, and of a size that does not give it away.

# %%
plot.show(cross, "vjp_of_heads", "of_weight", "vjp")
plot.show(multi_head, "vjp")

# %%
for variant, name in ("multi_head", "left_padding"), ("cross", "mask_per_head"):
    print(f"{variant}/{name}: {load_cases(variant, name)[0].why}")
    gradient_table(variant, name)
    print()

# %% [markdown]
# Identities for a test without an oracle. $o$ is linear in $W_O$ and in $W_V$, so $\langle W_O, dW_O \rangle$,
# $\langle W_V, dW_V \rangle$ and $\langle o, do \rangle$ are one number. $q$ and $k$ meet only in $q \cdot k$, so
# $\langle W_Q, dW_Q \rangle = \langle W_K, dW_K \rangle$. More than that: as turning a head by $G$ in (3.3) changes
# nothing, the derivative along every such turn is 0, head by head, which makes
# $(W_Q^h)^T dW_Q^h = (dW_K^h)^T W_K^h$, a $d_k$ by $d_k$ identity, and $(W_V^h)^T dW_V^h = dW_O^h (W_O^h)^T$.

# %%
golden = load_cases("multi_head", "basic")[0]
y, do, g = golden.inputs, golden.cotangents["do"], golden.gradients
g_cross = cross.vjp(do, y["x"], y["x"], *(y[name] for name in WEIGHTS), heads=3, scale=y["scale"])
through = multi_head.paths(golden.cotangents | y)
agree("self-attention as cross-attention to itself: dx + dz", g_cross["dx"] + g_cross["dz"], g["dx"])
agree("dx of cross is the path through the queries", g_cross["dx"], through[0])
agree("dz is the other two", g_cross["dz"], through[1] + through[2])
print("sizes of the three:", *(np.abs(path).max().round(1) for path in through))

inner = {name: (y[name] * g["d" + name]).sum() for name in WEIGHTS}
agree("<W_O, dW_O> = <o, do>", inner["w_o"] / (golden.outputs["o"] * do).sum(), 1)
agree("<W_V, dW_V> = <o, do>", inner["w_v"] / (golden.outputs["o"] * do).sum(), 1)
agree("<W_Q, dW_Q> = <W_K, dW_K>", inner["w_q"], inner["w_k"])
for w, dw in zip(*(cross.of_each_head(*(a[name] for name in names), 3) for a, names in
                   ((y, WEIGHTS), (g, ["d" + name for name in WEIGHTS])))):
    agree("turns of q and k", w[0].T @ dw[0], dw[1].T @ w[1])
    agree("turns of v and W_O", w[2].T @ dw[2], dw[3] @ w[3].T)

# %% [markdown]
# ## What goes wrong
#
# The mistakes of this block and its own backward. Those that are made inside a head (scale, mask, softmax) are the
# ones of chapter 1 and are caught here again.

# %%
inside = sdpa.BUGS | sdpa.VJP_BUGS
own = {slug: text for module in (multi_head, cross) for slug, (text, _) in (module.BUGS | module.VJP_BUGS).items()
       if slug not in inside or slug == "scale_by_d_model"}
print(table(own.items(), ("mistake", "what is wrong")))

# %% [markdown]
# The trick of the last maps again, with $X = [1 \thinspace 0]$, and one sequence: head 0 is causal, head 1 sees all.
# Every one of these has the right shape, weights that look like weights, and no error message.

# %%
see = dict(x=np.eye(3, 6)[None], w_q=3 * draw("w_q", (6, 6)), w_k=draw("w_k", (6, 6)), heads=2, scale=0.75,
           w_v=np.vstack([np.tile(np.eye(3), 2), np.zeros((3, 6))]), w_o=np.eye(6),
           mask=np.stack([masks.causal(3, 3), masks.full(3, 3)])[None])
shown = ("heads_split_by_view", "heads_split_interleaved", "heads_merged_by_view", "shared_head_projection",
         "mask_of_head_0")
panels = {"right": (multi_head.dense(**see)[0], np.hstack(see["mask"][0]))}
panels |= {slug: np.reshape(multi_head.BUGS[slug][1](see), (3, 6)) for slug in shown}
figure = plot.attention_maps(panels, "Two heads side by side, right and five times wrong",
                             labels=("keys of head 0, then of head 1", "query i"))
figure.set_size_inches(8.9, 3.6)
for axis in figure.axes[:-1]:
    axis.axvline(2.5, color="white", linewidth=1.5)
    axis.set(xticks=[], yticks=[])
plot.save(figure, "03_multi_head_and_cross_mistakes", """Six maps of three queries by two times three keys, two
    heads side by side. Right: head 0 is a staircase, head 1 is full. Split by view: query 1 of head 0 has token 0
    alone, head 1 has nothing of token 0. Split interleaved: query 1 of head 0 seems to read token 2, which is masked.
    Merged by view: row 0 is queries 0 and 1 of head 0. Shared projection: in row 2, where nothing is masked, the heads
    agree. Mask of head 0: both heads are staircases.""")

# %% [markdown]
# **One wrong port, caught live.** Someone knows that attention wants (B, H, T, d), and reshapes to it. Shapes agree
# all the way, and the merge is even right. It returns its steps by name, so the report can say where it began.

# %%
# exercise
def port(x, w_q, w_k, w_v, w_o, mask=True, *, heads, scale):
    B, T, _ = x.shape
    q, k, v = ((x @ w).reshape(B, heads, T, -1) for w in (w_q, w_k, w_v))
    weights, _ = core.softmax(scale * q @ k.swapaxes(-1, -2), mask)
    head = weights @ core.unread(v, mask)
    return dict(q=q, k=k, v=v, weights=weights, o=head.swapaxes(1, 2).reshape(B, T, -1) @ w_o)


right = check_exercise("multi_head", port)

# %% [markdown]
# Two cases forgive it: one token, and one head. There the two reshapes are the same, and that is why it survives a
# quick test. A loss curve may
# forgive it too: training makes the best of scrambled tokens.
#
# ## Where code in the wild differs
#
# **How weights are stored.** The same numbers in another order, which is harmless once known. For $d_k = d_v = d$:
#
# | stored | where | to ours |
# |---|---|---|
# | $W_Q$, $W_K$, $W_V$ apart, each (out, in) = (H d, D) | BERT, Llama, T5 | transpose each |
# | `in_proj_weight` (3 H d, D), rows of $W_Q$, then $W_K$, then $W_V$ | torch `nn.MultiheadAttention` | transpose, cut in three |
# | `c_attn` (D, 3 H d), columns of $W_Q$, then $W_K$, then $W_V$ | GPT-2 | cut in three |
# | `query_key_value` (3 H d, D), rows of q, k, v of head 0, then of head 1, ... | Bloom, GPT-NeoX | reshape to (H, 3, d, D), then as below |
# | the same, but q ... q, k, v for each group of heads that share k and v | Falcon 40B | reshape to (Hkv, H / Hkv + 2, d, D); groups are [chapter 4](04_gqa_and_kv_cache.ipynb) |
# | kernels (D, H, d), and (H, d, D) for $W_O$ | Flax, Keras | reshape |

# %%
names = {"[Q|K|V]": [(h, f"{a}{h}") for a in "qkv" for h in range(3)],
         "per head": [(h, f"{a}{h}") for h in range(3) for a in "qkv"]}
figure, axis = plot.subplots(size=(7.5, 1.6))
plot.group_map(axis, [[h for h, _ in row] for row in names.values()], [[a for _, a in row] for row in names.values()],
               "Nine blocks of columns in two orders: six of them change place", labels=("block", ""))
axis.set_yticks(range(2), ["[Q|K|V]: torch, GPT-2", "[q|k|v] per head: Bloom, NeoX"])
plot.save(figure, "03_multi_head_and_cross_packed", """Two rows of nine blocks, coloured by head. First row: q0 q1 q2 k0
    k1 k2 v0 v1 v2. Second row: q0 k0 v0 q1 k1 v1 q2 k2 v2. Only the first, the middle and the last block agree.""")

golden = load_cases("multi_head", "square")[0]
y, (D, H, d) = golden.inputs, (12, 3, 4)
three = [y[name] for name in WEIGHTS[:3]]
in_proj = np.concatenate([w.T for w in three])                               # as they come in files
c_attn = np.concatenate(three, axis=1)
query_key_value = np.stack([w.T.reshape(H, d, D) for w in three], axis=1).reshape(3 * H * d, D)
kernels = [w.reshape(D, H, d) for w in three]
read = {"torch in_proj_weight": np.split(in_proj.T, 3, axis=1),
        "GPT-2 c_attn": np.split(c_attn, 3, axis=1),
        "Bloom, GPT-NeoX query_key_value":
            query_key_value.reshape(H, 3, d, D).transpose(1, 3, 0, 2).reshape(3, D, H * d),
        "Flax, Keras kernels": [kernel.reshape(D, H * d) for kernel in kernels]}
for name, ours in read.items():
    agree(name, multi_head.dense(**y | dict(zip(WEIGHTS, ours))), golden.outputs["o"])

# %% [markdown]
# When $D = H d$, as in most models, every wrong reading fits. The two that happen:

# %%
right = check_exercise("multi_head", lambda **x: multi_head.dense(**x | multi_head.packed_per_head(x)), "square")
right = check_exercise("multi_head", lambda **x: multi_head.dense(**x | {n: x[n].T for n in WEIGHTS}), "square")

# %% [markdown]
# **What else to look for.** In torch `nn.MultiheadAttention` True means *masked*, unlike nearly everywhere else, in
# `attn_mask` and in `key_padding_mask`; its scale is fixed at $1/\sqrt{D/H}$; the widths of $Z$ are called `kdim` and `vdim`; the
# weights it returns are the mean over the heads unless asked otherwise; a query without keys gives 0, or NaN if
# weights are returned too; and an empty $Z$ is refused. Its `add_zero_attn` appends a key and a value of zeros: that
# is a sink of 0 (chapter 1). Its `bias_k` and `bias_v` are no biases but one more key and value, learned, the same
# for all entries, and never masked. T5 has $scale = 1$ and heads of any width, and no relative position bias across
# sequences. The paper's $d_k = D/H$ is a habit, not a rule: `scale_by_d_over_heads` is the port that thinks
# otherwise.

# %%
y = load_cases("cross", "padding")[0].inputs
q, k, v = cross.project(*(y[name] for name in ("x", "z", *WEIGHTS[:3])), 3)
more = dict(k=np.insert(k, 8, 0.0, axis=2), v=np.insert(v, 8, 0.0, axis=2), mask=np.insert(y["mask"], 8, True, axis=3))
zero_attn = sdpa.dense(q, **more, scale=0.5)[0]
agree("add_zero_attn is a sink of 0", zero_attn, sdpa.dense(q, k, v, y["mask"], sink=np.zeros(3), scale=0.5)[0])
inverted = cross.BUGS["mask_polarity"][1](y)[0]
opposite = cross.BUGS["mask_polarity"][1](y | dict(mask=~y["mask"]))[0]
agree("True = masked: pass the opposite", opposite, cross.dense(**y))
print("or be off by", np.abs(inverted - cross.dense(**y)).max().round(1))

# %% [markdown]
# ## Relations
#
# What becomes of the block at its borders, and what may be done to its heads without anyone noticing.

# %%
y = load_cases("multi_head", "basic")[0].inputs
o, eye = multi_head.dense(**y), np.eye(8)
plain = sdpa.dense(*[y["x"][:, None]] * 3, scale=0.5)[0][:, 0]
agree("one head, weights 1: attention", multi_head.dense(y["x"], *[eye] * 4, heads=1, scale=0.5), plain)
first = y | dict(x=y["x"][:, :1], mask=np.array(True))
agree("one token: x W_V W_O", multi_head.dense(**first), first["x"] @ y["w_v"] @ y["w_o"])
mean = y["x"].mean(1, keepdims=True)
agree("scale 0: the mean token, projected", multi_head.dense(**y | dict(scale=0.0)), mean @ y["w_v"] @ y["w_o"])

four = list(cross.of_each_head(*(y[name] for name in WEIGHTS), 3))
join = lambda *order: dict(zip(WEIGHTS, (np.concatenate([four[h][i] for h in order], int(i < 3)) for i in range(4))),
                           heads=len(order))
agree("heads in another order, rows and columns alike", multi_head.dense(**y | join(2, 0, 1)), o)
parts = [multi_head.dense(**y | join(*order)) for order in ([0, 2], [1])]
agree("heads 0 and 2 as one layer, head 1 as another, added", sum(parts), o)
silent = y | dict(w_o=np.concatenate([four[0][3], 0 * four[1][3], four[2][3]]))
agree("a head whose W_O is 0 may be cut out", multi_head.dense(**silent), parts[0])

shared = y | dict(w_k=np.tile(four[0][1], 3), w_v=np.tile(four[0][2], 3))
q, k, v = core.split_heads(y["x"] @ y["w_q"], 3), *((y["x"] @ four[0][i])[:, None] for i in (1, 2))
multi_query = core.merge_heads(gqa.dense(q, k, v, scale=y["scale"])[0]) @ y["w_o"]
agree("one W_K and W_V for all heads: multi-query attention", multi_head.dense(**shared), multi_query)

# %% [markdown]
# ## In a box
#
# | | |
# |---|---|
# | formula | $o = \sum_h \mathrm{softmax}(scale \thinspace X W_Q^h (W_K^h)^T Z^T) \thinspace Z W_V^h W_O^h$; $Z = X$ is self-attention |
# | shapes | x (B, Tq, D), z (B, Tk, Dz), w_q (D, H dk), w_k (Dz, H dk), w_v (Dz, H dv), w_o (H dv, D) to o (B, Tq, D) |
# | heads | contiguous columns of $W_Q, W_K, W_V$, rows of $W_O$: reshape (B, T, H, d), *then* swap to (B, H, T, d) |
# | scale | $1/\sqrt{d_k}$ of the head, if nothing else is said |
# | mask | padding of $Z$; causal only where $Z = X$ |
# | biases | one more row of $W$; $b_K$ does nothing, $b_V$ adds $b_V W_O$ to rows that have keys |
# | backward | (3.8); $dX$ has a path for each place $X$ is read: three in self-attention, one and two across |
# | cost | $8 B T D^2$ for projections, $4 B T^2 D$ for attention; equal at $T = 2D$; parameters $4 D^2$, whatever $H$ |
# | between sequences | $K$, $V$ once; or absorbed, $Z$ alone |
# | goes wrong | reshape without swap, transposed or repacked weights, $\sqrt{D}$, mask of one head for all, causal across, padding of the wrong side, a lost path |
#
# ## Exercises
#
# Write each function in place of the line that raises and run the cell. `core.softmax` and `core.unread`, from
# chapter 1, may be used.
#
# **1. Repair the port.** Without `split_heads` and without a loop over heads.

# %%
# exercise
def self_attention(x, w_q, w_k, w_v, w_o, mask, heads, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("multi_head", self_attention)

# %% [markdown]
# **2. Fold the heads.** Batched matrix products of many libraries take three axes. Write cross-attention with arrays
# of no more than three axes between the split and the merge: the heads go into the batch. Where does the mask go?

# %%
# exercise
def folded(x, z, w_q, w_k, w_v, w_o, mask, heads, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("cross", folded)

# %% [markdown]
# **3. Two matrices a head.** Use (3.3) as it stands: form $A_h$ and $B_h$, and never a query, key or value.

# %%
# exercise
def two_matrices(x, z, w_q, w_k, w_v, w_o, mask, heads, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("cross", two_matrices)

# %% [markdown]
# ## Answers
#
# **1.** First name the axes that are there, (B, T, H, d), then swap them. The same two steps lead back.

# %%
# exercise
def self_attention(x, w_q, w_k, w_v, w_o, mask, heads, scale):
    B, T, _ = x.shape
    q, k, v = ((x @ w).reshape(B, T, heads, -1).swapaxes(1, 2) for w in (w_q, w_k, w_v))
    weights, _ = core.softmax(scale * q @ k.swapaxes(-1, -2), mask)
    head = weights @ core.unread(v, mask)
    return head.swapaxes(1, 2).reshape(B, T, -1) @ w_o


assert check_exercise("multi_head", self_attention)

# %% [markdown]
# **2.** The mask is broadcast to all four axes first, then folded exactly as the heads were, batch before head. Heads
# before batch, on one side only, is `mask_head_batch_order`.

# %%
# exercise
def folded(x, z, w_q, w_k, w_v, w_o, mask, heads, scale):
    B, Tq, Tk = len(x), x.shape[1], z.shape[1]
    fold = lambda a: core.split_heads(a, heads).reshape(B * heads, a.shape[1], a.shape[2] // heads)
    q, k, v = fold(x @ w_q), fold(z @ w_k), fold(z @ w_v)
    mask = np.broadcast_to(mask, (B, heads, Tq, Tk)).reshape(B * heads, Tq, Tk)
    weights, _ = core.softmax(scale * q @ k.swapaxes(-1, -2), mask)
    head = weights @ core.unread(v, mask)
    return core.merge_heads(head.reshape(B, heads, Tq, -1)) @ w_o


assert check_exercise("cross", folded)

# %% [markdown]
# **3.** $A_h$ and $B_h$ are as large as $D$ times $D_z$: this is for understanding, not for speed. `absorbed` keeps
# the thin matrices and multiplies from the left.

# %%
# exercise
def two_matrices(x, z, w_q, w_k, w_v, w_o, mask, heads, scale):
    o = np.zeros(x.shape)
    mask = np.broadcast_to(mask, (len(x), heads, x.shape[1], z.shape[1]))
    for h in range(heads):
        wq, wk, wv = (np.split(w, heads, axis=1)[h] for w in (w_q, w_k, w_v))
        A, B = wq @ wk.T, wv @ np.split(w_o, heads)[h]
        weights, _ = core.softmax(scale * x @ A @ z.swapaxes(-1, -2), mask[:, h])
        o += weights @ core.unread(z, mask[:, h]) @ B
    return o


assert check_exercise("cross", two_matrices)

# %% [markdown]
# ## Sources
#
# - Vaswani et al. 2017, *Attention is all you need*, arXiv:1706.03762: section 3.2.2, the unnumbered equation of
#   MultiHead; section 3.2.3, attention between encoder and decoder; $d_k = d_v = D/H$.
# - Bahdanau et al. 2014, arXiv:1409.0473: attention between two sequences, before heads and before self-attention.
# - Michel et al. 2019, arXiv:1905.10650: the sum over heads, and what can be cut out.
# - Elhage et al. 2021, *A mathematical framework for transformer circuits*: a head as two matrices, (3.3).
# - Cordonnier et al. 2020, arXiv:2006.16362, and Namazifar et al. 2023, arXiv:2302.08626: what the biases do, (3.4).
# - Lee et al. 2019, *Set transformer*, arXiv:1810.00825: equivariance, (3.5).
# - DeepSeek-V2, arXiv:2405.04434, section 2.1.2: the absorbed form and what it saves.
# - Shazeer 2019, arXiv:1911.02150: one $W_K$ and $W_V$ for all heads.
# - The comparisons with torch run in the project's tests: `make peers`.
