"""Streamed text against whole decoding, stop strings against a search that knows the whole text."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from nanollm.outputs import EngineOutput, RequestMetrics, TokenLogprobs
from nanollm.sampling_params import SamplingParams
from nanollm.text.output_processor import OutputProcessor
from nanollm.text.tokenizer import load_tokenizer

QWEN3_FOLDER = Path(__file__).parents[2] / ".cache/qwen3-tokenizer"


@pytest.fixture(scope="module")
def qwen3():
    found = sorted(QWEN3_FOLDER.glob("**/tokenizer.json"))
    if not found:
        pytest.skip("the Qwen3 tokenizer is not in .cache/qwen3-tokenizer: ./launch.sh test puts it there")
    return load_tokenizer(found[0].parent)


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_tokenizer(smollm2_path)


def sentencepiece_like():
    """Llama 2's kind: a word's token holds the space before it; unknown characters are runs of byte tokens."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁▁", "▁Hello", "wor", "ld", "▁a", "é", "\ufffd", "<0xZZ>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def words_without_a_decoder():
    """Tokens that whole decoding joins with spaces."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["</s>", "a", "b", "é"])}, "a"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def bytes_and_tokens_spelled_otherwise():
    """Byte-level, with added tokens that hold characters outside the byte alphabet, as DeepSeek's do."""
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate("abĠÃ©")}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<｜end▁of▁sentence｜>"])
    tokenizer.add_tokens(["漢 字", "é"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<｜end▁of▁sentence｜>")


class PythonTokenizer(PreTrainedTokenizer):
    """One that the tokenizers library has no part in."""

    tokens = ("</s>", "a", "b", "é", " ")

    def __init__(self):
        super().__init__(eos_token="</s>")

    @property
    def vocab_size(self):
        return len(self.tokens)

    def get_vocab(self):
        return {token: i for i, token in enumerate(self.tokens)}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.tokens.index(token) if token in self.tokens else 1

    def _convert_id_to_token(self, index):
        return self.tokens[index] if index < len(self.tokens) else ""

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


SMALL = (bytes_and_tokens_spelled_otherwise, sentencepiece_like, words_without_a_decoder, PythonTokenizer)


@pytest.fixture(scope="module", params=["qwen3", "smollm2", *SMALL])
def tokenizer(request):
    return request.getfixturevalue(request.param) if isinstance(request.param, str) else request.param()


def run(tokenizer, steps, finish_reason="length", **params):
    """Feed one request a list of tokens a step, then its end; return every RequestOutput and whether it was aborted."""
    processor = OutputProcessor(tokenizer)
    processor.add(7, "seven", "prompt", [1, 2], SamplingParams(**params))
    shown, aborted = [], []
    for step in steps:
        results, aborts = processor.process([EngineOutput(7, step)])
        shown += results
        aborted += aborts
    results, aborts = processor.process([EngineOutput(7, [], finish_reason)])
    return shown + results, aborted + aborts


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def one_each(ids):
    return [[token_id] for token_id in ids]


# Whole decoding, a token at a time


@pytest.fixture(scope="module")
def any_ids(tokenizer):
    """Any ids; and often the ones that make trouble: single bytes, special tokens, ids past the vocabulary."""
    vocab = tokenizer.get_vocab()
    pieces = [i for token, i in vocab.items() if len(token) == 1 or token.startswith("<")]
    emoji = tokenizer.encode("🫠 👩‍💻 é漢𓀀", add_special_tokens=False)
    odd = sorted({*pieces, *emoji, *tokenizer.all_special_ids, len(vocab), len(vocab) + 9})
    return st.lists(st.sampled_from(odd) | st.integers(0, len(vocab) - 1), max_size=40)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans(), step_len=st.integers(1, 3))
def test_streamed_text_grows_into_whole_decoding(tokenizer, any_ids, data, skip, step_len):
    ids = data.draw(any_ids)
    whole = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    steps = [ids[i : i + step_len] for i in range(0, len(ids), step_len)]
    outputs, aborted = run(tokenizer, steps, skip_special_tokens=skip)
    shown = texts(outputs)
    assert shown[-1] == whole
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert outputs[-1].outputs[0].token_ids == ids
    assert not aborted


@settings(max_examples=50, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_request_that_is_not_streamed_ends_the_same(tokenizer, any_ids, data, skip):
    ids = data.draw(any_ids)
    processor = OutputProcessor(tokenizer)
    processor.add(7, "seven", None, [1], SamplingParams(skip_special_tokens=skip), stream=False)
    for token_id in ids:
        assert processor.process([EngineOutput(7, [token_id])]) == ([], [])
    ((output,), aborts) = processor.process([EngineOutput(7, [], "length")])
    streamed, _ = run(tokenizer, one_each(ids), skip_special_tokens=skip)
    assert (output.outputs, output.finished, aborts) == (streamed[-1].outputs, True, [])


def test_character_in_pieces_is_shown_when_it_is_whole(qwen3):
    ids = qwen3.encode("a🫠b")
    assert len(ids) == 5
    assert texts(run(qwen3, one_each(ids))[0]) == ["a", "a", "a", "a🫠", "a🫠b", "a🫠b"]


def test_half_a_character_at_the_end_is_what_decode_gives(qwen3):
    ids = qwen3.encode("a🫠")[:-1]
    assert texts(run(qwen3, one_each(ids))[0]) == ["a", "a", "a", "a\ufffd"]
    assert qwen3.decode(ids) == "a\ufffd"


def test_half_a_character_in_the_middle_is_replaced_once_it_is_decided(qwen3):
    ids = [*qwen3.encode("🫠")[:-1], *qwen3.encode("ab")]
    assert texts(run(qwen3, one_each(ids))[0]) == ["", "", "\ufffdab", "\ufffdab"]


def test_special_token_in_the_middle_is_skipped_or_shown(qwen3):
    ids = qwen3.encode("a<|im_end|>b")
    assert texts(run(qwen3, one_each(ids))[0]) == ["a", "a", "ab", "ab"]
    assert texts(run(qwen3, one_each(ids), skip_special_tokens=False)[0])[1:3] == ["a<|im_end|>", "a<|im_end|>b"]


def test_byte_tokens_of_sentencepiece_are_shown_when_their_run_ends():
    tokenizer = sentencepiece_like()
    ids = tokenizer.convert_tokens_to_ids(["▁Hello", "<0xC3>", "<0xA9>", "<0xC3>", "▁a", "<0xC3>", "<0xA9>"])
    assert texts(run(tokenizer, one_each(ids))[0]) == [
        *["Hello"] * 4,
        *["Hello\ufffd\ufffd\ufffd a"] * 3,
        "Hello\ufffd\ufffd\ufffd aé",
    ]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_bytes_of_the_tokens_make_up_the_text(tokenizer, any_ids, data, skip):
    ids = data.draw(any_ids)
    processor = OutputProcessor(tokenizer)
    processor.add(7, "seven", None, [1], SamplingParams(skip_special_tokens=skip, logprobs=0))
    for token_id in ids:
        processor.process([EngineOutput(7, [token_id], logprobs=[TokenLogprobs(-1.0, 1, [], [])])])
    ((output,), _) = processor.process([EngineOutput(7, [], "length")])
    steps = output.outputs[0].logprobs
    joined = b"".join(step[token_id].token_bytes or b"" for step, token_id in zip(steps, ids, strict=True))
    whole = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    try:
        assert joined.decode() == whole
    except UnicodeDecodeError:
        assert "\ufffd" in whole


# What an output says


def test_output_carries_what_the_request_and_the_engine_said(qwen3):
    metrics = RequestMetrics(arrival_time=1.0)
    processor = OutputProcessor(qwen3)
    processor.add(3, "three", "Hi", [5, 6], SamplingParams(), metrics)
    (first,), _ = processor.process([EngineOutput(3, [64], num_cached_tokens=2)])
    (last,), _ = processor.process([EngineOutput(3, [65], "stop", stop_reason=65)])
    for output in (first, last):
        assert (output.request_id, output.prompt, output.prompt_token_ids) == ("three", "Hi", [5, 6])
        assert (output.num_cached_tokens, output.metrics) == (2, metrics)
    assert (first.finished, first.outputs[0].finish_reason, first.outputs[0].token_ids) == (False, None, [64])
    completion = last.outputs[0]
    assert (last.finished, completion.finish_reason, completion.stop_reason) == (True, "stop", 65)
    assert (completion.index, completion.token_ids, completion.text) == (0, [64, 65], "a")


@pytest.mark.parametrize("settings", [{}, {"stop": "xyz"}])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab<|im_end|>")])
def test_text_has_the_token_that_ended_it_only_if_stop_strings_are_included(qwen3, settings, stream, include, text):
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include, **settings)
    processor = OutputProcessor(qwen3)
    processor.add(1, "1", None, [0], params, stream=stream)
    processor.process([EngineOutput(1, [64])])
    end = qwen3.convert_tokens_to_ids("<|im_end|>")
    (output,), _ = processor.process([EngineOutput(1, [65, end], "stop")])
    assert (output.outputs[0].text, output.outputs[0].token_ids) == (text, [64, 65, end])


def test_earlier_outputs_keep_their_tokens(qwen3):
    outputs, _ = run(qwen3, [[64], [65, 66], [67]])
    assert [output.outputs[0].token_ids for output in outputs] == [[64], [64, 65, 66], *[[64, 65, 66, 67]] * 2]


def test_requests_of_one_step_do_not_mix(qwen3):
    processor = OutputProcessor(qwen3)
    for request_id, stop in ((1, []), (2, ["b"]), (3, [])):
        processor.add(request_id, str(request_id), None, [0], SamplingParams(stop=stop))
    half = qwen3.encode("🫠")
    processor.process([EngineOutput(1, half[:1]), EngineOutput(2, [64]), EngineOutput(3, [64])])
    results, aborts = processor.process([EngineOutput(3, [65]), EngineOutput(2, [65]), EngineOutput(1, half[1:])])
    assert [(r.request_id, r.outputs[0].text) for r in results] == [("3", "ab"), ("2", "a"), ("1", "🫠")]
    assert aborts == [2]


@pytest.mark.parametrize("why", ["no tokenizer", "detokenize=False"])
def test_without_detokenizing_text_stays_empty(qwen3, why):
    tokenizer = None if why == "no tokenizer" else qwen3
    outputs, _ = run(tokenizer, [[64], [65]], detokenize=tokenizer is None)
    assert texts(outputs) == ["", "", ""]
    assert outputs[-1].outputs[0].token_ids == [64, 65]


def test_continuations_that_one_step_extends_are_shown_together(qwen3):
    processor = OutputProcessor(qwen3)
    processor.add(1, "1", None, [0], SamplingParams(n=3, stop="c"))
    (output,), _ = processor.process([EngineOutput(i, [63 + i]) for i in (1, 2)])
    assert ([c.text for c in output.outputs], output.finished) == (["a", "b", ""], False)
    (output,), aborts = processor.process([EngineOutput(3, [66]), EngineOutput(1, [66]), EngineOutput(2, [65], "stop")])
    assert ([c.text for c in output.outputs], output.finished, aborts) == (["a", "b", ""], True, [3, 1])
    assert [c.finish_reason for c in output.outputs] == ["stop"] * 3


def test_request_id_in_use_is_refused_until_it_finishes(qwen3):
    processor = OutputProcessor(qwen3)
    processor.add(1, "1", None, [0], SamplingParams())
    with pytest.raises(ValueError, match="request_id 1 is in use"):
        processor.add(1, "1", None, [0], SamplingParams())
    processor.process([EngineOutput(1, [64], "length")])
    processor.add(1, "1", None, [0], SamplingParams())
    assert texts(processor.process([EngineOutput(1, [65])])[0]) == ["b"]


# Surplus tokens and aborts


def test_what_comes_after_the_end_is_ignored(qwen3):
    processor = OutputProcessor(qwen3)
    processor.add(1, "1", None, [0], SamplingParams(stop="b"))
    assert processor.process([EngineOutput(1, [64]), EngineOutput(1, [65]), EngineOutput(1, [66])])[1] == [1]
    assert processor.process([EngineOutput(1, [67])]) == ([], [])
    assert processor.process([EngineOutput(1, [], "abort")]) == ([], [])


def test_abort_of_a_running_request_ends_it_with_the_text_so_far(qwen3):
    (first, last), aborted = run(qwen3, [qwen3.encode("see <en")], "abort", stop="<end>")
    assert (first.outputs[0].text, last.outputs[0].text) == ("see ", "see <en")
    assert (last.finished, last.outputs[0].finish_reason, aborted) == (True, "abort", [])


def test_discarded_request_is_ignored(qwen3):
    processor = OutputProcessor(qwen3)
    processor.add(1, "1", None, [0], SamplingParams())
    processor.discard(1)
    processor.discard(1)
    assert processor.process([EngineOutput(1, [64], "length")]) == ([], [])


def test_stop_string_on_the_last_token_wins_over_the_engine_and_needs_no_abort(qwen3):
    processor = OutputProcessor(qwen3)
    processor.add(1, "1", None, [0], SamplingParams(stop="b"), metrics := RequestMetrics(arrival_time=0.0))
    (output,), aborts = processor.process([EngineOutput(1, [64, 65], "length")])
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason, aborts) == ("a", "stop", "b", [])
    assert metrics.finished_time is not None


