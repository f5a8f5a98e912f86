"""Tools: what they write is right, is read by the policy, and is known not to be its own."""

import dataclasses
import functools
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_rollout
from gspo_jax.cold_start import supervised_loss
from gspo_jax.config import load
from gspo_jax.data.prompts import WorkedBatch, right_pad
from gspo_jax.data.reasoning import TaskSpec, generate
from gspo_jax.data.tokenizers import AsciiTokenizer
from gspo_jax.logps import response_logps
from gspo_jax.sharding import make_mesh, to_devices
from gspo_jax.tools import calculator, open_tool, read_along
from gspo_jax.train import train
from test_rollout import CONFIG, SHAPES, R, rollout
from tiny import tiny_policy

TOKENIZER = AsciiTokenizer()
CALCULATOR = calculator(TOKENIZER)

# --- The calculator ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="width")
def played(tokens, width):
    """What becomes of texts [n, t] that a policy draws one token after the other, [n, width]; and
    which of it the policy drew."""

    def one(text):
        def step(carry, position):
            state, at = carry
            token = text[jnp.minimum(at, text.shape[0] - 1)]
            state, token, drawn = CALCULATOR.step(state, jnp.int32(0), position, token)
            return (state, at + drawn), (token, drawn)

        start = CALCULATOR.start(), jnp.int32(0)
        return jax.lax.scan(step, start, jnp.arange(width))[1]

    return jax.vmap(one)(tokens)


def replies(*texts: str) -> list[str]:
    """Each text with what the calculator writes into it; the policy pads it with blanks."""
    width = max(map(len, texts)) + 30
    rows, _ = right_pad([[*map(ord, text)] for text in texts], width, ord(" "))
    return [TOKENIZER.decode(row).rstrip(" ") for row in np.array(played(rows, width)[0])]


COMPUTE = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a // b if b and a % b == 0 else None,
    "%": lambda a, b: a % b if b else None,
}


def result(text: str) -> str:
    """What belongs after an expression, by Python."""
    a, sign, b = re.fullmatch(r"(-?\d+)([-+*/%])(\d+)", text).groups()
    value = COMPUTE[sign](int(a), int(b))
    fits = value is not None and max(abs(value), abs(int(a)), int(b)) < 10**8
    return str(value) if fits else "?"


def expressions() -> list[str]:
    rng = np.random.default_rng(0)
    found = ["0+0", "7/0", "7%0", "-7%3", "-8/2", "99999999+1", "99999999*99999999", "-0*5"]
    found += ["100000000-1", "12345678901-1", "10000*10000", "9999*10000", "3-5", "65536*65536"]
    for _ in range(200):
        a, b = (int(rng.integers(10 ** rng.integers(1, 9))) for _ in range(2))
        found.append(f"{'-' * rng.integers(2)}{a}{rng.choice(list(COMPUTE))}{b}")
    return found


def test_the_calculator_computes_what_python_does():
    asked = expressions()
    wanted = [f"{text}={result(text)}" for text in asked]
    assert sum(text.endswith("?") for text in wanted) > 20
    assert replies(*(f"{text}=" for text in asked)) == wanted


@pytest.mark.parametrize(
    ("drawn", "reply"),
    [
        ("so 12+34=;46-5=#41", "so 12+34=46;46-5=41#41"),
        ("1+2=*4=", "1+2=3*4=12"),  # the result is the next number
        ("5-7=+1=", "5-7=-2+1=-1"),
        ("x=;=;5=;5+=;+5=;--5+1=;1+2+3=;1 +2=", None),  # nothing that it understands
        ("1+2=;1+2 =", "1+2=3;1+2 ="),
    ],
)
def test_the_calculator_answers_expressions_only(drawn, reply):
    assert replies(drawn) == [drawn if reply is None else reply]


@pytest.mark.parametrize("task", ["chain_sum", "products", "gcd", "lcm"])
def test_worked_solutions_are_those_of_the_calculator(task):
    """So that a cold start teaches to call it: what it writes is as they have it."""
    small = {"products": {"max_terms": 2, "max_digits": 3}}
    problems = generate(TaskSpec(task, small.get(task, {})), 30, 0)
    texts = [p.worked for p in problems]
    called = [re.sub(r"=-?\d+", "=", text) for text in texts]
    assert replies(*called) == texts


def test_a_tokenizer_without_a_token_for_each_sign_is_refused():
    class Bytes(AsciiTokenizer):
        def encode(self, text):
            return [x for character in text for x in (0, ord(character))]

    with pytest.raises(ValueError, match="one token for '\\+'"):
        calculator(Bytes())


