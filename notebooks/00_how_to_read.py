# %% [markdown]
# # How to read this book
#
# **Every claim in this book is an equality that ran, and what came out of it stands below.**
#
# Attention has many forms, and nearly all of them are one line. A token $i$ reads from tokens $j$, with weights:
#
# $$
# o_i = \sum_j p_{ij} v_j
# \tag{0.1}
# $$
#
# The forms differ in where the weights come from and in how the sum is arranged, and each of them has been written
# down wrongly, many times, in the same few ways. This book takes them one by one. It goes with a package,
# `attention_ref`, that holds each form as a short file of NumPy, *golden* outputs that are right to the last bit, and
# the mistakes, each with a name. The chapters derive the formulas, run them, draw them and break them, so that you
# can write them yourself, in any language, and know that you did.
#
# You need no computer to read it: all outputs are in the page. To run it: `pip install -e '.[notebooks,golden]'` in
# the project's folder, then `jupyter lab notebooks`.

# %%
import json
import re
from pathlib import Path

import numpy as np
from IPython.display import display

import attention_ref
from attention_ref import check, deberta, diagnose, load_cases, masks, plot, reformer, sdpa, variants
from attention_ref.conformance.cases import GOLDEN
from attention_ref.conformance.cli import main
from attention_ref.conformance.numbers import TINY, UNIT
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, in_system
from attention_ref.names import NAMES, draw

# %% [markdown]
# ## Four ideas
#
# **1. One formula, every number system.** A formula is written once, as plain NumPy, and the same text runs on any
# kind of number: half and single precision show how it behaves, double precision what it is, complex numbers carry
# derivatives without error, and *balls*, intervals that surely hold the exact value, certify digits. Here is one
# entry of one output in five of them.

# %%
for system in "float16", "float32", "float64", "complex128", "balls":
    o, lse = sdpa.dense(**in_system("sdpa", "basic", system))
    print(f"{system:10}", o[0, 0, 0, 0])

# %% [markdown]
# **2. Every form agrees.** A form of attention can be computed in several ways: as the formula says, in scalar loops,
# in tiles, token by token. They are independent texts, and they give the same numbers. The table shows the largest
# error of each against the certified value, and for balls their radius.

# %%
forms_table("sdpa", "basic")

# %% [markdown]
# **3. Mistakes have names.** What goes wrong is written down like what is right: a name, a sentence, a function that
# computes the wrong numbers. A case that cannot tell a mistake from the truth is no good, so each mistake is caught
# by some case, and what is caught can be called by its name. Here is a function that forgets the scale.

# %%
forgetful = lambda q, k, v, mask: sdpa.dense(q, k, v, mask, scale=1.0)
right = check_exercise("sdpa", forgetful, "basic")

# %% [markdown]
# "Right" means within a *budget*. Rounding is allowed, a mistake is not, and the line between them is no tolerance
# that someone typed: for an output with exact value $y$, in a type of roundoff $u$ whose sums are taken with roundoff
# $u'$,
#
# $$
# budget = 2 \left( u \thinspace \lvert y \rvert + u' K \right) + \eta
# \tag{0.2}
# $$
#
# with $K$ the measured sensitivity of that very output to rounding on the way to it (stored beside it), and $\eta$
# the smallest number of the type above 0. Shapes and infinities must be met exactly, and a NaN is wrong. (A
# stored NaN, for a masked score or a cache slot that nobody wrote, says that anything is right there.) Per type:

# %%
print(table([(t, f"2^{np.log2(UNIT[t]):.0f}", f"2^{np.log2(TINY[t]):.0f}") for t in UNIT], ("type", "u", "eta")))

# %% [markdown]
# In half precision rounding and mistakes come closest (what is NaN, or beyond a million budgets, is drawn at a
# million):

# %%
# exercise
def score(case, function):
    """The largest error of a function on a case in half precision, in budgets."""
    with np.errstate(all="ignore"):
        return check(case, function(case.in_dtype("float16")), "float16").score


cases = load_cases("sdpa")
honest = sorted(score(case, lambda x: sdpa.dense(**x)) for case in cases)
wrong = sorted(max(score(case, bug) for case in cases) for _, bug in sdpa.BUGS.values())
print(f"the formula, on {len(honest)} cases: at most {honest[-1]:.2f} budgets")
print(f"{len(wrong)} mistakes, each on the case that shows it best: at least {wrong[0]:.0f} budgets")
assert honest[-1] <= 1 < wrong[0]

figure, axis = plot.subplots(size=(6.5, 3.0))
for scores, marker, label in (honest, "o", "the formula, on each case"), (wrong, "D", "each mistake, at its clearest"):
    axis.semilogy(np.linspace(0, 1, len(scores)), np.clip(scores, 0.01, 1e6), marker, markersize=4, label=label)
