"""BigBird and Reformer against torch and transformers, and where these read a list of blocks or a chunk differently."""
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from exact import agrees, without_dlse, without_nan
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_cases import tensors, with_gradients

from attention_ref import bigbird, diagnose, load_cases, reformer
from attention_ref.names import draw

BIGBIRD, REFORMER = ({case.name: case for case in load_cases(variant)} for variant in ("bigbird", "reformer"))


def ids(case):
    return case.id


def attention(q, k, v, mask, bias, scale):
    """scaled_dot_product_attention, whose rows without keys are 0 here."""
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, k, v, torch.where(mask, bias, -torch.inf), scale=scale)


# BigBird

@pytest.mark.parametrize("case", without_nan(BIGBIRD.values()), ids=ids)
def test_sdpa_under_the_pattern(case):
    x = tensors(case, "qkv")
    mask = torch.from_numpy(bigbird.mask_of(case.inputs))
    o = attention(*x.values(), mask, torch.zeros((), dtype=torch.float64), case.inputs["scale"])
    assert agrees(without_dlse(case), with_gradients(case, dict(o=o), x))


def block_sparse(case, leaves, training=True, table=None):
    """o of BigBirdBlockSparseAttention for these random blocks, or for those it draws, which are put into `drawn`.

    It takes whole blocks: the last is filled up with padding.
    """
    modeling = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    (B, H, T, _), b, r = case.inputs["q"].shape, case.inputs["block_size"], case.inputs["random_blocks"].shape[2]
    config = SimpleNamespace(max_position_embeddings=512, hidden_size=H, num_attention_heads=H, num_random_blocks=r,
                             block_size=b, use_bias=False)
    module = modeling.BigBirdBlockSparseAttention(config, seed=3).train(training)
    own = module._bigbird_block_rand_mask_with_head
    module.drawn = []

    def rows(**arguments):
        module.drawn[:] = own(**arguments) if table is None else list(table[:, 1:-1])
        return module.drawn
    module._bigbird_block_rand_mask_with_head = rows
    q, k, v = (functional.pad(x, (0, 0, 0, -T % b)) for x in leaves.values())
    keep = torch.from_numpy(np.pad(case.inputs["keep"], ((0, 0), (0, -T % b)))).double()
    blocked, band, rows_kept, keys_kept = modeling.BigBirdModel.create_masks_for_block_sparse_attn(keep, b)
    o, _ = module.bigbird_block_sparse_attention(
        q, k, v, band, rows_kept, keys_kept, blocked, blocked, H, r, case.inputs["scale"] ** -2, b, b, B, q.shape[2],
        q.shape[2], seed=3, plan_from_length=None, plan_num_rand_blocks=None)
    return o.transpose(1, 2)[:, :, :T], module.drawn


ITC = [without_dlse(case) for case in without_nan(BIGBIRD.values()) if case.inputs["global_tokens"] == 0
       and case.sizes["M"] > 4 and case.sizes["r"] and case.inputs["global_blocks"][[0, -1]].all()]
SETS = [case for case in ITC if case.name != "listed_again"]


@pytest.mark.parametrize("case", SETS, ids=ids)
def test_block_sparse_attention(case):
    """As in training, with our random blocks: 0 for a padded query."""
    x = tensors(case, "qkv")
    o, _ = block_sparse(case, x, table=case.inputs["random_blocks"])
    assert agrees(case, with_gradients(case, dict(o=o), x))


def test_most_of_bigbird_is_met():
    assert {"basic", "padding", "whole_blocks", "block_of_one", "long"} <= {case.name for case in SETS}


def test_block_sparse_attention_counts_a_block_as_often_as_it_is_listed():
    case = BIGBIRD["listed_again"]
    o, _ = block_sparse(case, tensors(case, "qkv"), table=case.inputs["random_blocks"])
    assert diagnose(case, o.detach().numpy()).mistake == "random_counted_again"


@pytest.mark.parametrize("case", [BIGBIRD["basic"], BIGBIRD["long"]], ids=ids)
def test_outside_of_training_every_random_block_is_block_0(case):
    o, drawn = block_sparse(case, tensors(case, "qkv"), training=False)
    assert (np.array(drawn) == 0).all()
    assert diagnose(case, o.detach().numpy()).mistake == "random_all_block_0"


def test_what_it_draws_in_training_is_free_and_distinct():
    case = BIGBIRD["long"]
    o, drawn = block_sparse(case, tensors(case, "qkv"))
    table = np.pad(np.array(drawn), ((0, 0), (1, 1), (0, 0)), constant_values=-1)
    listed = (table[..., None] == np.arange(table.shape[1])).sum(2)
    assert (listed + (bigbird.near(case.inputs) | bigbird.both(case.inputs["global_blocks"]))).max() == 1
    expected, _ = bigbird.dense(**case.inputs | dict(random_blocks=table))
    np.testing.assert_allclose(o.detach().numpy(), expected, rtol=1e-12, atol=1e-13)


# Reformer