def test_what_is_no_tool_is_refused():
    config = load("tests/tiny_run.py", ["--config.rollout.tool=tiny:length_of"])
    with pytest.raises(ValueError, match="must return a Tool"):
        open_tool(config, TOKENIZER)


# --- In the sampler ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Echo:
    """Writes the two tokens after one that 5 divides: the response's number, and the position."""

    def start(self):
        return jnp.int32(0), jnp.zeros(2, jnp.int32)

    def step(self, state, response, position, token):
        left, output = state
        drawn = left == 0
        token = jnp.where(drawn, token, output[jnp.minimum(2 - left, 1)])
        called = drawn & (token % 5 == 0)
        output = jnp.where(called, jnp.stack([response, position]) + 20, output)
        return (jnp.where(called, 2, jnp.maximum(left - 1, 0)), output), token, drawn


ECHO = Echo()


def echo(tokenizer: Any) -> Echo:
    """For rollout.tool."""
    return ECHO


def written(responses: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Which tokens of whole responses are the policy's own; asserts that the others are Echo's."""
    drawn = np.zeros(responses.shape, bool)
    for row, (tokens, n) in enumerate(zip(responses, lengths, strict=True)):
        queue: list[int] = []
        for place in range(n):
            if queue:
                assert tokens[place] == queue.pop(0)
                continue
            drawn[row, place] = True
            if tokens[place] % 5 == 0:
                queue = [row + 20, place + 20]
    return drawn


def test_a_tool_writes_into_its_own_response_alone(mesh):
    r = rollout(tool=ECHO)
    lengths = r.mask.sum(1)
    drawn = written(r.responses, lengths)
    np.testing.assert_array_equal(r.drawn, drawn)
    assert (~drawn & r.mask).sum() > 10 and lengths.min() < R


def test_what_a_tool_wrote_is_read_by_the_policy(mesh):
    """The sampler's log-probabilities are those of a plain pass over everything."""
    r = rollout(tool=ECHO)
    found = test_rollout.score(r).logps
    np.testing.assert_allclose(r.logps[r.mask], found[r.mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES[-1:])
def test_meshes_do_not_change_what_a_tool_writes(shape):
    whole, found = rollout(tool=ECHO), rollout(shape, tool=ECHO)
    for name in ("responses", "mask", "drawn"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))


def test_slots_do_not_change_what_a_tool_writes(mesh):
    """One that begins a response has forgotten the last."""
    whole, found = rollout(tool=ECHO), rollout(tool=ECHO, slots=16)
    for name in ("responses", "mask", "drawn"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
    assert CONFIG.slots < len(whole.responses)


def test_given_responses_are_read_as_sampled_ones(mesh):
    r = rollout(tool=ECHO)
    found = map(np.array, read_along(ECHO, to_devices(r.responses, make_mesh())))
    for array, wanted in zip(found, (r.responses, r.drawn), strict=True):
        # Echo repeats the number of the response, which here is always 0.
        same = array == wanted if array.dtype == bool else (array == wanted) | ~r.drawn
        assert same[r.mask].all()


def test_a_cold_start_does_not_teach_what_a_tool_writes(mesh):
    policy = tiny_policy(vocab_size=128, num_layers=1)
    problems = generate(TaskSpec("chain_sum", {}), 4, 0)
    prompts = np.full((4, 3), 5, np.int32), np.ones((4, 3), bool)
    worked = [TOKENIZER.encode(p.worked) for p in problems]
    batch = WorkedBatch(*prompts, *right_pad(worked, max(map(len, worked)), 0))
    mask, batch = batch.response_mask, to_devices(batch, make_mesh())
    drawn = np.array(read_along(CALCULATOR, batch.responses)[1]) & mask
    assert 0 < drawn.sum() < mask.sum()

    @jax.jit
    def losses(policy, batch) -> Any:
        scored, _ = response_logps(policy, *batch)
        return supervised_loss(policy, batch, 0.0, CALCULATOR)[1], scored.logps

    found, logps = losses(policy, batch)
    np.testing.assert_allclose(found, -np.array(logps)[drawn].mean(), rtol=1e-5)


@pytest.mark.slow
def test_worked_solutions_that_contradict_the_tool_are_refused(tmp_path):
    """They would teach how to go on from what never happens."""
    changes = (
        f"data.dir={str(tmp_path / 'data')!r}",
        "data.tasks={'base_conversion':{}}",
        "data.phrases=()",
        "rollout.tool=gspo_jax.tools:calculator",
        "rollout.prompt_length=200",
        "rollout.response_length=200",
        "policy.max_positions=400",
    )
    config = load("tests/tiny_run.py", [f"--config.{change}" for change in changes])
    with pytest.raises(ValueError, match="writes something else than the worked solution"):
        train(config, tmp_path / "run")
