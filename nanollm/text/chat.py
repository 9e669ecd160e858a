"""Chat messages as the text of a prompt, by the model's own chat template."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> str:
    """Return the prompt for `messages` in OpenAI's form; encode it with add_special_tokens=False.

    messages: each a dict with "role" (one of ROLES; "developer" is rendered as "system", which templates know) and
        "content": a string, None, or text parts [{"type": "text", "text": ...}], joined by newlines as in vLLM.
    tools: functions that the model may call, as JSON schemas.
    template_kwargs: variables of the template itself, such as enable_thinking=False.
    Raises ValueError if the model has no chat template, or says what in the messages or arguments is wrong.
    """
    if not tokenizer.chat_template:
        raise ValueError("this model's tokenizer has no chat template: use generate() with a prompt instead")
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"kwargs"}
    if wrong := sorted(reserved & template_kwargs.keys()):
        raise ValueError(
            f"{', '.join(wrong)} can't be passed to the chat template: only variables it defines itself can"
        )
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages must be a non-empty list of dicts with role and content, got {messages!r:.200}")
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError(f"tools must be a list of JSON schemas, got {tools!r:.200}")
    conversation = [_checked(i, message) for i, message in enumerate(messages)]
    try:
        return str(
            tokenizer.apply_chat_template(
                conversation,
                tools=list(tools) if tools else None,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_kwargs,
            )
        )
    except Exception as error:  # a template is the model's own program: it may raise anything
        raise ValueError(f"the chat template can't render these messages: {error}") from error


def _checked(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of message i whose content is a string; ValueError says what is wrong with it."""
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{i}] must be a dict with role and content, got {message!r:.200}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"messages[{i}]: role must be one of {', '.join(ROLES)}, got {role!r:.200}")
    if not message.keys() & {"content", "tool_calls", "reasoning_content"}:
        raise ValueError(f"messages[{i}] has no content")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of(f"messages[{i}].content[{j}]", part) for j, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"messages[{i}]: content must be a string, None or a list of text parts, got {content!r:.200}")
    return {**message, "role": "system" if role == "developer" else role, "content": content or ""}


def _text_of(where: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f'{where} must be {{"type": "text", "text": "..."}} (this model reads text only), got {part!r:.200}'
        )
    text: str = part["text"]
    return text
