"""LLM: the offline API. Text or token ids in, RequestOutputs out."""

import gc
import hashlib
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, overload

from tqdm import tqdm

from nanollm.config import GPU_BLOCK_SIZE, EngineConfig
from nanollm.engine.engine_core import EngineCore, EngineStats
from nanollm.engine.follower_core import FollowerCore
from nanollm.engine.grammars import Grammars
from nanollm.engine.sequence import Sequence as EngineSequence
from nanollm.models.source import ModelSource, resolve_model
from nanollm.outputs import EngineOutput, RequestOutput, pack_outputs
from nanollm.runtime.executor import Executor, Follower, resolve_device
from nanollm.runtime.ranks import EngineDeadError, check_ranks, follow_torchrun, torchrun_world
from nanollm.sampling_params import SamplingParams
from nanollm.text.chat import render_chat
from nanollm.text.output_processor import OutputProcessor
from nanollm.text.prompts import BYTES, Prompt, default_params, need_tokenizer, prepare_params, prepare_prompt
from nanollm.text.tokenizer import encode_prompt, load_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("nanollm")

_TAKE_SECONDS = 0.05  # of asking an iterator for prompts, after which a step is due

_MISSING = object()  # in place of a prompt, or of its sampling_params

# One for all prompts, one for each, or the model's defaults.
Params = SamplingParams | Iterable[SamplingParams] | None


def find_engine(model: str, kwargs: Mapping[str, Any]) -> "tuple[EngineConfig, ModelSource, torch.device]":
    """Check the engine arguments and find the model, before anything is loaded."""
    config = EngineConfig.from_args(model, **kwargs)
    device = resolve_device(config.device)
    if device.type == "cuda" and kwargs.get("block_size") is None:
        config.block_size = GPU_BLOCK_SIZE
    source = find_model(config)
    check_ranks(config, source.config, device)
    return config, source, device


def find_model(config: EngineConfig) -> ModelSource:
    """Its files; generation_config is {} where the user wants none of it."""
    source = resolve_model(
        config.model, revision=config.revision, load_format=config.load_format, hf_overrides=config.hf_overrides
    )
    return source if config.generation_config == "auto" else replace(source, generation_config={})


def find_tokenizer(config: EngineConfig, source: ModelSource) -> "PreTrainedTokenizerBase | None":
    """The model's tokenizer, or the one that was given; None if there is none, or none is wanted."""
    where = config.tokenizer or source.path
    if where is None or config.skip_tokenizer_init:
        return None
    return load_tokenizer(where, revision=config.revision)


def start_engine(
    config: EngineConfig, source: ModelSource, device: "torch.device", grammars: Grammars
) -> tuple[Executor, EngineCore]:
    """Start all ranks and load the model; this process is rank 0."""
    executor = Executor(config, source, device)
    overlap = device.type != "cpu" if config.overlap is None else config.overlap
    name = os.path.basename(config.model) if os.path.exists(config.model) else config.model
    logger.info("%s: %s", name, executor.runner.describe())
    return executor, EngineCore(config, source.config, executor, overlap, grammars)


_RARER = 10
_num_runs, _thresholds = 0, gc.get_threshold()  # runs that go on, and what was set before the first of them
_counting = threading.RLock()  # a collection may close a generator of this thread


def _rarer(first: int, second: int, third: int) -> tuple[int, int, int]:
    return first, second, min(_RARER * third, 2**31 - 1)


