"""ALiBi, relative biases and T5 buckets in torch and transformers: values, gradients, slopes, rows, buckets."""
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exact import agrees, changed, without_dlse
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_cases import floating, tensors, with_gradients

from attention_ref import alibi, load_cases, relative_bias, t5
from attention_ref.core import merge_heads, split_heads
from attention_ref.masks import causal
from attention_ref.names import draw, draw_cotangent

ALIBI, RELATIVE, T5 = ({case.name: case for case in load_cases(name)} for name in ("alibi", "relative_bias", "t5"))


# F.scaled_dot_product_attention with the bias as its float mask

def alibi_bias(x, leaves):
    i, j = np.ogrid[:x["q"].shape[2], :x["k"].shape[2]]
    slopes = leaves.get("slopes", torch.from_numpy(alibi.slopes(x["q"].shape[1])))
    return -slopes[:, None, None] * torch.from_numpy(abs(i + x["offset"] - j))


def relative_bias_bias(x, leaves):
    return leaves["table"][:, torch.from_numpy(x["index"])]


def t5_bias(x, leaves):
    i, j = np.ogrid[:x["q"].shape[2], :x["k"].shape[2]]
    rows = t5.bucket(j - i - x["offset"], len(x["table"]), x["max_distance"], x["bidirectional"])
    return functional.embedding(torch.from_numpy(rows), leaves["table"]).permute(2, 0, 1)


BIAS = dict(alibi=alibi_bias, relative_bias=relative_bias_bias, t5=t5_bias)


def expressible(case):
    """torch reads what a mask hides."""
    return not np.isnan(case.inputs["k"]).any()


@pytest.mark.parametrize("case", [c for c in (*ALIBI.values(), *RELATIVE.values(), *T5.values()) if expressible(c)],
                         ids=lambda case: case.id)
def test_torch_with_a_bias(case):
    x = case.inputs
    leaves = tensors(case, floating(case))
    mask = torch.where(torch.from_numpy(x["mask"]), BIAS[case.variant](x, leaves), -torch.inf)
    with sdpa_kernel(SDPBackend.MATH):
        o = functional.scaled_dot_product_attention(leaves["q"], leaves["k"], leaves["v"], mask, scale=x["scale"])
    assert agrees(without_dlse(case), with_gradients(case, dict(o=o), leaves))


# transformers: models whose projections give q, k and v

class Given(torch.nn.Module):
    """In place of a projection: what it would have given."""

    def __init__(self, y):
        super().__init__()
        self.y = torch.from_numpy(np.ascontiguousarray(y)) if isinstance(y, np.ndarray) else y

    def forward(self, *_):
        return self.y


def decoder(case, T=6, d=4, **more):
    """A case as these models have it: one sequence, causal, dv = dk; exact values and conditioning anew."""
    B, H = case.sizes["B"], case.sizes["H"]
    x = {name: draw(name, (B, H, T, d)) for name in "qkv"} | dict(mask=causal(T, T)[None, None], offset=0)
    return changed(case, **x | dict(do=draw_cotangent((B, H, T, d), 0), dlse=np.zeros((B, H, T))) | more)


def fused(case):
    """(B, T, H 3 d): q, k and v of each head side by side."""
    return merge_heads(np.concatenate([case.inputs[name] for name in "qkv"], -1))


def additive(mask):
    return torch.from_numpy(np.where(mask, 0, np.finfo(np.float64).min))


HEADS = pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 16, 20, 25, 32, 40, 71, 112])


@HEADS
def test_slopes_of_bloom_mpt_and_falcon(heads):
    """Powers of a float32, and for Falcon rounded to bfloat16; the closed form of the paper is none of them."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    ours, two = alibi.slopes(heads), torch.ones(1, 2, dtype=torch.long)
    for alike, found in ((1e-5, bloom.build_alibi_tensor(two, heads, torch.float32)[:, 0, 1]),
                         (1e-5, -mpt.build_mpt_alibi_tensor(heads, 2)[:, 0, 0]),
                         (2 ** -8, falcon.build_alibi_tensor(two, heads, torch.float32)[:, 0, 1])):
        assert np.allclose(found.numpy(), ours, rtol=alike, atol=0)
        power_of_two = heads & (heads - 1) == 0
        assert power_of_two == np.allclose(found.numpy(), alibi.closed_form(heads), rtol=alike, atol=0)


@pytest.mark.parametrize("name", ["causal", "basic"])
def test_bloom_attention(name):
    """Its bias is m j without the position of the query; its softmax is in float32."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    case = decoder(ALIBI[name])
    B, H, T, d = case.inputs["q"].shape
    layer = bloom.BloomAttention(bloom.BloomConfig(hidden_size=H * d, n_head=H, hidden_dropout=0), 0).double().eval()
    layer.query_key_value, layer.dense = Given(fused(case)), torch.nn.Identity()
    bias = bloom.build_alibi_tensor(torch.ones(B, T, dtype=torch.long), H, torch.float64)
    nothing = torch.zeros(B, T, H * d, dtype=torch.float64)
    o, _ = layer(nothing, nothing, bias, additive(case.inputs["mask"]))
    assert agrees(case, dict(o=split_heads(o.detach().numpy(), H)), "float32")


@pytest.mark.parametrize("name", ["causal", "basic"])
def test_mpt_attention(name):
    """Its bias is m (j - Tk + 1), in float32."""
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    case = decoder(ALIBI[name])
    B, H, T, d = case.inputs["q"].shape
    layer = mpt.MptAttention(mpt.MptConfig(d_model=H * d, n_heads=H), 0).double().eval()
    layer.Wqkv = Given(np.concatenate([merge_heads(case.inputs[name]) for name in "qkv"], -1))
    layer.out_proj = torch.nn.Identity()
    bias, hidden = mpt.build_mpt_alibi_tensor(H, T).double(), torch.from_numpy(~case.inputs["mask"])
    o, _ = layer(torch.zeros(B, T, H * d, dtype=torch.float64), bias, attention_mask=hidden)
    assert agrees(case, dict(o=split_heads(o.detach().numpy(), H)), "float32")