# Stop strings


def end_of(tokenizer, text, **params):
    outputs, aborted = run(tokenizer, one_each(tokenizer.encode(text)), **params)
    completion = outputs[-1].outputs[0]
    assert aborted == ([7] if completion.finish_reason == "stop" else [])
    return completion.text, completion.stop_reason


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (2, "a"), (3, "a.bc"), (5, "a.bc"), (6, "a.bc.bd")])
@pytest.mark.parametrize("others", [[], [".bcd"]])
def test_a_stop_string_counts_if_it_is_complete_after_min_tokens(qwen3, min_tokens, text, others):
    """ ".b" is complete with the third token, and with the sixth. It is held then if it may start another one."""
    ids = [qwen3.convert_tokens_to_ids(char) for char in "a.bc.bd"]
    outputs, _ = run(qwen3, one_each(ids), stop=[".b", *others], min_tokens=min_tokens)
    assert outputs[-1].outputs[0].text == text


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop must be"):
        SamplingParams(stop="")


def test_stop_string_is_cut_off_or_included(qwen3):
    assert end_of(qwen3, "one two three", stop=" two") == ("one", " two")
    assert end_of(qwen3, "one two three", stop="wo") == ("one t", "wo")
    assert end_of(qwen3, "one two three", stop="w", include_stop_str_in_output=True) == ("one tw", "w")
    assert end_of(qwen3, "one two three", stop="four") == ("one two three", None)
    assert end_of(qwen3, "one two three", stop="one", max_tokens=1) == ("", "one")


