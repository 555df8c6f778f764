"""What a verifier of answers does not read: the thinking before them."""

from __future__ import annotations


def after_thinking(text: str) -> str:
    """The text after the last `</think>`; nothing if a `<think>` is still open, as there is no
    answer yet then; all of it if nobody thought aloud."""
    answer = text.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer
