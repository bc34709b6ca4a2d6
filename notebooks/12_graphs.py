# %% [markdown]
# # Attention over a graph
#
# **A graph is a mask, and softmax over its edges costs O(E).**
#
# Nodes ask and nodes answer, and an edge says who is heard. Along every edge $e$ from $j = source_e$ to
# $i = target_e$ a score is formed, the edges that end in one node share its softmax, and what travels is a value:
#
# $$
# \begin{aligned}
# s_e &= scale \thinspace q_i \cdot k_j + bias_e & z_i &= \sum_{e \colon target_e = i} \exp(s_e) &
# lse_i &= \log z_i \\
# & & p_e &= \exp(s_e) / z_i & o_i &= \sum_{e \colon target_e = i} p_e v_j
# \end{aligned}
# \tag{12.1}
# $$
#
# That is `graph`. Two more variants put another score in the place of $s_e$ and call it $a_e$. Both project node
# vectors $x$ to $h$, and send $h_j$ where (12.1) sends $v_j$. Graph attention, `gat`:
#
# $$
# h_i = x_i W, \qquad a_e = LeakyReLU(a_{target} \cdot h_i + a_{source} \cdot h_j)
# \tag{12.2}
# $$
#
# and its second version, `gatv2`, which moves the product with $a$ from inside LeakyReLU to the outside:
#
# $$
# t_i = x_i W_{target}, \quad h_j = x_j W_{source}, \qquad a_e = a \cdot LeakyReLU(t_i + h_j)
# \tag{12.3}
# $$
#
# The fourth, `graphormer`, lets every node see every node and tells the softmax how far apart they are. With
# $distance_{ij}$ the number $L_{ij}$ of edges on a shortest path from $i$ to $j$, and $path_{ijn}$ the $n$-th of them,
#
# $$
# s_{ij} = scale \thinspace q_i \cdot k_j + b[distance_{ij}] + c_{ij}, \qquad
# c_{ij} = \frac{1}{L_{ij}} \sum_{n \lt L_{ij}} f[path_{ijn}] \cdot w_n
# \tag{12.4}
# $$
#
# and $z_i$, $lse_i$, $p_{ij}$, $o_i$ are those of plain attention, summed over all $j$. This chapter is enough to write
# the four functions in any language and to pass their golden cases.

# %%
import numpy as np

from attention_ref import core, gat, gatv2, graph, graphormer, load_cases, masks, plot, sdpa
from attention_ref.conformance.numbers import count
from attention_ref.conformance.report import table
from attention_ref.conformance.teach import agree, check_exercise, forms_table, gradient_table
from attention_ref.names import draw

np.set_printoptions(precision=4, suppress=True)
VARIANTS = dict(graph=graph, gat=gat, gatv2=gatv2, graphormer=graphormer)

# %% [markdown]
# ## The contract
#
# The shapes, as the files state them (an axis with `?` may be 1 or, in front, missing: it is broadcast), and what is
# to be read in one way only.

# %%
for name, variant in VARIANTS.items():
    shapes = variant.INPUTS | variant.OUTPUTS
    print(name)
    print(table([(name, text or "a number") for name, text in shapes.items()], ("name", "kind and shape")), "\n")

# %% [markdown]
# 1. **Shapes.** `B` batch entries and `H` heads, all independent of one another; `N` nodes; `E` edges, possibly none.
#    There is one list of edges for the whole batch. Several graphs in one call are one graph in parts: number the
#    nodes on.
# 2. **Direction.** An edge carries a value from its source to its target. The target asks (it is the query), the source
#    answers (it is the key), and the softmax of a node is over the edges that *end* in it.
# 3. **The list is taken as it is.** Its order means nothing. Parallel edges are separate terms. A node sees itself if
#    an edge says so; no loop is added and none removed. An undirected edge is two edges.
# 4. **A node in which no edge ends** has $o = 0$, $lse = -\infty$ and gradients 0.
# 5. **scale** (`graph`, `graphormer`) is a number without a default that multiplies $q$ before the product is formed.
# 6. **bias** (`graph`) has one number per edge and follows the list. Zero means none, $-\infty$ removes the edge,
#    though its nodes are still read.
# 7. **LeakyReLU** (`gat`, `gatv2`) is $u$ for $u \gt 0$, else $slope \cdot u$. slope is 0.2 in the papers and by
#    default, and golden cases state another. Its derivative at 0 is slope.
# 8. **Weights** (`gat`, `gatv2`) stand as (in, out), one matrix per head: $h = x W$ with $x_i$ a row. In the paper's
#    vector $a = [a_{target} \mid a_{source}]$ the first half meets the node that receives. There is no bias on nodes.
# 9. **Heads stay apart**: $o$ is (B, H, N, dv). The caller concatenates or averages them and applies a nonlinearity
#    after that.
# 10. **distance and path** (`graphormer`) are inputs, for one graph or one per batch entry. They run from *query* $i$
#     to *key* $j$, along the arrows. A distance of -1 says that no path leads there and reads the *last* entry of the
#     table `spatial_bias`, $b$; an entry of $-\infty$ excludes its pairs. A path is a list of edge numbers, its $n$-th
#     edge meets $w_n$ (`edge_weight`), -1 fills it up, and $c_{ij}$ is divided by the number of entries that are not
#     -1, whatever the distance says; without any it is 0. A row of $-\infty$ is a node of rule 4.
# 11. **lse** (`graph`, `graphormer`) is the natural logarithm of $z$, of biased scores.
# 12. **Never read.** In `graph`: key and value of a node that no edge leaves, and the query of a node in which none
#     ends. In `gat` and `gatv2`: a node on no edge. In `graphormer`: the features of an edge on no path. There may be
#     anything there, NaN included, and what is read holds numbers.
# 13. **Types.** $o$ has the type of the inputs. The largest score of *each node* is subtracted before the exponential.
# 14. **Gradients** exist for all floating arguments but scale and slope, in the shape of the argument. The loss may
#     depend on $o$ and, where there is one, on lse.
#
# The rest of the chapter is consequence.

# %% [markdown]
# ## Three nodes by hand
#
# Five edges between three nodes. Node 0 only sends. Node 1 hears one neighbour. Node 2 hears everybody: twice node 0,
# by two parallel edges that do not stand side by side, and itself. No number is one that hides a mistake. The first
# score is $s_0 = 0.75 \thinspace (0.5 \cdot 2 - 0.25 \cdot 1) + 0.5 = 1.0625$.

# %%
source, target = np.array([0, 2, 1, 0, 2]), np.array([2, 1, 2, 2, 2])
q = np.array([[1.0, -0.5], [0.5, 2.0], [0.5, -0.25]])
k = np.array([[2.0, 1.0], [-1.0, 0.5], [1.5, 1.25]])
v = np.array([[1.0, 2.0, -1.0], [3.0, -2.0, 0.5], [-0.5, 4.0, 2.0]])
bias, scale = np.array([0.5, -0.25, 1.0, -0.75, 0.25]), 0.75

product = (q[target] * k[source]).sum(1)
s = scale * product + bias
ends = target == np.arange(3)[:, None]
m = np.where(ends, s, -np.inf).max(1)
e = np.exp(s - m[target])
z = ends @ e
p = e / z[target]
o = (ends * p) @ v[source]
has_edges = z > 0
lse = np.where(has_edges, m, -np.inf) + np.log(np.where(has_edges, z, 1))
columns = dict(j=source, i=target, product=product, s=s, e=e, p=p)
print(table([(f"{j} -> {i}", *(f"{x:.4f}" for x in row)) for j, i, *row in zip(*columns.values())],
            ("edge", "q_i . k_j", "s_e", "exp(s_e - m_i)", "p_e")))
print("m", m, "z exp(-m)", z, "lse", lse, "o", o, sep="\n")

three = dict(q=q[None, None], k=k[None, None], v=v[None, None], source=source, target=target)
for form in graph.FORMS:
    o_ref, lse_ref = form(**three, bias=bias, scale=scale)
    agree(f"o by hand, {form.__name__}", o, o_ref[0, 0])
    agree(f"lse by hand, {form.__name__}", lse, lse_ref[0, 0])
agree("one neighbour: its value", o[1], v[2], 0)

# %% [markdown]
# The same graph with the scores of GAT and GATv2. Two of the five sums in GAT are negative and meet the slope. In GATv2
# each *channel* meets it on its own.

# %%
x = np.array([[1.0, -0.5], [0.5, 1.5], [-1.0, 0.75]])
w = np.array([[1.0, -0.5], [0.5, 0.75]])
a_source, a_target, slope = np.array([0.5, -1.25]), np.array([-0.75, 0.5]), 0.25
h = x @ w
sends, receives = h @ a_source, h @ a_target
u = receives[target] + sends[source]
a_gat = np.where(u > 0, u, slope * u)
p_gat = np.exp(a_gat) / (ends @ np.exp(a_gat))[target]
print("h", h, "a_source . h", sends, "a_target . h", receives, "sum on each edge", u, "a_e", a_gat, "p_e", p_gat,
      sep="\n")

w_target, a = np.array([[0.5, 1.0], [-0.75, 0.25]]), np.array([1.0, -0.5])
t = x @ w_target
u2 = t[target] + h[source]
a_gatv2 = np.where(u2 > 0, u2, slope * u2) @ a
p_gatv2 = np.exp(a_gatv2) / (ends @ np.exp(a_gatv2))[target]
print("\nt", t, "t_i + h_j on each edge", u2, "a_e", a_gatv2, "p_e", p_gatv2, sep="\n")

edges = dict(source=source, target=target)
layer = dict(x=x[None], w=w[None], a_source=a_source[None], a_target=a_target[None], slope=slope)
layer2 = dict(x=x[None], w_source=w[None], w_target=w_target[None], a=a[None], slope=slope)
agree("gat by hand", (ends * p_gat) @ h[source], gat.dense(**layer, **edges)[0, 0])
agree("gatv2 by hand", (ends * p_gatv2) @ h[source], gatv2.dense(**layer2, **edges)[0, 0])

places = np.array([[0.0, 1.15], [0.85, 0.0], [-0.85, 0.0]])
figure, axes = plot.subplots(1, 3, size=(2.5, 2.4))
for axis, (title, weights) in zip(axes, dict(graph=p, gat=p_gat, gatv2=p_gatv2).items()):
    plot.graph(axis, places, source, target, weights, f"{title}: weights p")
plot.save(figure, "12_graphs_by_hand", """Three drawings of the same three nodes and five arrows, each with its weight.
    The arrow from 2 to 1 weighs 1.00 in all: it is the only one that ends there. The four that end in node 2
    sum to one. In graph the two parallel arrows from node 0 weigh 0.40 and 0.12, told apart by their biases;
    in gat they weigh 0.45 each, in gatv2 0.28 each.""")

# %% [markdown]
# And Graphormer's. Along the arrows node 2 is one edge away from node 0, and node 1 is two; nothing leads back to node
# 0. Of two parallel edges the first of the list is on the path. The table $b$ has an entry for the distances 0, 1, 2
# and, at its end, one for "no path".

# %%
b = np.array([0.5, -0.25, 1.0, -0.75])
f = np.array([[1.0, -0.5], [0.5, 0.75], [-1.0, 0.25], [0.5, 0.5], [2.0, -1.0]])
w_hops = np.array([[0.5, 1.0], [-1.0, 0.75]])
distance, path = graphormer.shortest_paths(source, target, 3)
c = np.zeros((3, 3))
c[0, 1] = (f[0] @ w_hops[0] + f[1] @ w_hops[1]) / 2
c[0, 2], c[1, 2], c[2, 1] = f[0] @ w_hops[0], f[2] @ w_hops[0], f[1] @ w_hops[0]
s_ij = scale * q @ k.T + b[distance] + c
p_ij = np.exp(s_ij) / np.exp(s_ij).sum(1, keepdims=True)
print("distance", distance, "path from 0 to 1: edges", path[0, 1], "b[distance]", b[distance], "c", c, "s", s_ij,
      "p", p_ij, "o", p_ij @ v, sep="\n")
o_ref, lse_ref = graphormer.dense(q[None, None], k[None, None], v[None, None], b[None], f, w_hops[None], distance, path,
                                  scale=scale)
agree("o by hand", p_ij @ v, o_ref[0, 0])
agree("lse by hand", np.log(np.exp(s_ij).sum(1)), lse_ref[0, 0])

# %% [markdown]
# ## The code
#
# The definition compares every query with every key, picks the edges out, and takes for each node a softmax over *all*
# edges, those that end elsewhere masked. It is plain, and it wastes. `segment` visits each edge once. It stands on two
# small functions that any library of graphs has under some name: sums by target, and a softmax by target.

# %%
plot.show(graph, "dense", "edge_scores", "segment")
plot.show(core, "segment_sum", "segment_softmax")

# %% [markdown]
# `np.add.at` is not decoration. `y[target] += x` reads, adds and writes once for each *place*, not for each edge, and
# of the edges that meet there the last remains; further down a port is caught at it. The loop to carry to another
# language needs no sorting either: a pass for the maxima, a pass for the sums, a pass over the nodes.

# %%
plot.show(graph.loop)

# %% [markdown]
# GAT, GATv2 and Graphormer differ in their scores. GAT needs two numbers per node before it meets the first edge,
# GATv2 a vector per edge (what follows `edge_sums` is as in GAT), Graphormer a table and the paths.

# %%
plot.show(core.leaky_relu)
plot.show(gat, "half", "edge_scores", "segment")
plot.show(gatv2, "edge_sums")
plot.show(graphormer, "shortest_paths", "spatial", "lengths", "mean_of", "edge_encoding", "dense")

# %% [markdown]
# The rules that are easiest to break, run: order and names (1, 3), direction (2), nodes without edges (4), a bias of
# $-\infty$ (6), the entry for no path (10), what is never read (12).

# %%
first = lambda y: y[0] if isinstance(y, tuple) else y
for name in "graph", "gat", "gatv2":
    variant, y = VARIANTS[name], load_cases(name, "parallel")[0].inputs
    shuffled = {end: y[end][::-1] for end in ("source", "target")}
    agree(f"3: {name}, the list backwards", first(variant.segment(**y | shuffled)), first(variant.segment(**y)))
    place = np.array([3, 0, 4, 1, 2])                                       # node n becomes node place[n]
    renamed = {node: y[node][..., np.argsort(place), :] for node in "qkvx" if node in y}
    renamed |= {end: place[y[end]] for end in ("source", "target")}
    agree(f"1: {name}, nodes renamed: outputs move along", first(variant.segment(**y | renamed))[:, :, place],
          first(variant.segment(**y)))

one_edge = three | dict(source=np.array([0]), target=np.array([2]), scale=scale)
agree("2: one edge from 0 to 2: node 2 gets the value of node 0", graph.dense(**one_edge)[0][0, 0, 2], v[0], 0)
agree("4: nodes 0 and 1 get o = 0", graph.dense(**one_edge)[0][0, 0, :2], 0, 0)
agree("4: ... and lse = -inf", graph.dense(**one_edge)[1][0, 0, :2], -np.inf, 0)
without_1 = dict(source=np.delete(source, 1), target=np.delete(target, 1), bias=np.delete(bias, 1))
cut = np.where(np.arange(5) == 1, -np.inf, bias)
removed = graph.segment(**three | without_1, scale=scale)
for name, y, z in zip(graph.OUTPUTS, graph.segment(**three, bias=cut, scale=scale), removed):
    agree(f"6: a bias of -inf, or the edge taken from the list: the same {name}", y, z, 0)