def test_tokens_end_with_the_one_that_completed_the_stop_string(qwen3):
    ids = qwen3.encode("a b c d e")
    outputs, aborted = run(qwen3, [ids[:1], ids[1:]], stop="c")
    assert outputs[-1].outputs[0].token_ids == ids[:3]
    assert (texts(outputs), aborted) == (["a", "a b "], [7])


def test_stop_string_that_spans_three_tokens(qwen3):
    ids = qwen3.encode("x one two three")
    assert [qwen3.decode(i) for i in ids] == ["x", " one", " two", " three"]
    assert texts(run(qwen3, one_each(ids), stop="ne two th")[0]) == ["x", "x o", "x o", "x o"]
    assert texts(run(qwen3, one_each(ids), stop="ne two to")[0])[:4] == ["x", "x o", "x o", "x one two three"]
    included = run(qwen3, one_each(ids), stop="ne two th", include_stop_str_in_output=True)[0]
    assert texts(included) == ["x", "x one", "x one two", "x one two th"]


def test_stop_string_that_is_a_prefix_of_another_wins(qwen3):
    for stop in (["ab", "abc"], ["abc", "ab"]):
        ids = [qwen3.convert_tokens_to_ids(char) for char in "xabcd"]
        assert texts(run(qwen3, one_each(ids), stop=stop)[0])[-1] == "x"
        assert run(qwen3, one_each(ids), stop=stop)[0][-1].outputs[0].stop_reason == "ab"
        assert end_of(qwen3, "xabcd", stop=stop)[1] == "ab"


