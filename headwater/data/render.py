"""Messages to tokens, with every token's author known.

The ids that a policy is trained on are those it would see when sampling: the prompt is tokenised as
the template renders it with the opening of an assistant turn, and what follows continues from there.
A boundary between authors is exact where the tokens before it are the same with and without what
comes after; the marks of chat templates are special tokens, so theirs always are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from headwater.errors import DataError, ModelError
from headwater.types import Author, Message, Span, Task, Trajectory

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CHOICES = (
    'Set model.chat_template to "chatml" or to the path of a Jinja file; '
    'or to "none", with prompts that are plain text.'
)
STEP_MARK = "\n"
"""What stands between the steps of a solution."""

_MARK = "A turn of the policy stands here"


class Renderer:
    """Turns tasks into spans of tokens, for one tokenizer and one chat template.

    `chat_template` is "auto" (the tokenizer's own), "none" (plain text), "chatml", or the path of a
    Jinja file. `end_of_turn_ids` are the tokens that end a policy's turn; the tokenizer's
    end-of-sequence token if none are given. Raises ModelError where these cannot work together.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str = "auto",
        end_of_turn_ids: Collection[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.template = _find_template(tokenizer, chat_template)
        eos = _single(tokenizer.eos_token_id)
        self.end_of_turn_ids = frozenset(end_of_turn_ids) or frozenset(() if eos is None else (eos,))
        if not self.end_of_turn_ids:
            raise ModelError(
                "The tokenizer names no end-of-sequence token and no end of turn was given, so nothing could "
                'end an answer. Set model.end_of_turn, for example to "<|im_end|>".'
            )

    # --- what others call --------------------------------------------------------------------------

    def prompt(self, task: Task) -> Span:
        """The prompt as the policy reads it, up to where its answer begins."""
        text = self._prompt_text(task)
        tokens = self._encode(text)
        if not tokens:
            raise DataError(f"The prompt of task '{task.id}' has no tokens, so there is nothing to continue.")
        return Span(author="prompt", tokens=tokens, text=text)

    def continuation(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens between the end of a policy's turn and the start of its next one, when `messages`
        are what the world says in between. They follow the end-of-turn token that was sampled."""
        before = (Message(role="user", content="?"), Message(role="assistant", content=_MARK))
        text = self._render((*before, *messages), opening=True)
        return self._encode_piece(self._after_turn(text.partition(_MARK)[2]))

    def demonstration(self, task: Task) -> Trajectory:
        """The task as its completion does it: policy spans for what the assistant says, each with its
        end-of-turn token, and world spans for anything between them. Ends with an end-of-turn token;
        what a template writes after the last one is left out, as nobody samples it. A completion that is cut
        into steps has a span for each."""
        if not task.completion:
            raise DataError(f"Task '{task.id}' has no completion to imitate. Give its row one (tasks.completion).")
        pieces = self._plain_pieces(task) if self.template is None else self._chat_pieces(task)
        tokens = self._encode_pieces([text for _, text in pieces], task)
        spans: list[Span] = []
        following = [author for author, _ in pieces[1:]] + ["end"]
        for (author, text), piece, after in zip(pieces, tokens, following, strict=True):
            if author == "policy" != after and piece[-1] not in self.end_of_turn_ids:
                raise ModelError(
                    f"The tokenizer does not turn the end of {text[-40:]!r} into an end-of-turn token. "
                    "Set model.end_of_turn to a special token of this tokenizer."
                )
            shown = self.decode(piece) if author == "policy" else text
            spans.append(Span(author=author, tokens=piece, text=shown))
        return Trajectory(task_id=task.id, spans=tuple(spans), agent="demonstration")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        return self._decode(tokens, skip_special=True)

    # --- text ----------------------------------------------------------------------------------------

    def _prompt_text(self, task: Task) -> str:
        if self.template is not None:
            return self._render(self._prompt_messages(task), opening=True)
        if isinstance(task.prompt, str):
            return task.prompt
        raise ModelError(
            f"The prompt of task '{task.id}' is a list of messages, but model.chat_template is \"none\". " + _CHOICES
        )

    def _prompt_messages(self, task: Task) -> tuple[Message, ...]:
        if isinstance(task.prompt, str):
            return (Message(role="user", content=task.prompt),)
        if not task.prompt or task.prompt[-1]["role"] == "assistant":
            raise DataError(
                f"The prompt of task '{task.id}' must end with a message that an assistant can answer; "
                f"it {'ends with an assistant message' if task.prompt else 'has no messages'}."
            )
        return task.prompt

    def _render(self, messages: Sequence[Message], *, opening: bool) -> str:
        if self.template is None:
            raise ModelError('Messages cannot be written with model.chat_template = "none". ' + _CHOICES)
        try:
            text = self.tokenizer.apply_chat_template(
                [{"role": message["role"], "content": message["content"]} for message in messages],
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=opening,
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ModelError(f"The chat template refuses messages of roles {roles}: {error}.") from error
        assert isinstance(text, str)
        return text

    def _plain_pieces(self, task: Task) -> list[tuple[Author, str]]:
        if not isinstance(task.completion, str):
            raise ModelError(
                f"The completion of task '{task.id}' is a list of messages, but model.chat_template is "
                '"none". ' + _CHOICES
            )
        said = self._said(task.completion, task.id)
        return [("prompt", self._prompt_text(task)), *_stepwise(said, self._end_of_turn, task)]

    def _chat_pieces(self, task: Task) -> list[tuple[Author, str]]:
        """The whole conversation as rendered, cut where the author changes."""
        prompt = self._prompt_messages(task)
        messages = (*prompt, *self._completion_messages(task))
        whole = self._render(messages, opening=False)
        pieces: list[tuple[Author, str]] = []
        done = 0
        for index in range(len(prompt), len(messages)):
            if messages[index]["role"] != "assistant":
                continue
            head = self._render(messages[:index], opening=True)
            if not whole.startswith(head) or len(head) < done:
                raise ModelError(
                    f"The chat template writes the conversation of task '{task.id}' differently once an "
                    "assistant has answered, so what is trained on would not be what is sampled from. Use a "
                    "template that only adds to what it wrote before. " + _CHOICES
                )
            end = len(whole) - len(self._after_turn(whole[len(head) :]))
            pieces.append(("world" if pieces else "prompt", whole[done : len(head)]))
            turn = whole[len(head) : end]
            said = messages[index]["content"]
            steps = _stepwise(said, turn[len(said) :], task) if turn.startswith(said) else [("policy", turn)]
            pieces.extend(cast("list[tuple[Author, str]]", steps))
            done = end
        return pieces

    def _completion_messages(self, task: Task) -> tuple[Message, ...]:
        found = task.completion or ()
        messages = (Message(role="assistant", content=found),) if isinstance(found, str) else found
        if not messages or messages[-1]["role"] != "assistant":
            raise DataError(f"The completion of task '{task.id}' does not end with an assistant message.")
        return tuple(
            Message(role="assistant", content=self._said(message["content"], task.id))
            if message["role"] == "assistant"
            else message
            for message in messages
        )

    def _said(self, text: str, task_id: str) -> str:
        """What the assistant says, without an end of turn that the data may already carry."""
        for mark in self._end_marks:
            text = text.removesuffix(mark)
        if any(mark in text for mark in self._end_marks):
            raise DataError(f"The completion of task '{task_id}' has an end of turn in its middle: {text[:80]!r}.")
        return text

    def _after_turn(self, text: str) -> str:
        """What follows the first end of turn in rendered text."""
        ends = [text.index(mark) + len(mark) for mark in self._end_marks if mark in text]
        if not ends:
            raise ModelError(
                f"The chat template ends an assistant's turn with {text[-40:]!r}, where none of the "
                f"end-of-turn tokens {', '.join(self._end_marks)} stands. "
                "Set model.end_of_turn to the token that it writes."
            )
        return text[min(ends) :]

    @cached_property
    def _end_marks(self) -> tuple[str, ...]:
        return tuple(self._decode((token,), skip_special=False) for token in sorted(self.end_of_turn_ids))

    @cached_property
    def _end_of_turn(self) -> str:
        """The end of turn that plain text gets."""
        eos = _single(self.tokenizer.eos_token_id)
        token = eos if eos is not None and eos in self.end_of_turn_ids else min(self.end_of_turn_ids)
        return self._decode((token,), skip_special=False)

    # --- tokens --------------------------------------------------------------------------------------

    def _encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text from its start. A template writes its own beginning-of-sequence token."""
        return (*self._beginning, *self._encode_piece(text))

    def _encode_piece(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def _beginning(self) -> tuple[int, ...]:
        """The token that this tokenizer puts before plain text, if it does."""
        bos = _single(self.tokenizer.bos_token_id)
        if self.template is None and bos is not None and self.tokenizer.encode("")[:1] == [bos]:
            return (bos,)
        return ()

    def _encode_pieces(self, texts: Sequence[str], task: Task) -> list[tuple[int, ...]]:
        """The tokens of consecutive texts, as they are when tokenised in one go. Where a token would
        straddle two texts, the second is tokenised by itself: that is how a policy has to write it."""
        pieces: list[tuple[int, ...]] = []
        tokens: tuple[int, ...] = ()
        for number, text in enumerate(texts, start=1):
            whole = self._encode("".join(texts[:number]))
            piece = whole[len(tokens) :]
            if whole[: len(tokens)] != tokens:
                piece = self._encode_piece(text)
                if self._decode((*tokens, *piece), skip_special=False) != self._decode(whole, skip_special=False):
                    raise DataError(
                        f"The completion of task '{task.id}' cannot be tokenised apart from what "
                        f"stands before it: {text[:40]!r}. Remove the white space at its start."
                    )
            pieces.append(piece)
            tokens = (*tokens, *piece)
        return pieces

    def _decode(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _stepwise(said: str, ending: str, task: Task) -> list[tuple[Author, str]]:
    """A turn of the policy, cut into the task's steps if it has any; what ends the turn goes with the last."""
    if not task.steps:
        return [("policy", said + ending)]
    if said != STEP_MARK.join(task.steps):
        raise DataError(f"The steps of task '{task.id}', joined by line breaks, are not its completion.")
    pieces: list[tuple[Author, str]] = [("policy", step + STEP_MARK) for step in task.steps]
    pieces[-1] = ("policy", task.steps[-1] + ending)
    return pieces


def _single(token: object) -> int | None:
    """A tokenizer's special id, which its type allows to be more than it ever is."""
    assert token is None or isinstance(token, int)
    return token


def _find_template(tokenizer: PreTrainedTokenizerBase, choice: str) -> str | None:
    """The Jinja text of a chat template, or None for plain text."""
    if choice == "none":
        return None
    if choice == "chatml":
        return CHATML
    if choice == "auto":
        if not tokenizer.chat_template:
            raise ModelError("The model's tokenizer has no chat template. " + _CHOICES)
        return tokenizer.get_chat_template()
    try:
        return Path(choice).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"model.chat_template is '{choice}', which cannot be read: {error}. {_CHOICES}") from error