far = load_cases("graphormer", "basic")[0].inputs
last = np.where(far["distance"] == -1, far["spatial_bias"].shape[1] - 1, far["distance"])
agree("10: -1 is the last entry of the table", graphormer.dense(**far | dict(distance=last))[0],
      graphormer.dense(**far)[0], 0)
for name, hidden in dict(graph="qkv", gat="x", gatv2="x", graphormer=["edge_features"]).items():
    y = load_cases(name, "unread_nan")[0].inputs
    clean = y | {node: np.nan_to_num(y[node]) for node in hidden}
    for form in VARIANTS[name].FORMS:
        agree(f"12: {name}.{form.__name__} reads none of {sum(int(np.isnan(y[node]).sum()) for node in hidden)} NaN",
              first(form(**y)), first(form(**clean)), 0)

# %% [markdown]
# ## Derivation: a graph is a mask
#
# Sort the sums of (12.1) by pairs of nodes. All edges from $j$ to $i$ share the product $q_i \cdot k_j$ and the value
# $v_j$, so that
#
# $$
# z_i = \sum_j \exp(scale \thinspace q_i \cdot k_j) \sum_{e \colon j \to i} \exp(bias_e)
# = \sum_j \exp(scale \thinspace q_i \cdot k_j + B_{ij}),
# \qquad B_{ij} = \log \sum_{e \colon j \to i} \exp(bias_e)
# \tag{12.5}
# $$
#
# and $o_i$ likewise: attention over edges *is* plain attention with the matrix $B$ as its bias. Where no edge leads
# from $j$ to $i$ the sum is empty and $B_{ij} = -\infty$. Without biases and without parallel edges the entries of $B$
# are 0 and $-\infty$, which is a mask, and the only thing a graph can say. With $n$ parallel edges $B_{ij} = \log n$:
# an edge said $n$ times.
#
# **Why edges.** The matrix asks every pair. The list asks for $E$ scores and $E$ exponentials, and the two sums by
# target take $E$ steps: nothing in `segment` has the size $N^2$.
#
# **Why one maximum per node.** A number subtracted from all scores of one node cancels in $p_e$, and every node may
# have its own. With the largest of its own edges the largest exponential is 1, so $z_i \geq 1$ wherever there is an
# edge. With one maximum for the graph, a node whose scores all lie far below has only zeros to divide.

# %%
B = np.full((3, 3), -np.inf)
np.logaddexp.at(B, (target, source), bias)
print("B, rows i, columns j", B, sep="\n")
q3, k3, v3 = three["q"], three["k"], three["v"]
for name, by_matrix, by_hand in zip(("o", "lse"), sdpa.dense(q3, k3, v3, bias=B, scale=scale), (o, lse)):
    agree(f"(12.5) {name} of plain attention with bias B", by_matrix[0, 0], by_hand)

single = dict(source=np.array([0, 2, 1, 2]), target=np.array([2, 1, 2, 2]))
mask = masks.graph(np.column_stack([single["source"], single["target"]]), 3)
as_edges = graph.segment(**three | single, scale=scale)
for name, y, z in zip(graph.OUTPUTS, as_edges, sdpa.dense(q3, k3, v3, mask, scale=scale)):
    agree(f"no bias, no parallel edges: {name} of plain attention with a mask", y, z)
double = graph.segment(**three, scale=scale)[0]
once = graph.segment(**three | single, bias=np.array([np.log(2), 0, 0, 0]), scale=scale)[0]
agree("two parallel edges are one with bias log 2", double, once)

low = load_cases("graph", "far_below")[0].in_dtype("float32")
with np.errstate(all="ignore"):
    print("one maximum for the whole graph, node 1:", graph.BUGS["global_maximum"][1](low)[0][0, 0, 1, :3])
print("a maximum for each node:                ", graph.segment(**low)[0][0, 0, 1, :3])

# %% [markdown]
# ## Derivation: who decides the order
#
# **Two halves.** The paper of GAT has one vector $a$ that meets $h_i$ and $h_j$ side by side. A product with two
# vectors side by side is a sum of two products, $r_i = a_{target} \cdot h_i$ and $c_j = a_{source} \cdot h_j$, one of
# each per node. No edge ever needs a vector product for its score.
#
# **GAT is static.** $a_e = LeakyReLU(r_i + c_j)$, and LeakyReLU with a slope above 0 rises. So whatever $r_i$ is,
#
# $$
# c_j \gt c_l \quad \Longrightarrow \quad LeakyReLU(r_i + c_j) \gt LeakyReLU(r_i + c_l)
# \tag{12.6}
# $$
#
# Among the neighbours they share, all nodes have the same order of preference, that of $c_j$ (each head its own): it is
# a property of those who speak, not of those who listen. What is left to the listener is how sharp the preference is,
# and not much of that. The slope of LeakyReLU is slope or 1, so with $0 \lt slope \leq 1$
#
# $$
# slope \thinspace (c_j - c_l) \leq \log \frac{p_{ij}}{p_{il}} \leq c_j - c_l \qquad \text{for } c_j \geq c_l
# \tag{12.7}
# $$
#
# With a slope of 1 both ends meet, $r_i$ cancels in the softmax, and the listener does not matter at all.
#
# **GATv2 is not.** $a \cdot LeakyReLU(t_i + h_j)$ has a kink per channel, and $t_i$ says where each lies for node $i$.
# To see what that can do, let every node of $n$ prefer another one of its choice, $\pi(i)$. Take unit vectors $x$, a
# strength $\beta$, and
#
# $$
# h_j = \beta \thinspace x_j, \qquad t_i = -\beta \thinspace x_{\pi(i)}, \qquad a = (-1, \ldots, -1)
# \tag{12.8}
# $$
#
# For $j = \pi(i)$ the sum $t_i + h_j$ is the zero vector and the score is 0. For any other $j$ it has one entry
# $\beta$ and one $-\beta$, and the score is $-\beta (1 - slope)$. So node $i$ gives its choice the weight
# $1 / (1 + (n - 1) \exp(-\beta (1 - slope)))$, as near to 1 as $\beta$ is large. By (12.6) no GAT can do it, for two
# nodes of which one prefers $j$ to $l$ and the other $l$ to $j$ are already too many.

# %%
n, beta, choice = 4, 4.0, np.array([2, 0, 3, 1])
everybody = dict(zip(("source", "target"), np.indices((n, n)).reshape(2, -1)))
unit = np.eye(n)[None]
chosen = dict(x=unit, w_source=beta * unit, w_target=-beta * unit[:, choice], a=-np.ones((1, n)), slope=0.2)
p_dynamic = gatv2.steps(**chosen, **everybody)[1].reshape(n, n).T           # rows target, columns source
agree("(12.8) the weight of the choice", p_dynamic[np.arange(n), choice], 1 / (1 + (n - 1) * np.exp(-beta * 0.8)))

static = dict(x=unit, w=unit, a_source=np.array([[1.5, 0.25, 2.0, -0.5]]), a_target=np.array([[-3.0, -1.0, 0.0, 1.0]]),
              slope=0.2)
p_static = gat.steps(**static, **everybody)[2].reshape(n, n).T
print("GAT, the order of preference of each node:", *np.argsort(-p_static, 1))
print("GATv2, the favourite of each node:", p_dynamic.argmax(1))

