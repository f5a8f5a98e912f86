"""What a compiled program says of itself in its text: how many bytes its collectives move."""

import collections
import re
from collections.abc import Callable
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
)
_BYTES = {"pred": 1, "bf16": 2, "f16": 2}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OP = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_NAMES = r"%?[\w.\-]+(?:, %[\w.\-]+)*"
_CALLS = re.compile(r"\b(?:calls|body|branch_computations)=\{?(" + _NAMES + ")")


class _Op(NamedTuple):
    name: str
    kind: str
    size: int  # bytes of the result
    rest: str  # operands and attributes


def collective_bytes(text: str, trips: Callable[[str], float]) -> dict[str, float]:
    """Bytes of the results (of what is scattered, the operands) of the collectives that a device
    takes part in, by kind, over one run of the program.

    Args:
      text: of the compiled module.
      trips: how often a loop is run whose condition does not say, by the name of its operation in
        the traced program.
    """
    computations, entry = _parse(text)
    known: dict[str, dict[str, float]] = {}

    def total(name: str) -> dict[str, float]:
        if name in known:
            return known[name]
        found: dict[str, float] = collections.defaultdict(float)
        sizes = {op.name: op.size for op in computations[name]}
        for op in computations[name]:
            kind = op.kind.removesuffix("-start")
            if kind in KINDS:
                operands = re.findall(r"%?([\w.\-]+)", op.rest.split(")")[0])
                found[kind] += max(op.size, *(sizes.get(x, 0) for x in operands), 0)
                continue
            times = 1.0
            if op.kind == "while":
                condition = re.search(r"condition=%?([\w.\-]+)", op.rest)
                bound = _bound(computations[condition[1]]) if condition else None
                times = trips(_traced_name(op.rest)) if bound is None else bound
            for group in _CALLS.findall(op.rest):
                for called in group.split(", "):
                    for kind, size in total(called.lstrip("%")).items():
                        found[kind] += times * size
        known[name] = found
        return found

    return dict(total(entry))


def _parse(text: str) -> tuple[dict[str, list[_Op]], str]:
    """The operations of every computation, and the name of the entry."""
    computations: dict[str, list[_Op]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = header[1]
            computations[current] = []
            entry = current if line.startswith("ENTRY") else entry
            continue
        op = _OP.match(line)
        if op and current:
            computations[current].append(_Op(op[1], op[3], _size(op[2]), op[4]))
    return computations, entry


def _size(shape: str) -> int:
    """Bytes of the arrays that a shape names."""
    size = 0
    for kind, dimensions in _ARRAY.findall(shape):
        bits = re.search(r"\d+", kind)
        count = 1
        for n in dimensions.split(","):
            count *= int(n or 1)
        size += count * (_BYTES.get(kind) or max(int(bits[0]) // 8, 1) if bits else 1)
    return size


def _bound(condition: list[_Op]) -> float | None:
    """The constant that the counter of a loop is compared with."""
    constants = {op.name: op.rest for op in condition if op.kind == "constant"}
    compare = condition[-1]
    if compare.kind != "compare" or "direction=LT" not in compare.rest:
        return None
    for operand in re.findall(r"%?([\w.\-]+)", compare.rest.split(")")[0]):
        number = re.match(r"(\d+)\)", constants.get(operand, ""))
        if number:
            return float(number[1])
    return None


def _traced_name(rest: str) -> str:
    name = re.search(r'op_name="([^"]*)"', rest)
    return name[1] if name else ""
