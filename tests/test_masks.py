"""Masks: drawn for small rectangles, held against their docstrings pair by pair, and composed."""
from itertools import product

import numpy as np
import pytest

from attention_ref import masks

SHAPES = [(1, 1), (1, 4), (4, 1), (3, 3), (2, 5), (5, 2), (0, 3), (3, 0)]
ANCHORED = [(*shape, anchor) for shape in SHAPES for anchor in masks.ANCHORS]
SIDES = None, 0, 1, 3


def drawn(mask):
    """Rows of a mask, # for True."""
    return ["".join(".#"[int(seen)] for seen in row) for row in mask]


def by_pairs(Tq, Tk, rule):
    """The mask of rule(i, j), one pair after the other."""
    mask = np.zeros((Tq, Tk), bool)
    for i, j in product(range(Tq), range(Tk)):
        mask[i, j] = rule(i, j)
    return mask


def agrees(mask, Tq, Tk, rule):
    """Boolean, of this shape, and what the rule says."""
    return mask.dtype == bool and np.array_equal(mask, by_pairs(Tq, Tk, rule))


def first_position(Tq, Tk, anchor):
    return dict(zip(masks.ANCHORS, (0, Tk - Tq)))[anchor]


def test_the_two_corners_of_causal():
    assert drawn(masks.causal(2, 3, "top-left")) == ["#..", "##."]
    assert drawn(masks.causal(2, 3, "bottom-right")) == ["##.", "###"]
    assert drawn(masks.causal(3, 2, "top-left")) == ["#.", "##", "##"]
    assert drawn(masks.causal(3, 2, "bottom-right")) == ["..", "#.", "##"]


def test_the_two_corners_of_a_window():
    assert drawn(masks.window(2, 4, 1, 1, anchor="top-left")) == ["##..", "###."]
    assert drawn(masks.window(2, 4, 1, 1, anchor="bottom-right")) == [".###", "..##"]
    assert drawn(masks.window(4, 2, 1, 0, anchor="top-left")) == ["#.", "##", ".#", ".."]
    assert drawn(masks.window(4, 2, 1, 0, anchor="bottom-right")) == ["..", "..", "#.", "##"]
    assert drawn(masks.window(3, 7, 1, 2, dilation=2, anchor="top-left")) == ["#.#.#..", ".#.#.#.", "#.#.#.#"]


def test_without_an_anchor_it_is_bottom_right():
    assert np.array_equal(masks.causal(2, 5), masks.causal(2, 5, "bottom-right"))
    assert np.array_equal(masks.window(2, 5, 1, 0), masks.window(2, 5, 1, 0, anchor="bottom-right"))
    assert masks.diagonal(2, 5) == 3


@pytest.mark.parametrize("Tq, Tk, anchor", ANCHORED)
def test_causal_keeps_keys_up_to_the_position(Tq, Tk, anchor):
    p = first_position(Tq, Tk, anchor)
    assert masks.diagonal(Tq, Tk, anchor) == p
    assert agrees(masks.causal(Tq, Tk, anchor), Tq, Tk, lambda i, j: j <= i + p)
    assert np.array_equal(masks.causal(Tq, Tk, p), masks.causal(Tq, Tk, anchor))


@pytest.mark.parametrize("Tq, Tk, anchor", ANCHORED)
def test_window_keeps_steps_to_both_sides(Tq, Tk, anchor):
    p, far = first_position(Tq, Tk, anchor), Tq + Tk
    for left, right, dilation in product(SIDES, SIDES, (1, 2, 3)):
        steps = range(-far if left is None else -left, far + 1 if right is None else right + 1)
        seen = [step * dilation for step in steps]
        window = masks.window(Tq, Tk, left, right, dilation, anchor)
        assert agrees(window, Tq, Tk, lambda i, j: j - (i + p) in seen), (left, right, dilation)


def test_window_with_a_dilation_for_each_head():
    stacked = masks.window(5, 7, 2, 1, np.array([2, 1, 3])[:, None, None])
    assert np.array_equal(stacked, [masks.window(5, 7, 2, 1, dilation) for dilation in (2, 1, 3)])
    with pytest.raises(ValueError, match="dilation: expected an integer >= 1"):
        masks.window(5, 7, 2, 1, np.array([2, 0])[:, None, None])


