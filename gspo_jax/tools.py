"""Tools that the policy calls while it samples: their output is written inside the decode loop.

A tool is an automaton over the tokens of a response. It reads every one of them, and now and then
writes the next ones itself. Those are read by the policy like its own and count towards the
response length, but they were not drawn: they are never trained on and never in n. Every slot of
the decode loop has a state of its own.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Int

from gspo_jax.data.tokenizers import Tokenizer
from gspo_jax.rewards import load_function
from gspo_jax.sharding import DATA

if TYPE_CHECKING:
    from gspo_jax.config import TrainConfig


@runtime_checkable
class Tool(Protocol):
    """What the sampler asks of a tool; it must be hashable, as configs are."""

    def start(self) -> Any:
        """The state before the first token: a tree of arrays."""

    def step(
        self, state: Any, response: Int[Array, ""], position: Int[Array, ""], token: Int[Array, ""]
    ) -> tuple[Any, Int[Array, ""], Bool[Array, ""]]:
        """One token of one response: the next state, the token, and whether the policy drew it.

        Args:
          response: its number, position: of the token in it.
          token: what the policy drew; the tool may put another in its place.
        """


def open_tool(config: "TrainConfig", tokenizer: Tokenizer) -> Tool | None:
    """The tool that rollout.tool names, made for the tokenizer; ValueError with the remedy."""
    name = config.rollout.tool
    if not name:
        return None
    tool = load_function(name, "rollout.tool")(tokenizer)
    if not isinstance(tool, Tool):
        raise ValueError(f"rollout.tool={name!r}: returned {tool!r:.100}; it must return a Tool")
    return tool


def begun(tool: Tool, shape: tuple[int, ...]) -> Any:
    """States before the first token, [*shape, ...], the first axis split over the data shards."""

    def fill(x):
        x = jnp.asarray(x)
        lead = (None,) * len(shape)
        return jnp.broadcast_to(x[lead], (*shape, *x.shape), out_sharding=Spec(DATA))

    return jax.tree.map(fill, tool.start())


def advance(
    tool: Tool,
    states: Any,
    responses: Int[Array, "Z slots"],
    positions: Int[Array, "Z slots"],
    tokens: Int[Array, "Z slots"],
) -> tuple[Any, Int[Array, "Z slots"], Bool[Array, "Z slots"]]:
    """`step` of every slot."""
    # Inside, nothing is sharded, so that a tool needs to know nothing of meshes.
    each = jax.shard_map(
        jax.vmap(jax.vmap(tool.step)), in_specs=Spec(DATA), out_specs=Spec(DATA), check_vma=False
    )
    return each(states, responses, positions, tokens)


def read_along(
    tool: Tool, tokens: Int[Array, "B R"]
) -> tuple[Int[Array, "B R"], Bool[Array, "B R"]]:
    """Given responses, such as worked solutions, as they would be with a tool: with what it would
    write in its places, and which tokens the policy is to draw itself."""

    def read(states, inputs):
        position, token = inputs
        where = jnp.zeros_like(token)
        states, *found = advance(tool, states, where, where + position, token)
        return states, found

    inputs = jnp.arange(tokens.shape[1]), jnp.moveaxis(tokens[:, None], 2, 0)
    found = jax.lax.scan(read, begun(tool, (tokens.shape[0], 1)), inputs)[1]
    written, drawn = (jnp.moveaxis(x, 0, 2)[:, 0] for x in found)
    return written, drawn


LIMIT = 10**8  # numbers and results stay below it
PLACES = 9  # of a sign and the digits
OPERATORS = "+-*/%"


class _Reading(NamedTuple):
    """Where a calculator is in a response."""

    mode: Int[Array, ""]
    negative: Bool[Array, ""]
    left: Int[Array, ""]
    operator: Int[Array, ""]  # its place in OPERATORS
    right: Int[Array, ""]
    output: Int[Array, " W"]  # ids, flush right
    pending: Int[Array, ""]  # of them still to be written


# Nothing yet, a minus, the first number, an operator, the second number; no expression.
OUTSIDE, SIGN, LEFT, BETWEEN, RIGHT, OTHER = range(6)


@dataclasses.dataclass(frozen=True)
class Calculator:
    """Writes the result after `a+b=`, with any of OPERATORS, and `?` where there is none.

    a may be negative, and may be a result; b is not negative. There is no result where a or b
    or it has more than 8 digits, where a division leaves a remainder, and after a division by 0.

    Attributes: the ids of the digits, the operators, `=` and `?`.
    """

    digits: tuple[int, ...]
    operators: tuple[int, ...]
    equals: int
    unknown: int

    def start(self) -> _Reading:
        """Outside of any expression."""
        zero = jnp.int32(0)
        return _Reading(
            zero, jnp.array(False), zero, zero, zero, jnp.zeros(PLACES, jnp.int32), zero
        )

    def step(self, state: _Reading, response, position, token):
        """See Tool."""
        drawn = state.pending == 0
        written = state.output[jnp.minimum(PLACES - state.pending, PLACES - 1)]
        token = jnp.where(drawn, token, written)
        state = state._replace(pending=jnp.maximum(state.pending - 1, 0))
        return self._read(state, token), token, drawn

    def _read(self, s: _Reading, token: Int[Array, ""]) -> _Reading:
        is_digit, digit = _place(token, self.digits)
        is_operator, operator = _place(token, self.operators)
        is_minus, mode = token == self.operators[1], s.mode
        first = is_digit & ((mode == OUTSIDE) | (mode == SIGN) | (mode == LEFT))
        second = is_digit & ((mode == BETWEEN) | (mode == RIGHT))
        chosen = is_operator & (mode == LEFT)
        called = (token == self.equals) & (mode == RIGHT)
        part = is_digit | is_operator
        new_mode = jnp.select(
            [first, second, chosen, is_minus & (mode == OUTSIDE), part],
            [LEFT, RIGHT, BETWEEN, SIGN, OTHER],
            OUTSIDE,
        )
        begins = first & (mode != LEFT)
        left = jnp.where(begins, 0, s.left)
        right = jnp.where(chosen, 0, s.right)
        output, count = self._result(s)
        return _Reading(
            mode=new_mode.astype(jnp.int32),
            negative=jnp.where(begins, mode == SIGN, s.negative),
            left=jnp.where(first, jnp.minimum(left * 10 + digit, LIMIT), left),
            operator=jnp.where(chosen, operator, s.operator),
            right=jnp.where(second, jnp.minimum(right * 10 + digit, LIMIT), right),
            output=jnp.where(called, output, s.output),
            pending=jnp.where(called, count, s.pending),
        )

    def _result(self, s: _Reading) -> tuple[Int[Array, " W"], Int[Array, ""]]:
        """The ids that are written, and how many they are."""
        left, right = jnp.where(s.negative, -s.left, s.left), s.right
        divisor = jnp.maximum(right, 1)
        quotient, remainder = left // divisor, left % divisor
        results = jnp.stack([left + right, left - right, left * right, quotient, remainder])
        result = results[s.operator]
        product = OPERATORS.index("*")
        size = jnp.abs(left.astype(jnp.float32)) * right.astype(jnp.float32)
        known = (s.left < LIMIT) & (right < LIMIT) & (jnp.abs(result) < LIMIT)
        known &= (s.operator != product) | (size < 2.0 * LIMIT)  # else it has overflowed
        known &= (s.operator < OPERATORS.index("/")) | (right > 0)
        known &= (s.operator != OPERATORS.index("/")) | (remainder == 0)
        powers = jnp.array([10**place for place in reversed(range(PLACES - 1))], jnp.int32)
        digits = jnp.abs(result) // powers % 10
        count = jnp.maximum((jnp.abs(result) >= powers).sum(), 1)
        ids = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.array(self.digits)[digits]])
        places = jnp.arange(PLACES)
        ids = jnp.where(places == PLACES - 1 - count, self.operators[1], ids)
        count += result < 0
        only = jnp.full(PLACES, self.unknown)
        return jnp.where(known, ids, only), jnp.where(known, count, 1).astype(jnp.int32)


def _place(token: Int[Array, ""], ids: tuple[int, ...]) -> tuple[Bool[Array, ""], Int[Array, ""]]:
    """Whether a token is among some, and where."""
    same = token == jnp.array(ids, jnp.int32)
    return same.any(), jnp.argmax(same).astype(jnp.int32)


def calculator(tokenizer: Tokenizer) -> Calculator:
    """A calculator in the ids of a tokenizer: for rollout.tool.

    Raises ValueError for a tokenizer in which a digit or a sign is not one token.
    """

    def only(character: str) -> int:
        ids = tokenizer.encode(character)
        if len(ids) != 1:
            raise ValueError(
                f"rollout.tool: the calculator needs one token for {character!r}, and this "
                f"tokenizer makes {ids} of it; write a tool for its tokens"
            )
        return ids[0]

    signs = tuple(map(only, OPERATORS))
    return Calculator(tuple(map(only, "0123456789")), signs, only("="), only("?"))
