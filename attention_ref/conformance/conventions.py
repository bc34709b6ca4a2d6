"""Conventions: where the formula leaves a choice, how else it is read, by whom, and golden cases in another reading.

What is right in another reading is a named mistake in ours. CONVENTIONS says which one, and the cases in that reading
expect what the mistake computes, with a conditioning of its own. So a variant needs no line for it: it has the choice
if it names the mistake. Who reads it how was measured (tests/peers/conventions.py) and lies in readers.json.
"""
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import variants
from .diagnosis import golden_cases, mistakes, wrong_outputs
from .numbers import conditioning
from .verify import TIERS, check, compare

READERS = Path(__file__).with_name("readers.json")


class Convention(NamedTuple):
    """One choice. The reading of a variant is the first under which none of its mistakes is right."""
    what: str
    readings: dict                      # reading -> the mistakes that are right under it
    arguments: tuple = ()               # a variant with the choice takes one of these; () if any may have it


CONVENTIONS = dict(
    mask_true=Convention("what True in a boolean mask means", {
        "attend": (), "masked": ("mask_polarity",)}, ("mask",)),
    causal_anchor=Convention("where the causal diagonal ends if Tq differs from Tk", {
        "bottom-right": (), "top-left": ("causal_top_left",)}, ("mask", "anchor")),
    window=Convention("what the width of a window counts", {
        "keys-beside": ("window_plus_one",), "own-key-too": ("window_counts_self",)}),
    padded_anchor=Convention("where bottom-right is if keys are padded", {
        "last-key": (), "last-slot": ("aligned_to_padding",)}),
    padding=Convention("the side on which keys are padded", {"right": (), "left": ("padding_on_the_left",)}),
    padded_query=Convention("o of a query beyond the length of the keys", {
        "computed": (), "empty-row": ("padding_hides_queries",)}),
    segment_0=Convention("what segment number 0 is", {"segment": (), "padding": ("segment_0_is_padding",)}),
    empty_row=Convention("o of a query without keys", {
        "zero": (), "nan": ("empty_row_nan",), "uniform": ("empty_row_uniform",)}),
    empty_row_lse=Convention("lse of a query without keys", {
        "-inf": (), "zero": ("empty_row_lse_zero",), "+inf": ("empty_row_lse_plus_inf", "empty_row_lse_infinite"),
        "nan": ("minus_inf_minus_inf",)}),
    masked_nan=Convention("whether NaN in a masked value reaches o", {
        "unread": (), "read": ("masked_nan_poison", "garbage_nan_poison")}),
    softcap=Convention("what the soft cap acts on", {
        "scores": (), "biased": ("softcap_after_bias",)}),
    alibi_slopes=Convention("ALiBi slopes where the number of heads is no power of two", {
        "interpolated": (), "closed-form": ("slopes_closed_form",)}),
    alibi_distance=Convention("ALiBi for keys after the query", {"absolute": (), "signed": ("distance_signed",)}),
    lse_base=Convention("the base of the logarithm in lse", {"e": (), "2": ("lse_base_2",)}),
    lse_sink=Convention("whether lse counts the sink", {"counted": (), "left-out": ("lse_without_sink",)}),
    kv_heads=Convention("the kv head of query head h", {
        "h//group": (), "h%Hkv": ("heads_tiled",)}, ("q",)),
    unused_slots=Convention("what a cache holds in slots without a token", {
        "copied": (), "zero": ("unused_slots_cleared",)}),
    self_loops=Convention("whether a node of a graph sees itself", {
        "as-listed": (), "added": ("self_loops_added",), "removed": ("self_loops_removed",)}),
    parallel_edges=Convention("what two edges between the same nodes are", {
        "two-terms": (), "one": ("parallel_edges_merged",)}),
    listed_blocks=Convention("a block that a row lists twice", {
        "once": (), "as-listed": ("random_counted_again",)}),
    chunks=Convention("what a token sees of its chunk and the one before", {
        "bucket": (), "whole": ("chunk_taken_for_bucket",), "whole-and-wrapped": ("released_code",)}),
    ring=Convention("the order in which a ring comes back", {"slots": (), "positions": ("present_in_order",)}),
)


def choices(module):
    """Convention -> {reading: mistakes of this variant that are right under it}, its own reading first, without any."""
    known, found = mistakes(module), {}
    for name, (_, readings, arguments) in CONVENTIONS.items():
        named = {reading: tuple(s for s in slugs if s in known) for reading, slugs in readings.items()}
        ours = next(reading for reading, slugs in named.items() if not slugs)
        others = {reading: slugs for reading, slugs in named.items() if slugs}
        if others and (not arguments or set(arguments) & set(module.INPUTS)):
            found[name] = {ours: ()} | others
    return found


