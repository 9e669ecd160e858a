"""Latency and throughput of any OpenAI-compatible server (nanollm's, vLLM's) under load.

    python bench/serving.py --rate 1 2 4 8 --slo-ttft 0.5 --slo-tpot 0.05 --png rates.png   # open loop, Poisson
    python bench/serving.py --concurrency 256 --workload w                                  # closed loop

Workloads: "random" prompts of --input-len tokens; "shared-prefix": the first --prefix-len tokens are one of
--num-prefixes; "multi-turn": conversations of --turns turns, each with all before it as its prefix; "w": the 256
requests of bench/throughput.py; "trace": the lines of --trace, {"timestamp": ms, "input_length": tokens,
"output_length": tokens}, at their own times. Open loop: requests come at their times whether or not the server keeps
up. Closed loop: as soon as another is done.

TTFT: sending to first token. TPOT: time per later token of a request. ITL: time between two events of a stream, which
may bring several tokens. E2E: sending to end. Goodput: requests per second within all SLOs.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from command_line import at_least, parser_of, positive, positive_float, pyplot
from tqdm import tqdm
from workload import Workload

from nanollm.cli import exit_code

MAX_TOKEN_ID = 10_000  # of random prompts: every model has these
WORDS = ["time", "water", "people", "light", "house", "music", "river", "stone", "paper", "green", "small", "north"]


@dataclass
class Turn:
    """One request. prompt: token ids; or text, to which what was said before is prefixed."""

    prompt: list[int] | str
    output_len: int


@dataclass
class Conversation:
    """Turns that follow each other. at: seconds from the start when the first is sent; None leaves it to the loop."""

    turns: list[Turn]
    at: float | None = None


@dataclass
class Result:
    """A request as its client saw it; times in seconds of time.perf_counter()."""

    sent: float
    events: list[float] = field(default_factory=list)  # when each came
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.events[0] - self.sent

    @property
    def tpot(self) -> float:
        return (self.events[-1] - self.events[0]) / max(self.output_tokens - 1, 1)

    @property
    def e2e(self) -> float:
        return self.events[-1] - self.sent


def main() -> int:
    parser = parser_of(__doc__, png="latency over load")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="(default: %(default)s)")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the first that the server names")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--rate", type=positive_float, nargs="+", help="requests per second, one run each; inf is all at once"
    )
    load.add_argument("--concurrency", type=positive, nargs="+", help="requests at once, one run each")
    workloads = ("random", "shared-prefix", "multi-turn", "w", "trace")
    parser.add_argument("--workload", choices=workloads, default="random", help="(default: %(default)s)")
    parser.add_argument("--num-requests", type=positive, default=256, help="a run (default: %(default)s)")
    parser.add_argument("--input-len", type=positive, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=positive, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--prefix-len", type=at_least(0), default=256, help="tokens (default: %(default)s)")
    parser.add_argument("--num-prefixes", type=positive, default=4, help="(default: %(default)s)")
    parser.add_argument("--turns", type=positive, default=4, help="(default: %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument("--temperature", type=float, default=0.6, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")
    parser.add_argument("--slo-ttft", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--slo-tpot", type=float, default=float("inf"), help="seconds")
    args = parser.parse_args()
    if (args.workload == "trace") != (args.trace is not None):
        parser.error("--workload trace and --trace FILE go together")
    if not (args.rate or args.concurrency) and args.trace is None:
        args.rate = [float("inf")]
    return uvloop.run(run_all(args))  # the client must keep up, too


async def run_all(args: argparse.Namespace) -> int:
    """One run for each rate or concurrency, each with prompts of its own, so that no prefix is cached; after one that
    got no answer no more, and exit status 1."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    headers = {"authorization": f"Bearer {args.api_key}"}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # less than servers keep a connection
    rows = []
    async with aiohttp.ClientSession(args.base_url, timeout=timeout, headers=headers, connector=connector) as session:
        async with session.get("/v1/models") as response:
            response.raise_for_status()
            args.model = args.model or (await response.json())["data"][0]["id"]
        client = Client(session, args.model, args.temperature)
        await client.ask(Turn([1, 2, 3], 4))  # connects, and compiles what is missing
        print(f"{args.model} at {args.base_url}, {args.workload}")
        for number, load in enumerate(args.rate or args.concurrency or [None]):
            draw = random.Random(1000 * args.seed + number)
            conversations = make_conversations(args, draw, number)
            start = time.perf_counter()
            if args.concurrency:
                results = await closed_loop(client, conversations, load)
            else:
                results = await open_loop(client, conversations, load or float("inf"), draw)
            row = {"concurrency" if args.concurrency else "rate": load} | summary(results, start, args)
            rows.append(row)
            show(row)
            if not row["completed"]:
                break
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "api_key"}
        args.json.write_text(json.dumps({"settings": settings, "runs": rows}, indent=2) + "\n")
    if not rows[-1]["completed"]:
        return 1
    if args.png:
        draw_png(args.png, rows, f"{args.model}, {args.workload}")
    return 0