@pytest.mark.parametrize("case", [case for case in without_nan(REFORMER.values()) if case.name != "length_0"], ids=ids)
def test_rounds_of_sdpa(case):
    """Every round from scaled_dot_product_attention with log N as a bias, the rounds joined by autograd's own lse."""
    x, inputs = tensors(case, ("qk", "v")), case.inputs
    same, seen = (torch.from_numpy(m) for m in reformer.sets(inputs))
    q, own = x["qk"], torch.eye(x["qk"].shape[2], dtype=bool)
    k = functional.normalize(q, dim=-1)
    bias = -torch.where(own, inputs["self_penalty"], same.sum(2).clamp(min=1).double().log())
    o, z = [], []
    for r in range(seen.shape[2]):
        o.append(attention(q, k, x["v"], seen[:, :, r], bias, inputs["scale"]))
        s = inputs["scale"] * q @ k.transpose(-1, -2) + bias
        empty = ~seen[:, :, r].any(-1)
        z.append(torch.where(empty, -1e300, torch.where(seen[:, :, r] | empty[..., None], s, -torch.inf).logsumexp(-1)))
    weights = torch.stack(z).softmax(0)
    o = (weights[..., None] * torch.stack(o)).sum(0)
    assert agrees(without_dlse(case), with_gradients(case, dict(o=o), x))


class Given(torch.nn.Module):
    """In place of a projection: the vectors (B, T, H d) that were asked for."""
    def __init__(self, x):
        super().__init__()
        self.x = x.transpose(1, 2).flatten(2)

    def forward(self, hidden):
        return self.x


def lsh(x, seed=None):
    """LSHSelfAttention and its output for inputs of reformer. Its scale is 1: the queries carry ours."""
    modeling = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    (B, H, T, dk), L, dv = x["qk"].shape, x["buckets"].shape[2], x["v"].shape[3]
    config = SimpleNamespace(
        lsh_attn_chunk_length=x["chunk_length"], num_hashes=L, num_buckets=8, lsh_num_chunks_before=1,
        lsh_num_chunks_after=0, hash_seed=seed, is_decoder=not x["mask"].all(), max_position_embeddings=512,
        lsh_attention_probs_dropout_prob=0.0, num_attention_heads=H, attention_head_size=dv, hidden_size=H * dv)
    module = modeling.LSHSelfAttention(config, layer_idx=0).eval()
    module.query_key = Given(functional.pad(torch.from_numpy(x["scale"] * x["qk"]), (0, dv - dk)))
    module.value = Given(torch.from_numpy(x["v"]))
    n = x["buckets"].max() + 2
    buckets = np.where(x["keep"][:, None, None], x["buckets"], n - 1) + n * np.arange(L)[:, None]
    keep = torch.from_numpy(x["keep"])
    o = module(torch.zeros(B, T, 1), attention_mask=keep, buckets=torch.from_numpy(buckets)).hidden_states
    return o.unflatten(2, (H, dv)).transpose(1, 2).numpy(), module


def hashed(T, L=3, **more):
    """Inputs of reformer whose tokens fill their chunks, with the penalty of the paper."""
    qk, rotations = draw("qk", (2, 3, T, 4)), draw("k", (3, L, 4, 3))
    return dict(qk=qk, v=draw("v", (2, 3, T, 5)), buckets=reformer.hash_buckets(qk, rotations), chunk_length=4,
                mask=np.ones((T, T), bool), keep=np.ones((2, T), bool), self_penalty=1e5, scale=0.5) | more


@pytest.mark.parametrize("T, changes", [
    (12, {}), (12, dict(L=1)), (8, {}), (12, dict(chunk_length=2)), (12, dict(mask=np.tri(12, dtype=bool))),
    (12, dict(keep=np.arange(12) < np.array([[12], [9]])))])
def test_lsh_self_attention_reads_whole_chunks(T, changes):
    """It adds 1e-6 to the mean square of a key before its root; a padded query gives what nobody asked for."""
    x = hashed(T, **changes)
    o, _ = lsh(x)
    expected, _ = reformer.released_code(x)
    kept = np.broadcast_to(x["keep"][:, None, :, None], o.shape)
    np.testing.assert_allclose(o[kept], expected[kept], rtol=1e-5, atol=1e-5)
    assert not np.allclose(o[kept], reformer.dense(**x)[0][kept], atol=0.01)


def test_a_sequence_of_one_chunk_is_one_bucket():
    x = hashed(8, chunk_length=8)
    o, _ = lsh(x)
    np.testing.assert_allclose(o, reformer.dense(**x | dict(buckets=0 * x["buckets"]))[0], rtol=1e-5, atol=1e-5)


def test_its_hash_is_ours():
    x = hashed(12)
    module = lsh(x, seed=5)[1]
    torch.manual_seed(5)
    rotations = torch.randn(3, 5, 3, 4, dtype=torch.float64).numpy()                   # head, channel, round, axis
    vectors = draw("v", (2, 3, 12, 5))
    found = module._hash_vectors(torch.from_numpy(vectors), 3, None).unflatten(2, (3, 12)).numpy()
    ours = reformer.hash_buckets(vectors, rotations.swapaxes(1, 2))
    assert np.array_equal(found, ours + 8 * np.arange(3)[:, None])