axis.axhline(1, color="black", linewidth=0.8)
axis.set(xlabel="sorted", xticks=[], ylabel="error / budget", title="The budget parts rounding from mistakes")
axis.minorticks_off()
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False)
plot.save(figure, "00_how_to_read_budget", """Errors in units of the budget, on a logarithmic scale, sorted. All
    runs of the formula in half precision lie below the line at 1, below one third of a budget; all mistakes lie
    above it, at more than ten.""")

# %% [markdown]
# **4. The chapter is the proof.** What a chapter says about the formulas it says with `agree`, which prints the error
# it found and the limit it had to keep. A claim that is not true stops the chapter, and a chapter that stops is not
# published.

# %%
x = in_system("sdpa", "basic", "float64")
x["v"] = np.ones_like(x["v"])
agree("if all values are 1, so is their average", sdpa.dense(**x)[0], 1)
try:
    agree("... and it stays so with a sink", sdpa.dense(**x | dict(sink=np.array([0.5])))[0], 1)
except AssertionError as error:
    print("AssertionError:", error)

# %% [markdown]
# ## Who looks at whom
#
# Most forms of attention are told apart by one picture: which entries $p_{ij}$ may be other than 0, or how those that
# may are tied to one another. Eight tokens, rows queries, columns keys. Seven of the nine are *masks*, sets of pairs. Two
# are not: a low-rank projection mixes the keys into two before anything looks at them, so all rows are mixtures of two
# rows; and disentangled attention sees every pair, with weights that know how far apart its tokens stand.

# %%
T, x = 8, {name: draw(name, (1, 1, 8, 4)) for name in "qk"} | dict(v=np.eye(8)[None, None])
E = np.kron(np.eye(2), np.ones((1, 4)) / 4)                                           # two slots, means of four keys
slots, _ = sdpa.dense(x["q"], E @ x["k"], np.eye(2)[None, None], scale=0.5)
near = dict(pos_key=2 * draw("pos_key", (1, 6, 4)), pos_query=0 * draw("pos_query", (1, 6, 4)), p2c="released")
apart, _ = deberta.dense(0 * x["q"] + 0.5, 0 * x["k"], x["v"], **near, scale=0.5)
bucket = reformer.hash_buckets(x["k"], draw("k", (1, 1, 4, 2)))[0, 0, 0]
some = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]], bool)
edges = [(0, 0), (3, 0), (0, 1), (4, 1), (1, 2), (6, 2), (2, 3), (3, 5), (5, 5), (2, 6), (6, 6), (0, 7), (4, 7)]
kinds = {"none (chapter 1)": masks.full(T, T), "causal (2)": masks.causal(T, T),
         "padding (2)": masks.padding([5], T)[0, 0] & masks.full(T, T), "local window (9)": masks.window(T, T, 2, 1),
         "block-sparse (10)": masks.blocks(some, 2, T, T), "hash bucket (11)": bucket[:, None] == bucket,
         "low-rank projection": (slots @ E)[0, 0], "disentangled (8)": apart[0, 0], "graph (12)": masks.graph(edges, T)}
figure, axes = plot.subplots(3, 3, size=(1.9, 2.05))
for axis, (name, picture) in zip(axes.flat, kinds.items()):
    if picture.dtype == bool:
        plot.mask_map(axis, picture, name)
    else:
        plot.attention_map(axis, picture, title=name)
        for number in axis.texts:
            number.set_fontsize(4.5)
    axis.set(xticks=[], yticks=[])
    axis.label_outer()
figure.suptitle("Nine kinds of attention: seven sets of pairs, two ties between them")
plot.save(figure, "00_how_to_read_kinds", """Nine 8 by 8 grids. None is full; causal a lower triangle; padding five full
    columns; local window a band; block-sparse squares of 2 by 2; hash bucket scattered cells, symmetric about the
    diagonal; low-rank projection weights that are equal within columns 0 to 3 and within 4 to 7; disentangled weights
    that are constant along diagonals near the middle; graph an irregular set with an empty row.""")
agree("low rank: two rows span all", np.linalg.svd(slots[0, 0] @ E)[1][2:], 0)

# %% [markdown]
# ## How a chapter is built
#
# | part | what it gives |
# |---|---|
# | title | one claim and the formula |
# | contract | every convention, once: shapes, polarity, order, borders |
# | three tokens by hand | all intermediate numbers of one small example, to compare a port with |
# | the code | the file itself, not a copy: `plot.show` prints the lines that run |
# | derivation | forward and backward, every step |
# | forms that agree | the table above, for that variant |
# | the picture | the weights, beside those of plain attention |
# | cost | operations counted while the code runs, against a formula |
# | what goes wrong | the mistakes, drawn, and one wrong port caught live |
# | in the wild | where libraries differ, and how to translate |
# | relations | what it becomes at its borders, as equalities |
# | box, exercises, answers, sources | one table to keep; three functions to write, checked by `check_exercise`; where it all comes from |
#
# Chapters stand alone, but it is easiest to begin with the first: the others assume its words.

