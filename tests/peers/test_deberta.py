"""Disentangled attention in transformers, DeBERTa v1 and v2/v3: values, gradients, buckets, and padded queries."""
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from exact import agrees, changed
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

from attention_ref import check, deberta, diagnose, load_cases
from attention_ref.core import merge_heads, split_heads
from attention_ref.names import draw, draw_cotangent

CASES = {case.name: case for case in load_cases("deberta")}
torch.set_num_threads(1)


def counted_scale(case):
    """The scale that transformers takes: the tables that are there, counted; it has no other."""
    tables = sum(case.inputs[name].any() for name in ("pos_key", "pos_query"))
    return float((case.sizes["dk"] * (1 + tables)) ** -0.5)


def config(case, position_buckets=-1, max_relative_positions=None):
    terms = [term for term, name in dict(c2p="pos_key", p2c="pos_query").items() if case.inputs[name].any()]
    n = case.sizes
    return SimpleNamespace(
        hidden_size=n["H"] * n["dk"], num_attention_heads=n["H"], attention_head_size=n["dk"], pos_att_type=terms,
        relative_attention=True, max_relative_positions=max_relative_positions or n["R"] // 2,
        position_buckets=position_buckets, share_att_key=False, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=512, talking_head=False)


def leaves(case):
    """q, k, v and the tables that are there as tensors that record gradients."""
    x = case.inputs
    names = ["q", "k", "v", *(name for name in ("pos_key", "pos_query") if x[name].any())]
    return {name: torch.from_numpy(np.ascontiguousarray(x[name])).requires_grad_() for name in names}


class Given(torch.nn.Module):
    """In place of a projection: what it would have given."""

    def __init__(self, y):
        super().__init__()
        self.y = y

    def forward(self, _):
        return self.y


def wide(x):
    """(B, H, T, d) -> (B, T, H*d), a table (H, R, d) -> (1, R, H*d), by views."""
    x = x if x.ndim == 4 else x[None]
    return x.transpose(1, 2).flatten(2)


def by_v2(case, x):
    """The module of v2 with projections that give q, k, v and the tables."""
    buckets = -1 if case.inputs["max_position"] is None else case.sizes["R"] // 2
    layer = v2.DisentangledSelfAttention(config(case, buckets, case.inputs["max_position"])).double().eval()
    layer.query_proj, layer.key_proj, layer.value_proj = (Given(wide(x[name])) for name in "qkv")
    layer.pos_key_proj, layer.pos_query_proj = (Given(wide(x[n])) if n in x else None for n in ("pos_key", "pos_query"))
    return call(layer, case, torch.zeros(case.sizes["R"], 1).double())


def by_v1(case, x):
    """The module of v1: one projection gives q, k and v of each head side by side; the table is cut to the sequence."""
    layer = v1.DisentangledSelfAttention(config(case)).double().eval()
    layer.in_proj = Given(wide(torch.cat([x["q"], x["k"], x["v"]], -1)))
    cut = slice((case.sizes["R"] - 2 * span(case)) // 2, (case.sizes["R"] + 2 * span(case)) // 2)
    layer.pos_proj, layer.pos_q_proj = (Given(wide(x[n][:, cut]).clone()) if n in x else None
                                        for n in ("pos_key", "pos_query"))
    relative = v1.build_relative_position(x["q"], x["k"])
    return call(layer, case, torch.zeros(case.sizes["R"], 1).double(), relative_pos=relative)


def span(case):
    return min(case.sizes["T"], case.sizes["R"] // 2)


def call(layer, case, embeddings, **more):
    B, T = case.sizes["B"], case.sizes["T"]
    mask = torch.from_numpy(np.broadcast_to(case.inputs["mask"], (B, case.inputs["mask"].shape[1], T, T)).copy())
    o, weights = layer(torch.zeros(B, T, 1).double(), mask, output_attentions=True, rel_embeddings=embeddings, **more)
    return o, weights


def expressible(case):
    """One reading, no NaN; what a row without keys gives is another test's."""
    x = case.inputs
    return x["p2c"] == "released" and not np.isnan(x["k"]).any() and x["mask"].any(-1).all()


PLAIN = [case for case in CASES.values() if expressible(case)]
MODULES = pytest.mark.parametrize("module", [by_v1, by_v2])


def found_by(module, case, x):
    """Outputs, the weights and the gradients that a module gives."""
    o, weights = module(case, x)
    found = dict(o=split_heads(o.detach().numpy(), case.sizes["H"]))
    if case.cotangents:
        cotangent = torch.from_numpy(merge_heads(case.cotangents["do"]))
        gradients = torch.autograd.grad(o, list(x.values()), cotangent)
        found |= {"d" + name: g.numpy() for name, g in zip(x, gradients)} | dict(weights=weights.detach().numpy())
    return found


def as_theirs(case):
    """The case with values as wide as keys, no gradient through lse, and the scale of transformers, a float32 root."""
    shape = case.inputs["q"].shape
    changes = dict(v=draw("v", shape), scale=1 / float(np.float32(1 / counted_scale(case))))
    if case.cotangents:
        changes |= dict(do=draw_cotangent(shape, 0), dlse=0 * case.cotangents["dlse"])
    return changed(case, **changes)


@MODULES
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_module(module, case):
    if module is by_v1 and case.inputs["max_position"] is not None:
        pytest.skip("version 1 has no buckets")
    case = as_theirs(case)
    assert agrees(case, found_by(module, case, leaves(case)), "float32")


def test_most_cases_are_expressible():
    assert len(PLAIN) >= len(CASES) / 2 and any(case.inputs["max_position"] for case in PLAIN)


@MODULES
def test_the_last_term_reads_i_minus_j(module):
    """They are not the equation of the paper, whose golden case names them."""
    case = as_theirs(CASES["basic"])
    found = found_by(module, case, leaves(case))
    paper = changed(case, p2c="paper")
    assert check(case, found, "float32").passed and not check(paper, found, "float32").passed


@pytest.mark.parametrize("buckets, max_position", [(256, 512), (32, 128), (8, 16), (8, 12), (6, 7)])
def test_buckets(buckets, max_position):
    r = np.arange(-2 * max_position, 2 * max_position + 1)
    theirs = v2.make_log_bucket_position(torch.from_numpy(r), buckets, max_position)
    assert np.array_equal(theirs.numpy(), deberta.bucket(r, buckets, max_position))


@MODULES
def test_a_padded_query_is_uniform_over_all_keys(module):
    """The lowest number in place of every score of a row: the mean of all values, padding included. Ours is 0."""
    case = as_theirs(CASES["padded_rows"])
    found = found_by(module, case, leaves(case))["o"]
    empty = ~case.inputs["mask"].any(-1)[:, 0]
    mean = case.inputs["v"].mean(2, keepdims=True)
    for b, rows in enumerate(empty):
        assert np.allclose(found[b][:, rows], mean[b]) and (case.outputs["o"][b][:, rows] == 0).all()
    assert empty.any()


def test_diagnosis_of_a_port_of_the_paper():
    """What a port of eq. 4 gives where released weights are run is named."""
    case = CASES["basic"]
    assert diagnose(case, deberta.dense(**case.inputs | dict(p2c="paper"))).mistake == "p2c_other_index"
