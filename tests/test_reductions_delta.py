"""The delta rules: what they become, what a chunk, a step and a gate of 0 may not change, and what they cost."""
import numpy as np
import pytest

from attention_ref import delta_rule, gated_delta_rule, rwkv7
from attention_ref.conformance import numbers
from attention_ref.core import solve_unit_lower
from attention_ref.kit import l2_normalised, unit_keys
from attention_ref.names import draw

MODULES = delta_rule, gated_delta_rule, rwkv7
WIDE = [form for module in MODULES for form in module.FORMS]


def inputs(T=7, dk=5, dv=6, **changes):
    """The inputs of delta_rule with keys of length 1, B = 2 and H = 3."""
    shapes = dict(q=(2, 3, T, dk), v=(2, 3, T, dv), beta=(2, 3, T), initial_state=(2, 3, dk, dv))
    n = type("sizes", (), dict(B=2, H=3, T=T, dk=dk))
    drawn = {name: draw(name, shape) for name, shape in shapes.items()}
    return drawn | dict(k=unit_keys(n), scale=0.75, chunk_size=3) | changes


def gated(gates=1, **changes):
    """The inputs of gated_delta_rule, one gate per head or as many as channels."""
    x = inputs(**changes)
    return x | dict(log_decay=draw("log_decay", (*x["beta"].shape, gates))) if "log_decay" not in x else x


def with_removal(**changes):
    """The inputs of rwkv7: keys of length 1 remove, half of them write."""
    x = gated(5, **changes)
    del x["beta"]
    return x | dict(removal_key=x["k"], k=x["k"][:, :, ::-1] / 2, removal_rate=draw("removal_rate", x["k"].shape))


def arguments(form, **changes):
    makers = {delta_rule.__name__: inputs, gated_delta_rule.__name__: gated, rwkv7.__name__: with_removal}
    return makers[form.__module__](**changes)


def assert_close(got, expected, atol=1e-13):
    for y, z in zip(got, expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-12, atol=atol)


# What they become

@pytest.mark.parametrize("gates", [1, 5])
@pytest.mark.parametrize("form", gated_delta_rule.FORMS)
def test_gates_of_1_are_the_delta_rule(form, gates):
    x = inputs()
    assert_close(form(**x, log_decay=np.zeros((2, 3, 7, gates))), delta_rule.recurrent(**x))


@pytest.mark.parametrize("form", gated_delta_rule.FORMS)
def test_equal_gates_of_all_channels_are_the_gate_of_a_head(form):
    x = gated()
    assert_close(form(**x | dict(log_decay=np.repeat(x["log_decay"], 5, 3))), form(**x))


@pytest.mark.parametrize("form", delta_rule.FORMS)
def test_strength_0_reads_the_state_and_leaves_it(form):
    x = inputs(beta=np.zeros((2, 3, 7)))
    assert_close(form(**x), (0.75 * x["q"] @ x["initial_state"], x["initial_state"]))


@pytest.mark.parametrize("form", delta_rule.FORMS)
def test_orthonormal_keys_are_linear_attention_of_beta_v(form):
    x = inputs(T=5, k=np.zeros((2, 3, 1, 1)) + np.eye(5)[::-1], initial_state=np.zeros((2, 3, 5, 6)))
    written = x["beta"][..., None] * x["v"]
    o = 0.75 * np.tril(x["q"] @ x["k"].swapaxes(2, 3)) @ written
    assert_close(form(**x), (o, x["k"].swapaxes(2, 3) @ written))


@pytest.mark.parametrize("form", delta_rule.FORMS)
def test_strength_1_overwrites_what_a_key_holds(form):
    x = inputs(T=2, beta=np.ones((2, 3, 2)))
    x["k"] = x["k"][:, :, :1].repeat(2, 2)
    _, state = form(**x)
    _, last = form(**{name: y[:, :, 1:] if name in ("q", "k", "v", "beta") else y for name, y in x.items()})
    assert np.array_equal(state, last) and np.array_equal(x["k"][:, :, 1:] @ state, x["v"][:, :, 1:])


@pytest.mark.parametrize("form", delta_rule.FORMS)
def test_strength_2_twice_is_nothing(form):
    """A reflection is its own inverse."""
    x = inputs(T=2, beta=np.full((2, 3, 2), 2.0), v=np.zeros((2, 3, 2, 6)))
    x["k"] = x["k"][:, :, :1].repeat(2, 2)
    assert np.array_equal(form(**x)[1], x["initial_state"])


@pytest.mark.parametrize("form", rwkv7.FORMS)
def test_rwkv7_with_one_key_is_the_delta_rule(form):
    """Without gates, with beta as the rate of every channel and the key beta k for writing."""
    x = inputs()
    beta = x.pop("beta")[..., None]
    same = dict(removal_key=x["k"], removal_rate=beta + np.zeros(5), k=beta * x["k"], log_decay=np.zeros((2, 3, 7, 5)))
    assert_close(form(**x | same), delta_rule.recurrent(**inputs()))


