"""What a process in the sandbox may be: a program that reads and prints, one whose functions are called,
or an examiner, which runs a task's own tests and asks for each call. Standard library only.

An examiner runs in another sandbox than the program that it examines. Its `candidate` is a stand-in that sends
the arguments out and waits for what came back, so expected values never are where the program is.
"""

from __future__ import annotations

import builtins
import json
import os
import struct
import sys
import types

from plain import NotPlain, decode, encode, same  # pyright: ignore[reportMissingImports]

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any


def act(job: dict[str, Any], rpc: socket.socket, settings: dict[str, Any]) -> None:
    """Plays the role that the job names, and then ends the process."""
    import site  # for exit(), quit() and help(), which programs expect

    site.setquit()
    site.sethelper()
    if job["role"] == "script":
        rpc.close()
        script(job["source"])
    elif job["role"] == "functions":
        functions(job["source"], Channel(rpc, settings["value"]))
    else:
        examine(job, Channel(rpc, settings["value"]))
    sys.exit(0)


class Channel:
    """Messages to and from the parent, as JSON."""

    def __init__(self, rpc: socket.socket, size: int) -> None:
        self.rpc, self.size = rpc, size

    def send(self, message: object) -> None:
        """Sends one message."""
        payload = json.dumps(message).encode()
        if len(payload) > self.size:
            raise NotPlain("the value is too large")
        self.rpc.sendall(struct.pack("!I", len(payload)) + payload)

    def receive(self) -> Any:
        """The next message. Ends the process where the parent is gone."""
        return json.loads(self._exactly(struct.unpack("!I", self._exactly(4))[0]))

    def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            piece = self.rpc.recv(count - len(found))
            if not piece:
                os._exit(0)
            found += piece
        return bytes(found)


def module(name: str) -> types.ModuleType:
    """A fresh module of that name, importable as such."""
    made = types.ModuleType(name)
    made.__dict__["__builtins__"] = builtins
    sys.modules[name] = made
    return made


def script(source: str) -> None:
    """Runs the program as `python program.py` would."""
    code = compile(source, "program.py", "exec")
    exec(code, module("__main__").__dict__)


def functions(source: str, channel: Channel) -> None:
    """Runs the program as an imported module would be, and then calls its functions as told."""
    namespace = module("solution").__dict__
    try:
        exec(compile(source, "solution.py", "exec"), namespace)
    except BaseException as error:  # noqa: BLE001  whatever a program does at its start, it is told
        channel.send({"broken": about(error)})
        os._exit(1)
    channel.send({"loaded": True})
    while True:
        call = channel.receive()
        try:
            function = find(call["fn"], namespace)
            arguments, named = decode(call["args"]), decode(call["kwargs"])
            value = function(*arguments, **named)
            channel.send({"value": encode(value, lenient=call["lenient"], size=channel.size)})
        except NotPlain as error:
            channel.send({"odd": str(error)})
        except BaseException as error:  # noqa: BLE001  what a function raises is its answer
            channel.send(about(error))


def find(name: str, namespace: dict[str, Any]) -> Any:
    """The function of that name; of `Class.method`, the method of a new instance."""
    first, *rest = name.split(".")
    found = namespace[first]
    for part in rest:
        found = getattr(found() if isinstance(found, type) else found, part)
    return found


def about(error: BaseException) -> dict[str, str]:
    """The name of an exception, and the first of its words."""
    try:
        words = str(error)[:500]
    except BaseException:  # noqa: BLE001  a hostile __str__
        words = ""
    return {"raised": type(error).__name__, "words": words}


# --- the examiner ----------------------------------------------------------------------------------


class Raised(Exception):
    """What the program raised, where that was no exception of Python's own."""


class OddValue(Exception):
    """The program returned something that is no plain data, or nothing at all."""


class TestsBroken(Exception):
    """The tests themselves cannot be run."""


def stand_in(name: str, channel: Channel, lenient: bool) -> Any:
    """A function that has the program's function of that name called, and gives back what it gave."""

    def candidate(*args: object, **kwargs: object) -> object:
        try:
            call = {"fn": name, "args": encode(args, size=channel.size), "kwargs": encode(kwargs, size=channel.size)}
            channel.send({"call": {**call, "lenient": lenient}})
        except NotPlain as error:
            raise TestsBroken(f"an argument of {name} cannot be sent: {error}") from error
        try:
            reply = channel.receive()
            if "value" in reply:
                return decode(reply["value"])
            if "raised" in reply:
                kind = getattr(builtins, str(reply["raised"]), Raised)
                usable = isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError
                error = (kind if usable else Raised)(str(reply.get("words")))
            else:
                error = OddValue(str(reply.get("odd")))
        except (NotPlain, ValueError, TypeError, AttributeError, RecursionError) as broken:
            raise OddValue("the program sent no plain data") from broken
        error.__dict__["from_program"] = True
        raise error

    candidate.__name__ = name.rpartition(".")[2]
    return candidate


def examine(job: dict[str, Any], channel: Channel) -> None:
    """Runs the tests of a task and says what they came to: passed, wrong, or broken themselves."""
    try:
        outcome, words = _examine(job, channel)
    except RecursionError:
        outcome, words = "wrong", "RecursionError in the tests"
    channel.send({"outcome": outcome, "words": words[:500]})
    os._exit(0)


def _examine(job: dict[str, Any], channel: Channel) -> tuple[str, str]:
    import random

    random.seed(job["seed"])
    namespace = module("examination").__dict__
    try:
        exec(compile(job["context"], "context.py", "exec"), namespace)
        stand_ins = {name: stand_in(name, channel, not job["exact"]) for name in job["names"]}
        namespace.update(stand_ins)
        tests = strict(job["tests"], job["tolerance"], namespace) if job["exact"] else job["tests"]
        code = compile(tests, "tests.py", "exec")
        exec(code, namespace)
        if job["entry"]:
            namespace["check"](stand_ins[job["entry"]])
    except (SyntaxError, ImportError, NameError, TestsBroken) as error:
        outcome = "wrong" if hasattr(error, "from_program") else "broken"
        return outcome, f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  tests tell of a wrong value by raising whatever they raise
        return "wrong", f"{type(error).__name__}: {error}"
    return "passed", ""


def strict(tests: str, tolerance: float, namespace: dict[str, Any]) -> Any:
    """The tests, with each `a == b` of an assertion comparing types too."""
    import ast

    class Strict(ast.NodeTransformer):
        def visit_Compare(self, node: ast.Compare) -> ast.AST:
            self.generic_visit(node)
            if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
                return node
            name = ast.Name(id="__same__", ctx=ast.Load())
            return ast.copy_location(ast.Call(func=name, args=[node.left, node.comparators[0]], keywords=[]), node)

    def alike(left: object, right: object) -> bool:
        try:
            first, second = encode(left), encode(right)
        except NotPlain:
            return left == right
        return same(second, first, tolerance=tolerance)

    tree = ast.parse(tests)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            node.test = Strict().visit(node.test)
    namespace["__same__"] = alike
    return ast.fix_missing_locations(tree)