def falcon_o(falcon, case, implementation):
    """What the only layer of a model attends to, before its last projection."""
    B, H, T, d = case.inputs["q"].shape
    model = falcon.FalconModel(falcon.FalconConfig(
        vocab_size=12, hidden_size=H * d, num_attention_heads=H, num_hidden_layers=1, alibi=True, multi_query=False,
        new_decoder_architecture=False, attn_implementation=implementation)).double().eval()
    layer, seen = model.h[0].self_attention, []
    layer.query_key_value = Given(fused(case))
    layer.dense.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].detach().numpy()))
    model(torch.zeros(B, T, dtype=torch.long))
    return split_heads(seen[0], H)


def test_falcon_scales_the_bias_and_adds_it_twice_where_it_is_eager():
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    once, twice = (decoder(ALIBI["learned"], slopes=factor * 0.5 * alibi.slopes(3)) for factor in (1, 2))
    assert once.inputs["scale"] == 0.5, "1/sqrt(dk), by which it multiplies slopes too"
    assert agrees(once, dict(o=falcon_o(falcon, once, "sdpa")))
    assert agrees(twice, dict(o=falcon_o(falcon, once, "eager")))
    assert np.abs(once.outputs["o"] - twice.outputs["o"]).max() > 0.5


def test_falcon_rounds_positions_to_bfloat16():
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    exact = alibi.slopes(2)[:, None, None] * np.arange(300)
    found = falcon.build_alibi_tensor(torch.ones(1, 300, dtype=torch.long), 2, torch.float64).numpy()
    assert np.array_equal(found[..., :257], exact[..., :257]) and np.array_equal(found[..., 258::4], exact[..., 258::4])
    assert np.abs(found - exact).max() == 2 ** -4, "one position off"


def t5_layer(modeling, case, **config):
    x, (R, H) = case.inputs, case.inputs["table"].shape
    d = x["q"].shape[3]
    layer = modeling.T5Attention(modeling.T5Config(
        d_model=H * d, d_kv=d, num_heads=H, relative_attention_num_buckets=R, dropout_rate=0,
        relative_attention_max_distance=x["max_distance"], is_decoder=not x["bidirectional"]), True, 0).double()
    layer.relative_attention_bias.weight.data = torch.from_numpy(x["table"])
    return layer


@pytest.mark.parametrize("name", ["scale_1", "decoder"])
def test_t5_attention(name):
    """Values and gradients, of the table too; it never scales."""
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    case = decoder(T5[name], scale=1.0)
    layer, (B, H, T, d) = t5_layer(modeling, case), case.inputs["q"].shape
    x = {name: torch.from_numpy(case.inputs[name]).requires_grad_() for name in "qkv"}
    layer.q, layer.k, layer.v = (Given(y.transpose(1, 2).flatten(2)) for y in x.values())
    layer.o = torch.nn.Identity()
    o = layer(torch.zeros(B, T, H * d).double(), mask=additive(case.inputs["mask"]))[0]
    o.backward(torch.from_numpy(merge_heads(case.cotangents["do"])))
    found = dict(o=split_heads(o.detach().numpy(), H), dtable=layer.relative_attention_bias.weight.grad.numpy())
    assert agrees(case, found | {"d" + name: y.grad.numpy() for name, y in x.items()})


@pytest.mark.parametrize("case", T5.values(), ids=lambda case: case.name)
def test_t5_bias_of_every_case(case):
    """The offset is what its cache has seen; in float32 one case has a distance in another bucket."""
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    x = case.inputs
    ours = x["table"].T[:, t5.buckets_of(*(x[name] for name in ("q", "k", "table", "bidirectional", "max_distance",
                                                                "offset")))]
    lengths = x["q"].shape[2], x["k"].shape[2]
    theirs = t5_layer(modeling, case).compute_bias(*lengths, past_seen_tokens=x["offset"])[0].detach().numpy()
    assert np.array_equal(theirs, ours) == (case.name != "whole_edge_in_float32")


def test_buckets_of_many_settings():
    """Two settings differ in a sweep: float32 misses a logarithm that is a whole number."""
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance, differ, tried = np.arange(-600, 601), [], 0
    for buckets in (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 320):
        for far in (3, 5, 8, 20, 32, 64, 81, 100, 128, 256, 512):
            for both in (True, False):
                if far > (buckets // 2 if both else buckets) // 2:
                    theirs = modeling.T5Attention._relative_position_bucket(
                        torch.from_numpy(distance), both, buckets, far).numpy()
                    off = distance[theirs != t5.bucket(distance, buckets, far, both)]
                    differ += [(buckets, far, both, off.tolist())] if len(off) else []
                    tried += 1
    assert differ == [(48, 81, False, [-54]), (96, 81, True, [-54, 54])] and tried > 150


@pytest.mark.parametrize("height, width", [(2, 3), (3, 2), (4, 4), (1, 5)])
def test_swin_windows(height, width):
    """Its table is (R, H)."""
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    layer, index = swin.SwinRelativePositionBias(3, (height, width)), relative_bias.window_index(height, width)
    table = draw("table", (3, (2 * height - 1) * (2 * width - 1)))
    layer.relative_position_bias_table.data = torch.from_numpy(table.T)
    assert np.array_equal(layer.relative_position_index.numpy().reshape(index.shape), index)
    assert np.array_equal(layer()[0].detach().numpy(), table[:, index])
