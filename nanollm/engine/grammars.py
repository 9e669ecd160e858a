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
_THREAD_NAME = "nanollm-grammar"
_MAX_REFUSED = 8  # grammars that took too long and are still being compiled, since that can't be stopped
_is_exiting = threading.Event()
_XGRAMMAR = "0.2.9"
# Kinds of expression in a serialized grammar, as that version has it: kind, number of words, words.
_CLASS, _RULE, _SEQUENCE, _CHOICES, _REPEAT = 1, 4, 5, 6, 8
# What a string with a length is made of there, and what it must be of: classes that exclude these ranges.
_ANY_CHARACTER = [_CLASS, 9, 1, 34, 34, 92, 92, 13, 13, 10, 10]
_MARK = np.array([0x2F6E2B1, -0x51C3A9D7, 0x68E31DA4], np.int32)  # what no mask begins with but by a rare chance
_REPEATED = re.compile(r"\)[*+?{]")
_HALF = re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89a-fA-F]..)")
_ADDITIONAL_NAME, _BACKSLASH = re.compile(r"_addl_key(_\d+)?$"), [0, 1, 92]
_JSON_CHARACTER = [_CLASS, 9, 1, 0, 31, 34, 34, 92, 92, 0xD800, 0xDFFF]


@atexit.register
def await_threads() -> None:
    """Give what is being compiled its time: a thread whose grammar is done while the interpreter ends aborts it."""
    _is_exiting.set()
    end = time.monotonic() + COMPILE_SECONDS
    for thread in threading.enumerate():
        if thread.name == _THREAD_NAME:
            thread.join(max(end - time.monotonic(), 0))


class Grammar:
    """A grammar that is being compiled, or was."""

    def __init__(self, wanted: StructuredOutputsParams) -> None:
        self.kind = wanted.kind  # of structured_outputs; their text, which may be long, is not kept
        # Whether making a mask may take for ever: repetitions within repetitions can be left and entered in any number
        # of ways, which grows with their numbers' product.
        self.is_risky = wanted.grammar is not None or bool(_REPEATED.search(wanted.regex or str(wanted.json)))
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
    """Makes masks, if need be in a thread of its own, which is left alone when that takes too long: it can't be
    stopped. The thread takes 0.1 ms to hear of them and to be heard."""

    def __init__(self) -> None:
        import xgrammar

        # Elsewhere than on Linux no process knows its cores.
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        self.fill = xgrammar.BatchGrammarMatcher(min(max(num_cores // 2, 1), 8)).batch_fill_next_token_bitmask
        self._jobs: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_fill_all, args=(self.fill, self._jobs), daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def fill_in_time(self, matchers: list[Any], masks: NDArray[np.int32], index: list[int]) -> bool:
        """Make these matchers' masks, in these rows. False if that takes over FILL_SECONDS, and may go on for ever."""
        done: SimpleQueue[BaseException | None] = SimpleQueue()  # its own: a wait may be interrupted
        self._jobs.put((done, matchers, masks, index))
        try:
            error = done.get(timeout=FILL_SECONDS)
        except Empty:
            return False
        if error is not None:
            raise error
        return True

    def abandon(self) -> threading.Thread:
        """Returns the thread; for await_threads it is as one that compiles."""
        self._thread.name = _THREAD_NAME
        return self._thread


def _fill_all(fill: Callable[..., None], jobs: "SimpleQueue[tuple[Any, ...] | None]") -> None:
    while (job := jobs.get()) is not None:
        done, *arguments = job
        try:
            fill(*arguments)
            done.put(None)
        except BaseException as error:
            done.put(error)
        del job, arguments  # or they would be kept as long as none follows


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
        self._refused: list[threading.Thread] = []
        self._masks = np.empty((0, 0), np.int32)
        self._compiler: Any = None
        self._filler: _Filler
        self._is_told = np.empty(0, np.uint8)  # of each token, 1 if it is more than blanks and ends nothing

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

    def masks(self, matchers: list[Any], *, is_risky: bool) -> tuple[NDArray[np.int32], list[int]]:
        """Int32 [len(matchers), words]: a bit for each token, the lowest first, 1 if it may come; None allows all. Good
        until the next call. And which matchers, by index, took over MATCH_SECONDS.

        is_risky: whether a grammar of these is.
        """
        if len(self._masks) < len(matchers):  # memory that is new takes longer to write to
            self._masks = np.empty((len(matchers), -(-self._vocab_size // 32)), np.int32)
        masks = self._masks[: len(matchers)]
        masks[[matcher is None for matcher in matchers]] = -1
        slow: list[int] = []
        if index := [i for i, matcher in enumerate(matchers) if matcher is not None]:
            start, mark, some = time.monotonic(), _MARK[: masks.shape[1]], [matchers[i] for i in index]
            masks[index, : len(mark)] = mark
            if not is_risky:
                self._filler.fill(some, masks, index)
            elif not self._filler.fill_in_time(some, masks, index):
                with self._lock:
                    self._refused.append(self._filler.abandon())
                    self._filler, self._masks = _Filler(), np.empty((0, 0), np.int32)
                slow = [i for i in index if (masks[i, : len(mark)] == mark).all()]  # a mask is written when it is whole
                masks = masks.copy()
                masks[slow] = -1
            if not slow and time.monotonic() - start > MATCH_SECONDS:  # one after the other, to see whose fault it is
                slow = [i for i in index if _seconds_to_fill(matchers[i], masks, i) > MATCH_SECONDS]
        return masks, slow

    def _work(self) -> None:
        """Have what is queued compiled, each in a thread that is left alone when it takes too long."""
        while True:
            with self._lock:
                if not self._queue or _is_exiting.is_set():
                    self._num_workers -= 1
                    return
                key, grammar, wanted = self._queue.popleft()
                self._refused = [thread for thread in self._refused if thread.is_alive()]
                is_full = len(self._refused) >= _MAX_REFUSED
            if is_full:
                why = f"{_MAX_REFUSED} that take too long are still being compiled: try again later"
                self._refuse(key, grammar, ValueError(f"structured_outputs.{grammar.kind}: {why}"))
                continue
            grammar.started = time.monotonic()
            thread = threading.Thread(target=self._run, args=(key, grammar, wanted), name=_THREAD_NAME, daemon=True)
            thread.start()
            thread.join(COMPILE_SECONDS)
            if thread.is_alive():
                with self._lock:
                    self._refused.append(thread)

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
            allowed = np.unpackbits(masks.view(np.uint8), bitorder="little", count=self._vocab_size)
            # Rather what isn't blank, of which many grammars allow any number.
            ids = (allowed & self._is_told).nonzero()[0]
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
        self._is_told = np.array([bool(token.strip()) for token in info.decoded_vocab], np.uint8)
        self._is_told[stops] = 0
        self._filler = _Filler()
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _seconds_to_fill(matcher: Any, masks: NDArray[np.int32], i: int) -> float:
    """Of CPU time, to make this mask."""
    start = time.thread_time()
    matcher.fill_next_token_bitmask(masks, i)
    return time.thread_time() - start


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
