"""A text printed as it is generated."""

from nanollm import LLM, SamplingParams
from nanollm.cli import default_model


def main() -> None:
    llm = LLM(default_model())
    prompt = "The planets of the solar system are Mercury, Venus,"
    print(prompt, end="")
    num_printed = 0
    for output in llm.generate_stream(prompt, SamplingParams(temperature=0.0, max_tokens=32)):
        text = output.outputs[0].text  # everything so far, not only what is new
        print(text[num_printed:], end="", flush=True)
        num_printed = len(text)
    print()


if __name__ == "__main__":
    main()
