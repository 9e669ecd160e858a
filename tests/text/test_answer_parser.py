"""AnswerParser: what is reasoning, content and a call, wherever the text is cut into pieces."""

import itertools
import json

import pytest

from nanollm.text.answer_parser import AnswerParser, Piece

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü\\n"}}\n</tool_call>'
ARGUMENTS = {"a": 1, "b": "ü\n"}


def parse(pieces: list[str], *, is_thinking: bool = False, max_calls: int = 9, thinks: bool = True) -> Piece:
    parser, whole = AnswerParser(thinks=thinks, is_thinking=is_thinking, max_calls=max_calls), Piece()
    for i, piece in enumerate(pieces):
        new = parser.push(piece, last=i == len(pieces) - 1)
        whole.reasoning += new.reasoning
        whole.content += new.content
        whole.calls += new.calls
    return whole


CASES = [
    ("<think>\nHm.\n\nYes.\n</think>\n\nFour.", "Hm.\n\nYes.", "Four.", 0),
    ("\n\n<think>\n\n</think>\n\nFour.\n", "", "Four.\n", 0),
    ("Four <think> five</think>", "", "Four <think> five</think>", 0),  # not at the start
    ("<think>\ncut off", "cut off", "", 0),
    ("<thin", "", "<thin", 0),
    (f"I add.\n{CALL}", "", "I add.", 1),
    (f"<think>\nadd\n</think>\n\n{CALL}\n{CALL}", "add", "", 2),
    (f"{CALL}\nDone.", "", "Done.", 1),
    ("<tool_call>\nnot JSON\n</tool_call> so", "", "<tool_call>\nnot JSON\n</tool_call> so", 0),
    (
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        "",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        0,
    ),
    ('<tool_call>\n{"name": "add', "", '<tool_call>\n{"name": "add', 0),
    ("a < b, <tool is no tag ", "", "a < b, <tool is no tag ", 0),
    ("", "", "", 0),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "num_calls"), CASES)
def test_parts_of_an_answer_wherever_it_is_cut(text: str, reasoning: str, content: str, num_calls: int) -> None:
    for i, j in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        found = parse([text[:i], text[i:j], text[j:]])
        assert (found.reasoning, found.content, len(found.calls)) == (reasoning, content, num_calls)
        assert all(name == "add" and json.loads(arguments) == ARGUMENTS for name, arguments in found.calls)
    assert parse(list(text) or [""]) == found


def test_arguments_with_half_a_surrogate_pair_can_be_sent() -> None:
    ((_, arguments),) = parse([CALL.replace(r"\n", r"\ud800")]).calls
    assert json.loads(arguments.encode()) == {"a": 1, "b": "ü\ud800"}


def test_reasoning_that_the_prompt_opened() -> None:
    found = parse(["Hm.</thi", "nk>\n\nFour."], is_thinking=True)
    assert (found.reasoning, found.content) == ("Hm.", "Four.")


def test_without_tools_or_reasoning_everything_is_content() -> None:
    text = f"<think>\nHm.</think>{CALL} "
    assert parse([text], max_calls=0, thinks=False).content == text


def test_what_follows_the_one_call_that_was_asked_for_does_not_count() -> None:
    found = parse([f"{CALL}\n{CALL} and so on"], max_calls=1)
    assert len(found.calls) == 1 and found.content == ""


def test_text_is_shown_as_soon_as_it_can_be_no_tag() -> None:
    parser = AnswerParser(thinks=True, max_calls=9)
    shown = [parser.push(piece) for piece in ("<", "think", ">", "\na", " b </", "x", "</think>", "\n", "c <", "d")]
    assert [piece.reasoning for piece in shown] == ["", "", "", "a", " b", " </x", "", "", "", ""]
    assert [piece.content for piece in shown][-2:] == ["c", " <d"]
