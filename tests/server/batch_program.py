"""`nanollm` with an engine of a few lines in place of the real one, so that it starts at once. It continues a prompt of
one token id with that id as text, after up to 10 ms."""

import asyncio
import random
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

from nanollm import cli
from nanollm.config import EngineConfig
from nanollm.engine.engine_core import EngineStats
from nanollm.outputs import CompletionOutput, RequestOutput
from nanollm.runtime.channel import EngineDeadError
from nanollm.sampling_params import SamplingParams
from nanollm.server import batch

DEADLY = 13  # the engine dies of this prompt


class QuickEngine:
    tokenizer = None
    max_model_len = 100

    def __init__(self, model: str, *, max_waiting: int, **engine_args: Any) -> None:
        self.config = EngineConfig.from_args(model, **engine_args)
        self.stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self.dead = asyncio.Event()

    async def __aenter__(self) -> "QuickEngine":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    async def in_text_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    async def generate_all(
        self, prompts: list[Any], params: SamplingParams, request_id: str, *, stream: bool, timeout: float | None
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        await asyncio.sleep(random.random() / 100)
        for index, prompt in enumerate(prompts):
            ids = prompt["prompt_token_ids"]
            if ids == [DEADLY]:
                raise EngineDeadError("rank 1 fell over")
            yield index, RequestOutput("0", None, ids, [CompletionOutput(0, str(ids[0]), ids, "stop")], finished=True)


if __name__ == "__main__":
    batch.AsyncLLMEngine = QuickEngine  # type: ignore[assignment,misc]
    sys.exit(cli.main())