figure, axes = plot.subplots(1, 2, size=(3.0, 2.9))
titles = "GAT: all prefer node 2", "GATv2: each has its own choice"
for axis, weights, title in zip(axes, (p_static, p_dynamic), titles):
    plot.attention_map(axis, weights, None, title, labels=("source j", "target i"))
    axis.label_outer()
plot.save(figure, "12_graphs_order", """Two maps of four nodes that all see all. GAT: in every row the columns have the
    same order, 2 first, then 0, 1, 3; row 0 is nearly flat and row 3 is sharp. GATv2: the large weight, 0.89, stands
    in another column in every row.""")

difference = static["a_source"][0, :, None] - static["a_source"][0]
ratio = np.log(p_static[:, :, None] / p_static[:, None])
inside = (0.2 * difference - 1e-12 <= ratio) & (ratio <= difference + 1e-12) | (difference < 0)
agree("(12.7) every ratio lies between its bounds", inside, True, 0)

y = load_cases("gat", "complete")[0].inputs
logits = np.zeros((2, 3, 5, 5))
logits[:, :, y["target"], y["source"]] = gat.steps(**y)[1]
order = np.argsort(logits, -1)
agree("(12.6) golden case: one order for all nodes, head by head", order, order[:, :, :1], 0)
y = load_cases("gatv2", "own_order")[0].inputs
logits[:, :, y["target"], y["source"]] = gatv2.steps(**y)[0]
favourite = logits.argmax(-1)
differ = (favourite != favourite[:, :, :1]).any(-1)
print("golden case of GATv2, favourites in a head in which nodes differ:", favourite[differ][0])
y = load_cases("gat", "basic")[0].inputs | dict(slope=1.0)
agree("slope 1: the listener does not matter", gat.segment(**y), gat.segment(**y | dict(a_target=0 * y["a_target"])))

# %% [markdown]
# ## Derivation: distances and paths
#
# Graphormer is plain attention whose bias is read from the graph. The table $b$ holds one number per distance, and
# `shortest_paths` finds the distances by going out from each node in rings, as in any breadth-first search. The mean
# $c_{ij}$ is a sum of products $f_e \cdot w_n$. There are $N^2 L$ places on paths, but only $E L$ different products,
# so the form `gathered` makes $g_{ne} = f_e \cdot w_n$ first and reads
#
# $$
# c_{ij} = \frac{1}{L_{ij}} \sum_{n \lt L_{ij}} g_{n, path_{ijn}}
# \tag{12.9}
# $$
#
# Five nodes now, to be kept for the rest of the chapter: node 3 only sends, node 4 is on no edge, node 2 sees itself
# and has two edges from node 0.

# %%
source5, target5 = np.array([0, 3, 1, 2, 0, 1, 2, 0]), np.array([2, 1, 0, 2, 1, 2, 0, 2])
five = dict(source=source5, target=target5)
distance, path = graphormer.shortest_paths(source5, target5, 5)
qkv = {name: draw(name, (1, 1, 5, 4)) for name in "qk"} | dict(v=np.eye(5)[None, None], scale=0.25)
near = dict(spatial_bias=np.array([[1.5, 1.0, -0.5, -1.0, -2.0]]), edge_features=draw("edge_features", (8, 3)),
            edge_weight=0.25 * draw("edge_weight", (1, path.shape[-1], 3)), distance=distance, path=path)
plain, biased = sdpa.dense(**qkv)[0][0, 0], graphormer.dense(**qkv, **near)[0][0, 0]
b_and_c = graphormer.spatial(near["spatial_bias"], distance)[0] + graphormer.edge_encoding(
    near["edge_features"], near["edge_weight"], path)[0]
agree("(12.4) plain attention with the bias b + c", sdpa.dense(**qkv, bias=b_and_c)[0][0, 0], biased)
agree("(12.9) every product once", graphormer.gathered(**qkv, **near)[0][0, 0], biased)

figure, axes = plot.subplots(1, 3, size=(2.7, 2.7))
plot.group_map(axes[0], distance % 5, distance, "Distance, -1 is no path", labels=("key j", "query i"))
plot.attention_map(axes[1], b_and_c, None, "b[distance] + c: near is dear", signed=True)
plot.attention_map(axes[2], biased, None, "Weights")
for axis in axes:
    axis.label_outer()
plot.save(figure, "12_graphs_graphormer", """Three maps of five by five nodes. Distance: 0 on the diagonal, 1 and 2
    along arrows, -1 where no path leads: to nodes 3 and 4, and from node 4. The bias is positive on the diagonal and
    for most neighbours, and -2 where there is no path. The weights: every node keeps to itself and to neighbours, node
    4, which stands alone, keeps 0.96.""")

# %% [markdown]
# ## Forms that agree
#
# Three independent texts per variant, five number systems. The table holds the largest error against the certified
# value: half and single precision keep what their type allows, the rest is rounding. `balls` is the radius that
# interval arithmetic leaves around the exact value. A form that leaves the budget of a type fails the cell.

# %%
for name, case in ("graph", "bias_full"), ("graph", "left_out"), ("gat", "basic"), ("gatv2", "basic"), (
        "graphormer", "two_graphs"):
    print(f"{name}, {case}: {load_cases(name, case)[0].why}")
    forms_table(name, case)
    print()

# %% [markdown]
# ## The pattern beside dense softmax
#
# The five nodes as a drawing, as a matrix, and without the graph. With $v$ the identity, $o$ is the matrix of weights,
# parallel edges added up. It has the cells of the mask and no others; and within them it is the dense softmax, made to
# sum to one, but for the doubled edge, which counts twice.

# %%
places5 = np.array([[0.0, 1.9], [-1.1, 0.9], [0.9, 0.8], [-0.9, -0.3], [0.6, -0.4]])
p5 = graph.steps(qkv["q"], qkv["k"], source5, target5, scale=0.25)[2][0, 0]
o5 = graph.segment(**qkv, **five)[0][0, 0]
mask5 = masks.graph(np.column_stack([source5, target5]), 5)
agree("the mask is where the weights are", o5 > 0, mask5, 0)
times = np.zeros((5, 5))
np.add.at(times, (target5, source5), 1)
share = (plain * times).sum(1, keepdims=True)
agree("dense softmax, each edge as often as it is there, made to sum to one",
      plain * times / np.where(share, share, 1), o5)

figure, axes = plot.subplots(1, 3, size=(2.9, 2.8))
plot.graph(axes[0], places5, source5, target5, p5, "Five nodes, eight edges")
plot.attention_map(axes[1], o5, mask5, "The same as a matrix", labels=("source j", "target i"))
image = plot.attention_map(axes[2], plain, None, "Dense softmax", labels=("source j", "target i"))
axes[2].set(yticks=[], ylabel="")
figure.colorbar(image, ax=axes[2], label="weight", shrink=0.8)
plot.save(figure, "12_graphs_pattern", """Left: five nodes with their arrows and weights; node 2 has a loop and two
    arrows from node 0, node 3 only sends, node 4 stands alone. Middle: the same weights as a matrix, hatched
    where there is no edge; rows 3 and 4 are empty. Right: the dense softmax fills all 25 cells.""")

# %% [markdown]
# ## What it costs
#
# One multiply-add is two operations. Per edge `graph` pays for the scaled product ($3 d_k$) and the bias, for the
# softmax (subtract, add to $z$, divide) and for the weighted value ($2 d_v$); per node for putting $m$ back in lse.
# GAT pays for its projection and two products per node, then for two operations per score; GATv2 for two projections
# per node, then for $4 d_v$ per score. Exponentials and logarithms are counted apart.
#
# $$
# \begin{aligned}
# graph &= B H \left( E \thinspace (3 d_k + 2 d_v + 4) + N \right) \\
# gat &= B H \left( E \thinspace (2 d_v + 5) + N \thinspace (2 D d_v + 4 d_v + 1) \right) \\
# gatv2 &= B H \left( E \thinspace (6 d_v + 3) + N \thinspace (4 D d_v + 1) \right) \\
# exp &= B H \left( E + N \right)
# \end{aligned}
# \tag{12.10}
# $$

