"""Plain data as trees of JSON, and the comparison of two such trees.

It runs on both sides of the sandbox's wall and needs the standard library only. A value is written down
by its exact type: None, bool and str as they are, everything else as a list that starts with a tag.

    ["i", "-ff"]   int, in hexadecimal       ["l", [...]]             list
    ["f", "0x1.8p+1"]  float, as by hex()    ["t", [...]]             tuple
    ["c", re, im]  complex, likewise         ["e", [...]]             set, sorted by their texts
    ["b", "00ff"]  bytes                     ["z", [...]]             frozenset, likewise
    ["a", "00ff"]  bytearray                 ["d", [[key, value]..]]  dict, in its order

Nothing is ever unpickled, and the parent never rebuilds a value: it compares trees, so that no key with
a chosen hash and no method of a hostile class gets a say.
"""

from __future__ import annotations

import json
import math

TYPE_CHECKING = False  # as typing has it, without the cost of importing that in every sandbox
if TYPE_CHECKING:
    from typing import Any

MAX_DEPTH = 100
"""How deep a value may be nested."""

_PLURAL = {list: "l", tuple: "t", set: "e", frozenset: "z"}
_KINDS = {"l": list, "t": tuple, "e": set, "z": frozenset}
_BASES: tuple[Any, ...] = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


class NotPlain(Exception):
    """A value that is no plain data, or too large or deep a one."""


class _Budget:
    """What a value may still cost, in characters or so."""

    def __init__(self, size: int) -> None:
        self.left = size

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise NotPlain("the value is too large")


def encode(value: object, *, lenient: bool = False, size: int = 4_000_000) -> Any:
    """The tree of a value. `lenient` takes an instance of a subclass for one of its plain base.
    Raises NotPlain for what is of another type, deeper than MAX_DEPTH, or larger than `size` characters."""
    return _encode(value, lenient, _Budget(size), 0)