def parse(text, module):
    """Convention -> reading from "empty_row=nan,lse_base=2"; ValueError for what the variant leaves no choice in."""
    known, chosen = choices(module), {}
    for part in filter(None, (text or "").split(",")):
        name, _, reading = (word.strip() for word in part.partition("="))
        if name not in known:
            raise ValueError(f"convention: expected name=reading with a name among {', '.join(known)}, got {part!r}")
        if reading not in known[name]:
            raise ValueError(f"convention: {name} is read as one of {', '.join(known[name])}, got {reading!r}")
        if chosen.setdefault(name, reading) != reading:
            raise ValueError(f"convention: {name} is given twice, as {chosen[name]} and as {reading}")
    return chosen


def spelt(chosen):
    """Convention -> reading as the command takes it."""
    return ",".join(f"{name}={reading}" for name, reading in chosen.items())


# Cases in another reading

def declared(golden, convention=None, tier=None):
    """Golden cases of one variant as they are read under "name=reading,..." and with the limit of a tier (strict).

    Raises ValueError for what the variant leaves no choice in, and for a tier that does not exist.
    """
    if (tier := tier or "strict") not in TIERS:
        raise ValueError(f"tier: expected one of {', '.join(TIERS)}, got {tier!r}")
    chosen = parse(convention, golden[0].module)
    return [replace(under(case, chosen), limit=TIERS[tier]) for case in golden]


def under(case, chosen):
    """The case with the outputs that are right under these readings (convention -> reading).

    Where two readings move the same element of an output to different values, any value is right: exact NaN, K = 0.
    Where a reading gives NaN, NaN must be met: exact NaN, K NaN. A case with moved outputs has no steps and no
    gradients, for those are known in our reading only; one that no reading moves is returned as it is.
    """
    known = choices(case.module)
    moves = [move(case, slug) for name, reading in chosen.items() for slug in known[name][reading]]
    joined = {name: join(case.outputs[name], case.conditioning[name], [m[name] for m in moves if name in m])
              for name in case.outputs}
    if not any(moved for *_, moved in joined.values()):
        return case
    outputs, K = ({name: part[i] for name, part in joined.items()} for i in (0, 1))
    return replace(case, outputs=outputs, conditioning=K, steps={}, cotangents={}, gradients={},
                   conventions=case.conventions | chosen)


def outputs_only(case):
    """Whether a reading took the steps and gradients from a case, which are known in ours."""
    ours = golden_cases(case.variant).get(case.name, case)
    return len(case.expected) < len(ours.expected)


def move(case, slug):
    """Output -> (where a mistake moves it by more than rounding, to which values, with which K)."""
    wrong = mistakes(case.module)[slug][1]
    with np.errstate(all="ignore"):
        values = wrong_outputs(case, slug, "longdouble")
        K = conditioning([lambda **x: wrong(x)], case.inputs)
        moved = {name: compare(name, y, case.outputs[name], case.conditioning[name], "float64")
                 for name, y in values.items()}
    return {name: (c.scores > 1, values[name], np.where(np.isnan(values[name]), np.nan, K[name]))
            for name, c in moved.items() if c.score > 1}


def join(exact, K, moves):
    """(exact, K, whether anything moved) after all moves of one output."""
    taken = meet = np.zeros(np.shape(exact), bool)
    for where, y, k in moves:
        meet = meet | where & taken & ~((y == exact) | np.isnan(y) & np.isnan(exact))
        exact, K, taken = np.where(where, y, exact), np.where(where, k, K), taken | where
    return np.where(meet, np.nan, exact), np.where(meet, 0, K), taken.any()


def right_under(results, diagnosis):
    """The readings (convention -> reading) under which every failing result would be right; {} if there are none."""
    chosen, failing = {}, [r for r in results if r.failed]
    for finding in diagnosis.findings:
        for name, readings in choices(failing[0].case.module).items():
            for reading, slugs in readings.items():
                if finding.candidates & set(slugs):
                    chosen.setdefault(name, reading)
    accumulate = next((f.accumulate for f in diagnosis.findings), None)
    return chosen if chosen and all(_right(r, chosen, accumulate) for r in failing) else {}


def _right(result, chosen, accumulate):
    if result.error or any(c.problem for c in result.comparisons):
        return False
    case = under(result.case, chosen)
    outputs = {name: y for name, y in result.outputs.items() if name in case.expected}
    return len(outputs) == len(result.outputs) and check(case, outputs, result.dtype, accumulate).passed


# Who reads it how

@cache
def readers():
    """Library -> {"version": ..., convention: reading}, as measured."""
    return json.loads(READERS.read_text())


def read_so_by(name, reading):
    """The libraries, with versions, in which this reading was measured."""
    return ", ".join(f"{library} {read['version']}" for library, read in readers().items() if read.get(name) == reading)


def rows(names):
    """(convention, reading, variants whose own it is, mistakes it is in the others) of variants, by name."""
    known = {variant: choices(variants()[variant]) for variant in names}
    for name, convention in CONVENTIONS.items():
        having = [(variant, found[name]) for variant, found in known.items() if name in found]
        for reading in convention.readings:
            ours = [variant for variant, read in having if read.get(reading) == ()]
            wrong = dict.fromkeys(slug for _, read in having for slug in read.get(reading, ()))
            if ours or wrong:
                yield name, reading, ", ".join(ours), ", ".join(wrong)