# %%
def ring(N, degree):
    return dict(source=np.arange(N * degree) % N, target=(np.arange(N * degree) % N + np.arange(N * degree) // N) % N)


def nodes(B, H, N, d):
    return {name: draw(name, (B, H, N, d)) for name in "qkv"} | dict(scale=0.25)


rows = []
for name, case in ("graph", "bias_full"), ("graph", "parallel"), ("gat", "basic"), ("gatv2", "own_order"):
    y = load_cases(name, case)[0]
    B, H, N, E, dv, dk, D = (y.sizes.get(size, 0) for size in ("B", "H", "N", "E", "dv", "dk", "D"))
    formula = B * H * dict(graph=E * (3 * dk + 2 * dv + 4) + N, gat=E * (2 * dv + 5) + N * (2 * D * dv + 4 * dv + 1),
                           gatv2=E * (6 * dv + 3) + N * (4 * D * dv + 1))[name]
    counted = count(VARIANTS[name].segment, **y.inputs)
    rows.append((f"{name}, {case}", counted["flops"], formula, counted["exp"], B * H * (E + N)))
print(table(rows, ("variant, case", "flops counted", "(12.10)", "exp counted", "(12.10)")))
agree("(12.10)", [row[1::2] for row in rows], [row[2::2] for row in rows], 0)

# %% [markdown]
# Plain attention with a mask computes all pairs, $2 N^2 (d_k + d_v + 2)$ and small terms, whatever the mask hides
# ([chapter 1](01_scaled_dot_product.ipynb)). With $d_k = d_v = d$ the two meet where
#
# $$
# E \thinspace (5 d + 4) = N^2 (4 d + 4)
# \tag{12.11}
# $$
#
# that is when about four fifths of all pairs are edges. Below that the list does less arithmetic. (A machine does more
# operations at a time in a dense product than in a gather, so there the crossing comes at fewer edges. This book
# counts operations.) The definition `graph.dense` is for reading: its softmax has $N E$ entries.

# %%
d, N = 16, [8, 16, 32, 64, 128]
listed = [count(graph.segment, **nodes(1, 1, n, d), **ring(n, 4))["flops"] for n in N]
masked = [count(sdpa.dense, **nodes(1, 1, n, d))["flops"] for n in N]
defined = [count(graph.dense, **nodes(1, 1, n, d), **ring(n, 4))["flops"] for n in N]
degrees = [1, 4, 16, 32]
by_edges = [count(graph.segment, **nodes(1, 1, 32, d), **ring(32, degree))["flops"] for degree in degrees]
all_pairs = count(sdpa.dense, **nodes(1, 1, 32, d))["flops"]
meet = 32 ** 2 * (4 * d + 4) / (5 * d + 4)

figure, axes = plot.subplots(1, 2, size=(3.9, 3.0))
plot.lines(axes[0], N, {"list of edges": listed, "matrix and mask": masked, "definition, N by E": defined}, "nodes N",
           "flops", "Four edges into every node:\nthe list grows like N")
curves = {"list of edges": by_edges, "matrix and mask": [all_pairs] * 4}
plot.lines(axes[1], [32 * degree for degree in degrees], curves, "edges E among 32 nodes", "flops",
           "The matrix pays for pairs,\nthe list for edges")
axes[1].axvline(meet, color="black", linewidth=0.8, linestyle=":")
for axis in axes:
    axis.minorticks_off()
plot.save(figure, "12_graphs_cost", """Two log-log plots of counted operations. Left: with four edges into every node,
    the list rises with the number of nodes, the matrix and the definition with its square; at 128 nodes the list does a
    twenty-seventh of the matrix. Right: with 32 nodes the list rises with the number of edges and crosses the
    level line of the matrix at about 830 of 1024 edges, marked by a dotted line.""")
agree("twice the nodes: the list, twice the flops", listed[-1] / listed[-2], 2)
agree("twice the nodes: the matrix, four times", masked[-1] / masked[-2], 4, 0.03)
agree("(12.11) at the crossing both do the same, but for N", (meet * (5 * d + 4) + 32) / all_pairs, 1, 0.01)

y = load_cases("graphormer", "basic")[0]
H, L, F, E, N = (y.sizes[size] for size in "HLFEN")
spared = count(graphormer.dense, **y.inputs)["flops"] - count(graphormer.gathered, **y.inputs)["flops"]
agree("(12.9) spares this many flops", spared, 2 * H * L * F * (N * N - E), 0)

# %% [markdown]
# ## Derivation: backward
#
# $do$, $dlse$ are derivatives of a loss, $dX$ is its derivative with respect to any $X$, and $ds_e$ stands for what is
# exponentiated in all variants ($da$ is taken: a vector is called so). Edges that end in different nodes do not meet
# in a softmax; those that end in one do as the keys of a row ([chapter 1](01_scaled_dot_product.ipynb)): for $f$ and
# $e$ with one target $i$,
#
# $$
# \frac{\partial p_f}{\partial s_e} = p_f \left( [f = e] - p_e \right), \qquad
# \frac{\partial \thinspace lse_i}{\partial s_e} = p_e
# \tag{12.12}
# $$
#
# and $o_i$ depends on $p_e$ by $dp_e = do_i \cdot v_j$. Both paths from $s_e$ to the loss add up:
#
# $$
# ds_e = \sum_{f \colon target_f = i} dp_f \thinspace p_f \left( [f = e] - p_e \right) + dlse_i \thinspace p_e
# = p_e \left( dp_e - row_i \right), \qquad row_i = \sum_{f \colon target_f = i} p_f dp_f - dlse_i
# \tag{12.13}
# $$
#
# where the sum is also $do_i \cdot o_i$. A node without edges has no $s_e$, and so nothing comes back from it.
#
# The rest needs one fact: *what was read along the edges comes back along the edges.* If $y_e = x_{source_e}$, then
# $x_j$ was read by each edge that leaves $j$, and $dx_j$ is the sum over them; if $y_e = x_{target_e}$, the sum is over
# those that end there. Reading and `segment_sum` are transposes of each other. Hence, for `graph`,
#
# $$
# \begin{aligned}
# dq_i &= scale \sum_{e \colon target_e = i} ds_e k_j & dk_j &= scale \sum_{e \colon source_e = j} ds_e q_i \\
# dv_j &= \sum_{e \colon source_e = j} p_e \thinspace do_i & dbias_e &= ds_e
# \end{aligned}
# \tag{12.14}
# $$
#
# with a bias that was broadcast summed over the axes along which it was. For `gat`, let $u_e = r_i + c_j$ be what
# LeakyReLU receives, and $du_e = ds_e$ where $u_e \gt 0$, else $slope \thinspace ds_e$. Then
#
# $$
# \begin{aligned}
# dr_i &= \sum_{e \colon target_e = i} du_e & dc_j &= \sum_{e \colon source_e = j} du_e \\
# da_{target} &= \sum_i dr_i h_i & da_{source} &= \sum_j dc_j h_j \\
# dh_i &= dr_i \thinspace a_{target} + dc_i \thinspace a_{source} + dv_i \\
# dW &= \sum_i x_i^T dh_i & dx_i &= dh_i W^T
# \end{aligned}
# \tag{12.15}
# $$
#
# where $dv$ is that of (12.14): $h$ is also the value. $dx$ is summed over heads, $dW$, $da$ over the batch. In `gatv2`
# LeakyReLU is inside, so $du_e$ is a vector, of channels $ds_e \thinspace a$ where $t_i + h_j \gt 0$, else slope times
# that, and
#
# $$
# \begin{aligned}
# da &= \sum_e ds_e \thinspace LeakyReLU(t_i + h_j) & dt_i &= \sum_{e \colon target_e = i} du_e &
# dh_j &= \sum_{e \colon source_e = j} du_e + dv_j \\
# dW_{target} &= \sum_i x_i^T dt_i & dW_{source} &= \sum_j x_j^T dh_j & dx_i &= dt_i W_{target}^T + dh_i W_{source}^T
# \end{aligned}
# \tag{12.16}
# $$
#
# In `graphormer` $ds_{ij} = p_{ij} (do_i \cdot v_j - row_i)$, as in any attention with a bias. A table is read once for
# each pair, and gets back a sum over the pairs that read one entry; so do $f$ and $w$, by way of the paths:
#
# $$
# db[\delta] = \sum_{i, j \colon distance_{ij} = \delta} ds_{ij}, \qquad
# df_e = \sum_{i, j, n \colon path_{ijn} = e} \frac{ds_{ij}}{L_{ij}} w_n, \qquad
# dw_n = \sum_{i, j \colon n \lt L_{ij}} \frac{ds_{ij}}{L_{ij}} f[path_{ijn}]
# \tag{12.17}
# $$
#
# with all three summed over the batch, and $df$ over the heads, which share the features. Pairs without a path belong
# to the last entry of $b$. (Below, `gat` calls $u$ and $du$ by `s` and `ds`. `on_edges` puts zeros in place of nodes on no
# edge, for $dW$ reads all nodes, and $0 \cdot \mathrm{NaN}$ is NaN. Of `graphormer` only this last part is shown; the
# rest is plain attention.)

# %%
plot.show(graph.vjp)
plot.show(gat.vjp)
plot.show(gatv2.vjp)
plot.show(graphormer, "table_gradient", "encoding_vjp")

# %% [markdown]
# By hand, for the three nodes. The sums by source are `leaves`, the transpose of reading.

# %%
do, dlse = np.array([[0.75, 1.25, -1.5], [0.5, -1.0, 0.25], [1.5, 0.75, -0.5]]), np.array([0.5, 0.25, -0.75])
leaves = source == np.arange(3)[:, None]
dp = (do[target] * v[source]).sum(1)
row = ends @ (p * dp) - dlse
ds = p * (dp - row[target])
by_hand = dict(dq=scale * (ends * ds) @ k[source], dk=scale * (leaves * ds) @ q[target], dv=(leaves * p) @ do[target],
               dbias=ds)
print("dp", dp, "row", row, "ds", ds, sep="\n")
for name, gradient in graph.vjp(do[None, None], dlse[None, None], **three, bias=bias, scale=scale).items():
    print(name, by_hand[name], sep="\n")
    agree(f"{name} by hand", by_hand[name], gradient)
agree("all scores of a node together get its dlse, or 0 without edges", ends @ ds, dlse * has_edges)
gathered, other = do[source], np.cos(np.arange(15.0)).reshape(5, 3)
agree("reading and segment_sum are transposes", (gathered * other).sum(),
      (do * core.segment_sum(other[None, None], source, 3)[0, 0]).sum())

# %% [markdown]
# Each backward against a complex step of its definition, along a fixed direction in each input. A complex step has no
# truncation error, so the two agree to rounding.

# %%
for name, case in ("graph", "bias_full"), ("graph", "left_out"), ("gat", "parallel"), ("gatv2", "parallel"), (
        "graphormer", "two_graphs"):
    print(f"{name}, {case}")
    gradient_table(name, case)
    print()

# %% [markdown]
# ## What goes wrong
#
# Each of these is a mistake someone made, written as code in the file of its variant, caught by a golden case and told
# from all others by its numbers alone. The first three variants share their mistakes with edges.

# %%
told = {}
for name, variant in VARIANTS.items():
    mistakes = {slug: text for slug, (text, _) in (variant.BUGS | variant.VJP_BUGS).items()}
    new = [(slug, text) for slug, text in mistakes.items() if slug not in told]
    print(table(new, (f"{name}: mistake", "what is wrong")))
    print(f"and {len(mistakes) - len(new)} that stand above\n" if told else "")
    told |= mistakes

# %% [markdown]
# The five nodes again, with $v$ the identity, so that a mistake shows its weights. What has no weight is hatched.

# %%
y = qkv | five | dict(bias=np.array([0.5, -0.25, 1.0, -0.5, 0.25, 0.75, -1.0, 0.75])[None, None])
shown = ("direction_reversed", "self_loops_added", "edges_assumed_sorted", "softmax_over_outgoing",
         "scatter_overwrites")
maps = {"right": graph.dense(**y)[0]} | {slug: graph.BUGS[slug][1](y)[0] for slug in shown}
figure, axes = plot.subplots(2, 3, size=(2.5, 2.3))
for axis, (title, weights) in zip(axes.flat, maps.items()):
    image = plot.attention_map(axis, weights[0, 0], weights[0, 0] > 0, title, labels=("source j", "target i"))
    axis.label_outer()
figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
figure.suptitle("One graph, five mistakes: the weights they give")
plot.save(figure, "12_graphs_mistakes", """Six maps of five by five nodes. Right: seven cells in rows 0, 1, 2.
    Direction reversed: the mirror image of the pattern. Self loops added: the diagonal is full, rows 3 and 4 included.
    Edges assumed sorted: other sources in rows 0 to 2. Softmax over outgoing edges: the right cells, but columns sum to
    one. Scatter overwrites: one cell of weight 1 in each row.""")

# %% [markdown]
# Which tests see them? On an *undirected* graph, each edge in the list both ways, the reversed direction changes
# nothing at all. A graph without loops and parallel edges forgives what is done to them. The golden graphs have no
# symmetry, a loop, and their edges in no order; a test of your own should have them too.

# %%
both_ways = {"source": np.array([0, 1, 1, 2, 4, 3]), "target": np.array([1, 0, 2, 1, 3, 4])}
undirected = y | both_ways | dict(bias=np.zeros((1, 1, 6)))
for slug in "direction_reversed", "parallel_edges_merged", "self_loops_removed":
    agree(f"undirected, simple: {slug} is not seen", graph.BUGS[slug][1](undirected)[0], graph.dense(**undirected)[0])

# %% [markdown]
# **One wrong port, caught live.** The sums by target, written as one would say them. It runs, it is right on any graph
# in which each node has one edge, and the rows of its weights even sum to one. (Where the last edge has a bias of
# $-\infty$ nothing at all remains; that case has no name.)

# %%
# exercise
def port(q, k, v, source, target, bias, scale):
    s = (scale * q[:, :, target] * k[:, :, source]).sum(-1) + bias
    m, z, o = np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3]), np.zeros(v.shape)
    np.maximum.at(m, np.s_[:, :, target], s)
    e = np.exp(s - np.where(m == -np.inf, 0, m)[:, :, target])
    z[:, :, target] += e
    o[:, :, target] += e[..., None] * v[:, :, source]
    return o / np.where(z == 0, 1, z)[..., None], m + np.log(np.where(z == 0, 1, z))


