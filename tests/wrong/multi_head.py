"""Wrong implementations of multi_head."""
import numpy as np

from attention_ref.core import merge_heads, split_heads

from .right import attend


def viewed_as_heads(x, w_q, w_k, w_v, w_o, mask, heads, scale):
    """Heads are split and joined by a reshape alone, so that a head holds pieces of several tokens.

    reczoo/FuxiCTR issue 30
    """
    B, T, _ = x.shape
    q, k, v = ((x @ w).reshape(B, heads, T, -1) for w in (w_q, w_k, w_v))
    return attend(q, k, v, mask, scale)[0].reshape(B, T, -1) @ w_o


def joined_without_transpose(x, w_q, w_k, w_v, w_o, mask, heads, scale):
    """Heads are split rightly and joined by a reshape of (B, H, T, d).

    jsbaan/transformer-from-scratch PR 6
    """
    q, k, v = (split_heads(x @ w, heads) for w in (w_q, w_k, w_v))
    return attend(q, k, v, mask, scale)[0].reshape(*x.shape[:2], -1) @ w_o


def scaled_by_the_model(x, w_q, w_k, w_v, w_o, mask, heads, scale):
    """Scores are divided by the root of the width of x.

    lucidrains/vit-pytorch issue 65
    """
    q, k, v = (split_heads(x @ w, heads) for w in (w_q, w_k, w_v))
    return merge_heads(attend(q, k, v, mask, x.shape[-1] ** -0.5)[0]) @ w_o


def scaled_by_the_number_of_heads(x, w_q, w_k, w_v, w_o, mask, heads, scale):
    """Scores are divided by the root of the number of heads.

    tenstorrent/tt-metal PR 56789
    """
    q, k, v = (split_heads(x @ w, heads) for w in (w_q, w_k, w_v))
    return merge_heads(attend(q, k, v, mask, heads ** -0.5)[0]) @ w_o


def each_head_has_its_features(x, w_q, w_k, w_v, w_o, mask, heads, scale):
    """x is cut into heads before the projection, so a head sees its share of the features.

    MarcoMeter/episodic-transformer-memory-ppo PR 22
    """
    D = x.shape[-1] // heads
    if D * heads != x.shape[-1]:
        raise NotImplementedError("features that heads do not divide")
    parts = [[np.hsplit(w, heads)[h][h * D:(h + 1) * D] for h in range(heads)] for w in (w_q, w_k, w_v)]
    q, k, v = (np.stack([x[..., h * D:(h + 1) * D] @ w[h] for h in range(heads)], 1) for w in parts)
    return merge_heads(attend(q, k, v, mask, scale)[0]) @ w_o


def mask_repeated_the_other_way(x, w_q, w_k, w_v, w_o, mask, heads, scale):
    """Heads stand before the batch, and the mask is repeated as if they stood behind it.

    lsdefine/attention-is-all-you-need-keras issue 36
    """
    B, T, _ = x.shape
    if np.ndim(mask) == 4 and mask.shape[1] > 1:
        raise NotImplementedError("a mask for every head")
    folded = np.repeat(np.broadcast_to(mask, (B, 1, T, T))[:, 0], heads, axis=0).reshape(heads, B, T, T)
    q, k, v = (split_heads(x @ w, heads) for w in (w_q, w_k, w_v))
    return merge_heads(attend(q, k, v, folded.swapaxes(0, 1), scale)[0]) @ w_o


def true_is_hidden(x, w_q, w_k, w_v, w_o, mask, heads, scale):
    """A mask that says which keys to hide is passed where it says which to see.

    rasbt/LLMs-from-scratch issue 1061
    """
    q, k, v = (split_heads(x @ w, heads) for w in (w_q, w_k, w_v))
    return merge_heads(attend(q, k, v, ~np.array(mask), scale)[0]) @ w_o