def test_first_stop_string_to_complete_wins_and_on_one_token_the_one_that_starts_first(qwen3):
    chars = [qwen3.convert_tokens_to_ids(char) for char in "abcde"]
    outputs, _ = run(qwen3, one_each(chars), stop=["bcd", "c"])
    assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].stop_reason) == ("ab", "c")
    assert len(qwen3.encode(" world")) == 1
    assert end_of(qwen3, "a world", stop=["l", "rld", "orl", "or"]) == ("a w", "or")


def test_stop_string_inside_an_emoji(qwen3):
    assert len(qwen3.encode("👩‍💻")) > 2
    assert end_of(qwen3, "hi 👩‍💻!", stop="\u200d") == ("hi 👩", "\u200d")
    assert end_of(qwen3, "hi 👩‍💻!", stop="💻") == ("hi 👩\u200d", "💻")
    assert end_of(qwen3, "hi 👩‍💻!", stop="👩‍💻", include_stop_str_in_output=True) == ("hi 👩‍💻", "👩‍💻")


def test_prompt_does_not_trigger_a_stop_string(qwen3):
    processor = OutputProcessor(qwen3)
    processor.add(1, "1", "STO", qwen3.encode("STO"), SamplingParams(stop=["STO", "STOP"]))
    (output,), aborts = processor.process([EngineOutput(1, qwen3.encode("P now"), "length")])
    assert (output.outputs[0].text, aborts) == ("P now", [])