def with_rare_collections(run: Callable[..., Generator[Any, None, None]]) -> Callable[..., Generator[Any, None, None]]:
    """Decorates a generator: while it runs, collections that go through the whole heap are _RARER times as rare.

    One holds steps up by 0.15 s. Young garbage is collected as always, and what the program asks for is done; if it
    sets other thresholds meanwhile, they stay.
    """

    @wraps(run)
    def quiet(*args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        global _num_runs, _thresholds
        with _counting:
            if not _num_runs:
                _thresholds = gc.get_threshold()
                gc.set_threshold(*_rarer(*_thresholds))
            _num_runs += 1
        try:
            yield from run(*args, **kwargs)
        finally:
            with _counting:
                _num_runs -= 1
                if not _num_runs and gc.get_threshold() == _rarer(*_thresholds):
                    gc.set_threshold(*_thresholds)

    return quiet


@dataclass
class _Request:
    """A validated request, not queued yet."""

    sequences: list[EngineSequence]  # the n continuations
    prompt: str | None

    @property
    def is_compiled(self) -> bool:
        """Whether await_grammar returns, or raises, at once."""
        grammar = self.sequences[0].grammar
        return grammar is None or grammar.is_decided

    def await_grammar(self, index: int) -> None:
        """Return once it is compiled, if there is one; nobody is held up who runs steps. ValueError if it is bad."""
        try:
            if (grammar := self.sequences[0].grammar) is not None:
                grammar.result()
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None


class LLM:
    """A model ready to generate. Keyword arguments are EngineConfig's fields.

    Calls may come from several threads: the engine runs one step at a time, for whoever waits. `with LLM(...) as llm:`
    or close() frees the model.

    Under torchrun every rank makes the same LLM and the same calls of generate, chat, generate_stream and close, in
    one thread, and every rank gets the outputs; the other methods work on rank 0 only. A stream that a rank stops early
    must be stopped on all, at the same output.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        self.config, source, device = find_engine(model, kwargs)
        self.model_config = source.config
        self._generation_config = source.generation_config
        self.tokenizer = tokenizer = find_tokenizer(self.config, source)
        grammars = Grammars(lambda: tokenizer, source.config)
        world = torchrun_world()
        self._executor: Executor | Follower
        self._engine: EngineCore
        if world is not None and world[0] > 0:
            self._executor = Follower(self.config, source, *follow_torchrun(self.config, device))
            self._engine = FollowerCore(self.config, source.config, self._executor, grammars)
        else:
            self._executor, self._engine = start_engine(self.config, source, device, grammars)
        self.max_model_len = self._engine.scheduler.max_model_len
        self._processor = OutputProcessor(self.tokenizer)
        self._lock = threading.RLock()
        self._depth = 0  # of nested uses of the engine, in the thread that has the lock
        self._mailboxes: dict[int, deque[RequestOutput | EngineOutput | BaseException]] = {}
        self._abandoned: deque[int] = deque()  # requests whose caller went away

    @overload
    def generate(
        self, prompts: Iterator[Prompt], sampling_params: Params = None, *, use_tqdm: bool = True
    ) -> Iterator[RequestOutput]: ...

    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]: ...

    def generate(
        self, prompts: Any, sampling_params: Params = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Generate for every prompt; returns the outputs in the order of the prompts.

        prompts: one or a list of: a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...]}, these
            with an optional "cache_salt" (prompts share cached prefixes only within one salt).
        sampling_params: one for all, or one per prompt; None takes get_default_sampling_params().
        Raises ValueError, before anything runs, if any prompt or setting is bad; what to change is in the message.

        If prompts is an iterator, such as a generator or a file's lines, so is what is returned. Prompts are taken from
        it as there is room for them, so that it may be endless; a bad one raises when its turn comes. Nothing runs
        while the iterator is asked for its next prompt: it must not wait there for the outputs of earlier ones.
        """
        if isinstance(prompts, Iterator):
            run = self._run(self._take(prompts, sampling_params), stream=False, lazily=True)
            return _in_order(run, None, use_tqdm)
        return self._generate(lambda: prompts, sampling_params, use_tqdm)

    def _generate(
        self, make_prompts: Callable[[], Any], sampling_params: Params, use_tqdm: bool
    ) -> list[RequestOutput]:
        requests = self._prepare_on_all_ranks(make_prompts, sampling_params)
        return list(_in_order(self._run(iter(requests), stream=False), len(requests), use_tqdm))

    def _take(self, prompts: Iterator[Prompt], sampling_params: Params) -> Iterator[_Request]:
        """Requests of prompts as they come, and of as many sampling_params unless they are one for all."""
        if torchrun_world() is not None:
            raise ValueError("prompts can't be an iterator under torchrun, where ranks compare them first: give a list")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = sampling_params or self.get_default_sampling_params()
            pairs: Iterator[Any] = ((prompt, params) for prompt in prompts)
        elif isinstance(sampling_params, Mapping) or not isinstance(sampling_params, Iterable):
            raise ValueError(f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r}")
        else:
            pairs = itertools.zip_longest(prompts, sampling_params, fillvalue=_MISSING)

        def prepare(index: int, prompt: Any, params: Any) -> _Request:
            if prompt is _MISSING or params is _MISSING:
                few, more = ("prompts", "sampling_params")[:: 1 if prompt is _MISSING else -1]
                raise ValueError(f"{index} {few} came with more {more}: give one for all, or one each")
            with self._lock:
                return self._prepare_one(prompt, params, index, False)

        return (prepare(index, *pair) for index, pair in enumerate(pairs))

    def generate_stream(
        self, prompts: Prompt | Sequence[Prompt] | Iterator[Prompt], sampling_params: Params = None
    ) -> Iterator[RequestOutput]:
        """Yield each request's output so far whenever it grew; request_id is the prompt's index, as a string.

        Text and token_ids are cumulative. Closing the iterator early aborts what is left. Takes prompts and raises as
        generate does.
        """
        if isinstance(prompts, Iterator):
            return _outputs(self._run(self._take(prompts, sampling_params), stream=True, lazily=True))
        requests = self._prepare_on_all_ranks(lambda: prompts, sampling_params)
        return _outputs(self._run(iter(requests), stream=True))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Generate the assistant's next message of one conversation, or of each in a list of them.

        template_kwargs go to the chat template (enable_thinking=False, tools=[...]). Without sampling_params they are
        get_default_sampling_params(), and an answer may be as long as the context allows.
        """

        def render() -> list[dict[str, Any]]:
            if not isinstance(messages, Sequence) or isinstance(messages, str):
                raise ValueError(f"messages must be a list of messages, or of such lists, got {messages!r}")
            conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
            return [self.chat_prompt(conversation, **template_kwargs) for conversation in conversations]

        if sampling_params is None:
            sampling_params = default_params(self._generation_config, chat=True)
        return self._generate(render, sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: the model's generation_config.json, as far as vLLM reads it, unless
        generation_config="vllm"; SamplingParams' own defaults for the rest."""
        return default_params(self._generation_config)

    def apply_chat_template(self, messages: Any, **template_kwargs: Any) -> str:
        """The conversation as the prompt text that the model was trained on, up to where the assistant answers."""
        return render_chat(need_tokenizer(self.tokenizer, "chat"), messages, **template_kwargs)

    def chat_prompt(self, messages: Any, **template_kwargs: Any) -> dict[str, Any]:
        """The conversation as generate() takes it: text, and token ids without another BOS than the template's."""
        text = self.apply_chat_template(messages, **template_kwargs)
        ids = encode_prompt(need_tokenizer(self.tokenizer, "chat"), text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def compute_logits(self, prompts: Prompt | Sequence[Prompt]) -> "list[torch.Tensor]":
        """The model's logits at every position of each prompt: float32 [tokens, V] on the CPU.

        Row t is the distribution of the token after prompt token t. Prompts may be as long as max_model_len.
        """
        import torch

        if isinstance(self._engine, FollowerCore):
            raise RuntimeError("compute_logits works on rank 0 only")
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        requests = self._prepare(prompts, params, all_logits=True)
        logits: dict[int, torch.Tensor] = {}
        for index, output in self._run(iter(requests), stream=None):
            logits[index] = torch.cat(output.logits)
        return [logits[index] for index in range(len(requests))]

    def apply_model(self, function: "Callable[[torch.nn.Module], Any]") -> list[Any]:
        """Call the function with the model, on every rank; returns what each returned, in order of rank.

        It must be at the top level of a module, since other ranks import it, and what it returns there must have a form
        in JSON. With several ranks an exception in it ends the engine. Between steps, never while one is launched.
        """
        if not isinstance(self._executor, Executor):
            raise RuntimeError("apply_model works on rank 0 only")
        with self._exclusive(nested=True):
            return self._executor.apply_model(function)

    def get_stats(self) -> EngineStats:
        """Running and waiting requests, free and total KV blocks, prefix-cache hits, preemptions, tokens in and out."""
        with self._lock:
            return self._engine.get_stats()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: prompts from now on are computed anew. Requests that run go on."""
        with self._exclusive():
            self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the model and the KV cache; requests still running are dropped. Twice is fine."""
        with self._exclusive(nested=True):
            try:
                self._engine.reset()
            finally:
                self._deliver_error(EngineDeadError("this engine was closed: make a new LLM"))
                self._executor.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _prepare(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params, *, all_logits: bool = False
    ) -> list[_Request]:
        """Tokenize and validate everything before anything is queued, so that a bad prompt loses nothing else."""
        many: Any = prompts
        if isinstance(prompts, BYTES) or (not isinstance(prompts, (str, Mapping, Sequence)) and not _is_array(prompts)):
            raise ValueError(f"prompts must be one prompt, or a list or an iterator of them, got {prompts!r}")
        if isinstance(prompts, (str, Mapping)) or (len(prompts) and not _is_prompt(prompts[0])):
            many = [prompts]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or self.get_default_sampling_params()] * len(many)
        if not isinstance(sampling_params, Sequence):
            raise ValueError(f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r}")
        if len(sampling_params) != len(many):
            raise ValueError(
                f"{len(many)} prompts came with {len(sampling_params)} sampling_params: give one for all, or one each"
            )
        with self._lock:
            requests = [
                self._prepare_one(prompt, params, index, all_logits)
                for index, (prompt, params) in enumerate(zip(many, sampling_params, strict=True))
            ]
        for index, request in enumerate(requests):
            request.await_grammar(index)
        return requests

    def _prepare_on_all_ranks(self, make_prompts: Callable[[], Any], sampling_params: Params) -> list[_Request]:
        """_prepare, and under torchrun make sure that every rank was given the same; if one raises, all do."""
        requests: list[_Request] = []
        error: Exception | None = None
        try:
            requests = self._prepare(make_prompts(), sampling_params)
            firsts = [request.sequences[0] for request in requests]
            inputs = repr([(seq.token_ids.tobytes(), seq.cache_salt, seq.params) for seq in firsts])
        except Exception as problem:
            error, inputs = problem, repr(problem)
        same = torchrun_world() is None or self._agree_on_call(hashlib.sha256(inputs.encode()).digest())
        if error is not None:
            raise error
        if not same:
            raise ValueError("ranks were called with different prompts or sampling_params: give all the same")
        return requests

    def _agree_on_call(self, digest: bytes) -> bool:
        with self._lock:
            if isinstance(self._engine, FollowerCore):
                return self._engine.agree_on_call(digest)
            assert isinstance(self._executor, Executor)
            return self._executor.agree_on_call(digest, self._engine.next_request_id)

    def _prepare_one(self, prompt: Prompt, params: SamplingParams, index: int, all_logits: bool) -> _Request:
        try:
            checked = prepare_params(self.tokenizer, params)
            prepared = prepare_prompt(self.tokenizer, prompt)
            sequences = self._engine.make_sequences(
                prepared.token_ids,
                checked.params,
                all_logits=all_logits,
                cache_salt=prepared.cache_salt,
                bad_words=checked.bad_words,
            )
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
        return _Request(sequences, prepared.text)

    @with_rare_collections
    def _run(
        self, requests: Iterator[_Request], *, stream: bool | None, lazily: bool = False
    ) -> Generator[tuple[int, Any], None, None]:
        """Queue the requests and yield (index, output) as they progress; stream None yields EngineOutputs at the end.

        lazily: take a request when there is room for it: two for each row, and 16 from the oldest one that is not
        finished, so that outputs which wait for that one don't pile up. An error of `requests` is raised after that.
        However this generator ends, its requests are out of the engine afterwards.
        """
        mailbox: deque[RequestOutput | EngineOutput | BaseException] = deque()
        unfinished: dict[int, _Request] = {}  # by index, the oldest first
        source: Iterator[_Request | None] = _paced(requests, unfinished) if lazily else requests
        index_of: dict[int, int] = {}  # by the ids of their sequences
        room, span = (factor * self.config.num_rows if lazily else sys.maxsize for factor in (2, 16))
        num_taken, has_more = 0, True
        error: Exception | None = None
        try:
            while unfinished or has_more:
                while has_more and len(unfinished) < room and num_taken - next(iter(unfinished), num_taken) < span:
                    try:
                        request = next(source)
                    except Exception as problem:
                        has_more, error = False, None if isinstance(problem, StopIteration) else problem
                        break
                    if request is None:
                        break
                    unfinished[num_taken] = request
                    index_of |= dict.fromkeys((seq.request_id for seq in request.sequences), num_taken)
                    self._queue(request, mailbox, stream)
                    num_taken += 1
                with self._exclusive():
                    if unfinished and not mailbox:
                        self._pump()
                while mailbox:
                    output = mailbox.popleft()
                    if isinstance(output, BaseException):
                        raise output
                    index = index_of[int(output.request_id)]
                    if isinstance(output, EngineOutput) or output.finished:
                        ids = [seq.request_id for seq in unfinished.pop(index).sequences]
                        self._abandoned.extend(ids)
                        for request_id in ids:
                            del index_of[request_id]
                    if isinstance(output, RequestOutput):
                        output.request_id = str(index)
                    yield index, output
            if error is not None:
                raise error
        finally:
            self._abandoned.extend(index_of)
            with self._exclusive(nested=True):
                pass

    def _queue(self, request: _Request, mailbox: deque[Any], stream: bool | None) -> None:
        first = request.sequences[0]
        with self._exclusive():
            for seq in request.sequences:
                self._mailboxes[seq.request_id] = mailbox
                self._engine.add(seq)
            if stream is not None:
                self._processor.add(
                    first.request_id,
                    str(first.request_id),
                    request.prompt,
                    first.token_ids.tolist(),
                    first.params,
                    first.metrics,
                    stream=stream,
                )

    @contextmanager
    def _exclusive(self, *, nested: bool = False) -> Iterator[None]:
        """Nobody else uses the engine meanwhile; requests that were abandoned are out of it afterwards.

        nested: whether the thread that is inside already may come in again; RuntimeError otherwise. Garbage collection
        may close a stream there: then the outer one takes it out.
        """
        with self._lock:
            if self._depth and not nested:
                raise RuntimeError("what an LLM calls (a logits processor) can't use it: do so before, or make another")
            self._depth += 1
            try:
                yield
                if self._depth == 1:
                    self._take_out_abandoned()
            finally:
                self._depth -= 1

    def _take_out_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self._mailboxes.pop(request_id, None)
            self._processor.discard(request_id)
            self._engine.abort(request_id)
        while not self._mailboxes and self._engine.has_unfinished:
            self._engine.step()

    def _pump(self) -> None:
        """Run one step and deliver what it brought. If anything fails, everybody who waits gets the error."""
        try:
            executor = self._executor if isinstance(self._executor, Executor) else None
            with nullcontext() if executor is None else executor.tells_followers():
                outputs = self._engine.step()
                self._engine.launch_ahead()
                failures, self._engine.failures = self._engine.failures, []
                results, aborts = self._processor.process(outputs)
                # What a stop string has ended may have failed at the surplus token: that doesn't count.
                failures = [failure for failure in failures if failure[0] not in aborts]
                if executor is not None and executor.has_followers:
                    if failures:
                        raise failures[0][1]
                    executor.send_outputs(pack_outputs(outputs))
            for result in results:
                self._mailboxes[int(result.request_id)].append(result)
            for output in outputs:
                mailbox = self._mailboxes.get(output.request_id)
                if mailbox is not None and output.logits and output.finish_reason is not None:
                    mailbox.append(output)
            for request_id in aborts:
                self._engine.abort(request_id)
            for request_id, problem in failures:
                self._mailboxes[request_id].append(problem)
        except BaseException as error:
            self._deliver_error(error)

    def _deliver_error(self, error: BaseException) -> None:
        for mailbox in {id(mailbox): mailbox for mailbox in self._mailboxes.values()}.values():
            mailbox.append(error)


def _paced(requests: Iterator[_Request], unfinished: Mapping[int, _Request]) -> Iterator[_Request | None]:
    """The requests, once their grammars are compiled; and None where the unfinished ones should have a step first:
    while a grammar is compiled, and until steps have made up for the time that `requests` took."""
    seconds = 0.0  # to be made up for
    for index in itertools.count():
        began = time.monotonic()
        if (request := next(requests, None)) is None:
            return
        if unfinished:
            seconds += time.monotonic() - began
        while unfinished and not request.is_compiled:
            yield None
        request.await_grammar(index)
        yield request
        while unfinished and seconds > _TAKE_SECONDS:
            began = time.monotonic()
            yield None
            seconds -= max(time.monotonic() - began, _TAKE_SECONDS)


def _in_order(
    run: Generator[tuple[int, RequestOutput], None, None], total: int | None, use_tqdm: bool
) -> Iterator[RequestOutput]:
    """The finished outputs by index, under a bar; closing this closes the run too. total: None if it isn't known."""
    early: dict[int, RequestOutput] = {}  # that wait for those before them
    num_given = num_tokens = 0
    with (
        closing(run),
        tqdm(total=total, desc="generating", unit="prompt", disable=not use_tqdm, dynamic_ncols=True) as bar,
    ):
        for index, output in run:
            num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            bar.update()
            bar.set_postfix_str(f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", refresh=False)
            early[index] = output
            while num_given in early:
                yield early.pop(num_given)
                num_given += 1


def _outputs(run: Generator[tuple[int, RequestOutput], None, None]) -> Iterator[RequestOutput]:
    """The outputs alone; closing this closes the run too."""
    with closing(run):
        for _, output in run:
            yield output


def _is_prompt(value: object) -> bool:
    """Whether a list's first element is a prompt itself, rather than a token id of the one prompt."""
    return _is_array(value) or isinstance(value, (str, Mapping, Sequence, *BYTES))


def _is_array(value: object) -> bool:
    """Whether it is a NumPy array or a tensor, and no scalar."""
    return bool(getattr(value, "shape", ()))
