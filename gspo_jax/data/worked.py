"""Worked solutions: short texts that reach the answer step by step, for the supervised cold start.

One small function a task, from a reasoning-gym entry to the steps. Each step is what one can do in
the head, steps are joined by ';', and the answer follows the only '#':

    chain_sum    12 + 34 - 5    ->    12+34=46;46-5=41#41
"""

from collections.abc import Callable, Iterator
from typing import Any

Entry = dict[str, Any]  # question, answer and metadata, as reasoning-gym makes them
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def worked(task: str, entry: Entry) -> str:
    """Worked solution of `entry`, ending in '#' and the answer.

    Tasks without a function here get the bare '#answer'. An entry without a reference answer (any
    of many would do) gets ''.
    """
    if entry["answer"] is None:
        return ""
    steps = STEPS[task](entry["metadata"]) if task in STEPS else ()
    return f"{';'.join(steps)}#{entry['answer']}"


def chain_sum(metadata: Entry) -> Iterator[str]:
    """12 + 34 - 5: running sums, 12+34=46;46-5=41."""
    first, *rest = metadata["expression"].split()
    total = int(first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        yield f"{total}{sign}{term}={result}"
        total = result


def products(metadata: Entry) -> Iterator[str]:
    """23 * 45: partial products, highest digit first, 23*40=920;23*5=115;920+115=1035."""
    first, *factors = map(int, metadata["expression"].split(" * "))
    product = first
    for factor in factors:
        digits = str(abs(factor))
        parts = [int(d) * 10**place for place, d in enumerate(reversed(digits)) if d != "0"][::-1]
        total = 0
        for part in parts or [0]:
            partial = abs(product) * part
            yield f"{abs(product)}*{part}={partial}"
            if total:
                yield f"{total}+{partial}={total + partial}"
            total += partial
        if product < 0 or factor < 0:  # the parts above are magnitudes: say the sign once, at last
            yield f"{product}*{factor}={product * factor}"
        product *= factor


def gcd(metadata: Entry) -> Iterator[str]:
    """48, 18: Euclid, 48%18=12;18%12=6;12%6=0. More numbers are folded in one by one."""
    a, *rest = metadata["numbers"]
    for b in rest:
        a = yield from _euclid(a, b)


def lcm(metadata: Entry) -> Iterator[str]:
    """12, 18: Euclid, then divide and multiply, 18%12=6;12%6=0;12/6=2;2*18=36."""
    a, *rest = metadata["numbers"]
    for b in rest:
        divisor = yield from _euclid(a, b)
        yield f"{a}/{divisor}={a // divisor}"
        yield f"{a // divisor}*{b}={a // divisor * b}"
        a = a // divisor * b


def _euclid(a: int, b: int) -> Iterator[str]:
    """Steps of Euclid's algorithm, the larger number first; returns the greatest common divisor."""
    a, b = max(a, b), min(a, b)
    while b:
        yield f"{a}%{b}={a % b}"
        a, b = b, a % b
    return a


def number_sorting(metadata: Entry) -> Iterator[str]:
    """Selection: the number that comes next, then those still to place, 3.0<9.0,5.0;5.0<9.0."""
    relation = "<" if metadata["direction"] == "ascending" else ">"
    rest = list(metadata["original_numbers"])
    for number in metadata["sorted_numbers"][:-1]:
        rest.remove(number)
        yield f"{number}{relation}{','.join(rest)}"


def spell_backward(metadata: Entry) -> Iterator[str]:
    """sun: each letter goes before those already taken, s;us;nus."""
    word = metadata["word"]
    return (word[:count][::-1] for count in range(1, len(word) + 1))


def letter_counting(metadata: Entry) -> Iterator[str]:
    """Letter e in 'the year was': every word with the count so far, the 1;year 2;was 2."""
    total = 0
    for word in metadata["span"]:
        total += word.lower().count(metadata["target_letter"])
        yield f"{word} {total}"


def count_bits(metadata: Entry) -> Iterator[str]:
    """13: halve, with the count of odd numbers so far, 13 1;6 1;3 2;1 3."""
    number, count = metadata["number"], 0
    while number:
        count += number % 2
        yield f"{number} {count}"
        number //= 2


def base_conversion(metadata: Entry) -> Iterator[str]:
    """1011 from base 2 to base 5: Horner to decimal, then divide with remainder,
    1*2+0=2;2*2+1=5;5*2+1=11;11/5=2r1;2/5=0r2. Base 10 needs one half only."""
    source, target = metadata["source_base"], metadata["target_base"]
    if source != 10:
        first, *rest = map(DIGITS.index, metadata["source_repr"] or "0")  # reasoning-gym's zero
        value = first
        for digit in rest:
            result = value * source + digit
            yield f"{value}*{source}+{digit}={result}"
            value = result
    if target != 10:
        value = metadata["decimal_value"]
        while value:
            yield f"{value}/{target}={value // target}r{value % target}"
            value //= target


STEPS: dict[str, Callable[[Entry], Iterator[str]]] = {
    "chain_sum": chain_sum,
    "products": products,
    "gcd": gcd,
    "lcm": lcm,
    "number_sorting": number_sorting,
    "spell_backward": spell_backward,
    "letter_counting": letter_counting,
    "count_bits": count_bits,
    "base_conversion": base_conversion,
}