def make_conversations(args: argparse.Namespace, draw: random.Random, number: int) -> list[Conversation]:
    """The requests of a run."""

    def ids(count: int) -> list[int]:
        return [draw.randrange(MAX_TOKEN_ID) for _ in range(count)]

    if args.workload == "w":
        workload = Workload.make(args.num_requests)
        moved = [[(token_id + number) % (MAX_TOKEN_ID + 1) for token_id in prompt] for prompt in workload.prompts]
        return [Conversation([Turn(*pair)]) for pair in zip(moved, workload.output_lens, strict=True)]
    if args.workload == "trace":
        lines = [json.loads(line) for line in args.trace.read_text().splitlines()]
        return [
            Conversation([Turn(ids(line["input_length"]), line["output_length"])], line["timestamp"] / 1000)
            for line in lines
        ]
    if args.workload == "multi-turn":
        conversations = []
        for _ in range(max(args.num_requests // args.turns, 1)):
            texts = [" ".join(draw.choices(WORDS, k=args.input_len)) for _ in range(args.turns)]
            conversations.append(Conversation([Turn(text, args.output_len) for text in texts]))
        return conversations
    num_shared = args.prefix_len if args.workload == "shared-prefix" else 0
    prefixes = [ids(num_shared) for _ in range(args.num_prefixes)]
    return [
        Conversation([Turn(draw.choice(prefixes) + ids(max(args.input_len - num_shared, 1)), args.output_len)])
        for _ in range(args.num_requests)
    ]


@dataclass
class Client:
    """Sends requests and takes the times of what comes back."""

    session: aiohttp.ClientSession
    model: str
    temperature: float

    async def converse(self, conversation: Conversation) -> list[Result]:
        """All its turns, each with the text before it."""
        results, said = [], ""
        for turn in conversation.turns:
            prompt = f"{said}\n{turn.prompt}\n" if isinstance(turn.prompt, str) else turn.prompt
            result = await self.ask(Turn(prompt, turn.output_len))
            results.append(result)
            if isinstance(prompt, str):
                said = prompt + result.text
        return results

    async def ask(self, turn: Turn) -> Result:
        """One streamed completion. Only the events that say something new are looked into: the client must keep up."""
        body = {
            "model": self.model,
            "prompt": turn.prompt,
            "max_tokens": turn.output_len,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        wants_text = isinstance(turn.prompt, str)
        result = Result(time.perf_counter())
        try:
            async with self.session.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    result.error = f"{response.status} {(await response.text())[:200]}"
                    return result
                rest = b""
                async for data in response.content.iter_any():
                    now = time.perf_counter()
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        self._take(result, event, now, wants_text)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            result.error = f"{type(error).__name__}: {error}"
        if not result.error and not (result.events and result.output_tokens):
            result.error = "the stream ended early"
        return result

    def _take(self, result: Result, event: bytes, now: float, wants_text: bool) -> None:
        if event == b"data: [DONE]":
            return
        is_last = b'"choices":[]' in event
        if not is_last:
            result.events.append(now)
        if is_last or wants_text or b'"error"' in event:
            message = json.loads(event.removeprefix(b"data: "))
            if "error" in message:
                result.error = message["error"]["message"]
            elif is_last:
                result.prompt_tokens = message["usage"]["prompt_tokens"]
                result.output_tokens = message["usage"]["completion_tokens"]
            else:
                result.text += message["choices"][0]["text"]


async def open_loop(
    client: Client, conversations: list[Conversation], rate: float, draw: random.Random
) -> list[Result]:
    """Conversations start at times of a Poisson process of this rate per second, or at their own."""
    start = time.perf_counter()
    at, tasks = 0.0, []
    with progress(conversations) as bar:
        for conversation in conversations:
            at = at + draw.expovariate(rate) if conversation.at is None else conversation.at
            await asyncio.sleep(max(start + at - time.perf_counter(), 0))
            task = asyncio.create_task(client.converse(conversation))
            task.add_done_callback(lambda _: bar.update())
            tasks.append(task)
        return [result for results in await asyncio.gather(*tasks) for result in results]


async def closed_loop(client: Client, conversations: list[Conversation], concurrency: int) -> list[Result]:
    """This many conversations at a time."""
    left = iter(conversations)
    results: list[Result] = []
    with progress(conversations) as bar:

        async def work() -> None:
            for conversation in left:
                results.extend(await client.converse(conversation))
                bar.update()

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return results


def progress(conversations: list[Conversation]) -> "tqdm[Any]":
    return tqdm(total=len(conversations), desc="requests", dynamic_ncols=True, leave=False)


def summary(results: list[Result], start: float, args: argparse.Namespace) -> dict[str, Any]:
    """A run in numbers; times in milliseconds."""
    good = [result for result in results if not result.error]
    row: dict[str, Any] = {"completed": len(good), "failed": len(results) - len(good)}
    if row["failed"]:
        row["first_error"] = next(result.error for result in results if result.error)
    if not good:
        return row
    seconds = max(result.events[-1] for result in good) - start
    within = sum(result.ttft <= args.slo_ttft and result.tpot <= args.slo_tpot for result in good)
    row |= {
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "goodput": within / seconds,
        "output_tokens_per_second": sum(result.output_tokens for result in good) / seconds,
        "prompt_tokens_per_second": sum(result.prompt_tokens for result in good) / seconds,
    }
    gaps = [later - sooner for result in good for sooner, later in pairwise(result.events)]
    for name, values in (
        ("ttft", [result.ttft for result in good]),
        ("tpot", [result.tpot for result in good]),
        ("itl", gaps),
        ("e2e", [result.e2e for result in good]),
    ):
        row[f"{name}_ms"] = {f"p{share}": 1e3 * percentile(values, share) for share in (50, 90, 99)}
    return row


def percentile(values: list[float], share: int) -> float:
    """Linear between neighbours, as NumPy's."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


def show(row: dict[str, Any]) -> None:
    load = f"{row['concurrency']} at once" if "concurrency" in row else f"{row['rate'] or 'trace'} requests/s"
    error = f": {row['first_error']}" if row["failed"] else ""
    print(f"{load}: {row['completed']} done, {row['failed']} failed{error}")
    if not row["completed"]:
        return
    print(
        f"  {row['seconds']:.2f} s, {row['output_tokens_per_second']:,.1f} output tokens/s, "
        f"{row['requests_per_second']:.2f} requests/s, {row['goodput']:.2f} requests/s within the SLOs"
    )
    print(f"  {'ms':5} {'p50':>9} {'p90':>9} {'p99':>9}")
    for name in ("ttft", "tpot", "itl", "e2e"):
        print(f"  {name.upper():5}" + "".join(f" {value:9.2f}" for value in row[f"{name}_ms"].values()))


def draw_png(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """TTFT and TPOT over what the server got done."""
    plt = pyplot()
    rows = sorted((row for row in rows if row["completed"]), key=lambda row: row["requests_per_second"])
    figure, both = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for axes, name in zip(both, ("ttft", "tpot"), strict=True):
        for share in ("p50", "p90", "p99"):
            axes.plot(
                [row["requests_per_second"] for row in rows],
                [row[f"{name}_ms"][share] for row in rows],
                "o-",
                label=share,
            )
        axes.set(xlabel="requests done per second", ylabel=f"{name.upper()}, ms", ylim=(0, None))
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(exit_code(main))