right = check_exercise("graph", port)

# %% [markdown]
# ## Where code in the wild differs
#
# **Self loops.** PyTorch Geometric, unless told not to, drops the self loops of the list and adds one to every node, in
# its `GATConv` and `GATv2Conv`. With at most one loop per node in the list that is the named mistake
# `self_loops_added`; a loop said twice is lost on the way.
#
# **A node without edges.** The released code of GAT works with a matrix of $-10^9$ where there is no edge. A row of
# nothing else is a row of equal scores, and the node gets the mean of all values, as `empty_row_uniform` does.
# PyTorch Geometric gives 0, as here.

# %%
y = load_cases("gat", "left_out")[0].inputs
N = y["x"].shape[1]
loose = y["source"] != y["target"]
with_loops = {end: np.append(y[end][loose], np.arange(N)) for end in ("source", "target")}
agree("loops dropped, then one for every node", gat.segment(**y | with_loops), gat.BUGS["self_loops_added"][1](y))
twice = y | {end: np.append(y[end], 3) for end in ("source", "target")}
print("node 3, its loop twice in the list:", gat.segment(**twice)[0, 0, 3])
print("node 3, its loops replaced by one: ", gat.segment(**y | with_loops)[0, 0, 3])

_, a_e, _ = gat.steps(**y)
full = np.full((*a_e.shape[:2], N, N), -1e9)
full[:, :, y["target"], y["source"]] = a_e
by_fill = core.softmax(full)[0] @ (y["x"][:, None] @ y["w"])
agree("-10^9 where there is no edge", by_fill, gat.BUGS["empty_row_uniform"][1](y)[0])
print("node 2, no edges: here", gat.segment(**y)[0, 0, 2], " filled", by_fill[0, 0, 2])

