"""A conversation: each answer becomes part of what the next question is asked with, and is not computed again."""

from nanollm import LLM, SamplingParams
from nanollm.cli import default_model


def main() -> None:
    llm = LLM(default_model())
    messages = []
    for question in ("What is the capital of France?", "And of Italy?"):
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
        answer = output.outputs[0].text
        print(f"{question}\n{answer} ({output.num_cached_tokens} prompt tokens came from the cache)")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