def _encode(value: Any, lenient: bool, budget: _Budget, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain("the value is nested too deeply")
    kind = type(value)
    if lenient and kind not in _BASES and value is not None:
        kind = next((base for base in _BASES if isinstance(value, base)), kind)
    budget.spend(4)
    if value is None or kind is bool:
        return value
    if kind is str:
        budget.spend(str.__len__(value))
        return str.__str__(value)
    if kind is int:
        budget.spend(int.bit_length(value) // 4)
        return ["i", int.__format__(value, "x")]
    if kind is float:
        return ["f", float.hex(value)]
    if kind is complex:
        return ["c", float.hex(complex(value).real), float.hex(complex(value).imag)]
    if kind is bytes or kind is bytearray:
        budget.spend(2 * len(value))
        return ["b" if kind is bytes else "a", kind.hex(value)]
    if kind is dict:
        below = depth + 1
        rows = dict.items(value)
        return ["d", [[_encode(k, lenient, budget, below), _encode(v, lenient, budget, below)] for k, v in rows]]
    if kind not in _PLURAL:
        raise NotPlain(f"a {kind.__name__} is no plain data")
    items = [_encode(item, lenient, budget, depth + 1) for item in kind.__iter__(value)]
    return [_PLURAL[kind], sorted(items, key=json.dumps) if kind in (set, frozenset) else items]


def decode(tree: object) -> Any:
    """The value of a tree. Raises NotPlain for a tree that `encode` could not have made."""
    try:
        return _decode(tree, 0)
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise NotPlain(f"no plain data: {error}") from error


def _decode(tree: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain("the value is nested too deeply")
    if tree is None or type(tree) in (bool, str):
        return tree
    if type(tree) is not list:
        raise NotPlain(f"a bare {type(tree).__name__}")
    tag, content = tree[0], tree[1]
    if tag in _KINDS:
        return _KINDS[tag](_decode(item, depth + 1) for item in content)
    if tag == "d":
        return {_decode(key, depth + 1): _decode(value, depth + 1) for key, value in content}
    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float.fromhex(content)
    if tag == "c":
        return complex(float.fromhex(content), float.fromhex(tree[2]))
    if tag in ("b", "a"):
        return (bytes if tag == "b" else bytearray).fromhex(content)
    raise NotPlain(f"an unknown tag {tag!r}")


def same(wanted: Any, found: Any, *, exact: bool = True, tolerance: float = 0.0) -> bool:
    """Whether the tree `found` says the value of `wanted`, a tree that `encode` made. `found` may be anything.

    `exact`: types must be the same, so True is not 1 and 3.0 is not 3. Else numbers of any type are
    compared by value, and sets are with frozensets. NaN is equal to nothing. Where `wanted` is a float,
    or complex, `tolerance` is allowed, relative or absolute, whichever is more.
    """
    try:
        return _same(wanted, found, exact, tolerance)
    except RecursionError:  # a tree that no `encode` made, deeper than any that one did
        return False


def _same(wanted: Any, found: Any, exact: bool, tolerance: float) -> bool:
    if wanted is None or type(wanted) is str:
        return type(found) is type(wanted) and found == wanted
    left, right = _number(wanted), _number(found)
    if left is not None or right is not None:
        if left is None or right is None or (exact and _tag(wanted) != _tag(found)):
            return False
        return _close(left, right, tolerance if _tag(wanted) in ("f", "c") else 0.0)
    if type(found) is not list or len(found) != 2:
        return False
    tag, other = wanted[0], found[0]
    if type(other) is not str:
        return False
    if not exact and {tag, other} in ({"e", "z"}, {"a", "b"}):
        other = tag
    if tag != other:
        return False
    if tag in ("b", "a"):
        return wanted[1] == found[1]
    if type(found[1]) is not list or len(wanted[1]) != len(found[1]):
        return False
    if tag == "d":
        return _same_dict(wanted[1], found[1], exact, tolerance)
    if tag in ("e", "z"):
        return sorted(_text(item, exact) for item in wanted[1]) == sorted(_text(item, exact) for item in found[1])
    return all(_same(a, b, exact, tolerance) for a, b in zip(wanted[1], found[1], strict=True))


def _same_dict(wanted: list[Any], found: list[Any], exact: bool, tolerance: float) -> bool:
    if not all(type(row) is list and len(row) == 2 for row in found):
        return False
    values = {_text(key, exact): value for key, value in found}
    if len(values) != len(wanted):
        return False
    for key, value in wanted:
        text = _text(key, exact)
        if text not in values or not _same(value, values[text], exact, tolerance):
            return False
    return True


def _tag(tree: Any) -> str:
    return "bool" if type(tree) is bool else tree[0]


def _number(tree: Any) -> int | float | complex | None:
    """The number that a tree says, or None if it says none."""
    if type(tree) is bool:
        return int(tree)
    if type(tree) is not list or len(tree) not in (2, 3) or tree[0] not in ("i", "f", "c"):
        return None
    try:
        if tree[0] == "i" and len(tree) == 2:
            return int(tree[1], 16)
        if tree[0] == "f" and len(tree) == 2:
            return float.fromhex(tree[1])
        if tree[0] == "c" and len(tree) == 3:
            return complex(float.fromhex(tree[1]), float.fromhex(tree[2]))
    except (ValueError, TypeError, OverflowError):
        pass
    return None


def _close(left: complex, right: complex, tolerance: float) -> bool:
    if left == right:
        return True
    if not tolerance:
        return False
    try:
        away, scale = abs(left - right), max(1.0, abs(left))
    except OverflowError:
        return False
    return math.isfinite(away) and away <= tolerance * scale


def _text(tree: Any, exact: bool) -> str:
    """A text that is the same for keys, and members of sets, that are equal: never for a NaN."""
    if tree is None or type(tree) is str:
        return json.dumps(tree)
    number = _number(tree)
    if number is not None and number != number:
        return f"nan:{id(tree)}"
    if number is not None:
        if type(number) is complex and not number.imag and not exact:
            number = number.real
        if type(number) is float and number.is_integer() and not exact:
            number = int(number)
        shown = f"{number:x}" if type(number) is int else repr(number + 0)
        return f"{_tag(tree) if exact else 'n'}:{shown}"
    if type(tree) is not list or len(tree) != 2 or type(tree[1]) is not list:
        return json.dumps(tree)
    items = [_text(item, exact) for item in tree[1]]
    tag = "z" if tree[0] in ("e", "z") and not exact else tree[0]
    return f"{tag}[{','.join(sorted(items) if tag in ('e', 'z') else items)}]"
