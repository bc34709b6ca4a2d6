# %% [markdown]
# # Shared heads and the key-value cache
#
# **A cache changes what a token costs, and not one number of what it gives.**
#
# A model that writes text asks the same keys again for every new token. So it keeps them, and their values: the
# key-value cache. What is kept is then most of what is read, and two changes of the *model* make it smaller: several
# query heads share one key and value head (grouped-query attention), and a token sees no further back than $W$ tokens
# (a window, kept in a ring). Query and key positions are $i$ and $j$; token $t$ of a call stands at $i = n + t$, where
# $n$ tokens of its row came before the call, and
#
# $$
# \begin{aligned}
# g(h) &= \lfloor h / G \rfloor, \quad G = H_q / H_{kv} &
# s_{hij} &= scale \thinspace q_{hi} \cdot k_{g(h) j} \\
# seen_i &= \lbrace j : \max(0, i - W + 1) \leq j \leq i \rbrace &
# z_{hi} &= \sum_{j \in seen_i} \exp(s_{hij}) \\
# p_{hij} &= \exp(s_{hij}) / z_{hi} \text{ where } j \in seen_i \text{, else } 0 &
# o_{hi} &= \sum_j p_{hij} \thinspace v_{g(h) j}
# \end{aligned}
# \tag{4.1}
# $$
#
# (without a window $W = \infty$). The key and value of position $j$ lie in slot $j$ of a cache, or in slot $j \bmod W$
# of a ring. $H_{kv}$ and $W$ are in the formula: they make another function. The cache is not in it, and what is not
# in the formula may not show in a number. This chapter shows that it does not, counts what is saved, and is enough to
# write all three functions, `gqa`, `kv_cache` and `ring_cache`, in any language and to pass their golden cases.

# %%
import itertools

import numpy as np

from attention_ref import core, gqa, kv_cache, load_cases, masks, plot, ring_cache, sdpa
from attention_ref.conformance.numbers import count
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw

np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## The contract
#
# The shapes, as the files state them (an axis with `?` may be 1 or, in front, missing: it is broadcast), and what is
# to be read in one way only.

# %%
for variant in gqa, kv_cache, ring_cache:
    shapes = variant.INPUTS | variant.OUTPUTS
    print(variant.__name__.rpartition(".")[2])
    print(table([(name, text or "a number") for name, text in shapes.items()], ("name", "kind and shape")), "\n")

# %% [markdown]
# 1. **Shapes.** `B` rows, independent of one another; `Hq` query heads, `Hkv` key and value heads, `Hq` a multiple of
#    `Hkv`, else an error. Keys `dk` and values `dv` need not be as wide. In `gqa`, `Tk` may be 0. The caches have `P`
#    slots, the rings `W`; a call brings `T` new tokens, at least one.
# 2. **Heads.** Query head $h$ reads kv head $\lfloor h / G \rfloor$: neighbours share.
# 3. **scale** is a number without a default. It multiplies $q$ before the product is formed, so that the product
#    stays in range in half precision. There is no bias, cap or sink here.
# 4. **mask** (`gqa` only) is boolean, True = may attend, and belongs to *query* heads: heads that share keys need not
#    share a mask. A row without keys has $o = 0$, $lse = -\infty$, gradients 0. `lse` (`gqa` only) is the natural
#    logarithm of $z$, of scaled scores.
# 5. **past_length** is $n$, one integer per row: how many tokens the row has ever seen. In `kv_cache` they lie in slots
#    0 to $n - 1$; in `ring_cache`, where $n$ may exceed `W`, the last of them, position $j$ in slot $j \bmod W$.
# 6. **Write, then read.** New token $t$ is at position $i = n + t$. Its key and value go to slot $i$, or $i \bmod W$,
#    of every kv head. It sees itself and what came before: slots 0 to $i$, or the last $W$ positions, its own included.
#    Never more: several new tokens are causal among themselves. A token always sees itself, so no row is empty.
# 7. **Outputs** are $o$ and both caches after the call. Slots that the call does not write come back bit for bit.
#    The inputs are not changed. In `ring_cache`, `T` may exceed `W`; then the ring turns more than once.
# 8. **Room.** $n + T \leq P$ in every row of `kv_cache`, else an error. A ring takes any $n$.
# 9. **Never read.** A slot without a token may hold anything, NaN included; in `gqa` so may a key, with its value,
#    that no query head of its group may attend to, and a query that sees no key.
# 10. **chunk_size** (`kv_cache` only) says into how many tokens a form may cut the call. It never changes the result; a
#     port may ignore it.
# 11. **Positions** are the caller's. If keys are rotated (RoPE), they are so before the call, each by its own position,
#     and are cached as they are.
# 12. **Types.** Outputs have the type of the inputs. The maximum of a row is subtracted before the exponential.
# 13. **Gradients** exist for $q, k, v$ and, in the cache variants, for both caches. The loss may depend on all
#     outputs, the caches after the call included.
#
# The rest of the chapter is consequence.

# %% [markdown]
# ## Three tokens by hand
#
# Two tokens are cached, the third arrives: $n = 2$, `T` = 1. Four query heads share two kv heads, $G = 2$; of
# four slots two are empty, and NaN. Rows below are query heads, columns are slots. The first score is
# $s_{00} = 0.75 \thinspace (1 \cdot 2 - 0.5 \cdot 1) = 1.125$.

# %%
nan = np.nan
past_key = np.array([[[2.0, 1.0], [-1.0, 0.5], [nan, nan], [nan, nan]],
                     [[0.25, -1.5], [1.0, 2.0], [nan, nan], [nan, nan]]])
past_value = np.array([[[1.0, 2.0, -1.0], [3.0, -2.0, 0.5], [nan] * 3, [nan] * 3],
                       [[-0.5, 4.0, 2.0], [2.0, 1.0, -3.0], [nan] * 3, [nan] * 3]])
q = np.array([[1.0, -0.5], [0.5, 2.0], [-1.5, 0.25], [2.0, 1.0]])
k = np.array([[1.5, 1.25], [-0.5, 0.75]])
v = np.array([[0.25, -1.0, 3.0], [1.5, -2.5, 0.75]])
n, scale, G = 2, 0.75, 2