# %% [markdown]
# **Vectors on edges.** The graph transformer adds a vector $e$ of each edge to $k_j$ and to $v_j$, and has
# $scale = 1 / \sqrt{d_k}$. On the key it is a bias of $scale \thinspace q_i \cdot e$, on the value it adds
# $\sum_e p_e \thinspace e$ to $o_i$. So (12.1) gives the weights, and the weights give the rest.
#
# **The last layer.** GAT concatenates heads between layers and averages them in the last, so a port that concatenates
# there has the right numbers in the wrong shape. **The slope** of LeakyReLU is 0.2 here and 0.01 by default in
# libraries: `slope_of_libraries`. **Shared weights.** Where a library says `share_weights`, $W_{target} = W_{source}$.

# %%
y = load_cases("graph", "basic")[0].inputs
E, dk = len(y["source"]), y["q"].shape[3]
on_edge = draw("k", (2, 3, E, dk))
narrow = y | dict(v=y["v"][..., :dk])
q_i, k_j, v_j = y["q"][:, :, y["target"]], y["k"][:, :, y["source"]], narrow["v"][:, :, y["source"]]
p_e, _ = core.segment_softmax(y["scale"] * (q_i * (k_j + on_edge)).sum(-1), y["target"], 5)
theirs = core.segment_sum(p_e[..., None] * (v_j + on_edge), y["target"], 5)
ours = graph.segment(**narrow | dict(bias=y["scale"] * (q_i * on_edge).sum(-1)))[0]
agree("vectors on edges", ours + core.segment_sum(p_e[..., None] * on_edge, y["target"], 5), theirs)

y = load_cases("gat", "basic")[0].inputs
o = gat.segment(**y)
print("heads concatenated:", core.merge_heads(o).shape, " averaged:", o.mean(1).shape)
agree("slope_of_libraries is slope 0.01", gat.BUGS["slope_of_libraries"][1](y), gat.segment(**y | dict(slope=0.01)))
y = load_cases("gatv2", "shared_weights")[0].inputs
agree("with shared weights one_projection is no mistake", gatv2.BUGS["one_projection"][1](y), gatv2.segment(**y))

# %% [markdown]
# **Graphormer's released code** adds 1 to every distance, for 0 means padding there. It gives the pairs of a virtual
# node, which stands for the whole graph, a number of their own: a distance that no other pair has. Pairs beyond a
# cut-off get $-\infty$: an entry of the table. And it adds its mask twice. That is invisible while the mask holds 0 and
# $-\infty$, and the mistake `bias_twice` when it holds numbers.

# %%
y = load_cases("graphormer", "basic")[0].inputs
S = y["spatial_bias"].shape[1]
shifted = np.insert(y["spatial_bias"], 0, 0.0, axis=1)
plus_one = np.where(y["distance"] < 0, S, y["distance"] + 1)
agree("distances from 1, entry 0 is padding", graphormer.dense(**y | dict(spatial_bias=shifted, distance=plus_one))[0],
      graphormer.dense(**y)[0])

virtual = (np.arange(5) == 0)[:, None] | (np.arange(5) == 0)
own = dict(spatial_bias=np.insert(y["spatial_bias"], S - 1, 0.5, axis=1),
           distance=np.where(virtual, S - 1, y["distance"]), path=np.where(virtual[..., None], -1, y["path"]))
graph_bias = graphormer.spatial(y["spatial_bias"], y["distance"]) + graphormer.edge_encoding(
    y["edge_features"], y["edge_weight"], y["path"])
agree("a virtual node", graphormer.dense(**y | own)[0],
      sdpa.dense(y["q"], y["k"], y["v"], bias=np.where(virtual, 0.5, graph_bias), scale=y["scale"])[0])

cut_off = np.where(np.arange(S) < 3, 0.0, -np.inf) + 0 * y["spatial_bias"]
only_mask = y | dict(spatial_bias=cut_off, edge_weight=0 * y["edge_weight"])
added_twice = lambda inputs: graphormer.BUGS["bias_twice"][1](inputs)[0]
agree("0 and -inf, added twice: not seen", added_twice(only_mask), graphormer.dense(**only_mask)[0], 0)
print(f"numbers, added twice: o moves by {np.abs(added_twice(y) - graphormer.dense(**y)[0]).max():.2f}")

# %% [markdown]
# ## Relations
#
# Every mask is a graph, so the patterns of other chapters are lists of edges. And Graphormer with its table at
# $-\infty$ for all distances but 1 is attention over edges again, *against* the arrows: its paths lead from the query
# to the key, our edges from the key to the query.

# %%
y = nodes(2, 3, 6, 4)
pattern = lambda mask: dict(zip(("target", "source"), np.nonzero(mask)))
others = {"all pairs": masks.full(6, 6), "causal": masks.causal(6, 6), "a window": masks.window(6, 6, 2, 1)}
for title, mask in others.items():
    for name, got, expected in zip(graph.OUTPUTS, graph.segment(**y, **pattern(mask)), sdpa.dense(**y, mask=mask)):
        agree(f"{title} as a graph: {name}", got, expected)

lower = {name: y[name][:, :, :3] for name in "qkv"}
upper = {name: y[name][:, :, 3:] for name in "qkv"}
left, right_ = pattern(masks.causal(3, 3)), pattern(masks.window(3, 3, 1, 1))
joined = {end: np.append(left[end], right_[end] + 3) for end in left}
apart = [graph.segment(**half, **edges, scale=0.25)[0] for half, edges in ((lower, left), (upper, right_))]
agree("two graphs are one in parts", graph.segment(**y, **joined)[0], np.concatenate(apart, 2))

z = load_cases("gat", "basic")[0].inputs
h = z["x"][:, None] @ z["w"]
as_biases = graph.segment(0 * h, h, h, z["source"], z["target"], gat.steps(**z)[1], scale=1.0)[0]
agree("GAT is (12.1) with its scores as biases", gat.segment(**z), as_biases)
one_w = dict(x=z["x"], w_source=z["w"], w_target=z["w"], a=z["a_source"])
straight = dict(source=z["source"], target=z["target"], slope=1.0)
agree("slope 1: GAT = GATv2", gat.segment(**z | straight), gatv2.segment(**one_w, **straight))

