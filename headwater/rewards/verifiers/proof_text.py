"""Which part of an answer is a proof in Coq's language, and whether it holds nothing but tactics."""

from __future__ import annotations

import re

from headwater.rewards.verifiers.code_text import MAX_SOURCE, last_block
from headwater.rewards.verifiers.thinking import after_thinking

_STATEMENT = re.compile(
    r"\s*(?:Theorem|Lemma|Fact|Corollary|Proposition|Remark|Example)\s+(?P<name>[A-Za-z_][\w']*)(?![\w'])"
)
_TACTIC = re.compile(r"(?:(?:all|par|!|\d+(?:\s*[-,]\s*\d+)*|\[\w+\])\s*:\s*)?[a-z_(\[]")
_LEADING = re.compile(r"(?:\s|[-+*]+(?=\s|$)|[-+*]+(?=[a-z({])|(?:(?:\d+|!|\[[^\]]*\]|all|par)\s*:\s*)?\{(?!\|)|\})*")
_REFUSED = re.compile(r"\b(?:admit|give_up|native_compute|native_cast_no_check|vm_cast_no_check|exact_no_check)\b")


def proof_text(text: str) -> str | None:
    """The tactics of an answer, without `Proof.` and `Qed.`: of its last fenced block, or all of it. None where there
    is none. What follows a model's thinking alone is read."""
    text = after_thinking(text)
    block, fenced = last_block(text)
    found = block if fenced else text
    if found is None or not found.strip() or len(found) > MAX_SOURCE:
        return None
    return found


def tactics(proof: str, statement: str = "") -> list[str] | str:
    """The sentences of a proof, one by one; or, as a text, why it is more than tactics.

    Allowed are tactics, which start with a small letter or a bracket, bullets and braces, and `Unshelve`; `Proof.` at
    the start and `Qed.` at the end are left out, and so is the statement itself, if it is repeated word by word. All
    other commands of Coq start with a capital or `#`.
    """
    found = sentences(proof)
    if isinstance(found, str):
        return found
    if found and f"{found[0]}.".split() == statement.split():
        found = found[1:]
    if found and found[0] in ("Proof", "Proof using"):
        found = found[1:]
    if found and found[-1].lstrip("}- \n\t") == "Qed":
        found[-1] = found[-1].rpartition("Qed")[0].strip()
    kept: list[str] = []
    for sentence in found:
        bullets = _LEADING.match(sentence)
        assert bullets is not None
        rest = sentence[bullets.end() :]
        if rest and rest != "Unshelve" and not _TACTIC.match(rest):
            return f"it holds what is no tactic: {' '.join(rest.split())[:60]}"
        if refused := _REFUSED.search(rest):
            return f"it uses {refused.group()}, which is not allowed"
        if bullets.group() and not rest:
            kept.append(bullets.group())
        elif rest:
            kept.append(sentence + ".")
    return kept


def sentences(text: str) -> list[str] | str:
    """The text without comments, cut at each full stop that ends a sentence; or why it cannot be cut. A proof with a
    string is refused, as no tactic needs one, and so is what is no ASCII but in a comment."""
    bare: list[str] = []
    depth, place = 0, 0
    while place < len(text):
        pair = text[place : place + 2]
        if text[place] == '"':
            return "it holds a string, which is not allowed"
        if pair == "(*" and text[place : place + 3] != "(*)":
            depth, place = depth + 1, place + 2
        elif pair == "*)" and depth:
            depth, place = depth - 1, place + 2
            bare.append(" ")
        else:
            if not depth:
                bare.append(text[place])
            place += 1
    if depth:
        return "a comment is never closed"
    source = "".join(bare)
    if not source.isascii():
        return "it holds letters that are no ASCII"
    parts = [part.strip() for part in re.split(r"\.(?=\s|$)", source)]
    if parts[-1].strip("} \n\t"):
        return f"its last sentence has no full stop: {parts[-1][:60]}"
    return [part for part in parts if part]


def name_of(statement: str) -> str | None:
    """The name in `Theorem name : ...`, or None for what is no such statement."""
    match = _STATEMENT.match(statement)
    return match["name"] if match and statement.rstrip().endswith(".") else None


def renamed(statement: str, name: str) -> str:
    """The same statement under another name."""
    match = _STATEMENT.match(statement)
    assert match is not None
    return statement[: match.start("name")] + name + statement[match.end("name") :]