key, value = past_key.copy(), past_value.copy()
key[:, n], value[:, n] = k, v
s = np.array([[scale * q[h] @ key[h // G, j] for j in range(n + 1)] for h in range(4)])
m = s.max(1)
e = np.exp(s - m[:, None])
z = e.sum(1)
p = e / z[:, None]
o = np.array([p[h] @ value[h // G, :n + 1] for h in range(4)])
print("kv head of each query head", np.arange(4) // G, "key, slot by slot, of kv head 0", key[0], "s", s, "m", m,
      "exp(s - m)", e, "z exp(-m)", z, "p", p, "o", o, sep="\n")

# %% [markdown]
# The package says the same. So does attention over three tokens that knows of no cache, asked for its last row.

# %%
one_row = lambda a: a[None, :, None]
o_ref, key_ref, value_ref = kv_cache.dense(one_row(q), one_row(k), one_row(v), past_key[None], past_value[None],
                                           np.array([n]), scale=scale)
agree("o by hand", o, o_ref[0, :, 0])
agree("the cache after the call, NaN where it was NaN", key_ref[0], key, 0)
o_gqa, lse = gqa.dense(one_row(q), key[None, :, :3], value[None, :, :3], scale=scale)
agree("no cache: three keys, and the last row", o_gqa[0, :, 0], o)
agree("lse by hand", m + np.log(z), lse[0, :, 0])
o_ring, _, _ = ring_cache.dense(one_row(q), one_row(k), one_row(v), past_key[None], past_value[None], np.array([n]),
                                scale=scale)
agree("a ring that is not yet full", o_ring[0, :, 0], o)

# %% [markdown]
# ## One map of heads
#
# Multi-head attention (MHA) has $H_{kv} = H_q$, multi-query attention (MQA) $H_{kv} = 1$, grouped-query attention
# (GQA) all that is between. There are two ways to spread $H_{kv}$ heads over $H_q$: *repeat*, 0 0 0 1 1 1, and *tile*,
# 0 1 0 1 0 1. The formula is the first. At both ends the two are the same map, which is how the wrong one survives its
# tests.

# %%
Hq = 6
maps = {"repeat": lambda h, Hkv: h * Hkv // Hq, "tile": lambda h, Hkv: h % Hkv}
figure, axes = plot.subplots(2, 4, size=(2.05, 1.25))
for (row, (way, kv_head)), (column, Hkv) in itertools.product(enumerate(maps.items()), enumerate((6, 3, 2, 1))):
    axis, place = axes[row, column], (np.arange(Hkv) + 0.5) * Hq / Hkv - 0.5
    for g in range(Hkv):
        served = [h for h in range(Hq) if kv_head(h, Hkv) == g]
        fan = np.array([[h, place[g], np.nan] for h in served]).ravel()
        axis.plot(fan, [1, 0, np.nan] * len(served), color=plot.COLOURS[g], linewidth=1.5)
        axis.text(place[g], -0.13, g, ha="center", va="top", fontsize=8, color=plot.COLOURS[g])
    for h in range(Hq):
        axis.text(h, 1.13, h, ha="center", fontsize=8)
    same = all(maps["repeat"](h, Hkv) == kv_head(h, Hkv) for h in range(Hq))
    kind = {6: "MHA", 1: "MQA"}.get(Hkv, f"GQA, G = {Hq // Hkv}")
    axis.set(ylim=(-0.5, 1.45), xticks=[], yticks=[], title=kind if row == 0 else "the same" if same else "other heads")
    axis.set_ylabel(way if column == 0 else "")
    axis.spines[:].set_visible(False)
figure.suptitle("Query heads (above) and the kv head each reads: the two maps part only between the ends")
plot.save(figure, "04_gqa_and_kv_cache_heads", """Eight diagrams of six query heads joined to 6, 3, 2 and 1 kv
    heads. Upper row, repeat: neighbours share, the lines form separate fans. Lower row, tile: with 3 and 2 kv heads
    the lines cross, so that heads 0, 2 and 4 share kv head 0 of two. With 6 and with 1 kv head both rows are the
    same.""")

for Hkv in 6, 3, 2, 1:
    x = dict(q=draw("q", (2, Hq, 5, 4)), k=draw("k", (2, Hkv, 7, 4)), v=draw("v", (2, Hkv, 7, 3)), scale=0.5)
    copies = {way: x | {name: x[name][:, f(np.arange(Hq), Hkv)] for name in "kv"} for way, f in maps.items()}
    agree(f"Hkv = {Hkv}: GQA is MHA with kv heads repeated", gqa.dense(**x)[0], sdpa.dense(**copies["repeat"])[0])
    print(f"         tiled heads differ by {abs(gqa.dense(**x)[0] - sdpa.dense(**copies['tile'])[0]).max():.2f}")

# %% [markdown]
# A port that tiles, checked: `np.tile` where `np.repeat` should stand. The heads at the ends, Hkv = 6 and Hkv = 1, are
# among the cases it gets right.

# %%
# exercise
def tiled(q, k, v, mask, scale):
    copies = q.shape[1] // k.shape[1]
    return gqa.dense(q, np.tile(k, (1, copies, 1, 1)), np.tile(v, (1, copies, 1, 1)), mask, scale=scale)


right = check_exercise("gqa", tiled)

# %% [markdown]
# ## The code
#
# Grouped heads twice: by repeating the keys, which is the formula, and without a copy, by seeing the $G$ heads of a
# group as one head with $G$ times the queries. The second is how kernels read each key once for all its heads.

# %%
plot.show(core, "repeat_heads")
plot.show(gqa, "dense", "grouped")

# %% [markdown]
# The cache is a write, a mask and a call of the above. The ring is the same with its last $W$ tokens and the new ones
# laid out in one line; the form for carrying elsewhere takes one token at a time and needs no line.

# %%
plot.show(kv_cache, "dense", "whole", "write", "seen")
plot.show(ring_cache, "dense", "turn", "line")
plot.show(ring_cache, "decode")

# %% [markdown]
# The scalar loop of `kv_cache` is what to copy into a language without arrays; that of the ring differs from it in two
# expressions: position `p` goes to slot `p % W`, and `min(p + 1, W)` slots are read. The rules that are easiest to
# break, run:

# %%
plot.show(kv_cache.one_head)

golden = load_cases("kv_cache", "nan_in_empty_slots")[0].inputs
fours = golden | {name: np.nan_to_num(golden[name], nan=4.0) for name in ("past_key", "past_value")}
print("9: NaN among the cached keys:", int(np.isnan(golden["past_key"]).sum()))
for form in kv_cache.FORMS:
    agree(f"9: {form.__name__} does not read them", form(**golden)[0], form(**fours)[0], 0)
    agree("7: ... and brings back what it does not write", form(**golden)[1][:, :, 8], golden["past_key"][:, :, 8], 0)
try:
    kv_cache.dense(**golden | dict(past_length=np.array([1, 0, 5])))
except ValueError as error:
    print("8:", error)
tall = load_cases("gqa", "causal_tall")[0]
agree("4: rows 0 to 2 see no key: o", tall.outputs["o"][:, :, :3], 0, 0)
agree("4: ... and lse", tall.outputs["lse"][:, :, :3], -np.inf, 0)
half = load_cases("ring_cache", "basic")[0].in_dtype("float16")
print("12: float16 in,", *(y.dtype for y in ring_cache.dense(**half)), "out")

# %% [markdown]
# ## Derivation: forward
#
# **Why keys can be kept.** Row $i$ of causal attention holds $q_i$, and $k_j, v_j$ of positions $j \leq i$. What comes
# later is not in it, and no other query is. So $k_j$ and $v_j$, once computed, are read by every later row as they
# are, and $q_i$ is read by row $i$ alone: there is a key-value cache and no query cache. In a stack of layers, row $i$
# of one layer depends on rows up to $i$ of the layer below, so by induction over layers nothing that was ever
# cached changes when a token is added.
#
# **Why any cutting is right.** *Before a call, slots 0 to $n - 1$ hold positions 0 to $n - 1$.* With nothing cached
# this is true. The call writes position $n + t$ into slot $n + t$, so now slots 0 to $n + T - 1$ hold positions 0 to
# $n + T - 1$. Query $t$ reads slots $j \leq n + t$: these are the positions $j \leq i$, the very terms of row $i$ in
# (4.1). And $n$ grows by $T$, so the sentence is true before the next call. How many tokens the calls had was
# not used. Prefill in one call, prefill in chunks and decoding token by token are therefore the same sums.
#
# Six tokens can be cut into calls in 32 ways. Here are four of them; the colours come from `kv_cache.seen`, call after
# call.

# %%
T, P = 6, 9
cuts = {"prefill": [0, 6], "chunks of two": [0, 2, 4, 6], "a prompt, then tokens": [0, 3, 4, 5, 6],
        "token by token": list(range(7))}
figure, axes = plot.subplots(1, 4, size=(2.0, 2.4))
for axis, (name, borders) in zip(axes, cuts.items()):
    calls = list(zip(borders, borders[1:]))
    keep = np.concatenate([kv_cache.seen(np.array([s]), e - s, T)[0, 0] for s, e in calls])
    number = np.repeat(np.arange(len(calls)), np.diff(borders))[:, None] + np.zeros(T)
    axis.imshow(np.ma.array(number, mask=~keep), cmap="viridis", vmin=-0.5, vmax=5.5, interpolation="none")
    axis.hlines(np.array(borders[1:-1]) - 0.5, -0.5, T - 0.5, color="black", linewidth=1)
    axis.set(title=f"{name}\n{len(calls)} call{'s' * (len(calls) > 1)}", xticks=[], yticks=[], xlabel="slot j")
    assert (keep == masks.causal(T, T)).all()
axes[0].set_ylabel("token i")
figure.suptitle("However the tokens are cut into calls, they fill the same triangle")
plot.save(figure, "04_gqa_and_kv_cache_calls", """Four maps of six tokens by six slots, each the same lower
    triangle, with a line between calls and a colour per call: one call; three calls of two tokens; a call of three
    tokens and three of one; six calls of one token.""")

# %% [markdown]
# And here are all 32, run. The caches start as NaN, two kv heads serve six query heads, and every call gets the caches
# of the call before. In the same breath the other 32: the same cuttings through a ring of $W = 3$, against a window of
# three over the whole sequence.

# %%
def step(variant, past, n, **new):
    names = list(variant.INPUTS)[3:5]
    return variant.dense(**new, **dict(zip(names, past)), past_length=n, scale=0.5)


x = dict(q=draw("q", (2, 6, T, 4)), k=draw("k", (2, 2, T, 4)), v=draw("v", (2, 2, T, 5)))
results = {kv_cache: [], ring_cache: []}
for flags in itertools.product([False, True], repeat=T - 1):
    borders = [0, *np.flatnonzero(flags) + 1, T]
    for variant, slots in (kv_cache, P), (ring_cache, 3):
        past, o = [np.full((2, 2, slots, d), nan) for d in (4, 5)], []
        for s, e in zip(borders, borders[1:]):
            y, *past = step(variant, past, np.array([s, s]), **{name: x[name][:, :, s:e] for name in "qkv"})
            o.append(y)
        results[variant].append((np.concatenate(o, axis=2), *past))

outputs, keys, _ = zip(*results[kv_cache])
whole = gqa.dense(**x, mask=masks.causal(T, T), scale=0.5)[0]
agree(f"{len(outputs)} cuttings of causal attention: o", np.stack(outputs), whole)
agree("... and the keys in the cache are the keys", np.stack(keys)[..., :T, :], x["k"], 0)
outputs, keys, _ = zip(*results[ring_cache])
whole = gqa.dense(**x, mask=masks.window(T, T, left=2, right=0), scale=0.5)[0]
agree(f"{len(outputs)} cuttings of a window of 3: o", np.stack(outputs), whole)
agree("... and the ring holds positions 3, 4, 5 in slots 0, 1, 2", np.stack(keys), x["k"][:, :, 3:], 0)

# %% [markdown]
# **Where the diagonal starts.** In a call, query 0 stands at position $n$, so the mask is $j \leq n + t$: the *row's
# own length* is the offset. It is not 0 (top left), unless nothing is cached; and it is not $P - T$ (bottom right of
# the slots), unless the last token fills the last slot. One new token shows it best. From the top left it sees slot 0
# alone, and a softmax over one key is 1: the output is the first value of the row, whatever the query.

# %%
B, P = 3, 8
y = dict(q=draw("q", (B, 6, 1, 4)), k=draw("k", (B, 2, 1, 4)), v=draw("v", (B, 2, 1, 5)), scale=0.5, chunk_size=1,
         past_key=draw("past_key", (B, 2, P, 4)), past_value=draw("past_value", (B, 2, P, 5)),
         past_length=np.array([5, 2, 7]))
print("rows of 5, 2 and 7 cached tokens, and one new one; slots it sees, by length:")
print(kv_cache.seen(y["past_length"], 1, P)[:, 0, 0] * 1)
print("top left: ", masks.causal(1, P, "top-left")[0] * 1, " bottom right of the slots:", masks.causal(1, P)[0] * 1)
first = np.repeat(y["past_value"][:, :, :1], 3, axis=1)
agree("top left: o is the value of slot 0, for every head and row", kv_cache.BUGS["causal_top_left"][1](y)[0], first)
differs = abs(kv_cache.BUGS["causal_bottom_right"][1](y)[0] - kv_cache.dense(**y)[0]).max((1, 2, 3)) > 1e-9
print("bottom right of the slots is wrong in rows", np.flatnonzero(differs), "- and right in the row that is full")

# %% [markdown]
# ## The ring
#
# A token at $i$ sees positions $i - W + 1$ to $i$. When $i$ arrives, $i - W$ leaves, and $i \bmod W = (i - W) \bmod W$:
# the new token takes the slot of the one that nobody will ask for again. So, *with $n$ tokens seen, slot $j \bmod W$
# holds position $j$ for the last $\min(n, W)$ positions*; $W$ consecutive numbers have different remainders, and no two
# collide. The picture is not a sketch. Each value is the number of its position, the slots start as NaN, and the
# columns are what `ring_cache.decode` returned.

# %%
W, tokens = 4, 11
past, frames = (np.full((1, 1, W, 1), nan),) * 2, []
for t in range(tokens):
    new = dict(q=np.ones((1, 1, 1, 1)), k=np.full((1, 1, 1, 1), 0.5), v=np.full((1, 1, 1, 1), float(t)))
    _, *past = ring_cache.decode(**new, ring_key=past[0], ring_value=past[1], past_length=np.array([t]), scale=0.5)
    frames.append(past[1][0, 0, :, 0])
by_slot = np.stack(frames, axis=1)
ordered = lambda slots, n: ring_cache.turn(slots[None, None, :, None], np.array([n])).ravel()
in_order = np.stack([ordered(slots, t + 1) for t, slots in enumerate(frames)], axis=1)
figure, axes = plot.subplots(2, 1, size=(6.6, 1.85))
for axis, (title, held) in zip(axes, {"As it lies: one slot is written per token, the others stay": by_slot,
                                      "The same, turned into order: the window slides": in_order}.items()):
    age = np.arange(tokens) - held
    axis.patch.set(hatch="/////", linewidth=0)
    axis.imshow(np.ma.masked_invalid(age), cmap="viridis_r", vmin=-0.5, vmax=W - 0.5, interpolation="none",
                aspect="auto")
    for j, t in np.argwhere(~np.isnan(held)):
        axis.text(t, j, f"{held[j, t]:.0f}", ha="center", va="center", fontsize=9,
                  color="white" if age[j, t] > 1 else "black", fontweight="bold" if age[j, t] == 0 else "normal")
    axis.set(title=title, xticks=[], yticks=range(W), ylabel="slot" if held is by_slot else "place")
axes[1].set(xticks=range(tokens), xlabel="after token i")
plot.save(figure, "04_gqa_and_kv_cache_ring", """Two strips of eleven frames of four slots, numbers are the positions
    held, colour their age. Above, the ring: token i is written into slot i mod 4, so bright new cells run down the
    slots and start again at the top, and each number stays in its slot for four frames; the last frame holds 8, 9,
    10, 7. Below, the same frames in order: every number moves up one place per frame. Slots without a token are
    hatched in the first three frames.""")
print("after token 10, by slot:", by_slot[:, -1].astype(int), " in order:", in_order[:, -1].astype(int))
assert all(by_slot[j % W, i] == j for i in range(tokens) for j in range(max(0, i - W + 1), i + 1))

# %% [markdown]
# **The order of slots is nobody's business.** A softmax is a sum over keys, and so is the output: put the slots in any
# order, keys and values alike, and $o$ does not move. A query that comes alone therefore needs to know only which slots
# were written. That is also why a cache may be cut into pages that lie anywhere.
#
# **Several new tokens are another matter.** If all $T$ keys were written before the first query reads, token $t$ would
# miss the keys whose slots its successors took. So either one token is written and read at a time (`decode`), or the
# ring and the new tokens are laid side by side, $W + T$ places of which each knows its position, and token $i$ sees
# the places with $i - W \lt j \leq i$ (`dense`). Only then are slots written.

# %%
x = load_cases("ring_cache", "at_the_edge")[0].inputs
o, key, value = ring_cache.dense(**x)
order = np.array([5, 2, 7, 0, 3, 6, 1, 4])
written = (np.arange(8) <= x["past_length"][:, None])[:, None, None]
shuffled = gqa.dense(x["q"], key[:, :, order], value[:, :, order], written[..., order], scale=x["scale"])[0]
agree("one token at position 7, 8, 9 in a ring of 8, slots shuffled", shuffled, o)

x = load_cases("ring_cache", "basic")[0].inputs
late = ring_cache.BUGS["call_written_before_read"][1](x)[0]
wrong = abs(late - ring_cache.dense(**x)[0]).max((1, 3)) > 1e-9
print("W = 8, five tokens in one call, all written before any is read; wrong tokens of each row:")
for length, row in zip(x["past_length"], wrong):
    print(f"    {length:2} seen before: tokens {np.flatnonzero(row)} wrong")

# %% [markdown]
# The row with two tokens stays within its eight slots and does not notice. The others are wrong in every token but the
# last.
#
# ## Forms that agree
#
# Independent texts of each formula, five number systems, the largest error against the certified value (`balls` is the
# radius that interval arithmetic leaves around it). Each must lie within the budget of its type or the cell fails.

# %%
for variant, case in ("gqa", "everything"), ("kv_cache", "basic"), ("ring_cache", "long_call"):
    print(f"{variant}, {case}: {load_cases(variant, case)[0].why}")
    forms_table(variant, case)
    print()

# %% [markdown]
# ## The weights beside dense softmax
#
# If the values are the identity, the output is the matrix of weights. Five tokens, three times: softmax over all
# keys, and what `decode` gives from a cache and from a ring of three, one token at a time. The rows that a cache
# gives are those of causal attention, to rounding, and never were in memory together.

# %%
T = 5
x = dict(q=draw("q", (1, 1, T, 4)), k=draw("k", (1, 1, T, 4)), v=np.eye(T)[None, None], scale=0.5)
empty = lambda slots: dict(zip(("key", "value"), (np.full((1, 1, slots, d), nan) for d in (4, T))))
nothing = np.array([0])
by_cache = kv_cache.decode(**x, **{f"past_{name}": y for name, y in empty(8).items()}, past_length=nothing)[0][0, 0]
by_ring = ring_cache.decode(**x, **{f"ring_{name}": y for name, y in empty(3).items()}, past_length=nothing)[0][0, 0]
causal, window = masks.causal(T, T), masks.window(T, T, left=2, right=0)
agree("cache: causal softmax", by_cache, sdpa.dense(**x, mask=causal)[0][0, 0])
agree("ring: softmax over a window of three", by_ring, sdpa.dense(**x, mask=window)[0][0, 0])
figure = plot.attention_maps({"dense softmax": sdpa.dense(**x)[0][0, 0], "a cache, token by token": (by_cache, causal),
                              "a ring of 3, token by token": (by_ring, window)},
                             "The cache gives the rows of causal attention, the ring those of a window")
for axis in figure.axes[:-1]:
    axis.set(xticks=[], yticks=[])
plot.save(figure, "04_gqa_and_kv_cache_weights", """Three maps of five by five weights. Dense softmax fills the
    square. From a cache: the lower triangle, first row 1.00. From a ring of three: a band of width three below the
    diagonal; rows 0 to 2 equal those of the cache, later rows put on three keys what the cache spreads over all.""")

# %% [markdown]
# ## What it costs
#
# **Size.** Keys and values of $L$ layers, $T$ tokens per row, $B$ rows, $s$ bytes a number, $d_k = d_v = d_h$:
#
# $$
# bytes = 2 \thinspace L \thinspace B \thinspace T \thinspace H_{kv} \thinspace d_h \thinspace s
# \tag{4.2}
# $$
#
# $H_q$ is not in it. A layer with a window has $\min(T, W)$ in place of $T$. First the law against arrays, then
# models as their reports describe them, two bytes a number, one row.

# %%
arrays = [np.zeros((5, 2, 9, 4), np.float16) for layer in range(3) for kind in ("keys", "values")]
held = sum(array.nbytes for array in arrays)
agree("(4.2) for L = 3, B = 5, T = 9, Hkv = 2, dh = 4, s = 2", 5 * kv_cache.cache_bytes(3, 9, 2, 4, 2), held, 0)

KiB, GiB = 2 ** 10, 2 ** 30
models = {"GPT-3 175B": (96, 96, 96, 128), "Llama 2 7B": (32, 32, 32, 128), "Llama 2 70B": (80, 64, 8, 128),
          "Llama 3 405B": (126, 128, 8, 128), "Mistral 7B": (32, 32, 8, 128), "PaLM 540B": (118, 48, 1, 256),
          "Gemma 2B": (18, 8, 1, 256)}
rows = []
for name, (L, Hq, Hkv, dh) in models.items():
    token, text, as_mha = (kv_cache.cache_bytes(L, T, heads, dh, 2) for T, heads in ((1, Hkv), (8192, Hkv), (8192, Hq)))
    kind = {Hq: "MHA", 1: "MQA"}.get(Hkv, "GQA")
    rows.append((name, kind, L, Hq, Hkv, dh, token // KiB, f"{text / GiB:.2f}", f"{as_mha / GiB:.2f}"))
print(table(rows, ("model", "kind", "L", "Hq", "Hkv", "dh", "KiB a token", "GiB for 8192", "were it MHA")), "\n")
in_rings = kv_cache.cache_bytes(32, min(8192, 4096), 8, 128, 2)
print(f"Mistral 7B with its window of 4096, in rings: {in_rings / GiB:.2f} GiB, and no more ever")
T, layers = 131072, dict(kv_heads=8, head_dim=64, bytes_per_number=2)
mixed = kv_cache.cache_bytes(12, T, **layers) + kv_cache.cache_bytes(12, min(T, 128), **layers)
print(f"gpt-oss 20B, 12 of its 24 layers with a window of 128, {T} tokens: {mixed / GiB:.2f} GiB,",
      f"without windows {kv_cache.cache_bytes(24, T, **layers) / GiB:.2f} GiB")

# %% [markdown]
# **Work.** A decode step over $N$ keys, its own included, costs per row and layer
#
# $$
# flops = H_q \left( 2 N (d_k + d_v) + 3 N + d_k + 3 \right)
# \tag{4.3}
# $$
#
# (minus $m$, sum and division are the $3 N$; scaling $q$ is $d_k$; the last 3 are the row's own). $H_{kv}$ is not in
# it: sharing heads saves no work. It saves reading: each number of the cache serves $G$ heads, so a step has
# $2 G / s$ flops for every byte of cache, one if $G = 1$ and $s = 2$, while accelerators do hundreds in the time of
# reading one. Decoding is reading.
#
# **Without a cache** each step does the whole prefix again, in every layer but the last: $N^2$ pairs for $N$. Summed
# over a text, $T (T + 1) (2 T + 1) / 6$ pairs against $T (T + 1) / 2$, which is $(2 T + 1) / 3$ times as many.

# %%
def tokens(N, queries, Hkv=2):
    return dict(q=draw("q", (1, 6, queries, 4)), k=draw("k", (1, Hkv, N, 4)), v=draw("v", (1, Hkv, N, 5)), scale=0.5)


flops = lambda N, queries, Hkv=2, form=gqa.grouped: count(form, **tokens(N, queries, Hkv))["flops"]
formula = [6 * (2 * N * 9 + 3 * N + 4 + 3) for N in (1, 5, 12)]
for Hkv, form in itertools.product((6, 2, 1), (gqa.dense, gqa.grouped)):
    agree(f"(4.3) counted, Hkv = {Hkv}, {form.__name__}", [flops(N, 1, Hkv, form) for N in (1, 5, 12)], formula, 0)

lengths = [8, 16, 32, 64, 128]
cached = np.cumsum([flops(N, 1) for N in range(1, 129)])[np.array(lengths) - 1]
again = np.cumsum([flops(N, N) for N in range(1, 129)])[np.array(lengths) - 1]
print(table(zip(lengths, again, cached, (again / cached).round(1), [round((2 * t + 1) / 3, 1) for t in lengths]),
            ("tokens", "flops, prefix again", "flops, cached", "ratio", "(2 T + 1) / 3")))

# %% [markdown]
# **Bytes of a step.** A step reads the weights once, all but the table of embeddings, of which it reads a row, and the
# cache of every row of the batch. Mistral 7B, counted from the table of its report (width 4096, 32 layers, 32 heads of
# 128, 8 kv heads, feed-forward 14336, vocabulary 32000, window 4096), with its cache in the four ways that its 32 query
# heads could have been fed. A weight is 2 bytes and 2 flops; a key with its value, of all layers, takes $4 L H_q d_h$
# flops.

# %%
D, L, Hq, Hkv, dh, ffn, vocabulary, W = 4096, 32, 32, 8, 128, 14336, 32000, 4096
weights = L * (2 * D * Hq * dh + 2 * D * Hkv * dh + 3 * D * ffn + 2 * D) + D + vocabulary * D
print(f"{(weights + vocabulary * D) / 1e9:.2f} billion parameters; a step reads {2 * weights / GiB:.1f} GiB of them")
rows, flops_of_a_key = [], 4 * L * Hq * dh
for Hkv in 32, 8, 1:
    token = kv_cache.cache_bytes(L, 1, Hkv, dh, 2)
    equal_bytes, equal_flops = 2 * weights / token, 2 * weights / flops_of_a_key
    rows.append((Hkv, flops_of_a_key // token, round(equal_flops), round(equal_bytes), round(equal_bytes / 16)))
print(table(rows, ("Hkv", "flops per byte", "equal flops at T", "equal bytes at T", "... in a batch of 16")))

T = [1024, 4096, 16384, 65536, 262144]
figure, axes = plot.subplots(1, 2, size=(3.9, 3.1))
plot.lines(axes[0], lengths, {"the prefix again": again, "with a cache": cached}, "tokens written", "flops, one layer",
           "A cache takes one power\noff the work")
curves = {"weights, once": [2 * weights / GiB] * len(T)}
kinds = {"32 kv heads (MHA)": (32, np.inf), "8 kv heads (GQA)": (8, np.inf), "8, ring of 4096": (8, W),
         "1 kv head (MQA)": (1, np.inf)}
for name, (Hkv, most) in kinds.items():
    curves[name] = [kv_cache.cache_bytes(L, min(t, most), Hkv, dh, 2) / GiB for t in T]
plot.lines(axes[1], T, curves, "tokens T", "GiB read in one step",
           "Sharing moves the crossing by G,\na ring takes it away")
axes[1].legend(frameon=False, fontsize=7)
axes[1].set_xticks(T, ["1k", "4k", "16k", "64k", "256k"])
axes[0].set_yticks([1e4, 1e6, 1e8], ["10 thousand", "1 million", "100 million"])
axes[1].set_yticks([0.1, 1, 10, 100], [0.1, 1, 10, 100])
for axis in axes:
    axis.set_yticks([], minor=True)
plot.save(figure, "04_gqa_and_kv_cache_cost", """Left: counted flops to write 8 to 128 tokens, one layer: doing the
    prefix again rises with slope three, a cache with slope two, 86 times less at 128 tokens. Right: GiB read in one
    decode step of Mistral 7B against tokens: the weights are a level line at 13.2 GiB; the cache with 32 kv heads
    crosses it at 27 thousand tokens, with 8 at 108 thousand, with one beyond the picture; a ring of 4096 levels off
    at half a GiB.""")

# %% [markdown]
# Attention does as much work as the weights at the same $T$ whatever is shared. With 32 kv heads the cache outgrows the
# weights at that very $T$, for both take one flop per byte; with 8 it does so four times later. A batch divides the
# tokens: rows share the weights and not the cache.
#
# ## Derivation: backward
#
# **Groups.** Write $K_h = k_{g(h)}$ for the copy that head $h$ reads, $dK_h$ for its gradient, as if it were no copy.
# Move $k_g$ by $\delta$: the copies with $g(h) = g$ move by $\delta$, all others stay, and the loss changes by
# $\sum_h [g(h) = g] \thinspace dK_h \cdot \delta$. What multiplies $\delta$ is the gradient, and $g(h) = g$ means
# $g G \leq h \lt (g + 1) G$:
#
# $$
# dk_g = \sum_{h = g G}^{g G + G - 1} dK_h
# \qquad dv_g = \sum_{h = g G}^{g G + G - 1} dV_h
# \tag{4.4}
# $$
#
# a sum, not a mean, and not over equal $h \bmod H_{kv}$. And for each head alone, with $do$ and $dlse$ arriving (the
# steps are those of [scaled dot-product attention](01_scaled_dot_product.ipynb), equations 1.5 to 1.7):
#
# $$
# \begin{aligned}
# dp_{hij} &= do_{hi} \cdot v_{g(h) j} &
# ds_{hij} &= p_{hij} \left( dp_{hij} - \sum_l p_{hil} \thinspace dp_{hil} + dlse_{hi} \right) \\
# dq_{hi} &= scale \sum_j ds_{hij} \thinspace k_{g(h) j} &
# dK_{hj} &= scale \sum_i ds_{hij} \thinspace q_{hi} \qquad dV_{hj} = \sum_i p_{hij} \thinspace do_{hi}
# \end{aligned}
# \tag{4.5}
# $$
#
# **Caches.** After the call, slot $j$ of a kv head holds the new token $j - n$ if it was written, and the past else.
# What arrives at it, $dkey_j$, is what (4.4) gives, from the queries of this call, plus $dpresent_j$, from everything
# later. All of it belongs to whoever stands there, and nothing to whom it replaced:
#
# $$
# dkey_j = \sum_h dK_{hj} + dpresent_j \qquad
# dk_t = dkey_{n + t} \qquad
# dpast_j = \begin{cases} 0 & n \leq j \lt n + T \\ dkey_j & \text{else} \end{cases}
# \tag{4.6}
# $$
#
# with $h$ in the group, and values alike. A garbage slot has no $dK_{hj}$ and passes $dpresent_j$ on. **Rings** have
# the same sentence on the line of $W + T$ places: (4.4) gives every place its share, the last $W$ places add
# $dpresent$, and the line is handed back, the first $W$ places to the ring that came in and the rest to the new
# tokens. A key may be read by early tokens of the call and then overwritten by late ones; it still owns what the early
# ones sent.

# %%
plot.show(gqa.vjp)
plot.show(core, "sum_groups")
plot.show(kv_cache, "vjp", "shares")
plot.show(ring_cache, "vjp", "shares")

# %%
for variant, case in ("gqa", "everything"), ("kv_cache", "basic"), ("ring_cache", "long_call"):
    print(f"{variant}, {case}: {load_cases(variant, case)[0].why}")
    gradient_table(variant, case)
    print()
golden = load_cases("gqa", "basic")[0]
x, got = golden.inputs, gqa.vjp(**golden.cotangents | golden.inputs)
by_head = sdpa.vjp(**golden.cotangents | x | {name: core.repeat_heads(x[name], 6) for name in "kv"})
for name in "dk", "dv":
    groups = [by_head[name][:, 0:3].sum(1), by_head[name][:, 3:6].sum(1)]
    agree(f"(4.4) {name}: heads 0 to 2 and heads 3 to 5 of MHA, added up", got[name], np.stack(groups, axis=1))

# %% [markdown]
# The whole of it in one equality: cut seven tokens into calls of 3, 1, 2 and 1, run the calls forward, then their
# backwards in reverse, the *dpast* of a call being the *dpresent* of the one before. The gradients are those of
# the uncut sequence: a cache changes no number of training either. Stop the gradient at the cache, as one does
# to save memory, and they are not.

# %%
T, do = 7, draw("q", (2, 6, 7, 5))
x = dict(q=draw("q", (2, 6, T, 4)), k=draw("k", (2, 2, T, 4)), v=draw("v", (2, 2, T, 5)))
uncut = {kv_cache: masks.causal(T, T), ring_cache: masks.window(T, T, left=2, right=0)}
borders = [0, 3, 4, 6, 7]
for variant, slots in (kv_cache, 9), (ring_cache, 3):
    names, past, calls = list(variant.INPUTS)[3:5], [np.full((2, 2, slots, d), nan) for d in (4, 5)], []
    for s, e in zip(borders, borders[1:]):
        inputs = {name: x[name][:, :, s:e] for name in "qkv"} | dict(zip(names, past), past_length=np.array([s, s]))
        inputs |= dict(scale=0.5)
        calls.append((inputs, do[:, :, s:e]))
        _, *past = variant.dense(**inputs)
    whole = gqa.vjp(do, np.zeros((2, 6, T)), **x, mask=uncut[variant], scale=0.5)
    for kept in True, False:
        d, parts = [np.zeros_like(y) for y in past], []
        for inputs, d_out in reversed(calls):
            gradients = variant.vjp(d_out, *d, **inputs)
            parts.insert(0, [gradients["d" + name] for name in "qkv"])
            d = [kept * gradients["d" + name] for name in names]
        dq, dk, dv = (np.concatenate(part, axis=2) for part in zip(*parts))
        if kept:
            for name, got in dict(dq=dq, dk=dk, dv=dv).items():
                agree(f"{variant.__name__.rpartition('.')[2]}, four calls backwards: {name}", got, whole[name])
        else:
            off = [abs(got - whole["d" + name]).max() for name, got in zip("qkv", (dq, dk, dv))]
            print("    stopped at the cache: dq is off by {:.0e}, dk by {:.2f}, dv by {:.2f}".format(*off))

# %% [markdown]
# ## What goes wrong
#
# Each of these is a mistake someone made, written as code in the file of its variant, caught by a golden case and told
# from all others by its numbers alone.

# %%
told = {}
for variant in gqa, kv_cache, ring_cache:
    mistakes = {slug: text for slug, (text, _) in (variant.BUGS | variant.VJP_BUGS).items()}
    new = [(slug, text) for slug, text in mistakes.items() if slug not in told]
    print(table(new, (f"{variant.__name__.rpartition('.')[2]}: mistake", "what is wrong")))
    print(f"and {len(mistakes) - len(new)} that stand above\n" if told else "")
    told |= mistakes

# %% [markdown]
# The weights that a cache mistake gives, again by identity values: every past slot and every new token has a channel of
# its own. Three new tokens, eight slots. The row drawn has two tokens; the other row of the batch, not drawn, has four.
# What has no weight is hatched.

# %%
P, T = 8, 3
x = dict(q=draw("q", (2, 1, T, 4)), k=draw("k", (2, 1, T, 4)), past_key=draw("past_key", (2, 1, P, 4)),
         past_value=np.eye(P, P + T) + np.zeros((2, 1, 1, 1)), v=np.eye(P + T)[P:] + np.zeros((2, 1, 1, 1)),
         past_length=np.array([4, 2]), scale=0.125, chunk_size=2)
shown = ("causal_top_left", "causal_bottom_right", "garbage_read", "new_tokens_not_causal", "read_before_write",
         "past_ignored", "slots_from_0", "length_of_row_0")
panels = {"right": kv_cache.dense(**x)[0]} | {slug: kv_cache.BUGS[slug][1](x)[0] for slug in shown}
figure, axes = plot.subplots(3, 3, size=(2.6, 1.25))
for axis, (title, o) in zip(axes.flat, panels.items()):
    image = plot.attention_map(axis, o[1, 0], o[1, 0] > 0, title, labels=("", "new token t"))
    axis.vlines([1.5, 7.5], -0.5, T - 0.5, color="black", linewidth=1)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    axis.label_outer()
for axis in axes[2]:
    axis.set_xticks([0.5, 4.5, 9], ["past", "empty slots", "new"])
figure.colorbar(image, ax=axes, label="weight", shrink=0.7)
figure.suptitle("Two cached tokens, six empty slots, three new tokens: who is read")
plot.save(figure, "04_gqa_and_kv_cache_mistakes", """Nine maps of three new tokens by eleven columns: two past slots,
    six empty slots, three new tokens. Right: the past, no empty slot, a triangle of new tokens. Causal top left: only
    the first slots. Bottom right and garbage read: weight on empty slots. Not causal: the new square is full. Read
    before write: the diagonal is missing. Past ignored: the triangle alone. Slots from 0: no past, two empty slots,
    and the new square is full. Length of row 0: two empty slots are read.""")

# %% [markdown]
# And a ring of four after six tokens, so that slots 0 to 3 hold positions 4, 5, 2, 3, and a call of three. In these
# maps the columns are positions.

# %%
W, n = 4, 6
x = dict(q=draw("q", (1, 1, T, 4)), k=draw("k", (1, 1, T, 4)), v=np.eye(9)[6:][None, None], scale=0.125,
         ring_key=draw("ring_key", (1, 1, W, 4)), ring_value=np.eye(9)[[4, 5, 2, 3]][None, None],
         past_length=np.array([n]))
shown = "window_plus_one", "window_minus_one", "call_written_before_read", "slots_taken_for_positions", "slot_clamped"
panels = {"right: W keys": ring_cache.dense(**x)[0]} | {slug: ring_cache.BUGS[slug][1](x)[0] for slug in shown}
figure, axes = plot.subplots(2, 3, size=(2.6, 1.5))
for axis, (title, o) in zip(axes.flat, panels.items()):
    image = plot.attention_map(axis, o[0, 0], o[0, 0] > 0, title, labels=("position j", "position i"))
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    axis.label_outer()
for axis in axes[1]:
    axis.set_xticks(range(9))
for axis in axes[:, 0]:
    axis.set_yticks(range(T), range(6, 9))
figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
figure.suptitle("A ring of W = 4 and three new tokens: right is a band of four")
plot.save(figure, "04_gqa_and_kv_cache_ring_mistakes", """Six maps of tokens at positions 6, 7, 8 by positions 0 to 8.
    Right: a band of four that ends on the token's own position. Window plus one and minus one: bands of five and
    three. Written before read: the first token has only positions 5 and 6. Slots taken for positions: the wrong old
    tokens are dropped. Slot clamped: old tokens linger that should have been overwritten.""")

# %% [markdown]
# **One wrong port, caught live.** A decoder as it is often put together: write the new tokens, take everything up to
# the longest row, and ask for a causal mask, which in the library at hand is the lower triangle. It is right whenever
# the cache is empty, and so it passes every test of prefill.

# %%
# exercise
def port(q, k, v, past_key, past_value, past_length, scale, chunk_size):
    key, value, T = past_key.copy(), past_value.copy(), q.shape[2]
    for b, n in enumerate(past_length):
        key[b, :, n:n + T], value[b, :, n:n + T] = k[b], v[b]
    longest = past_length.max() + T
    is_causal = np.tril(np.ones((T, longest), bool))
    o, _ = gqa.dense(q, key[:, :, :longest], value[:, :, :longest], is_causal, scale=scale)
    return o, key, value


right = check_exercise("kv_cache", port)

# %% [markdown]
# The caches were right, so only $o$ is named, and `causal_top_left` is the place to look.
#
# ## Where code in the wild differs
#
# | | here | elsewhere |
# |---|---|---|
# | heads | repeat | the same in torch `enable_gqa`, jax, ONNX, transformers `repeat_kv`, flash-attention |
# | causal | offset $n$ of the row | top left in torch and jax `is_causal`, and in ONNX without cache and lengths |
# | | | bottom right in flash-attention since 2.1 |
# | lengths | one per row | one `start_pos` for the batch in Llama's reference code; per row in ONNX TensorScatter |
# | cache | `P` slots from the start | a cache that grows, past and new side by side: transformers by default |
# | window | `W` keys, own included | the same in transformers; the text of Mistral's report, $i - W$ to $i$, reads as $W + 1$ |
# | ring | position modulo `W` | the same in Mistral's first code and in ONNX TensorScatter, circular |
# | | | the last $W - 1$ tokens, in order, in the growing cache of transformers |
# | rotation | before the cache | the same in Llama and its kin |
#
# Tiling is in nobody's column: it is no convention, it is a mistake. Where words differ and numbers do not, the
# equality runs; where numbers differ, the named mistake is the other convention.

# %%
attend = lambda q, k, v, mask: gqa.dense(q, k, v, mask, scale=0.5)[0]
join = lambda past, new: [np.concatenate(pair, axis=2) for pair in zip(past, new)]
x = load_cases("kv_cache", "basic")[0].inputs
q, new, past = x["q"], (x["k"], x["v"]), [x[name][:, :, :4] for name in ("past_key", "past_value")]
grown = attend(q, *join(past, new), masks.causal(5, 9))
agree("a cache that grows, bottom right", grown, kv_cache.dense(**x | dict(past_length=np.array([4, 4, 4])))[0])

padded = 4 - x["past_length"]
past = [np.stack([np.roll(y[b], padded[b], axis=1) for b in range(3)]) for y in past]
real = masks.padding(9 - padded, 9)[..., ::-1]
agree("rows padded on the left", attend(q, *join(past, new), masks.causal(5, 9) & real), kv_cache.dense(**x)[0])

x = load_cases("ring_cache", "basic")[0].inputs | dict(past_length=np.array([13, 8, 11]))
q, new = x["q"], (x["k"], x["v"])
last = [ring_cache.turn(x[name], x["past_length"])[:, :, 1:] for name in ("ring_key", "ring_value")]
in_order = attend(q, *join(last, new), masks.window(5, 12, left=7, right=0))
agree("the last W - 1 tokens, in order", in_order, ring_cache.dense(**x)[0])

x |= dict(past_length=np.array([0, 0, 0]), ring_key=x["ring_key"][:, :, :3], ring_value=x["ring_value"][:, :, :3])
wider = ring_cache.BUGS["window_plus_one"][1](x)[0]
agree("W + 1 keys: the mistake window_plus_one", wider, attend(q, *new, masks.window(5, 5, left=3, right=0)))

# %% [markdown]
# Rotated keys are an example of rule 11. A rotation turns pairs of channels by an angle that grows with the position,
# and a score then depends on the distance $i - j$ alone. Let the new tokens of a call count from 0, and every distance
# to the past is wrong:

# %%
turned = lambda y, at: np.exp(1j * at) * (y[..., 0] + 1j * y[..., 1])
rotate = lambda y, at: np.stack([turned(y, at).real, turned(y, at).imag], axis=-1)
T, n, at = 5, 3, np.arange(5)
q, k, v = draw("q", (1, 6, T, 2)), draw("k", (1, 2, T, 2)), draw("v", (1, 2, T, 3))
whole = attend(rotate(q, at), rotate(k, at), v, masks.causal(T, T))
past = dict(past_key=rotate(k, at), past_value=v, past_length=np.array([n]), scale=0.5)
call = lambda at: kv_cache.dense(rotate(q[:, :, n:], at), rotate(k[:, :, n:], at), v[:, :, n:], **past)[0]
agree("keys rotated by their own position, then cached", call(at[n:]), whole[:, :, n:])
print(f"the new tokens rotated from position 0 again: wrong by {abs(call(at[:T - n]) - whole[:, :, n:]).max():.2f}")

# %% [markdown]
# ## Relations
#
# The three functions are one at their borders. Two of the lines are used everywhere: a cache can be taken back, for
# what lies beyond the length is garbage and garbage is not read (so speculative decoding rejects a token by lowering
# one number; a ring cannot, what it overwrote is gone); and a cache can be cut, each part attended to alone and the
# parts merged by lse.

# %%
x = load_cases("gqa", "mha")[0].inputs
agree("Hkv = Hq: scaled dot-product attention", gqa.dense(**x)[0], sdpa.dense(**x)[0])
x = load_cases("gqa", "mqa")[0].inputs
weights, _ = core.softmax(x["scale"] * x["q"] @ x["k"].swapaxes(-1, -2), x["mask"])
agree("Hkv = 1: plain broadcasting", gqa.dense(**x)[0], weights @ x["v"])

x = load_cases("kv_cache", "basic")[0].inputs
o, key, value = kv_cache.dense(**x)
ring = {name: x[name] for name in ("q", "k", "v", "past_length", "scale")}
ring |= dict(ring_key=x["past_key"], ring_value=x["past_value"])
for name, got, expected in zip(("o", "keys", "values"), ring_cache.dense(**ring), (o, key, value)):
    agree(f"a ring that is never filled is a cache: {name}", got, expected)
empty = load_cases("kv_cache", "empty_cache")[0].inputs
alone = gqa.dense(empty["q"], empty["k"], empty["v"], masks.causal(5, 5), scale=empty["scale"])[0]
agree("nothing cached: causal attention", kv_cache.dense(**empty)[0], alone)

again = {name: draw("x", x[name].shape) for name in "qkv"}
fresh = kv_cache.dense(**x | again)
retried = kv_cache.dense(**x | again | dict(past_key=key, past_value=value))
agree("taken back: the length of before, other tokens", retried[0], fresh[0], 0)
y = load_cases("ring_cache", "basic")[0].inputs
before, *after = ring_cache.dense(**y)
retried = ring_cache.dense(**y | dict(zip(("ring_key", "ring_value"), after)))[0]
wrong = abs(retried - before).max((1, 2, 3)) > 1e-9
print("a ring of 8 taken back by 5 tokens: rows of", y["past_length"][wrong], "tokens are wrong")

seen = kv_cache.seen(x["past_length"], 5, 9)
half = lambda part: gqa.dense(x["q"], key[:, :, part], value[:, :, part], seen[..., part], scale=x["scale"])
parts = half(slice(0, 4)), half(slice(4, 9))
both = np.logaddexp(parts[0][1], parts[1][1])
agree("two halves of the cache, merged by lse", sum(np.exp(lse - both)[..., None] * y for y, lse in parts), o)

q, heads = draw("q", (2, 6, 5, 4)), [draw("k", (2, 6, 7, 4)), draw("v", (2, 6, 7, 5))]
pooled = [gqa.pool_heads(y, 2) for y in heads]
twins = [core.repeat_heads(y, 6) for y in pooled]
agree("mean-pooled heads, if the heads of a group are equal", attend(q, *pooled, True), attend(q, *twins, True))
off = abs(attend(q, *pooled, True) - attend(q, *heads, True)).max()
print(f"... if not, pooling MHA into GQA makes another function, here {off:.1f} away: a start for training and no more")

# %% [markdown]
# ## In a box
#
# | | |
# |---|---|
# | formula | $o_{hi} = \sum_j p_{hij} \thinspace v_{g(h) j}$ with $p_{hij}$ the softmax over $j \in seen_i$ of $scale \thinspace q_{hi} \cdot k_{g(h) j}$ |
# | heads | $g(h) = \lfloor h / G \rfloor$, $G = H_q / H_{kv}$ |
# | positions | $i = n + t$ in each row; $\max(0, i - W + 1) \leq j \leq i$ |
# | cache | position $j$ in slot $j$, or $j \bmod W$; write, then read; other slots copied, empty ones never read |
# | shapes | q (B, Hq, T, dk), k (B, Hkv, T, dk), v (B, Hkv, T, dv), caches (B, Hkv, P or W, d), n (B,) |
# | | to o (B, Hq, T, dv) and the caches |
# | backward | sums over the heads of a group (4.4); a slot's gradient goes to whoever stands in it (4.6) |
# | cost | (4.2) bytes with $H_{kv}$ and $\min(T, W)$; (4.3) flops with $H_q$; $2 G / s$ flops per byte |
# | use it | the cache whenever a model writes; groups when the cache outgrows the weights; a ring when the past may be forgotten |
# | goes wrong | tiled heads; top-left causal; one length for a batch; garbage read; a ring off by one, or written before it is read; groups not summed |
#
# ## Exercises
#
# Write each function, in place of the line that raises, and run the cell. `check_exercise` passes arguments by name
# and leaves out the cases that need arguments you do not take; if something is wrong it says where, and, if it is a
# mistake others made, which. From a shell, for a function in your own file:
# `attention-ref verify kv_cache --impl mymodule:step --dtype float16`.
#
# **1. Nothing repeated.** GQA without a copy of the keys. Give $q$ a group axis. Mind the mask, which may differ
# between heads of a group, and may be broadcast; the rows without keys; and the keys nobody in the group sees.

# %%
# exercise
def grouped_attention(q, k, v, mask, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("gqa", grouped_attention)

# %% [markdown]
# **2. A call without a loop over rows.** `kv_cache` with array operations only: which new token, if any, belongs in
# slot $j$ of row $b$?

# %%
# exercise
def cached_attention(q, k, v, past_key, past_value, past_length, scale, chunk_size):
    raise NotImplementedError("not written yet")


right = check_exercise("kv_cache", cached_attention)

# %% [markdown]
# **3. A ring that is never turned.** All $T$ tokens at once, and leave the ring as it lies. Which position does slot
# $r$ hold when $n$ tokens were seen? Answer that with one remainder, and the mask and the new ring follow from it.

# %%
# exercise
def ring_attention(q, k, v, ring_key, ring_value, past_length, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("ring_cache", ring_attention)

# %% [markdown]
# ## Answers
#
# **1.** Query head $h = g G + c$ becomes place $(g, c)$; the keys get an axis of size 1 there and broadcast. A key is
# hidden if no head and no query of its group sees it.

# %%
# exercise
def grouped_attention(q, k, v, mask, scale):
    (B, Hq, Tq, dk), (_, Hkv, Tk, dv) = q.shape, v.shape
    split = lambda y: np.broadcast_to(y, (B, Hq, *y.shape[2:])).reshape(B, Hkv, Hq // Hkv, *y.shape[2:])
    q, mask = split(q), split(np.broadcast_to(mask, (*mask.shape[:2], Tq, Tk)))
    seen = mask.any((2, 3))[:, :, None, :, None]
    k, v = np.where(seen, k[:, :, None], 0), np.where(seen, v[:, :, None], 0)
    s = np.where(mask, scale * q @ k.swapaxes(-1, -2), -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(m == -np.inf, 0, m))
    z = e.sum(-1, keepdims=True)
    z = np.where(z == 0, 1, z)
    return (e / z @ v).reshape(B, Hq, Tq, dv), (m + np.log(z)).reshape(B, Hq, Tq)


assert check_exercise("gqa", grouped_attention)

# %% [markdown]
# **2.** Slot $j$ takes new token $j - n$, if there is one. Empty slots are replaced by zeros before they meet a weight
# of 0.

# %%
# exercise
def cached_attention(q, k, v, past_key, past_value, past_length, scale, chunk_size):
    T, P = q.shape[2], past_key.shape[2]
    n = past_length[:, None]
    t = np.arange(P) - n
    place, is_new = np.clip(t, 0, T - 1)[:, None, :, None], ((0 <= t) & (t < T))[:, None, :, None]
    key, value = (np.where(is_new, np.take_along_axis(new, place, axis=2), past)
                  for new, past in ((k, past_key), (v, past_value)))
    filled = (t < T)[:, None, :, None]
    G = q.shape[1] // k.shape[1]
    copies = [np.repeat(np.where(filled, y, 0), G, axis=1) for y in (key, value)]
    seen = (np.arange(P) <= n[..., None] + np.arange(T)[:, None])[:, None]
    s = np.where(seen, scale * q @ copies[0].swapaxes(-1, -2), -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ copies[1], key, value


assert check_exercise("kv_cache", cached_attention)

# %% [markdown]
# **3.** The largest position below $n$ that leaves remainder $r$ is $n - 1 - ((n - 1 - r) \bmod W)$, and if it is
# negative the slot is empty. Asked with $n + T$ in place of $n$, the same line says what each slot holds after the
# call: if the position is at least $n$, a new token, else what it held. As order does not matter, the ring stays as it
# lies.

# %%
# exercise
def ring_attention(q, k, v, ring_key, ring_value, past_length, scale):
    T, W = q.shape[2], ring_key.shape[2]
    n, r, t = past_length[:, None], np.arange(W), np.arange(T)
    held = lambda n: n - 1 - (n - 1 - r) % W
    j, i = np.concatenate([held(n), n + t], axis=1)[:, None], (n + t)[..., None]
    seen = ((0 <= j) & (i - W < j) & (j <= i))[:, None]
    after = np.where(held(n + T) >= n, W + held(n + T) - n, r)[:, None, :, None]
    key, value = (np.concatenate(pair, axis=2) for pair in ((ring_key, k), (ring_value, v)))
    G, written = q.shape[1] // k.shape[1], (j >= 0)[..., None]
    copies = [np.repeat(np.where(written, y, 0), G, axis=1) for y in (key, value)]
    s = np.where(seen, scale * q @ copies[0].swapaxes(-1, -2), -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ copies[1], *(np.take_along_axis(y, after, axis=2) for y in (key, value))


assert check_exercise("ring_cache", ring_attention)

# %% [markdown]
# ## Sources
#
# - Shazeer 2019, *Fast transformer decoding: one write-head is all you need*, arXiv:1911.02150: section 2.4,
#   incremental attention and its ratio of memory to arithmetic; section 3, multi-query attention.
# - Ainslie et al. 2023, *GQA*, arXiv:2305.13245: section 2.1, mean-pooling of heads; section 2.2, groups.
# - Jiang et al. 2023, *Mistral 7B*, arXiv:2310.06825: section 2, window and rolling buffer, and table 1.
# - Pope et al. 2022, *Efficiently scaling transformer inference*, arXiv:2211.05102: what a decode step reads.
# - Kwon et al. 2023, arXiv:2309.06180: a cache in pages that lie anywhere. Leviathan et al. 2022, arXiv:2211.17192:
#   speculative decoding, where tokens are taken back.
# - ONNX operators Attention-23 and -24, TensorScatter-24 (modes linear and circular).
# - Sizes of models: arXiv:2005.14165 (GPT-3), table 2.1; arXiv:2302.13971 (LLaMA), table 2, and arXiv:2307.09288
#   (Llama 2); arXiv:2407.21783 (Llama 3), table 3; arXiv:2204.02311 (PaLM), table 1; arXiv:2403.08295 (Gemma), table 1;
#   arXiv:2508.10925 (gpt-oss).
# - Code read for the table of differences: transformers `cache_utils.py`, the caches of Mistral's reference code, the
#   reference model of Llama 3. The comparisons with torch, jax and ONNX run in the project's tests: `make peers`.