z = load_cases("graphormer", "basic")[0].inputs
silent = z | dict(edge_weight=0 * z["edge_weight"])
plain = graphormer.dense(**silent | dict(spatial_bias=0 * z["spatial_bias"]))[0]
q5, k5, v5 = z["q"], z["k"], z["v"]
agree("Graphormer with tables of 0: plain attention", plain, sdpa.dense(q5, k5, v5, scale=z["scale"])[0])
neighbours = np.where(np.arange(z["spatial_bias"].shape[1]) == 1, 0.0, -np.inf) + 0 * z["spatial_bias"]
i, j = np.nonzero(z["distance"].reshape(5, 5) == 1)
against = graph.segment(q5, k5, v5, source=j, target=i, scale=z["scale"])[0]
of_neighbours = graphormer.dense(**silent | dict(spatial_bias=neighbours))[0]
agree("Graphormer of neighbours alone: edges, reversed", of_neighbours, against)
x0, edges0 = np.zeros((1, 3, 2)), dict(source=np.array([0, 0, 0, 2]), target=np.array([1, 2, 1, 2]))
degree_in, degree_out = np.arange(8.0).reshape(4, 2), -np.arange(8.0).reshape(4, 2)
print("centrality: a row for the edges that end in a node, one for those that leave it, added to x before the layers")
print(graphormer.centrality(x0, **edges0, z_in=degree_in, z_out=degree_out)[0])

# %% [markdown]
# ## In a box
#
# | | |
# |---|---|
# | formula | $o_i = \sum_{e \colon target_e = i} p_e v_j$, with $p_e$ a softmax over the edges that end in $i$ |
# | scores | `graph` (12.1), `gat` (12.2), `gatv2` (12.3), `graphormer` (12.4), which is dense |
# | shapes | q, k (B, H, N, dk), v (B, H, N, dv), or x (B, N, D); source, target (E,); o (B, H, N, dv) |
# | backward | $ds_e = p_e (do_i \cdot v_j - row_i)$; what was read along edges comes back along edges |
# | cost | $B H E (3 d_k + 2 d_v + 4)$ flops and $B H E$ exponentials; less than a matrix below 4/5 of all pairs |
# | use it | `graph`, `gatv2` when edges are few and known; `gat` when a node's importance is the same for all who listen; `graphormer` when all should see all, and far is not near |
# | goes wrong | direction; overwritten sums; parallel edges and loops; nodes without edges; one maximum for all; LeakyReLU on the wrong side of $a$; the -1 of no path |
#
# ## Exercises
#
# Write each function, in place of the line that raises, and run the cell. `check_exercise` passes arguments by name;
# if something is wrong it says where, and, if it is a mistake others made, which.
#
# **1. Attention over edges.** $o$ and lse, each edge once. `np.add.at` and `np.maximum.at` are allowed, the functions
# of `core` are not. Mind the node in which no edge ends, and the edge whose bias is $-\infty$.

# %%
# exercise
def edge_attention(q, k, v, source, target, bias, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("graph", edge_attention)

# %% [markdown]
# **2. GATv2 without a scatter.** Sort the edges by target, and the edges of a node lie side by side: `np.add.reduceat`
# and `np.maximum.reduceat` sum such runs. But a run of length 0 gives the number of the next one; what is to be done
# about nodes without edges? And which nodes may not be read?

# %%
# exercise
def sorted_gatv2(x, w_source, w_target, a, source, target, slope):
    raise NotImplementedError("not written yet")


right = check_exercise("gatv2", sorted_gatv2)

# %% [markdown]
# **3. The backward of (12.1), from lse.** A function that takes `do` and `dlse` is checked as a backward and returns
# `dict(dq=..., dk=..., dv=..., dbias=...)`. Take $o$ and lse from `graph.segment`, but call no softmax.

# %%
# exercise
def backward(do, dlse, q, k, v, source, target, bias, scale):
    raise NotImplementedError("not written yet")


right = check_exercise("graph", backward)

# %% [markdown]
# ## Answers
#
# **1.** A maximum of $-\infty$ is replaced by 0: then the exponentials of such a node are all 0, and so is its sum.

# %%
# exercise
def edge_attention(q, k, v, source, target, bias, scale):
    s = (scale * q[:, :, target] * k[:, :, source]).sum(-1) + bias
    m, z, o = np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3]), np.zeros(v.shape)
    np.maximum.at(m, np.s_[:, :, target], s)
    e = np.exp(s - np.where(m == -np.inf, 0, m)[:, :, target])
    np.add.at(z, np.s_[:, :, target], e)
    np.add.at(o, np.s_[:, :, target], e[..., None] * v[:, :, source])
    z = np.where(z == 0, 1, z)
    return o / z[..., None], m + np.log(z)


assert check_exercise("graph", edge_attention)

# %% [markdown]
# **2.** Runs are made only of nodes that have edges: `np.unique` names them and says where each run starts. The others
# keep the zeros they began with. A node on no edge is read by no edge, and its projection is never used.

# %%
# exercise
def sorted_gatv2(x, w_source, w_target, a, source, target, slope):
    t, h = x[:, None] @ w_target, x[:, None] @ w_source
    order = np.argsort(target, kind="stable")
    i, j = target[order], source[order]
    u = t[:, :, i] + h[:, :, j]
    logits = (np.where(u > 0, u, slope * u) * a[:, None]).sum(-1)
    some, start, length = np.unique(i, return_index=True, return_counts=True)
    o = np.zeros(h.shape)
    if len(i):
        e = np.exp(logits - np.repeat(np.maximum.reduceat(logits, start, -1), length, -1))
        z = np.add.reduceat(e, start, -1)
        o[:, :, some] = np.add.reduceat(e[..., None] * h[:, :, j], start, 2) / z[..., None]
    return o


assert check_exercise("gatv2", sorted_gatv2)

# %% [markdown]
# **3.** The weights are $\exp(s_e - lse_i)$. Each edge has a target with at least one edge, so its lse is $-\infty$
# only if all its biases are.

# %%
# exercise
def backward(do, dlse, q, k, v, source, target, bias, scale):
    o, lse = graph.segment(q, k, v, source, target, bias, scale=scale)
    q_i, k_j, v_j, do_i = q[:, :, target], k[:, :, source], v[:, :, source], do[:, :, target]
    lse = np.where(lse == -np.inf, 0, lse)
    p = np.exp(scale * (q_i * k_j).sum(-1) + bias - lse[:, :, target])
    row = (do * o).sum(-1) - dlse
    ds = p * ((do_i * v_j).sum(-1) - row[:, :, target])
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    np.add.at(dq, np.s_[:, :, target], scale * ds[..., None] * k_j)
    np.add.at(dk, np.s_[:, :, source], scale * ds[..., None] * q_i)
    np.add.at(dv, np.s_[:, :, source], p[..., None] * do_i)
    return dict(dq=dq, dk=dk, dv=dv, dbias=core.sum_to(ds, bias.shape))


assert check_exercise("graph", backward)

# %% [markdown]
# ## Sources
#
# - Velickovic et al. 2018, *Graph attention networks*, arXiv:1710.10903, section 2.1: equations 1 to 4 are (12.2), 5
#   concatenates the heads and 6 averages them.
# - Brody et al. 2021, *How attentive are graph attention networks?*, arXiv:2105.14491, section 3.2: equation 6 is GAT,
#   7 is (12.3). Static and dynamic attention are theirs.
# - Shi et al. 2020, *Masked label prediction*, arXiv:2009.03509: the graph transformer layer, (12.1) with vectors on
#   edges.
# - Ying et al. 2021, *Do transformers really perform bad for graph representation?*, arXiv:2106.05234, section 3.1:
#   equation 5 is centrality, 6 and 7 are (12.4).
# - The comparisons with torch and PyTorch Geometric run in the project's tests: `make peers`.
