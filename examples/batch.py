"""Several prompts in one call; each has its own sampling settings."""

from nanollm import LLM, SamplingParams
from nanollm.cli import default_model


def main() -> None:
    llm = LLM(default_model())
    prompts = ["The capital of France is", "Water boils at", "The first ten prime numbers are"]
    params = [SamplingParams(temperature=0.0, max_tokens=num_tokens) for num_tokens in (8, 16, 32)]
    for output in llm.generate(prompts, params):
        completion = output.outputs[0]
        print(
            f"{output.prompt!r} -> {completion.text!r} ({len(completion.token_ids)} tokens, {completion.finish_reason})"
        )


if __name__ == "__main__":
    main()