# %%
def columns(heads, rows):
    text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (heads, ["---"] * len(heads), *rows))
    display({"text/markdown": text, "text/plain": text}, raw=True)


claims, folder = [], Path(attention_ref.__file__).parents[1] / "notebooks"
for path in sorted(folder.glob("[0-9][0-9]_*.py")):
    text = path.read_text(encoding="utf-8").replace("\n# ", "\n")
    title, claim = re.search(r"\n# ([^\n]+).*?\*\*(.+?)\*\*", text, re.DOTALL).groups()
    claims.append((f"[{title}]({path.stem}.ipynb)", " ".join(claim.split())))
columns(("chapter", "its claim"), claims)

# %% [markdown]
# The variants that the chapters are about (`attention-ref list` prints them too), and how much is known of each:

# %%
titles = {name: module.__doc__.splitlines()[0].split(".  ")[0] for name, module in variants().items()}
columns(("variant", "what it is", "forms", "golden cases", "named mistakes"), [
    (f"`{name}`", titles[name].rstrip("."), len(module.FORMS), len(module.CASES),
     len(module.BUGS) + len(getattr(module, "VJP_BUGS", {}))) for name, module in variants().items()])

# %% [markdown]
# ## Words and signs
#
# The same letter means the same thing everywhere, in formulas, in code and in files. Sizes are `B` batch entries, `H`
# heads (`Hq` of queries, `Hkv` of keys and values), `Tq` queries, `Tk` keys or `T` tokens of both, `dk` channels of a
# key, `dv` of a value, `D` features of a token. The index $i$ is a query, $j$ a key. The gradient of a loss with
# respect to `x` is called `dx`. In a shape, `?` marks an axis that may be 1, or missing in front.
#
# These are the names of all arguments, outputs and intermediate results, and what others call them, where they have a
# name for it at all:

# %%
columns(("name", "meaning", "values"), [(f"`{name}`", n.meaning, n.domain) for name, n in NAMES.items()])
columns(("here", "torch", "jax", "ONNX", "flash-attention, flash-linear-attention"), [
    (f"`{name}`", *others) for name, n in NAMES.items() if any(others := (n.torch, n.jax, n.onnx, n.fla))])

# %% [markdown]
# What could be read in two ways is decided once. Each variant states its decisions, each golden case carries them,
# and a case adds its own where it has some. Those of plain attention are those of all that follow:

# %%
print(table(sdpa.CONVENTIONS.items(), ("what", "convention")))
print()
own = [(case.name, *item) for case in cases for item in sorted(case.conventions.items() - sdpa.CONVENTIONS.items())]
print(table(own, ("case", "what", "convention of the case")))

# %% [markdown]
# In the figures rows are queries and columns are keys, always. Weights are drawn on one fixed scale, from 0 to 1, so
# that two pictures can be compared; masked pairs are hatched; small maps carry their numbers. Scores and differences
# are red where positive, blue where negative. A mask alone is dark where a query may attend.

# %%
four = dict(q=draw("q", (1, 1, 4, 4)), k=draw("k", (1, 1, 6, 4)), v=np.eye(6)[None, None])
mask = masks.causal(4, 6, "bottom-right")
figure, axes = plot.subplots(1, 3, size=(2.9, 2.3))
plot.mask_map(axes[0], mask, "A mask: who may read whom")
plot.attention_map(axes[1], 0.5 * (four["q"] @ four["k"].swapaxes(2, 3))[0, 0], mask, "Scores: signed", signed=True)
plot.attention_map(axes[2], sdpa.dense(**four, mask=mask, scale=0.5)[0][0, 0], mask, "Weights: 0 to 1, rows sum to 1")
plot.save(figure, "00_how_to_read_maps", """Three maps of four queries by six keys. A causal mask whose
    diagonal ends at the bottom right: query 0 may read keys 0 to 2, query 3 all six. The scores of the same
    pairs, red and blue, the others hatched. The weights, purple to yellow, most of each row on one or two
    keys.""")

# %% [markdown]
# ## Check your own function
#
# **In Python.** `load_cases` gives the golden cases, `check` judges outputs, `diagnose` names the mistake. Outputs
# are an array, a tuple in the order of `OUTPUTS`, or a dict that may also hold gradients and intermediate steps.

# %%
for case in load_cases("sdpa", "causal"):
    o, lse = sdpa.dense(**case.inputs | dict(mask=masks.causal(case.sizes["Tq"], case.sizes["Tk"], "top-left")))
    print(f"{case.name}: passed {check(case, (o, lse)).passed}. {diagnose(case, (o, lse))}")

# %% [markdown]
# **From a shell.** The command imports your function, calls it with the arguments it takes, by name, in the type you
# ask for, and ends with exit code 0 if all is right, 1 if something is wrong, 2 if it could not be run. Here it runs
# on the package's own definition: `attention-ref verify sdpa --impl attention_ref:sdpa.dense --dtype float16 --case
# causal`.

# %%
code = main(["verify", "sdpa", "--impl", "attention_ref:sdpa.dense", "--dtype", "float16", "--case", "causal"])
print("exit code", code)

# %% [markdown]
# The first output must come in the type that went in; lse may be wider. NumPy has no bfloat16, so `--dtype bfloat16`
# hands over float32 arrays, wants float32 back and judges by the budget of bfloat16. `--accumulate float32` says that
# sums are taken in that type, and sets $u'$ in (0.2); without it $u' = u$.
#
# **A backward** is a function with parameters named like cotangents, here `do` and `dlse`: the derivatives of a loss
# with respect to the outputs. It gets them with the inputs, and returns a dict of the gradients `dq`, `dk`, `dv`,
# `dbias` and `dsink`, or some of them. Cases without gradients are left out. `attention-ref verify sdpa --impl
# mine:backward` checks it, and so does `check_exercise`. Here is a right one, and one that forgets that the loss may
# depend on lse.

# %%
right = check_exercise("sdpa", sdpa.vjp)
forgetful = lambda do, dlse, **inputs: sdpa.vjp(do, 0 * dlse, **inputs)
right = check_exercise("sdpa", forgetful)

# %% [markdown]
# **In any language.** Golden data are two files per variant. `sdpa.json` lists the cases: why each exists, its sizes,
# its conventions, its options (inputs that are no tensors; null is None) and the names of its tensors. Some cases
# have outputs only. `memory_order` is for Python views (the strided cases) and changes no number. `sdpa.safetensors`
# holds the tensors: 8 bytes with the length of a JSON header, the header, then the raw numbers, little-endian, row by
# row. `data_offsets`, start and end, count from the end of the header. Nothing is aligned: where a view of 8-byte
# numbers must begin at a multiple of 8, as in JavaScript, read through a DataView or copy the bytes first.
#
# | tensors | for instance | type |
# |---|---|---|
# | inputs | `basic/q` | F32, exact, and exact in bfloat16 and float16 too: every type starts from the same numbers |
# | masks | `basic/mask` | BOOL, one byte each, 0 or 1 |
# | integer inputs of other variants | `basic/past_length` of `kv_cache` | I64 |
# | cotangents | `basic/do`, `basic/dlse` | F32, exact |
# | outputs, steps, gradients | `basic/o`, `basic/scores`, `basic/dq` | F64 |
# | $K$ of each of these | `basic/K.o`, `basic/K.scores`, `basic/K.dq` | BF16: the upper half of a float32, the lower 16 bits are 0 |
#
# A step that equals the one before it is left out: without a cap there is no `capped`. A reader is a few lines.
#
# Even the inputs need no file. Unless a case says otherwise they follow an integer formula, the same in every
# language: entry $n$, counted row by row, of $tab(a, b)$ is
#
# $$
# tab_n = \frac{((a n^2 + b n + 3) \bmod 13) - 6}{8}
# \tag{0.3}
# $$
#
# and, for instance, $q = 3 \thinspace tab(3, 1)$ and $k = 3 \thinspace tab(5, 2)$.

# %%
data = (GOLDEN / "sdpa.safetensors").read_bytes()
body = 8 + int.from_bytes(data[:8], "little")
header = json.loads(data[8:body])
for name in "basic/q", "basic/mask", "basic/do", "basic/dlse", "basic/o", "basic/K.o", "basic/dq":
    print(f"{name:10}", header[name])

(o_start, o_end), (K_start, K_end) = (header[name]["data_offsets"] for name in ("basic/o", "basic/K.o"))
o = np.frombuffer(data[body + o_start:body + o_end], "<f8").reshape(header["basic/o"]["shape"])
K = (np.frombuffer(data[body + K_start:body + K_end], "<u2").astype("<u4") << 16).view("<f4").reshape(o.shape)
golden = load_cases("sdpa", "basic")[0]
agree("the bytes are the golden output", o, golden.outputs["o"], 0)
agree("... and its sensitivity", K, golden.conditioning["o"], 0)
agree("and what the formula gives", o, sdpa.dense(**golden.inputs)[0])

for name, a, b in ("q", 3, 1), ("k", 5, 2):
    index = np.arange(golden.inputs[name].size)
    agree(f"(0.3) for {name}", 3 * ((a * index**2 + b * index + 3) % 13 - 6) / 8, golden.inputs[name].ravel(), 0)

# %% [markdown]
# Now [scaled dot-product attention](01_scaled_dot_product.ipynb).