def test_held_text_is_released_at_the_end(qwen3):
    outputs, _ = run(qwen3, one_each(qwen3.encode("so...")), stop="....")
    assert texts(outputs) == ["so", "so", "so..."]


def test_replacement_character_of_the_end_can_be_a_stop_string(qwen3):
    outputs, aborted = run(qwen3, one_each(qwen3.encode("a🫠")[:-1]), stop="\ufffd")
    assert (texts(outputs)[-1], outputs[-1].outputs[0].finish_reason, aborted) == ("a", "stop", [])


def test_stop_strings_with_characters_that_mean_something_in_regular_expressions(qwen3):
    for stop in "^]-\\[.*|&&~~":
        assert end_of(qwen3, f"a{stop}b", stop=[stop, "zz"]) == ("a", stop)


def expected_texts(tokenizer, ids, stops, min_tokens, include):
    """By the rule in words: after each token, of the matches that end after min_tokens the earliest, then the shortest;
    else hold what may start one, unless stop strings are shown."""
    shown = []
    whole = [tokenizer.decode(ids[:end]).rstrip("\ufffd") for end in range(len(ids) + 1)]
    early = len(whole[min(min_tokens, len(ids))])
    for end, text in enumerate(whole[1:], 1):
        found = [(i, len(stop), stop) for stop in stops for i in range(len(text)) if text.startswith(stop, i)]
        if end > min_tokens and (matches := [match for match in found if match[0] + match[1] > early]):
            start, length, stop = min(matches)
            return [*shown, text[: start + length if include else start]], stop
        held = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        shown.append(text if include else text[: len(text) - max(held, default=0)])
    return [*shown, tokenizer.decode(ids)], None


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab🫠é ", max_size=30),
    st.lists(st.text("ab🫠é ", min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 9),
    st.booleans(),
)
def test_stop_strings_by_the_rule(qwen3, text, stops, min_tokens, include):
    ids = qwen3.encode(text)
    params = {"stop": stops, "min_tokens": min_tokens, "include_stop_str_in_output": include, "max_tokens": None}
    outputs, _ = run(qwen3, one_each(ids), **params)
    expected = expected_texts(qwen3, ids, stops, min_tokens, include)
    assert (texts(outputs), outputs[-1].outputs[0].stop_reason) == expected
