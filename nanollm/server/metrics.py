"""What Prometheus is told: vLLM's names and meanings, with the prefix nanollm."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanollm.async_engine import AsyncLLMEngine
from nanollm.outputs import RequestOutput

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_TOKENS = tuple(2**power for power in range(18))


class _EngineCollector(Collector):
    """Reads the engine's newest stats when somebody asks."""

    def __init__(self, engine: AsyncLLMEngine, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        used = 1 - stats.num_free_blocks / max(stats.num_total_blocks, 1)
        for name, text, value in (
            ("num_requests_running", "Sequences that the engine computes now.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait for a place.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", used),
        ):
            gauge = GaugeMetricFamily(f"nanollm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_hits),
            ("num_preemptions", "Times that a sequence was put back for want of blocks.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens taken in.", stats.num_tokens_in),
            ("generation_tokens", "Tokens generated.", stats.num_tokens_out),
        ):
            counter = CounterMetricFamily(f"nanollm:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter


class Metrics:
    """Counts and times of one server's requests, and its engine's state."""

    def __init__(self, engine: AsyncLLMEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))
        self._model_name = model_name
        reasons = ["model_name", "finished_reason"]
        self._finished = Counter(
            "nanollm:request_success", "Sequences that ended, by why.", reasons, registry=self._registry
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.")
        self._tpot = self._histogram("request_time_per_output_token_seconds", "Mean time of the later tokens.")
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.")
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first step.")
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token.")
        self._decode = self._histogram("request_decode_time_seconds", "First token to end.")
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output_tokens = self._histogram("request_generation_tokens", "Tokens generated.", _TOKENS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        histogram = Histogram(f"nanollm:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(self._model_name)

    def count_finished(self, output: RequestOutput) -> None:
        """A request has ended. Times are its first continuation's."""
        for completion in output.outputs:
            self._finished.labels(self._model_name, completion.finish_reason).inc()
            self._output_tokens.observe(len(completion.token_ids))
        self._prompt_tokens.observe(len(output.prompt_token_ids))
        times = output.metrics
        if times is None or times.first_token_time is None or times.first_scheduled_time is None:
            return
        self._ttft.observe(times.first_token_time - times.arrival_time)
        self._queue.observe(times.first_scheduled_time - times.arrival_time)
        self._prefill.observe(times.first_token_time - times.first_scheduled_time)
        if times.tpot is not None:
            self._tpot.observe(times.tpot)
        if times.finished_time is not None:
            self._e2e.observe(times.finished_time - times.arrival_time)
            self._decode.observe(times.finished_time - times.first_token_time)

    def count_aborted(self, num_sequences: int) -> None:
        """Their client went away, or they failed."""
        self._finished.labels(self._model_name, "abort").inc(num_sequences)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)
