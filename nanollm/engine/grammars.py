"""Structured output: grammars compiled off the step's path, and which tokens they allow next. Through xgrammar."""

import atexit
import hashlib
import json
import os
import re
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from importlib.metadata import PackageNotFoundError, version
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanollm.config import ModelConfig
from nanollm.engine.json_schema import prepare_regex, prepare_schema
from nanollm.engine.sequence import MATCH_SECONDS
from nanollm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPILE_SECONDS = 10.0  # after which a grammar is refused
FILL_SECONDS = 2.0  # after which the masks of a step that are not made yet end their requests
MASK_SECONDS = 0.5  # of CPU time, after which a mask that is tried out has its grammar refused
_TRIED_TOKENS = 24
CACHE_BYTES = 256 << 20
_OBJECT_BYTES = 4096  # of one that is kept, beside what xgrammar counts
_THREADS = 4
_LEFT_ALONE = "nanollm-grammar"  # a thread that may be, and that await_threads waits for
_MAX_ABANDONED = 8  # threads that took too long to compile a grammar, or to make its masks, and can't be stopped
_is_exiting = threading.Event()
_XGRAMMAR = "0.2.9"
# Kinds of expression in a serialized grammar, as that version has it: kind, number of words, words.
_CLASS, _RULE, _SEQUENCE, _CHOICES, _REPEAT = 1, 4, 5, 6, 8
# What a string with a length is made of there, and what it must be of: classes that exclude these ranges.
_ANY_CHARACTER = [_CLASS, 9, 1, 34, 34, 92, 92, 13, 13, 10, 10]
_JSON_CHARACTER = [_CLASS, 9, 1, 0, 31, 34, 34, 92, 92, 0xD800, 0xDFFF]
# Where the name of an additional property begins like a known one, and the expression of a backslash.
_ADDITIONAL_NAME, _BACKSLASH = re.compile(r"_addl_key(_\d+)?$"), [0, 1, 92]
_HALF = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u|U0000)[dD][89a-fA-F]..)")
_MARK = np.array([0x2F6E2B1, -0x51C3A9D7, 0x68E31DA4], np.int32)  # how a mask begins that is not made


@atexit.register
def await_threads() -> None:
    """Give what is being compiled its time: a thread whose grammar is done while the interpreter ends aborts it."""
    _is_exiting.set()
    end = time.monotonic() + COMPILE_SECONDS
    for thread in threading.enumerate():
        if thread.name == _LEFT_ALONE:
            thread.join(max(end - time.monotonic(), 0))


class Grammar:
    """A grammar that is being compiled, or was."""

    def __init__(self, wanted: StructuredOutputsParams) -> None:
        self.kind = wanted.kind  # of structured_outputs; their text, which may be long, is not kept
        # Whether making a mask may take for ever: of what schemas say otherwise, little can be read in several ways.
        has_pattern = wanted.json is not None and re.search(r"attern|\\u", str(wanted.json)) is not None
        self.is_risky = wanted.kind in ("regex", "grammar") or has_pattern
        self.future: Future[Any] = Future()
        self.started = float("inf")  # time.monotonic() when a thread took it up
        self.num_bytes = 0

    @property
    def is_decided(self) -> bool:
        """Whether result() returns, or raises, at once."""
        return self.future.done() or time.monotonic() - self.started > COMPILE_SECONDS

    def result(self) -> Any:
        """Wait for the xgrammar.CompiledGrammar. ValueError if it is bad, or takes too long."""
        while not self.is_decided:
            wait([self.future], timeout=0.05)
        if not self.future.done():
            raise ValueError(
                f"structured_outputs.{self.kind} takes over {COMPILE_SECONDS:g} s to compile: make it simpler"
            )
        return self.future.result()

    def make_matcher(self) -> Any:
        """What follows one output through the grammar. Raises as result()."""
        import xgrammar

        return xgrammar.GrammarMatcher(self.result())


