from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from headwater.data.render import CHATML, Renderer
from headwater.errors import DataError, ModelError
from headwater.types import Message, Task, Trajectory

TURN = (
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nBe good.<|im_end|>\n{% endif %}" + TURN
)
HEADERS = (
    "<|begin|>{% for message in messages %}<|im_start|>{{ message['role'] }}<|im_start|>\n\n"
    "{{ message['content'] | trim }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}"
)
EMPTY_THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last and message['role'] == 'assistant' %}<think>\n</think>\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THINKING = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
NO_SYSTEM = CHATML.replace(
    "<|im_start|>{{",
    "{% if message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}<|im_start|>{{",
)
ZOO = [CHATML, DEFAULT_SYSTEM, HEADERS, EMPTY_THINKING]
ENDS = {"<|im_end|>", "<|endoftext|>"}


def messages(*turns: str) -> tuple[Message, ...]:
    """`"user: hello"` and the like, as messages."""
    parts = (turn.partition(": ") for turn in turns)
    return tuple(Message(role=role, content=content) for role, _, content in parts)


def renderer(tokenizer: PreTrainedTokenizerBase, template: str) -> Renderer:
    ends = [tokenizer.convert_tokens_to_ids(end) for end in ENDS]
    made = Renderer(tokenizer, "chatml", ends)
    made.template = template
    return made


def whole(made: Renderer, turns: tuple[Message, ...]) -> tuple[int, ...]:
    """The tokens of a conversation rendered in one go, up to its last end of turn."""
    text = made.tokenizer.apply_chat_template(
        [dict(turn) for turn in turns], chat_template=made.template, tokenize=False
    )
    tokens = made.tokenizer.encode(text, add_special_tokens=False)
    last = max(index for index, token in enumerate(tokens) if token in made.end_of_turn_ids)
    return tuple(tokens[: last + 1])


def policy(trajectory: Trajectory) -> list[str]:
    return [span.text for span in trajectory.spans if span.author == "policy"]


