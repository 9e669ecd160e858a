"""Answers that fit a JSON schema, a list of choices, a regex: each request has its own, and they run in one batch."""

import json

from nanollm import LLM, SamplingParams
from nanollm.cli import default_model

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "hot": {"type": "boolean"},
        "month": {"type": "integer", "minimum": 1, "maximum": 12},
    },
    "required": ["city", "hot", "month"],
}


def main() -> None:
    llm = LLM(default_model())
    question = [{"role": "user", "content": "Where shall I spend my holidays? Answer in JSON."}]
    structures = [
        {"json": SCHEMA},
        {"choice": ["by the sea", "in the mountains"]},
        {"regex": "(June|July), [1-9] days"},
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=50, structured_outputs=each) for each in structures]
    place, choice, when = (out.outputs[0].text for out in llm.chat([question] * 3, params, use_tqdm=False))
    print(f"{json.loads(place)}; {choice}; {when}")


if __name__ == "__main__":
    main()