class _Filler:
    """Makes masks, and what may take too long in a thread of its own, which is left alone then: it can't be stopped.
    The thread takes 0.1 ms to hear of its work and to be heard."""

    def __init__(self) -> None:
        import xgrammar

        # Elsewhere than on Linux no process knows its cores.
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        self.fill = xgrammar.BatchGrammarMatcher(min(max(num_cores // 2, 1), 8)).batch_fill_next_token_bitmask
        self._jobs: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self.thread = threading.Thread(target=_run_all, args=(self._jobs,), name="nanollm-masks", daemon=True)
        self.thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def ends_in_time(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Call it in the thread. False if that takes over FILL_SECONDS, and may go on for ever."""
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._jobs.put((done, function, *arguments))
        try:
            error = done.get(timeout=FILL_SECONDS)
        except Empty:
            return False
        if error is not None:
            raise error
        return True


def _run_all(jobs: "SimpleQueue[tuple[Any, ...] | None]") -> None:
    while (job := jobs.get()) is not None:
        done, function, *arguments = job
        try:
            function(*arguments)
            done.put(None)
        except BaseException as error:
            done.put(error)
        del job, function, arguments  # or they would be kept as long as none follows


class Grammars:
    """Compiles grammars for a model's tokens in threads of its own, and keeps the latest of them.

    load_tokenizer: called once, when the first grammar comes. The model's EOS ids end the output, where a grammar may.
    """

    def __init__(
        self, load_tokenizer: "Callable[[], PreTrainedTokenizerBase | None]", model_config: ModelConfig
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size, self._eos_token_ids = model_config.vocab_size, list(model_config.eos_token_ids)
        self._lock, self._start_lock = threading.Lock(), threading.Lock()
        self._known: OrderedDict[bytes, Grammar] = OrderedDict()
        self._queue: deque[tuple[bytes, Grammar, StructuredOutputsParams]] = deque()
        self._num_workers = 0
        self._abandoned: list[threading.Thread] = []
        self._masks = np.empty((0, 0), np.int32)
        self._compiler: Any = None
        self._filler: _Filler
        self._weight = np.empty(0, np.uint8)  # of each token: 0 if it ends the output, 1 if it is blank, else 2

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """Start compiling, unless that was done or is going on."""
        key = hashlib.sha256(repr(wanted).encode()).digest()
        with self._lock:
            if (grammar := self._known.get(key)) is None:
                grammar = self._known[key] = Grammar(wanted)
                self._queue.append((key, grammar, wanted))
                if self._num_workers < _THREADS:
                    self._num_workers += 1
                    threading.Thread(target=self._work, name="nanollm-grammars", daemon=True).start()
            self._known.move_to_end(key)
        return grammar

    def masks(self, matchers: list[Any], risky: list[bool]) -> tuple[NDArray[np.int32], list[int]]:
        """Int32 [len(matchers), words]: a bit for each token, the lowest first, 1 if it may come; None allows all. Good
        until the next call. And the matchers, by index, whose mask took over MATCH_SECONDS, or is not made.

        risky: whose grammar is. Where there are few cores, a mask that is never made keeps risky ones after it from
        being made too.
        """
        if len(self._masks) < len(matchers):  # memory that is new takes longer to write to
            self._masks = np.empty((len(matchers), -(-self._vocab_size // 32)), np.int32)
        masks = self._masks[: len(matchers)]
        masks[[matcher is None for matcher in matchers]] = -1
        made = [i for i, matcher in enumerate(matchers) if matcher is not None]
        if plain := [i for i in made if not risky[i]]:
            self._filler.fill([matchers[i] for i in plain], masks, plain)
        left = [i for i in made if risky[i]]
        return self._risky_masks(matchers, masks, left) if left else (masks, [])

    def _risky_masks(
        self, matchers: list[Any], masks: NDArray[np.int32], index: list[int]
    ) -> tuple[NDArray[np.int32], list[int]]:
        """Make these; returns as masks()."""
        start, mark, seconds = time.monotonic(), _MARK[: masks.shape[1]], dict.fromkeys(index, 0.0)
        masks[index, : len(mark)] = mark
        is_whole = False  # also if the wait is interrupted: the thread goes on to write into these masks
        try:
            is_whole = self._filler.ends_in_time(self._filler.fill, [matchers[i] for i in index], masks, index)
            if is_whole and time.monotonic() - start > MATCH_SECONDS:  # one after the other, to see whose fault it is
                is_whole = self._filler.ends_in_time(_time_each, matchers, masks, seconds)
        finally:
            if not is_whole:
                self._filler.thread.name = _LEFT_ALONE
                with self._lock:
                    self._abandoned.append(self._filler.thread)
                    self._filler, self._masks = _Filler(), np.empty((0, 0), np.int32)
        slow = [i for i in index if seconds[i] > MATCH_SECONDS or (masks[i, : len(mark)] == mark).all()]
        if not is_whole:
            masks = masks.copy()
            masks[slow] = -1
        return masks, slow

    def _work(self) -> None:
        """Have what is queued compiled, each in a thread that is left alone when it takes too long."""
        while True:
            with self._lock:
                if not self._queue or _is_exiting.is_set():
                    self._num_workers -= 1
                    return
                key, grammar, wanted = self._queue.popleft()
                self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
                is_full = len(self._abandoned) >= _MAX_ABANDONED
            if is_full:
                why = f"{_MAX_ABANDONED} that take too long are still being compiled: try again later"
                self._refuse(key, grammar, ValueError(f"structured_outputs.{grammar.kind}: {why}"))
                continue
            grammar.started = time.monotonic()
            thread = threading.Thread(target=self._run, args=(key, grammar, wanted), name=_LEFT_ALONE, daemon=True)
            thread.start()
            thread.join(COMPILE_SECONDS)
            if thread.is_alive():
                with self._lock:
                    self._abandoned.append(thread)

    def _refuse(self, key: bytes, grammar: Grammar, error: ValueError) -> None:
        with self._lock:
            self._known.pop(key, None)
        grammar.future.set_exception(error)

    def _run(self, key: bytes, grammar: Grammar, wanted: StructuredOutputsParams) -> None:
        try:
            compiled = self._compile(wanted)
        except BaseException as error:  # of any kind: somebody waits
            if not isinstance(error, ValueError):
                error = ValueError(f"structured_outputs can't be had: {error!r}")
            self._refuse(key, grammar, error)
            return
        with self._lock:
            grammar.num_bytes = compiled.memory_size_bytes + _OBJECT_BYTES
            left = sum(known.num_bytes for known in self._known.values())
            for oldest, known in list(self._known.items()):
                if left > CACHE_BYTES and known.num_bytes:
                    left -= known.num_bytes
                    del self._known[oldest]
        grammar.future.set_result(compiled)

    def _compile(self, wanted: StructuredOutputsParams) -> Any:
        with self._start_lock:
            if self._compiler is None:  # the last that _start sets
                self._start()
        try:
            parsed = _parse(wanted)
            if not _can_end(json.loads(parsed.serialize_json())):
                raise ValueError("accepts nothing: no output could ever be complete")
            compiled = self._compiler.compile_grammar(parsed)
            self._try_out(compiled)
            return compiled
        except Exception as error:
            text = str(error)
            if not isinstance(error, ValueError):  # xgrammar's begin with the place in its source
                text = text.partition(": ")[2].strip() or text
            raise ValueError(f"structured_outputs.{wanted.kind}: {text}") from None

    def _try_out(self, compiled: Any) -> None:
        """Follow it for some tokens here: a mask that takes long would hold up a step, and everybody in it."""
        import xgrammar

        matcher, masks = xgrammar.GrammarMatcher(compiled), np.empty((1, -(-self._vocab_size // 32)), np.int32)
        draw_from = np.random.default_rng(0)
        for _ in range(_TRIED_TOKENS):
            if _seconds_to_fill(matcher, masks, 0) > MASK_SECONDS:
                raise ValueError("too ambiguous: finding what may come takes too long, make it simpler")
            allowed = np.unpackbits(masks.view(np.uint8), bitorder="little", count=self._vocab_size) * self._weight
            # Rather what isn't blank, of which many grammars allow any number.
            ids = (allowed == max(allowed.max(), 1)).nonzero()[0]
            if not len(ids) or not matcher.accept_token(int(draw_from.choice(ids))):
                return

    def _start(self) -> None:
        try:
            found = version("xgrammar")
        except PackageNotFoundError:
            found = "none"
        if found != _XGRAMMAR:  # with another, what is serialized may not mean what is read in it here
            raise ValueError(
                f"structured_outputs needs xgrammar {_XGRAMMAR}, found {found}: pip install 'nanollm[structured]'"
            )
        import xgrammar

        tokenizer = self._load_tokenizer()
        if tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer: pass tokenizer= and no skip_tokenizer_init")
        if not self._eos_token_ids:
            raise ValueError("structured_outputs needs a model with an EOS token: its config.json names none")
        size, stops = self._vocab_size, self._eos_token_ids
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=stops)
        vocab = info.decoded_vocab
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        for token_id in special.union(tokenizer.all_special_ids):  # not to be taken for the text that they look like
            if token_id < size:
                vocab[token_id] = b""
        info = xgrammar.TokenizerInfo(
            vocab, vocab_size=size, stop_token_ids=stops, add_prefix_space=info.add_prefix_space
        )
        self._weight = np.array([2 if token.strip() else 1 for token in info.decoded_vocab], np.uint8)
        self._weight[stops] = 0
        self._filler = _Filler()
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _seconds_to_fill(matcher: Any, masks: NDArray[np.int32], i: int) -> float:
    """Of CPU time, to make this mask."""
    start = time.thread_time()
    matcher.fill_next_token_bitmask(masks, i)
    return time.thread_time() - start


def _time_each(matchers: list[Any], masks: NDArray[np.int32], seconds: dict[int, float]) -> None:
    """Make each again. Whose is not made when time is up is at infinity."""
    for i in seconds:
        if threading.current_thread().name == _LEFT_ALONE:
            return  # others use the matchers now
        seconds[i] = float("inf")
        seconds[i] = _seconds_to_fill(matchers[i], masks, i)


def _parse(wanted: StructuredOutputsParams) -> Any:
    """The xgrammar.Grammar of what is wanted."""
    from xgrammar import Grammar as Parsed

    if wanted.regex is not None:
        return Parsed.from_regex(prepare_regex(wanted.regex, "it"))
    if wanted.grammar is not None:
        if half := _HALF.search(wanted.grammar):
            raise ValueError(f"it has half a surrogate pair, {half[1]}: write the character itself")
        return Parsed.from_ebnf(wanted.grammar)
    if wanted.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wanted.choice)
        return Parsed.from_ebnf(f"root ::= {choices}")
    schema = '{"type": "object", "additionalProperties": true}' if wanted.json_object else wanted.json
    assert isinstance(schema, str)
    parsed = Parsed.from_json_schema(prepare_schema(schema), any_whitespace=not wanted.disable_any_whitespace)
    described = json.loads(parsed.serialize_json())
    data = described["grammar_expr_data"]
    starts = described["grammar_expr_indptr"]
    for start in starts[:-1]:
        if data[start : start + len(_ANY_CHARACTER)] == _ANY_CHARACTER:
            data[start : start + len(_ANY_CHARACTER)] = _JSON_CHARACTER
    for name, body, *_ in described["rules"]:
        if _ADDITIONAL_NAME.search(name):  # which differs from all known ones where no escape may hide that it doesn't
            first, num = starts[body] + 2, data[starts[body] + 1]
            plain = [i for i in data[first : first + num] if data[starts[data[starts[i] + 2]] :][:3] != _BACKSLASH]
            data[first : first + num] = (plain * num)[:num]
    return Parsed.deserialize_json(json.dumps(described))


def _can_end(grammar: dict[str, Any]) -> bool:
    """Whether any text is complete: whether the start rule leads to something finite."""
    data, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
    bodies = [rule[1] for rule in grammar["rules"]]
    ending: set[int] = set()  # rules known to
    users: dict[int, set[int]] = {}

    def ends(expr: int, rule: int) -> bool:
        kind, _, *rest = data[starts[expr] : starts[expr] + 2 + data[starts[expr] + 1]]
        if kind in (_SEQUENCE, _CHOICES):
            found = [ends(part, rule) for part in rest]
            return all(found) if kind == _SEQUENCE else any(found)
        if kind == _RULE or (kind == _REPEAT and rest[1] > 0):
            users.setdefault(rest[0], set()).add(rule)
            return rest[0] in ending
        return True

    left = list(range(len(bodies)))
    while left:
        rule = left.pop()
        if rule not in ending and ends(bodies[rule], rule):
            ending.add(rule)
            left.extend(users.get(rule, ()))
    return grammar["root_rule_id"] in ending
