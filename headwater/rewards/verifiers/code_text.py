"""Which part of an answer is the program, and what of the task's prompt it stands on."""

from __future__ import annotations

import ast
import re
import warnings

from headwater.rewards.verifiers.thinking import after_thinking
from headwater.types import Task

MAX_SOURCE = 200_000
"""Longer programs, in characters, are not run."""

_FENCE = re.compile(r"^ {0,3}(?P<marks>`{3,}|~{3,})(?P<info>[^\n]*)$")


def program_text(text: str) -> str | None:
    """The program of an answer: its last fenced block, or all of it where nothing is fenced; None where
    that block is never closed, or what there is is too long or empty. Thinking before the answer is not read."""
    text = after_thinking(text)
    block, fenced = last_block(text)
    found = block if fenced else text
    if found is None or not found.strip() or len(found) > MAX_SOURCE:
        return None
    return found


def last_block(text: str) -> tuple[str | None, bool]:
    """The content of the last fenced block (None where it is never closed), and whether there is any."""
    opened, content = "", []
    last: str | None = None
    fenced = False
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.match(line)
        marks = fence["marks"] if fence else ""
        if not opened:
            if fence and "`" not in fence["info"]:
                opened, content, fenced, last = marks, [], True, None
        elif fence and marks[0] == opened[0] and len(marks) >= len(opened) and not fence["info"].strip():
            opened, last = "", "\n".join(content) + "\n"
        else:
            content.append(line)
    return last, fenced


def parse(source: str) -> ast.Module | None:
    """The syntax tree of a text, or None where it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about "\d" and its like, which is the author's affair
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def defines(source: str, name: str) -> bool:
    """Whether a text is Python that gives `name` a meaning at its top level."""
    tree = parse(source)
    return tree is not None and any(name in _names(statement) for statement in tree.body)


def context_of(task: Task, entry: str | None) -> str:
    """Python of the task's own that the program stands on: `meta.context`, or else the prompt, or its
    last fenced block, where that is Python that defines the function asked for (with an empty body)."""
    given = task.meta.get("context")
    if isinstance(given, str):
        return given
    if entry is None:
        return ""
    prompt = task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]
    block, _ = last_block(prompt)
    return next((text for text in (prompt, block) if text and defines(text, entry)), "")


def complete(program: str, context: str, entry: str | None) -> str:
    """The program with what it stands on: imports and helpers of the task's come first. One that does
    not define the function asked for is a continuation of the task's own text, if that makes sense."""
    if not context.strip():
        return program
    if entry is None or defines(program, entry):
        return helpers(context, entry) + "\n" + program
    joined = context + program
    if parse(program) is None and parse(joined) is not None:
        return joined
    return helpers(context, entry) + "\n" + program


def helpers(context: str, entry: str | None) -> str:
    """What a task's text defines, but for the function that is asked for."""
    tree = parse(context)
    if tree is None:
        return context
    kept = [statement for statement in tree.body if entry is None or entry not in _names(statement)]
    return ast.unparse(ast.Module(body=kept, type_ignores=[]))


def _names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
