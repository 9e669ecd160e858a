"""Many prompts: a list of them, each with its own sampling settings, then an iterator that may be endless."""

import itertools

from nanollm import LLM, SamplingParams
from nanollm.cli import default_model


def main() -> None:
    llm = LLM(default_model(), max_num_seqs=8)
    prompts = ["The capital of France is", "Water boils at", "The first ten prime numbers are"]
    params = [SamplingParams(temperature=0.0, max_tokens=num_tokens) for num_tokens in (8, 16, 32)]
    for output in llm.generate(prompts, params):
        completion = output.outputs[0]
        print(
            f"{output.prompt!r} -> {completion.text!r} ({len(completion.token_ids)} tokens, {completion.finish_reason})"
        )
    # Prompts are taken as there is room for them, and outputs come one by one in their order.
    endless = (f"{number}, {number + 1}, {number + 2}," for number in itertools.count())
    outputs = llm.generate(endless, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    for output in itertools.islice(outputs, 3):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
