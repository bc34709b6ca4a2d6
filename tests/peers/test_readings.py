"""How torch, jax, onnx and transformers read the formula is what readers.json, and with it the docs, says of them."""
import pytest
from conventions import OURS, PEERS, measured, readings

from attention_ref import variants
from attention_ref.conformance.conventions import CONVENTIONS, choices, readers

MEASURED = measured()


@pytest.mark.parametrize("peer", PEERS)
def test_what_was_written_is_what_is_measured(peer):
    if peer not in MEASURED:
        pytest.skip("not installed")
    found, written = dict(MEASURED[peer]), dict(readers()[peer])
    assert found.pop("version") and written.pop("version")
    assert found == written, "python tests/peers/conventions.py --write"


def test_every_peer_was_measured():
    assert list(readers()) == list(PEERS)
    for read in readers().values():
        assert set(read) <= {"version", *CONVENTIONS}
        assert all(reading in CONVENTIONS[name].readings for name, reading in read.items() if name != "version")


@pytest.mark.parametrize("name", OURS)
def test_the_same_measurement_finds_our_own_readings(name):
    ours = {what: next(iter(read)) for what, read in choices(variants()[name]).items()}
    found = {what: reading for what, reading in readings(OURS[name]).items() if what in ours}
    assert len(found) > 3 and all(ours[what] == reading for what, reading in found.items())