@pytest.mark.parametrize("form", rwkv7.FORMS)
def test_rwkv7_that_reads_with_a_decayed_key_is_kimi_delta_attention(form):
    """k diag(a) reads the state as k reads the decayed one; rate beta / a gives beta k back."""
    x = gated(5)
    y = {name: z for name, z in x.items() if name != "beta"}
    a, beta = np.exp(x["log_decay"]), x["beta"][..., None]
    assert_close(form(**y | dict(removal_key=a * x["k"], removal_rate=beta / a, k=beta * x["k"])),
                 gated_delta_rule.recurrent(**x))


def test_weights_of_a_matrix():
    """o = scale q S_0 + M (v - k S_0): the columns of M are what the values 1 at one token give."""
    x = inputs(initial_state=np.zeros((2, 3, 5, 7)))
    A, _ = delta_rule.steps(x["k"], x["v"][..., :1], x["beta"], np.zeros((2, 3, 5, 1)))
    M = 0.75 * np.tril(x["q"] @ x["k"].swapaxes(2, 3)) @ A
    o, _ = delta_rule.recurrent(**x | dict(v=np.zeros((2, 3, 1, 1)) + np.eye(7)))
    assert_close([o], [M])
    assert not np.triu(M, 1).any()


# What may change nothing

@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("form", WIDE, ids=lambda f: f"{f.__module__.split('.')[-1]}-{f.__name__}")
def test_the_size_of_chunks(form, chunk_size):
    x = arguments(form)
    assert_close(form(**x | dict(chunk_size=chunk_size)), form(**x))


@pytest.mark.parametrize("cuts", [[3], [1, 2, 3, 4, 5, 6], [2, 5]], ids=str)
@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.split(".")[-1])
def test_prefill_and_steps_are_the_whole(module, cuts):
    x = arguments(module.recurrent)
    along = [name for name in module.INPUTS if "T" in module.INPUTS[name].split()]
    outputs, state = [], x["initial_state"]
    for start, stop in zip([0, *cuts], [*cuts, 7]):
        part = {name: x[name][:, :, start:stop] for name in along}
        if stop - start == 1:
            o, state = module.step(**part, state=state, scale=0.75)
        else:
            o, state = module.chunkwise(**part, initial_state=state, scale=0.75, chunk_size=2)
        outputs.append(o)
    assert_close((np.concatenate(outputs, 2), state), module.recurrent(**x))


@pytest.mark.parametrize("gates", [1, 5])
@pytest.mark.parametrize("form", gated_delta_rule.FORMS)
def test_a_gate_of_0_is_two_runs(form, gates):
    x = gated(gates)
    x["log_decay"][:, :, 4] = -np.inf
    tail = {name: x[name][:, :, 4:] for name in ("q", "k", "v", "beta", "log_decay")}
    o, state = form(**x)
    assert_close((o[:, :, 4:], state), form(**x | tail | dict(initial_state=np.zeros((2, 3, 5, 6)))))


@pytest.mark.parametrize("module", [delta_rule, gated_delta_rule], ids=lambda m: m.__name__.split(".")[-1])
def test_the_blocks_of_transform_are_those_of_chunks(module):
    x = arguments(module.recurrent)
    given = {name: x[name] for name in ("k", "v", "beta", "log_decay", "initial_state") if name in x}
    whole, _ = module.steps(**given)
    block, _ = module.steps(**{name: y if name == "initial_state" else y[:, :, 3:6] for name, y in given.items()})
    assert_close([block], [whole[..., 3:6, 3:6]])


@pytest.mark.parametrize("form", delta_rule.FORMS)
def test_no_tokens_leave_the_state(form):
    x = inputs(T=0)
    o, state = form(**x)
    assert o.shape == (2, 3, 0, 6) and np.array_equal(state, x["initial_state"])


@pytest.mark.parametrize("form", WIDE, ids=lambda f: f"{f.__module__.split('.')[-1]}-{f.__name__}")
def test_the_initial_state_is_not_written_to(form):
    x = arguments(form)
    before = x["initial_state"].copy()
    _, state = form(**x)
    assert np.array_equal(x["initial_state"], before) and not np.array_equal(state, before)


# Keys of length 1, and others

