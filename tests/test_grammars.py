"""Grammars that take long, to compile or at a step: they end alone, and none holds the engine up."""

import gc
import threading
import time
import tracemalloc
from typing import Any

import pytest
import xgrammar

from nanollm import LLM
from nanollm.engine import grammars, sequence
from nanollm.engine.grammars import Grammar, Grammars
from nanollm.sampling_params import StructuredOutputsParams
from tests.test_structured_outputs import DRAWN, ask, byte_settings, grammar_of, outputs


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return byte_settings(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def llm(tiny: Any, settings: dict[str, Any]) -> Any:
    with tiny("qwen3").llm(**settings) as llm:
        yield llm


def test_grammars_that_take_long_are_refused_and_others_are_not(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    made, finish = Grammars(lambda: llm.tokenizer, llm.model_config), threading.Event()
    really_compile = made._compile

    def compile(wanted: StructuredOutputsParams) -> Any:
        if wanted.choice:
            finish.wait()
        return really_compile(wanted)

    def start(structure: dict[str, Any]) -> Grammar:
        return made.compile(ask(structure).structured_outputs)

    start({"regex": "a"}).result()
    monkeypatch.setattr(made, "_compile", compile)
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.05)
    slow = [start({"choice": [f"{i}"]}) for i in range(6)]  # more than there are workers
    start({"regex": "b"}).result()
    for grammar in slow:
        with pytest.raises(ValueError, match=r"structured_outputs.choice takes over 0.05 s to compile"):
            grammar.result()
    slow += [start({"choice": [f"{i}"]}) for i in range(6, 20)]
    with pytest.raises(ValueError, match=r"structured_outputs.choice: 8 that take too long are still being compiled"):
        slow[-1].result()
    begin = time.monotonic()
    grammars.await_threads()  # as at the interpreter's exit, which these don't hold up
    assert time.monotonic() - begin < 1
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("nanollm-grammar"))
    finish.set()
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 10.0)
    grammars.await_threads()
    assert slow[0].future.done() and time.monotonic() - begin < 5
    grammars._is_exiting.clear()
    assert start({"choice": ["0"]}) is slow[0] and slow[0].result() is not None
    start({"choice": ["again"]}).result()