# --- prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [*ZOO, OPENS_THINKING])
def test_a_prompt_is_what_the_template_renders(tokenizer: PreTrainedTokenizerBase, template: str):
    turns = messages("system: Add.", "user: 1 + 1?", "assistant: 2", "user: 2 + 2?")
    span = renderer(tokenizer, template).prompt(Task(id="t", prompt=turns))
    expected = tokenizer.apply_chat_template(
        [dict(turn) for turn in turns], chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert list(span.tokens) == expected
    assert span.author == "prompt"
    assert tokenizer.decode(span.tokens) == span.text


def test_text_under_a_template_is_one_user_message(tokenizer: PreTrainedTokenizerBase):
    made = Renderer(tokenizer, "chatml")
    assert made.prompt(Task(id="t", prompt="hi")) == made.prompt(Task(id="t", prompt=messages("user: hi")))
    assert made.prompt(Task(id="t", prompt="hi")).text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_system_message_replaces_the_default_one(tokenizer: PreTrainedTokenizerBase):
    made = renderer(tokenizer, DEFAULT_SYSTEM)
    assert made.prompt(Task(id="t", prompt="hi")).text.count("system") == 1
    own = made.prompt(Task(id="t", prompt=messages("system: Add.", "user: hi"))).text
    assert own.count("system") == 1
    assert "Be good." not in own


def test_plain_text_is_encoded_as_it_is(tokenizer: PreTrainedTokenizerBase):
    span = Renderer(tokenizer, "none").prompt(Task(id="t", prompt="What is 4 + 4? "))
    assert list(span.tokens) == tokenizer.encode("What is 4 + 4? ")
    assert span.text == "What is 4 + 4? "


def test_plain_text_gets_the_beginning_that_its_tokenizer_adds(tokenizer_with_bos: PreTrainedTokenizerBase):
    task = Task(id="t", prompt="hi", completion="ho")
    begin = tokenizer_with_bos.bos_token_id
    assert Renderer(tokenizer_with_bos, "none").prompt(task).tokens[0] == begin
    assert Renderer(tokenizer_with_bos, "none").demonstration(task).tokens.count(begin) == 1  # type: ignore[arg-type]
    # A template writes its own: never two.
    assert renderer(tokenizer_with_bos, HEADERS).prompt(task).tokens.count(begin) == 1  # type: ignore[arg-type]
    assert begin not in Renderer(tokenizer_with_bos, "chatml").prompt(task).tokens


def test_messages_without_a_template_are_refused_with_the_choices(tokenizer: PreTrainedTokenizerBase):
    made = Renderer(tokenizer, "none")
    for refused in (
        lambda: made.prompt(Task(id="t7", prompt=messages("user: hi"))),
        lambda: made.continuation(messages("user: hi")),
        lambda: made.demonstration(Task(id="t7", prompt="hi", completion=messages("assistant: hi"))),
    ):
        with pytest.raises(ModelError, match=r"chatml.*Jinja.*plain text"):
            refused()


def test_a_tokenizer_without_template_is_refused_with_the_choices(tokenizer: PreTrainedTokenizerBase):
    with pytest.raises(ModelError, match=r"no chat template.*chatml.*Jinja.*none"):
        Renderer(tokenizer)


def test_a_template_from_a_file(tokenizer: PreTrainedTokenizerBase, template: Callable[[str], str]):
    made = Renderer(tokenizer, template(DEFAULT_SYSTEM))
    assert made.prompt(Task(id="t", prompt="hi")).text.startswith("<|im_start|>system\nBe good.")
    with pytest.raises(ModelError, match=r"'absent\.jinja', which cannot be read"):
        Renderer(tokenizer, "absent.jinja")


def test_what_a_template_refuses_is_said(tokenizer: PreTrainedTokenizerBase):
    with pytest.raises(ModelError, match=r"refuses messages of roles system, user: no system"):
        renderer(tokenizer, NO_SYSTEM).prompt(Task(id="t", prompt=messages("system: a", "user: b")))


@pytest.mark.parametrize("turns", [(), messages("user: hi", "assistant: ho")])
def test_a_prompt_must_leave_the_assistant_to_answer(tokenizer: PreTrainedTokenizerBase, turns: tuple[Message, ...]):
    with pytest.raises(DataError, match="'t7' must end with a message"):
        Renderer(tokenizer, "chatml").prompt(Task(id="t7", prompt=turns))


def test_a_prompt_without_tokens_is_refused(tokenizer: PreTrainedTokenizerBase):
    with pytest.raises(DataError, match="'t7' has no tokens"):
        Renderer(tokenizer, "none").prompt(Task(id="t7", prompt=""))


# --- demonstrations --------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ZOO)
def test_a_demonstration_is_the_whole_render(tokenizer: PreTrainedTokenizerBase, template: str):
    made = renderer(tokenizer, template)
    prompt = messages("user: 1 + 1?", "assistant: 2", "user: 2 + 2?")
    task = Task(id="t", prompt=prompt, completion="The answer is 4")
    found = made.demonstration(task)
    assert found.tokens == whole(made, (*prompt, *messages("assistant: The answer is 4")))
    assert found.spans[0] == made.prompt(task)
    assert [span.author for span in found.spans] == ["prompt", "policy"]
    assert found.text.endswith("The answer is 4")


@pytest.mark.parametrize("template", ZOO)
@pytest.mark.parametrize("completion", ["4", "4<|im_end|>", messages("assistant: 4<|im_end|>")])
def test_a_demonstration_ends_with_exactly_one_end_of_turn(
    tokenizer: PreTrainedTokenizerBase, template: str, completion: str | tuple[Message, ...]
):
    made = renderer(tokenizer, template)
    said = made.demonstration(Task(id="t", prompt="2 + 2?", completion=completion)).spans[1].tokens
    assert [token in made.end_of_turn_ids for token in said] == [False] * (len(said) - 1) + [True]
    # Padding and end of turn are one token here, and it is still among those to be learnt.
    if template != HEADERS:
        assert said[-1] == tokenizer.pad_token_id


def test_plain_demonstration(tokenizer: PreTrainedTokenizerBase):
    found = Renderer(tokenizer, "none").demonstration(Task(id="t", prompt="2 + 2 =", completion=" 4"))
    assert list(found.tokens) == [*tokenizer.encode("2 + 2 = 4"), tokenizer.eos_token_id]
    assert policy(found) == [" 4"]


CONVERSATION = messages("assistant: Which?", "user: 2 and 3", "user: please", "assistant: 5", "assistant: Good?")


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, HEADERS])
def test_a_conversation_is_authored_turn_by_turn(tokenizer: PreTrainedTokenizerBase, template: str):
    made = renderer(tokenizer, template)
    found = made.demonstration(Task(id="t", prompt="Add.", completion=CONVERSATION))
    assert found.tokens == whole(made, (*messages("user: Add."), *CONVERSATION))
    assert policy(found) == ["Which?", "5", "Good?"]
    authors = [span.author for span in found.spans]
    assert authors == ["prompt", "policy", "world", "policy", "world", "policy"]
    ends = [span.tokens[-1] in made.end_of_turn_ids for span in found.spans if span.author == "policy"]
    assert ends == [True] * 3


def test_a_template_that_rewrites_what_it_wrote_is_refused(tokenizer: PreTrainedTokenizerBase):
    for template in (OPENS_THINKING, CHATML.replace("{% for", "{{ messages | length }}{% for")):
        made = renderer(tokenizer, template)
        with pytest.raises(ModelError, match="'t7' differently once"):
            made.demonstration(Task(id="t7", prompt="hi", completion="ho"))


def test_an_end_of_turn_that_the_template_does_not_write_is_refused(tokenizer: PreTrainedTokenizerBase):
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    made = Renderer(tokenizer, "chatml", [other])
    with pytest.raises(ModelError, match=r"<\|endoftext\|> stands. Set model.end_of_turn"):
        made.demonstration(Task(id="t", prompt="hi", completion="ho"))
    with pytest.raises(ModelError, match=r"Set model\.end_of_turn"):
        made.continuation(messages("user: hi"))


