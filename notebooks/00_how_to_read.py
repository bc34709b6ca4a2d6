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
# The forms differ in where the weights come from and in how the sum is arranged, and each of them has been written down
# wrongly, many times, in the same few ways. This book takes them one by one. It goes with a package, `attention_ref`, that
# holds each form as a short file of NumPy, *golden* outputs that are right to the last bit, and the mistakes, each with a
# name. The chapters derive the formulas, run them, draw them and break them, so that you can write them yourself, in
# any language, and know that you did.
#
# You need no computer to read it: all outputs are in the page. To run it: `pip install -e '.[test]'` in the project's
# folder, then `jupyter lab notebooks`.

# %%
import json
import re
from pathlib import Path

import numpy as np
from IPython.display import Markdown

import attention_ref
from attention_ref import check, diagnose, load_cases, masks, plot, sdpa
from attention_ref.conformance.cases import GOLDEN
from attention_ref.conformance.cli import main
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, in_system
from attention_ref.names import AXES, NAMES, draw

# %% [markdown]
# ## Four ideas
#
# **1. One formula, every number system.** A formula is written once, as plain NumPy, and the same text runs on any kind of number:
# half and single precision show how it behaves, double precision what it is, complex numbers carry derivatives
# without error, and *balls*, intervals that surely hold the exact value, certify digits. Here is one entry of one output in five
# of them.

# %%
for system in "float16", "float32", "float64", "complex128", "balls":
    o, lse = sdpa.dense(**in_system("sdpa", "basic", system))
    print(f"{system:10}", o[0, 0, 0, 0])

# %% [markdown]
# **2. Every form agrees.** A form of attention can be computed in several ways: as the formula says, in scalar
# loops, in tiles, token by token. They are independent texts, and they give the same numbers. The table shows the largest error
# of each against the certified value, and for balls their radius.

# %%
forms_table("sdpa", "basic")

# %% [markdown]
# **3. Mistakes have names.** What goes wrong is written down like what is right: a name, a sentence, a function that computes
# the wrong numbers. A case that cannot tell a mistake from the truth is no good, so each mistake is caught by some case, and
# what is caught can be called by its name. Here is a function that forgets the scale.

# %%
forgetful = lambda q, k, v, mask: sdpa.dense(q, k, v, mask, scale=1.0)
right = check_exercise("sdpa", forgetful, "basic")

# %% [markdown]
# "Right" means within a *budget*. Rounding is allowed, a mistake is not, and the line between them is no tolerance that someone typed:
# for an output with exact value $y$, in a type of roundoff $u$ whose sums are taken with roundoff $u'$,
#
# $$
# budget = 2 \left( u \thinspace \lvert y \rvert + u' K \right) + \eta
# \tag{0.2}
# $$
#
# with $K$ the measured sensitivity of that very output to rounding on the way to it (stored beside it), and $\eta$ the smallest
# number of the type. NaN, infinities and shapes must be met exactly. In half precision, where the two are closest:

# %%
# exercise
def score(case, function):
    """The largest error of a function on a case in half precision, in budgets."""
    with np.errstate(all="ignore"):
        return check(case, function(case.in_dtype("float16")), "float16").score


cases = load_cases("sdpa")
honest = sorted(score(case, lambda x: form(**x)) for case in cases for form in sdpa.FORMS)
wrong = sorted(max(score(case, bug) for case in cases) for _, bug in sdpa.BUGS.values())
print(f"honest: {len(honest)} runs, largest {honest[-1]:.2f}; wrong: {len(wrong)} mistakes, smallest {wrong[0]:.0f}")
assert honest[-1] <= 1 < wrong[0]

# %%
figure, axis = plot.subplots(size=(6.5, 3.0))
axis.semilogy(np.linspace(0, 1, len(honest)), np.maximum(honest, 1e-2), "o", markersize=4, label="a right form on one case")
axis.semilogy(np.linspace(0, 1, len(wrong)), np.minimum(wrong, 1e6), "D", markersize=4, label="a mistake on the case that shows it best")
axis.axhline(1, color="black", linewidth=0.8)
axis.set(xlabel="rank, from the smallest to the largest", ylabel="error / budget", title="The budget parts rounding from mistakes", xticks=[])
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False)
plot.save(figure, "00_how_to_read_budget", """Errors in units of the budget, on a logarithmic scale, sorted. All runs of right
    forms in half precision lie below the line at 1, all mistakes far above it.""")
