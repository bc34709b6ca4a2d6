"""The wrong implementations of this folder, and the mistake that the tool names first for each; None where it has none.

A module is called like its variant; functions in modules ending in _torch are differentiated by torch.
"""
import ast
import re
from pathlib import Path

NAMED = {
    "sdpa.softmax_down_the_column": "softmax_over_queries",
    "sdpa.scaled_by_the_model": "scale_by_d_model",
    "sdpa.causal_flag_at_the_top": "causal_top_left",
    "sdpa.minus_1e9_in_half": "sentinel_added_does_not_fit",
    "sdpa.probabilities_times_mask": "mask_after_softmax",
    "sdpa.float_mask_of_ones": "mask_added_as_0_1",
    "sdpa.cap_comes_last": "softcap_after_additive_mask",
    "sdpa.extra_one_unshifted": "sink_not_shifted",
    "sdpa.hidden_scores_overflow": "hidden_key_overflows",
    "sdpa.infinities_cleaned_up": "overflow_clean_up_unmasks",
    "sdpa.log2e_on_scores_only": "exp2_bias_not_rescaled",
    "sdpa.scaled_after_the_product": "score_overflow",
    "sdpa.most_negative_number": "sentinel_plus_score",
    "sdpa.values_in_memory_order": "value_strides_ignored",
    "sdpa.unscaled_key_gradient": "dk_scale_missing",
    "sdpa_torch.rows_repaired_after_softmax": "masked_row_gradient_nan",
    "masked.causal_from_the_top": "causal_top_left",
    "masked.own_key_counted": "window_left_exclusive",
    "masked.negative_is_open": "window_left_dropped",
    "masked.causal_only_with_padding": "causal_needs_padding",
    "masked.longest_row_for_all": "aligned_to_longest",
    "masked.lengths_not_passed_on": "padding_dropped",
    "masked.diagonal_of_the_padded_row": "aligned_to_padding",
    "masked.window_needs_a_mask": "window_needs_another",
    "masked.packed_row_is_one_sequence": "segments_dropped",
    "flash.lse_in_two_bases": "merge_base_2_lse",
    "flash.sink_in_every_split": "sink_per_tile",
    "flash.maximum_starts_at_minus_infinity": "first_tile_nan",
    "flash.tail_filled_with_zeros": "tail_not_masked",
    "flash.logarithms_added": "merge_adds_lse",
    "flash.last_key_again": "tail_repeats_last_key",
    "multi_head.viewed_as_heads": "heads_by_view",
    "multi_head.joined_without_transpose": "heads_merged_by_view",
    "multi_head.scaled_by_the_model": "scale_by_d_model",
    "multi_head.scaled_by_the_number_of_heads": "scale_by_num_heads",
    "multi_head.each_head_has_its_features": "features_split_first",
    "multi_head.mask_repeated_the_other_way": "mask_head_batch_order",
    "multi_head.true_is_hidden": "mask_polarity",
    "cross.mask_lost_between_layers": "mask_dropped",
    "cross.booleans_added": "mask_added_as_0_1",
    "cross.axis_two_by_number": "softmax_over_queries",
    "cross.large_negative_everywhere": "empty_row_uniform",
    "cross_torch.projected_once": "keys_and_values_detached",
    "gqa.heads_tiled": "heads_tiled",
    "gqa.values_as_wide_as_keys": "value_width_from_keys",
    "gqa.causal_when_nothing_is_said": "causal_implied",
    "gqa.nothing_over_nothing": "empty_row_nan",
    "gqa.one_head_of_the_group": "group_gradient_first_head",
    "kv_cache.diagonal_at_the_top": "causal_top_left",
    "kv_cache.causal_flag_lost": "new_tokens_not_causal",
    "kv_cache.longest_past_for_all": "length_of_longest_row",
    "kv_cache.one_token_at_a_time_only": "last_token_alone",
    "kv_cache.past_counted_twice": "offset_twice",
    "kv_cache.read_before_written": "read_before_write",
    "kv_cache.gradient_of_the_cache_dropped": "present_cotangent_lost",
    "ring_cache.full_one_token_early": "last_slot_unused",
    "ring_cache.all_written_before_any_is_read": "present_read_by_all",
    "ring_cache.mask_longer_than_the_cache": "mask_cut_at_start",
    "ring_cache.window_and_own_key": "window_plus_one",
    "ring_cache.empty_slots_read": "garbage_read",
    "ring_cache.longest_past_in_the_mask": "mask_of_longest_row",
    "ring_cache_torch.cached_without_history": "new_tokens_detached",
}
HALF = {"sdpa.minus_1e9_in_half", "sdpa.scaled_after_the_product", "sdpa.most_negative_number"}   # wrong in float16
THREAD = re.compile(r"(.*)\. (\S+ (?:issue|PR) \d+)")


def variant(name):
    """The variant that module.function implements."""
    return name.partition(".")[0].removesuffix("_torch")


def described():
    """module.function -> (what is wrong, public thread), from the docstrings of the functions in this folder."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        for f in functions:
            text = THREAD.fullmatch(" ".join((ast.get_docstring(f) or "").split()))
            found |= {f"{path.stem}.{f.name}": text.groups()} if text else {}
    return found