def test_a_grammar_whose_mask_would_hold_a_step_up_is_refused(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Such as ([a-z]?[a-y]?[a-x]?.?){500} with the 151,936 tokens of Qwen3; tiny vocabularies are quick at anything."""
    monkeypatch.setattr(grammars, "MASK_SECONDS", -1.0)
    with pytest.raises(ValueError, match=r"structured_outputs.regex: too ambiguous: finding what may come takes"):
        llm.generate([[1, 2]], ask({"regex": "[a-f]{77}"}), use_tqdm=False)


def test_a_grammar_that_gets_ever_slower_is_refused(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Such as (.{1,20}\\s?){1,30}: there are ever more ways to have come to what follows."""
    fill = grammars._seconds_to_fill
    seconds = iter([0.0, 0.1, 0.4, 0.6])
    monkeypatch.setattr(grammars, "_seconds_to_fill", lambda *mask: fill(*mask) + next(seconds))
    with pytest.raises(ValueError, match=r"structured_outputs.regex: too ambiguous"):
        llm.generate([[1, 2]], ask({"regex": "[a-f]{78}"}), use_tqdm=False)
    assert not list(seconds)


def test_a_mask_that_is_slow_to_make_ends_its_own_request(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    fill = grammars._seconds_to_fill
    monkeypatch.setattr(grammars, "_seconds_to_fill", lambda *mask: 0 * fill(*mask) + (mask[2] == 1))
    asked = [DRAWN, ask({"regex": "[a-c]{5}"}), ask({"regex": "[d-f]{5}"})]
    expected = outputs(llm, asked)
    monkeypatch.setattr(grammars, "MATCH_SECONDS", 0.0)  # for all of them together
    free, quick, slow = outputs(llm, asked)
    assert (slow.finish_reason, slow.token_ids) == ("error", [])
    assert slow.stop_reason == "structured_outputs is too ambiguous: make it simpler"
    assert [free.token_ids, quick.token_ids] == [one.token_ids for one in expected[:2]]


def test_a_mask_that_may_never_be_made_ends_its_own_request(
    monkeypatch: pytest.MonkeyPatch, tiny: Any, settings: dict[str, Any]
) -> None:
    asked = [DRAWN, ask({"regex": "[a-c]{5}"}), ask({"regex": "([d-f]){5}"})]
    sizes, stuck, goes_on = [], [], threading.Event()

    class Matcher(xgrammar.BatchGrammarMatcher):
        def batch_fill_next_token_bitmask(self, matchers: list[Any], masks: Any, index: list[int]) -> None:
            sizes.append(len(index))
            if sizes.count(2) == 3 and not stuck:  # both are at their third token
                stuck.append(index[-1])
                super().batch_fill_next_token_bitmask(matchers[:-1], masks, index[:-1])
                goes_on.wait()
            else:
                super().batch_fill_next_token_bitmask(matchers, masks, index)

    with tiny("qwen3").llm(**settings) as llm:
        expected = outputs(llm, asked)
        monkeypatch.setattr(grammars, "FILL_SECONDS", 0.5)
        monkeypatch.setattr(xgrammar, "BatchGrammarMatcher", Matcher)
        llm._engine._grammars._filler = grammars._Filler()
        free, quick, slow = outputs(llm, asked)
        assert (slow.finish_reason, slow.token_ids, stuck) == ("error", expected[2].token_ids[:2], [1])
        assert slow.stop_reason == "structured_outputs is too ambiguous: make it simpler"
        assert [free.token_ids, quick.token_ids] == [one.token_ids for one in expected[:2]]
        assert [one.token_ids for one in outputs(llm, asked)] == [one.token_ids for one in expected]
        goes_on.set()
        (thread,) = llm._engine._grammars._abandoned
        thread.join(5)  # for nobody holds its filler
        assert not thread.is_alive()


def test_masks_of_an_interrupted_wait_are_left_to_the_thread(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    made, matcher = llm._engine._grammars, grammar_of(llm, {"regex": "[a-c]*"}).make_matcher()
    expected, filler, masks = made.masks([matcher], [True])[0].copy(), made._filler, made._masks

    def interrupt(*arguments: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(filler, "ends_in_time", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.masks([matcher], [True])
    found, slow = made.masks([matcher], [True])
    assert (found == expected).all() and not slow and made._filler is not filler and made._masks is not masks


def test_whatever_keeps_grammars_from_compiling_is_said(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def fails() -> Any:
        raise OSError("no such file")

    made, wanted = Grammars(fails, llm.model_config), ask({"regex": "a"}).structured_outputs
    with pytest.raises(ValueError, match="structured_outputs can't be had: OSError\\('no such file'\\)"):
        made.compile(wanted).result()
    made._load_tokenizer = lambda: llm.tokenizer
    monkeypatch.setattr(grammars, "version", lambda name: "0.3.0")
    with pytest.raises(ValueError, match=r"needs xgrammar 0.2.9, found 0.3.0: pip install 'nanollm\[structured\]'"):
        made.compile(wanted).result()
    monkeypatch.undo()
    made.compile(wanted).result()


def test_a_grammar_that_is_slow_to_follow_ends_its_own_request(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(sequence, "MATCH_SECONDS", -1.0)
    slow, free = outputs(llm, [ask({"grammar": 'root ::= root root | "a"'}), DRAWN])
    assert (slow.finish_reason, len(slow.token_ids)) == ("error", 1) and free.finish_reason != "error"
    assert slow.stop_reason == "structured_outputs is too ambiguous: make it simpler"


def test_compiled_grammars_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    made = Grammars(lambda: llm.tokenizer, llm.model_config)

    def compile(word: str) -> Any:
        grammar = made.compile(ask({"json": {"enum": [word]}}).structured_outputs)
        return grammar.result()

    first = compile("one")
    assert compile("one") is first
    monkeypatch.setattr(grammars, "CACHE_BYTES", 3 * sum(known.num_bytes for known in made._known.values()))
    for i in range(10):
        compile(f"n{i}")
        compile("one")
    assert compile("one") is first and len(made._known) <= 3


def test_what_is_counted_for_grammars_is_no_less_than_what_they_keep(llm: LLM) -> None:
    made = Grammars(lambda: llm.tokenizer, llm.model_config)
    made.compile(ask({"regex": "a"}).structured_outputs).result()
    tracemalloc.start()
    try:
        for i in range(40):
            made.compile(ask({"json": {"const": i, "description": "é" * 10_000}}).structured_outputs).result()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < sum(known.num_bytes for known in made._known.values())
    finally:
        tracemalloc.stop()