@pytest.mark.parametrize("completion", [None, "", ()])
def test_without_completion_there_is_no_demonstration(tokenizer: PreTrainedTokenizerBase, completion: str | None):
    with pytest.raises(DataError, match="'t7' has no completion"):
        Renderer(tokenizer, "chatml").demonstration(Task(id="t7", prompt="hi", completion=completion))


def test_a_completion_must_end_with_the_assistant_and_have_no_end_inside(tokenizer: PreTrainedTokenizerBase):
    made = Renderer(tokenizer, "chatml")
    with pytest.raises(DataError, match="does not end with an assistant"):
        made.demonstration(Task(id="t", prompt="hi", completion=messages("assistant: a", "user: b")))
    with pytest.raises(DataError, match="end of turn in its middle"):
        made.demonstration(Task(id="t", prompt="hi", completion="a<|im_end|>b"))


def test_where_a_token_would_straddle_the_boundary_the_prompt_stays_as_sampled(
    tokenizer: PreTrainedTokenizerBase,
):
    made = Renderer(tokenizer, "chatml")
    task = Task(id="t", prompt="hi", completion="\n\nho")
    assert tokenizer.encode("\n\n\n") != tokenizer.encode("\n") + tokenizer.encode("\n\n")  # else this tests nothing
    found = made.demonstration(task)
    assert found.spans[0] == made.prompt(task)
    assert policy(found) == ["\n\nho"]
    assert tokenizer.decode(found.tokens) == made.prompt(task).text + "\n\nho<|im_end|>"


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=20)


@settings(max_examples=60)
@given(prompt=TEXT, said=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), last=TEXT)
def test_any_conversation_keeps_its_text_and_its_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, said: list[tuple[str, str]], last: str
):
    made = Renderer(tokenizer, "chatml")
    turns = [turn for a, u in said for turn in (("assistant", a), ("user", u))] + [("assistant", last)]
    completion = tuple(Message(role=role, content=content) for role, content in turns)
    task = Task(id="t", prompt=prompt, completion=completion)
    found = made.demonstration(task)
    assert found.spans[0] == made.prompt(task)
    assert policy(found) == [content for role, content in turns if role == "assistant"]
    whole_text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in [("user", prompt), *turns])
    assert tokenizer.decode(found.tokens) == whole_text[:-1]


# --- turns of the world ----------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, HEADERS, NO_SYSTEM])
def test_turns_add_up_to_the_whole_render(tokenizer: PreTrainedTokenizerBase, template: str):
    made = renderer(tokenizer, template)
    prompt = messages("user: Add.")
    tokens = made.prompt(Task(id="t", prompt=prompt)).tokens
    turns = list(prompt)
    end = "<|endoftext|>" if template == HEADERS else "<|im_end|>"
    for number in range(3):
        tokens += tuple(tokenizer.encode(f"Which {number}?{end}", add_special_tokens=False))
        world = messages(f"user: {number} + 1", "user: now")
        tokens += made.continuation(world)
        turns += [*messages(f"assistant: Which {number}?"), *world]
    expected = tokenizer.apply_chat_template(
        [dict(turn) for turn in turns], chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert list(tokens) == expected


def test_continuation_of_chatml(tokenizer: PreTrainedTokenizerBase):
    tokens = Renderer(tokenizer, "chatml").continuation(messages("user: no"))
    assert tokenizer.decode(tokens) == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"


# --- decoding and end of turn ----------------------------------------------------------------------


def test_decode_skips_special_tokens(tokenizer: PreTrainedTokenizerBase):
    tokens = tokenizer.encode("<|im_start|>The answer , is 4 .<|im_end|>")
    assert Renderer(tokenizer, "none").decode(tokens) == "The answer , is 4 ."


def test_the_end_of_turn_is_the_end_of_sequence_unless_given(tokenizer: PreTrainedTokenizerBase):
    assert Renderer(tokenizer, "none").end_of_turn_ids == {tokenizer.eos_token_id}
    assert Renderer(tokenizer, "none", {0, 2}).end_of_turn_ids == {0, 2}


# --- a real model's tokenizer and template ---------------------------------------------------------


@pytest.mark.slow
def test_smollm2(smollm2: PreTrainedTokenizerBase):
    made = Renderer(smollm2)
    prompt, completion = (
        messages("user: What is 47 + 38?"),
        messages("assistant: 85", "user: Sure?", "assistant: Yes."),
    )
    found = made.demonstration(Task(id="t", prompt=prompt, completion=completion))
    full = smollm2.apply_chat_template([dict(m) for m in (*prompt, *completion)], return_dict=False)
    assert isinstance(full, list)
    assert smollm2.decode(full[len(found.tokens) :]) == "\n"
    assert list(found.tokens) == full[: len(found.tokens)]
    assert policy(found) == ["85", "Yes."]
    assert found.spans[0].text.count("<|im_start|>system") == 1
    assert found.spans[2].tokens == made.continuation(completion[1:2])
    own = made.prompt(Task(id="t", prompt=(*messages("system: Add."), *prompt)))
    assert own.text.count("<|im_start|>system") == 1
