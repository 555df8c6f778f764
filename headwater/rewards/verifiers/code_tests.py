"""The tests of a task: what they look like in its `meta`, and what is made of them."""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.rewards.sandbox.plain import NotPlain, encode
from headwater.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A call of a function, and what is to come of it: a value, or an exception called `raises`. All
    are trees of `plain.encode`."""

    function: str
    args: Any
    kwargs: Any
    expected: Any = None
    raises: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTest:
    """What a program reads, and what it is to print."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTest:
    """Python of the task's: `check(candidate)`, run with the function `entry`; or assertions, if `entry` is
    None. `names` are the program's functions that it calls."""

    source: str
    names: tuple[str, ...]
    entry: str | None = None


Test = CallTest | ScriptTest | CheckTest


def entry_of(task: Task) -> str | None:
    """The function that a task asks for, if it names one: `meta.entry_point`."""
    found = task.meta.get("entry_point")
    return found if isinstance(found, str) and found else None


def tests_of(task: Task) -> list[Test]:
    """The tests of a task: those in `meta.tests` and `meta.test_list`, and the code in `meta.test`. None at
    all gives an empty list. Raises ValueError for one that is malformed."""
    entry = entry_of(task)
    found: list[Test] = []
    assertions: list[str] = []
    for field in ("tests", "test_list"):
        for number, test in enumerate(_listed(task.meta.get(field), field), 1):
            where = f"meta.{field}, test {number}"
            if isinstance(test, str):
                assertions.append(test)
            elif isinstance(test, Mapping):
                found.append(_test(test, entry, where))
            else:
                raise ValueError(f"{where} is {test!r}, wanted an object, or a text of Python that asserts something")
    if assertions:
        found.append(_assertions(assertions, entry))
    source = task.meta.get("test")
    if isinstance(source, str) and source.strip():
        found.append(_check(source, entry))
    return found


def _listed(found: Any, field: str) -> Sequence[Any]:
    if found is None:
        return ()
    if isinstance(found, str):
        found = json.loads(found)
    if isinstance(found, str | Mapping) or not isinstance(found, Sequence):
        raise ValueError(f"meta.{field} is no list of tests")
    return found


def _test(test: Mapping[str, Any], entry: str | None, where: str) -> Test:
    if "stdin" in test or "stdout" in test:
        _only(test, {"stdin", "stdout"}, where)
        stdin, stdout = test.get("stdin", ""), test.get("stdout")
        if not isinstance(stdin, str) or not isinstance(stdout, str):
            raise ValueError(f"{where}: stdin and stdout must be texts")
        return ScriptTest(stdin=stdin, stdout=stdout)
    _only(test, {"fn", "args", "kwargs", "expected", "raises", "literal"}, where)
    function, raises = test.get("fn", entry), test.get("raises")
    if not isinstance(function, str) or not function:
        raise ValueError(f"{where} names no function: wanted fn, or meta.entry_point")
    if ("expected" in test) == ("raises" in test) or not isinstance(raises, str | None):
        raise ValueError(f"{where} must have either expected, or raises with the name of an exception")
    args, kwargs, expected = test.get("args", []), test.get("kwargs", {}), test.get("expected")
    if test.get("literal"):
        args, kwargs, expected = (_literal(value, where) for value in (args, kwargs, expected))
    if not isinstance(args, Sequence) or isinstance(args, str) or not isinstance(kwargs, Mapping):
        raise ValueError(f"{where}: args must be a list, and kwargs an object")
    try:
        return CallTest(
            function=function,
            args=encode(tuple(_plain(value) for value in args)),
            kwargs=encode({key: _plain(value) for key, value in kwargs.items()}),
            expected=encode(_plain(expected)),
            raises=raises,
        )
    except NotPlain as error:
        raise ValueError(f"{where}: {error}") from error


def _plain(value: Any) -> Any:
    """JSON's own lists and objects, where a task holds them as other kinds; what literals hold stays as it is."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _literal(value: Any, where: str) -> Any:
    """With `literal`, texts are Python's: "(1, 2)", "{1, 2}"."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where}: {value[:80]!r} is no literal of Python") from error


def _only(test: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(test) - known)
    if unknown:
        raise ValueError(f"{where} has an unknown field '{unknown[0]}', wanted some of: {', '.join(sorted(known))}")


def _check(source: str, entry: str | None) -> CheckTest:
    tree = _parsed(source, "meta.test")
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        if entry is None:
            raise ValueError("meta.test defines check(candidate), but meta.entry_point names no function")
        return CheckTest(source=source, names=(entry,), entry=entry)
    return _assertions([source], entry)


def _assertions(lines: Sequence[str], entry: str | None) -> CheckTest:
    source = "\n".join(lines) + "\n"
    tree = _parsed(source, "the tests")
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("the tests assert nothing, so anything would pass them")
    names = (entry,) if entry else _called(tree)
    if not names:
        raise ValueError("the tests call no function of the program's; name it in meta.entry_point")
    return CheckTest(source=source, names=names)


def _called(tree: ast.Module) -> tuple[str, ...]:
    """The functions that are called, and come from nowhere else."""
    known = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
    called = (node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return tuple(dict.fromkeys(name for name in called if name not in known))


def _parsed(source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{what} is no Python: {error.msg}, line {error.lineno}") from error