@pytest.mark.parametrize("dk", [5, 8])
def test_keys_of_cases_have_length_1_and_differ(dk):
    k = inputs(dk=dk)["k"]
    assert ((k ** 2).sum(-1) == 1).all() and np.array_equal(numbers.round_to(k, "bfloat16"), k)
    assert all(len(np.unique(head, axis=0)) == 7 for head in k.reshape(-1, 7, dk))


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_equal_keys_of_length_1_stay_bounded_and_doubling_does_not(beta):
    """The inverse has entries of 2 at most, the powers of N in (I - N)(I + N^2)(I + N^4) ... up to 10^27."""
    n = np.full((64, 64), beta, np.float32)
    inverse = solve_unit_lower(n, np.eye(64, dtype=np.float32))
    exact = solve_unit_lower(n.astype(np.float64), np.eye(64))
    assert np.abs(exact).max() <= 2 and np.array_equal(inverse, exact)
    assert np.abs(delta_rule.by_doubling(n, np.eye(64, dtype=np.float32)) - exact).max() > 10


@pytest.mark.parametrize("length, least, most", [(1.0, 0, 1), (1.45, 5, 50), (2.0, 1e14, 1e16)])
def test_the_state_grows_where_the_strength_times_the_squared_length_exceeds_2(length, least, most):
    """1 - beta |k|^2 is what is left of the state along a key: 0, -1.1 and -3 for lengths of 1, 1.45 and 2."""
    x = inputs(T=32, beta=np.ones((2, 3, 32)), v=np.zeros((2, 3, 32, 6)))
    _, state = delta_rule.recurrent(**x | dict(k=length * x["k"][:, :, :1].repeat(32, 2)))
    assert least <= np.abs(state).max() <= most


@pytest.mark.parametrize("length, under_the_root", [(1, 1), (1e-2, 0.995037), (1e-3, 0.707107), (1e-4, 0.0995037)])
def test_where_the_eps_of_a_norm_stands(length, under_the_root):
    """x / sqrt(x.x + 1e-6) of fla and transformers is not x / max(|x|, 1e-12) of torch: a short key stays short."""
    k = length * np.array([0.6, 0.0, 0.8])
    assert np.sqrt((l2_normalised(k) ** 2).sum()) == pytest.approx(under_the_root, rel=1e-6)
    assert not l2_normalised(0 * k).any()


# By hand

HAND = dict(k=[[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], q=[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], v=[[2.0], [3.0], [1.0]],
            beta=[1.0, 0.5, 1.0])


def by_hand(**more):
    x = {name: np.array(y)[None, None] for name, y in (HAND | more).items()}
    return x | dict(initial_state=np.zeros((1, 1, 2, 1)), scale=1.0, chunk_size=2)


@pytest.mark.parametrize("form", delta_rule.FORMS)
def test_three_tokens_by_hand(form):
    """S_1 = (2, 0); u_2 = (3 - 1.2) / 2 = 0.9, S_2 = (2.54, 0.72); u_3 = 1 - 0.72 = 0.28, S_3 = (2.54, 1)."""
    o, state = form(**by_hand())
    assert_close([o.ravel(), state.ravel()], [[2, 0.72, 3.54], [2.54, 1]])


@pytest.mark.parametrize("form", gated_delta_rule.FORMS)
def test_three_tokens_by_hand_with_gates(form):
    """Gates 1/2, (1/2, 1/4), 0: S_1 = (2, 0), which decays to (1, 0); u_2 = (3 - 0.6) / 2, S_2 = (1.72, 0.96)."""
    gates = [[0.5, 0.5], [0.5, 0.25], [0.0, 0.0]]
    with np.errstate(divide="ignore"):
        o, state = form(**by_hand(log_decay=np.log(gates)))
    assert_close([o.ravel(), state.ravel()], [[2, 0.96, 1], [0, 1]])


# What they cost

def work(form, T):
    return numbers.count(form, **arguments(form, T=T, chunk_size=4))


def test_a_token_costs_seven_times_the_state():
    """Read, write and read again are 2 each and 1 to add what is written; a gate is one more, a second key 3."""
    dk, dv = 5, 6
    for T in (7, 70):
        assert work(delta_rule.recurrent, T) == dict(flops=6 * T * (7 * dk * dv + 2 * dv + dk), exp=0)
        assert work(gated_delta_rule.recurrent, T) == dict(flops=6 * T * (8 * dk * dv + 2 * dv + dk), exp=6 * T)
        assert work(rwkv7.recurrent, T) == dict(flops=6 * T * (11 * dk * dv + 2 * dk), exp=6 * T * dk)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.split(".")[-1])
def test_chunks_cost_in_proportion_to_tokens_and_dense_more(module):
    chunkwise, dense = ([work(form, T)["flops"] for T in (16, 32, 64)]
                        for form in (module.chunkwise, module.dense))
    assert chunkwise[1] == 2 * chunkwise[0] and chunkwise[2] == 4 * chunkwise[0]
    assert dense[2] > 3 * dense[1] > 9 * dense[0]