def test_padding_keeps_the_first_keys_of_each_batch_entry():
    padding = masks.padding([3, 0, 4], 4)
    assert padding.shape == (3, 1, 1, 4) and padding.dtype == bool
    assert drawn(padding[:, 0, 0]) == ["###.", "....", "####"]


def test_packed_keeps_pairs_of_one_segment():
    queries, keys = [4, 4, 0, 7], [4, 0, 0, 4, 9]
    assert agrees(masks.packed(queries, keys), 4, 5, lambda i, j: queries[i] == keys[j])
    both = masks.packed([queries, queries[::-1]], [keys, keys])
    assert both.shape == (2, 4, 5) and np.array_equal(both[1], masks.packed(queries[::-1], keys))


def test_global_fills_rows_and_columns():
    for tokens in ([], [0], [1, 4]):
        assert agrees(masks.global_(3, 5, tokens), 3, 5, lambda i, j: i in tokens or j in tokens)


def test_blocks_repeat_a_pattern_and_cut_the_last():
    pattern = np.array([[[1, 0, 1], [0, 1, 1]], [[0, 0, 1], [1, 1, 0]]], bool)
    mask = masks.blocks(pattern, 2, 3, 5)
    assert mask.shape == (2, 3, 5)
    for h in range(2):
        assert agrees(mask[h], 3, 5, lambda i, j: pattern[h, i // 2, j // 2])


def test_graph_lets_the_target_see_the_source():
    edges = [(0, 1), (2, 1), (3, 0)]
    assert agrees(masks.graph(edges, 3, 4), 3, 4, lambda i, j: (j, i) in edges)
    assert masks.graph(edges, 4).shape == (4, 4) and not masks.graph([], 2).any()


def test_full_hides_nothing():
    assert masks.full(2, 3).shape == (2, 3) and masks.full(2, 3).all()


@pytest.mark.parametrize("Tq, Tk, anchor", ANCHORED)
def test_windows_compose(Tq, Tk, anchor):
    def window(*sides, dilation=1, by=0):
        return masks.window(Tq, Tk, *sides, dilation, masks.diagonal(Tq, Tk, anchor) + by)
    causal, full = masks.causal(Tq, Tk, anchor), masks.full(Tq, Tk)
    assert np.array_equal(window(None, 0), causal)
    assert np.array_equal(window(2, 1), window(2, None) & window(None, 1))
    assert np.array_equal(window(2, 1) & causal, window(2, 0))
    assert np.array_equal(window(0, 0), causal & ~window(None, 0, by=-1))
    assert np.array_equal(window(None, None), full) and np.array_equal(window(Tq + Tk, Tq + Tk), full)
    assert np.array_equal(window(None, None, dilation=2), ~window(None, None, dilation=2, by=1))


def test_an_anchor_is_a_choice_of_rows():
    square = masks.causal(6, 6)
    assert np.array_equal(masks.causal(4, 6, "top-left"), square[:4])
    assert np.array_equal(masks.causal(4, 6, "bottom-right"), square[-4:])


def test_lengths_move_the_corner_of_each_batch_entry():
    lengths = np.array([2, 5, 7])
    corners = masks.diagonal(3, lengths[:, None, None, None], "bottom-right")
    mask = masks.causal(3, 7, corners) & masks.padding(lengths, 7)
    assert mask.shape == (3, 1, 3, 7)
    for n, of_one in zip(lengths, mask[:, 0]):
        assert np.array_equal(of_one[:, :n], masks.causal(3, n)) and not of_one[:, n:].any()


def test_one_pattern_by_several_functions():
    T, own = 5, np.arange(5)
    band = masks.window(T, T, 1, 1)
    assert np.array_equal(masks.packed(own, own), masks.window(T, T, 0, 0))
    assert np.array_equal(masks.packed(0 * own, 0 * own), masks.full(T, T))
    assert np.array_equal(masks.global_(T, T, own), masks.full(T, T))
    assert np.array_equal(masks.blocks(band, 1, T, T), band)
    assert np.array_equal(masks.graph(np.argwhere(band.T), T), band)
    assert np.array_equal(masks.blocks(np.eye(3, dtype=bool), 2, T, T), masks.packed(own // 2, own // 2))


def test_masks_compose_to_the_shape_of_the_scores():
    segments = masks.packed([[0, 0], [1, 1]], [[0, 0, 0], [1, 1, 0]])[:, None]
    mask = masks.causal(2, 3) & masks.padding([3, 1], 3) & segments
    assert mask.shape == (2, 1, 2, 3)
    assert drawn(mask[0, 0]) == ["##.", "###"] and drawn(mask[1, 0]) == ["#..", "#.."]


@pytest.mark.parametrize("message, call", [
    ("anchor: expected one of .*'top-left'.*'bottom-right'.* got 'lower'", lambda: masks.causal(2, 3, "lower")),
    ("anchor: expected one of .* got None", lambda: masks.window(2, 3, 1, 1, anchor=None)),
    ("left: expected an integer >= 0, got -1", lambda: masks.window(2, 3, left=-1)),
    ("right: expected an integer >= 0, got -2", lambda: masks.window(2, 3, right=-2)),
    ("dilation: expected an integer >= 1, got 0", lambda: masks.window(2, 3, dilation=0)),
    ("lengths: expected numbers of keys from 0 to 3, .*4", lambda: masks.padding([1, 4], 3)),
    ("lengths: expected numbers of keys from 0 to 3, .*-1", lambda: masks.padding([-1, 2], 3)),
    ("lengths: expected numbers of keys from 0 to 3, .*1.5", lambda: masks.padding([1.5], 3)),
    ("lengths: expected numbers of keys from 0 to 3, .*True", lambda: masks.padding([True], 3)),
    (r"lengths: expected numbers of keys from 0 to 3, shape \(B,\), got 2", lambda: masks.padding(2, 3)),
    ("left: expected an integer >= 0, got 1.0", lambda: masks.window(2, 3, left=1.0)),
    ("right: expected an integer >= 0, got one", lambda: masks.window(2, 3, right="one")),
    ("dilation: expected an integer >= 1, got 1.5", lambda: masks.window(2, 3, dilation=1.5)),
    ("anchor: expected one of .* got 0.5", lambda: masks.causal(2, 3, 0.5)),
    (r"anchor: expected one of .* got array\(\[0.5", lambda: masks.causal(2, 3, np.array([0.5, 1.5]))),
    ("Tq: expected an integer >= 0, got -2", lambda: masks.causal(-2, 3)),
    ("Tk: expected an integer >= 0, got 3.0", lambda: masks.full(2, 3.0)),
    (r"query_segments: expected integers, .* got \[0.5", lambda: masks.packed([0.5, 1.0], [0, 1])),
    ("key_segments: expected integers, one for each token, got 1", lambda: masks.packed([0, 1], 1)),
    (r"tokens: expected positions from 0 to 2, got \[-1", lambda: masks.global_(2, 3, [-1])),
    (r"tokens: expected positions from 0 to 2, got \[3", lambda: masks.global_(2, 3, [3])),
    (r"edges: expected \(source, target\) below \(3, 3\), got .*0.5", lambda: masks.graph([(0, 0.5)], 3)),
    (r"edges: expected \(source, target\) below \(3, 3\), got .*2", lambda: masks.graph([0, 1, 2, 1], 3)),
    ("size: expected an integer >= 1, got 0", lambda: masks.blocks(np.ones((1, 1), bool), 0, 2, 2)),
    (r"pattern: expected bool \(..., 2, 3\), got bool \(3, 2\)", lambda: masks.blocks(np.ones((3, 2), bool), 2, 3, 5)),
    (r"pattern: expected bool \(..., 1, 1\), got int", lambda: masks.blocks(np.ones((1, 1), int), 2, 2, 2)),
    (r"edges: expected \(source, target\) below \(3, 2\), got .*3", lambda: masks.graph([(3, 0)], 2, 3)),
    (r"edges: expected \(source, target\) below \(3, 3\), got .*-1", lambda: masks.graph([(0, -1)], 3)),
])
def test_bad_input_is_named(message, call):
    with pytest.raises(ValueError, match="^" + message):
        call()
