"""One model on two ranks: two GPUs, or two processes on the CPU."""

from nanollm import LLM, SamplingParams
from nanollm.cli import default_model


def main() -> None:
    with LLM(default_model(), tensor_parallel_size=2) as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=8)):
            print(repr(output.prompt), "->", repr(output.outputs[0].text))


if __name__ == "__main__":  # rank 1 is a new process that imports this file
    main()
