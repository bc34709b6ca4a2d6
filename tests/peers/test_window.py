"""Windows and Longformer against torch, jax and transformers, and where these read a window differently."""
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exact import agrees, changed, without_dlse, without_nan
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_cases import tensors, with_gradients

from attention_ref import check, diagnose, load_cases, longformer, window

WINDOW, LONGFORMER = ({case.name: case for case in load_cases(variant)} for variant in ("window", "longformer"))
LOCAL, GLOBAL = ("q", "k", "v"), ("q_global", "k_global", "v_global")


def ids(case):
    return case.id


def attention(q, k, v, mask, scale):
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, k, v, torch.as_tensor(mask), scale=scale)


# torch

@pytest.mark.parametrize("case", without_nan(WINDOW.values()), ids=ids)
def test_sdpa_under_a_band(case):
    x = tensors(case, LOCAL)
    o = attention(*x.values(), window.mask_of(case.inputs), case.inputs["scale"])
    assert agrees(without_dlse(case), with_gradients(case, dict(o=o), x))


def in_window(x):
    """The equation as a function of batch entry, head, query and key, as flex_attention takes a mask."""
    lengths, dilation = torch.from_numpy(x["lengths"]), torch.from_numpy(np.resize(x["dilation"], x["q"].shape[1]))
    left, right = (10 ** 6 if x[side] is None else x[side] for side in ("left", "right"))

    def seen(b, h, i, j):
        away = j - i - x["offset"]
        reached = (-left * dilation[h] <= away) & (away <= right * dilation[h])
        return reached & (away % dilation[h] == 0) & (j < lengths[b])
    return seen


@pytest.mark.parametrize("case", without_nan(WINDOW.values()), ids=ids)
def test_flex_attention(case):
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
    q, k, v = (torch.from_numpy(case.inputs[name]) for name in LOCAL)
    blocks = create_block_mask(in_window(case.inputs), *q.shape[:3], k.shape[2], device="cpu")
    with warnings.catch_warnings(action="ignore"):       # it says that it is not compiled
        o, more = flex_attention(q, k, v, block_mask=blocks, scale=case.inputs["scale"],
                                 return_aux=AuxRequest(lse=True))
    assert agrees(case, dict(o=o.numpy(), lse=more.lse.numpy()))


@pytest.mark.parametrize("case", without_nan(LONGFORMER.values()), ids=ids)
def test_longformer_as_two_attentions(case):
    """The rows of either kind from scaled_dot_product_attention, with autograd through all six arrays."""
    x = tensors(case, LOCAL + GLOBAL)
    local, wide = (attention(*(x[name] for name in names), mask, case.inputs["scale"])
                   for names, mask in zip((LOCAL, GLOBAL), longformer.masks_of(case.inputs)))
    o = torch.where(torch.from_numpy(case.inputs["is_global"])[:, None, :, None], wide, local)
    assert agrees(without_dlse(case), with_gradients(case, dict(o=o), x))


# jax

def jax_window(case, **options):
    """o of jax.nn.dot_product_attention, whose keys and values are equally wide: channels of zeros are added."""
    jax = pytest.importorskip("jax")
    x = case.inputs
    width = max(x["k"].shape[3], x["v"].shape[3])
    with jax.enable_x64(True):
        q, k, v = (np.pad(x[name], [(0, 0)] * 3 + [(0, width - x[name].shape[3])]).swapaxes(1, 2) for name in LOCAL)
        o = jax.nn.dot_product_attention(q, k, v, scale=x["scale"], key_value_seq_lengths=x["lengths"].astype(np.int32),
                                         **options)
        return np.asarray(o).swapaxes(1, 2)[..., :x["v"].shape[3]]


FROM_KEY_0 = [changed(case, offset=0) for case in without_nan(WINDOW.values())
              if (case.inputs["dilation"] == 1).all() and None not in (case.inputs["left"], case.inputs["right"])
              and case.name != "empty_rows"]


@pytest.mark.parametrize("case", FROM_KEY_0, ids=ids)
def test_jax_local_window(case):
    """The window of jax starts at key 0, whatever the sizes; its softmax runs in float32."""
    sides = case.inputs["left"], case.inputs["right"]
    assert agrees(case, dict(o=jax_window(case, local_window_size=sides)), "float32")


def test_a_window_of_jax_does_not_end_at_the_last_key():
    case = WINDOW["basic"]
    o = jax_window(case, local_window_size=(case.inputs["left"], case.inputs["right"]))
    assert diagnose(case, o, "float32").mistake == "window_top_left"


def test_one_number_in_jax_is_both_sides():
    case = WINDOW["causal_blocks"]
    o = jax_window(changed(case, offset=0), local_window_size=case.inputs["left"])
    assert check(changed(case, offset=0, right=case.inputs["left"]), o, "float32").passed


# transformers

class Given(torch.nn.Module):
    """In place of a projection: the vector (H d) of the token whose number stands in channel 0."""
    def __init__(self, x):
        super().__init__()
        self.x = x.swapaxes(1, 2).flatten(2).flatten(0, 1)

    def forward(self, hidden):
        return self.x[hidden[..., 0].long()]


def layer(case, leaves):
    """o of LongformerSelfAttention. Its heads have one width, its scale is fixed, its tokens fill whole windows."""
    modeling = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    (B, H, T, _), dv, w = case.inputs["q"].shape, case.inputs["v"].shape[3], 2 * case.inputs["half_window"]
    more, factor = -T % w, case.inputs["scale"] * dv ** 0.5
    config = SimpleNamespace(hidden_size=H * dv, num_attention_heads=H, attention_probs_dropout_prob=0.0,
                             attention_window=[w])
    module = modeling.LongformerSelfAttention(config, 0).eval()
    for name, x in leaves.items():
        full, kind = functional.pad(x, (0, dv - x.shape[3], 0, more)), dict(q="query", k="key", v="value")[name[0]]
        setattr(module, kind + name[1:], Given(full * factor if kind == "query" else full))
    kept = torch.from_numpy(np.pad(case.inputs["keep"], ((0, 0), (0, more))))
    is_global = torch.from_numpy(np.pad(case.inputs["is_global"], ((0, 0), (0, more)))) & kept
    hidden = torch.arange(B * (T + more)).reshape(B, -1, 1).expand(-1, -1, H * dv).float()
    mask = torch.where(kept, torch.where(is_global, 10000.0, 0.0), -10000.0)
    o, *_ = module(hidden, mask, mask < 0, mask > 0, bool(is_global.any()))
    return o.unflatten(2, (H, dv)).transpose(1, 2)[:, :, :T]


EXPRESSIBLE = [without_dlse(case) for case in without_nan(LONGFORMER.values())
               if (case.inputs["dilation"] == 1).all() and case.inputs["half_window"] > 1]
EXPRESSIBLE += [changed(without_dlse(LONGFORMER["padding"]), half_window=2)]        # a half of 1 fails in transformers


@pytest.mark.parametrize("case", EXPRESSIBLE, ids=ids)
def test_longformer_self_attention(case):
    """Global keys by the local projections, 0 for a padded query."""
    x = tensors(case, LOCAL + GLOBAL, "float32")
    assert agrees(case, with_gradients(case, dict(o=layer(case, x)), x), "float32")


def test_most_of_longformer_is_met():
    assert {"basic", "padding", "reaches_all", "long"} <= {case.name for case in EXPRESSIBLE}
