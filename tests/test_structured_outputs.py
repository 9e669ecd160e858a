"""structured_outputs and logits_processors through the whole engine: what comes out is what was asked for."""

import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanollm import LLM, SamplingParams
from nanollm.engine.json_schema import MAX_DEPTH
from nanollm.sampling_params import MAX_GRAMMAR_CHARS
from tests.conftest import DEVICE, TinyModel, random_prompt

EOS = 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "maximum": 99},
    },
    "required": ["name", "age"],
}
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=60)


def ask(structure: dict[str, Any], **settings: Any) -> SamplingParams:
    return replace(DRAWN, structured_outputs=structure, **settings)


def save_byte_tokenizer(path: Path) -> str:
    """All bytes, some pairs of them, two special tokens: 268 of the tiny models' 300 tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a, b in ('{"', '":', '",', "[]", '"}', "}]", "aa", "12", "Ã©", "ðŁ")]
    tokens = ["<pad>", "<end>", *letters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:2]])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(path)
    return str(path)


def byte_settings(path: Path) -> dict[str, Any]:
    """Of engines that know the tokenizer."""
    return {"tokenizer": save_byte_tokenizer(path), "skip_tokenizer_init": False}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return byte_settings(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def model(tiny: Any) -> Any:
    return tiny("qwen3")


@pytest.fixture(scope="module")
def llm(model: TinyModel, settings: dict[str, Any]) -> Any:
    with model.llm(**settings) as llm:
        yield llm


def outputs(llm: LLM, params: SamplingParams | list[SamplingParams], prompts: list[list[int]] | None = None) -> Any:
    many = params if isinstance(params, list) else [params]
    return [output.outputs[0] for output in llm.generate(prompts or [[5, 6, 7]] * len(many), params, use_tqdm=False)]


# 200 schemas, over all keywords that are supported

STRINGS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    {"type": "string", "pattern": "(ab|cd){1,3}e?"},
    {"type": "string", "pattern": "^[^\"\\\\]{0,4}$"},
    {"type": "string", "enum": ["red", "gr\"een", "blü\n"]},
    {"const": "a\\b"},
    *({"type": "string", "format": name} for name in ("date", "time", "ipv4", "uuid")),
]  # fmt: skip
NUMBERS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": 990, "maximum": 1_000_010},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"enum": [1, 2.5, -3]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
]
OTHERS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"a": [1, None, "é"]}},
    {"enum": [None, True, "x", [1, 2]]},
    {"type": ["string", "boolean"], "maxLength": 3},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 0},
]


def make_schema(rng: random.Random, depth: int, *, is_root: bool = False) -> dict[str, Any]:
    """A random schema whose values are short."""
    leaves = rng.choice([STRINGS, NUMBERS, OTHERS])
    if depth == 0:
        return rng.choice(leaves)

    def inner() -> dict[str, Any]:
        return make_schema(rng, rng.randrange(depth))

    kind = rng.choice(
        ["object", "object", "array", "tuple", "anyOf", "oneOf", "allOf", "open", *["$ref", "tree"] * is_root]
    )
    if kind == "object":
        names = rng.sample(["id", "name", "größe", "a b", 'q"t', "tags", "x"], 3)
        schema = {"type": "object", "properties": {name: inner() for name in names}, "title": "A thing"}
        schema["required"] = rng.sample(names, rng.randrange(4))
        return schema | rng.choice([{}, {"additionalProperties": False}, {"minProperties": 1}, {"maxProperties": 3}])
    if kind == "array":
        return {"type": "array", "items": inner(), "minItems": rng.randrange(2), "maxItems": rng.randrange(1, 4)}
    if kind == "tuple":
        more = rng.choice([{"items": False}, {"items": inner(), "minItems": 3}])
        return {"type": "array", "prefixItems": [inner(), inner()], "maxItems": 3} | more
    if kind == "anyOf":
        return {"anyOf": [inner(), inner(), {"type": "null"}], "description": "Any of these"}
    if kind == "oneOf":
        cats = [{"const": "cat"}, {"enum": ["dog", "cow"]}]
        shapes = [{"type": "object", "properties": {"kind": cat, "is": inner()}, "required": ["kind"]} for cat in cats]
        return {"oneOf": [*shapes, {"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 0, "maximum": 7}]}
    if kind == "allOf":
        return {"allOf": [inner()]}
    if kind == "$ref":
        where = rng.choice(["$defs", "definitions"])
        return {"type": "array", "maxItems": 2, "items": {"$ref": f"#/{where}/part"}, where: {"part": inner()}}
    if kind == "tree":
        properties = {"v": rng.choice(leaves), "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}
        return {"type": "object", "properties": properties, "required": ["v", "next"]}
    names = rng.choice(
        [
            {"propertyNames": {"pattern": "^[a-f]{1,3}$"}, "additionalProperties": rng.choice(leaves)},
            {"propertyNames": {"maxLength": 2}, "additionalProperties": rng.choice(leaves)},
            {"patternProperties": {"^k[0-9]$": rng.choice(leaves)}, "additionalProperties": False},
            {"additionalProperties": rng.choice(leaves)},
        ]
    )
    return {"type": "object", "maxProperties": 2} | names


def make_schemas() -> list[dict[str, Any]]:
    """200 different ones."""
    rng, found = random.Random(1), {}
    while len(found) < 200:
        schema = make_schema(rng, rng.randrange(4), is_root=True)
        found[json.dumps(schema)] = schema
    return list(found.values())


SCHEMAS = make_schemas()


def test_the_schemas_have_every_keyword() -> None:
    text = json.dumps(SCHEMAS)
    keywords = (
        "type enum const properties required additionalProperties items prefixItems minItems maxItems",
        "minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum anyOf oneOf allOf",
        "$ref $defs definitions patternProperties propertyNames minProperties maxProperties",
    )
    for keyword in " ".join(keywords).split():
        assert text.count(f'"{keyword}"') >= 3, keyword
    for schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)


def check_outputs(llm: LLM, schemas: list[dict[str, Any]], completions: list[Any]) -> int:
    """Complete ones are valid, the others begin something that the grammar accepts; returns how many are complete."""
    complete = 0
    for schema, completion in zip(schemas, completions, strict=True):
        if completion.finish_reason == "stop":
            assert completion.stop_reason is None
            jsonschema.Draft202012Validator(schema).validate(json.loads(completion.text))
            complete += 1
            continue
        assert completion.finish_reason == "length"
        made = llm._engine._grammars
        wanted = SamplingParams(structured_outputs={"json": schema}).structured_outputs
        matcher = made.compile(wanted).make_matcher()
        assert all(map(matcher.accept_token, completion.token_ids))
    return complete


def test_a_random_model_keeps_to_200_schemas(llm: LLM) -> None:
    params = [ask({"json": schema}, seed=i, max_tokens=120) for i, schema in enumerate(SCHEMAS)]
    assert check_outputs(llm, SCHEMAS, outputs(llm, params)) > 150


def test_smollm2_keeps_to_schemas(smollm2_path: Path) -> None:
    schemas = [PERSON, *SCHEMAS[::40]]
    prompts = [f"<|im_start|>user\nFill in {json.dumps(s)[:200]}<|im_end|>\n<|im_start|>assistant\n" for s in schemas]
    params = [ask({"json": schema}, temperature=0.7, max_tokens=30) for schema in schemas]
    with LLM(str(smollm2_path), device=DEVICE, num_kv_blocks=256) as llm:
        completions = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        assert check_outputs(llm, schemas, completions) >= 2
        # It would say more, and special tokens, whose text a string may hold, don't come in one.
        free = llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0].outputs[0]
        assert free.text != completions[0].text
        (mask,), _ = llm._engine._grammars.masks([grammar_of(llm, {"regex": ".*"}).make_matcher()], [True])
        allowed = {i for i in range(49152) if mask[i // 32] >> (i % 32) & 1}
        special = set(llm.tokenizer.all_special_ids)
        assert len(allowed) > 40_000 and allowed & special == {*llm.model_config.eos_token_ids}


def grammar_of(llm: LLM, structure: dict[str, Any]) -> Any:
    return llm._engine._grammars.compile(SamplingParams(structured_outputs=structure).structured_outputs)


# The other kinds


def test_regex_choice_grammar_and_object(llm: LLM) -> None:
    ebnf = 'root ::= "SELECT " column (", " column){0,2} " FROM t"\ncolumn ::= [a-c]{1,3}'
    choices = ["yes", "no", 'a "quoted" \\ one', "two\nlines", "é 😀"]
    structures = [{"regex": r"\d{3}-\d{4}|x*"}, {"grammar": ebnf}, {"choice": choices}, {"json_object": True}]
    for seed in range(4):
        params = [ask(structure, seed=seed, max_tokens=200) for structure in structures]
        number, query, choice, anything = outputs(llm, params)
        assert re.fullmatch(r"\d{3}-\d{4}|x*", number.text) or number.finish_reason == "length"
        assert re.fullmatch(r"SELECT [a-c]{1,3}(, [a-c]{1,3}){0,2} FROM t", query.text)
        assert choice.text in choices
        assert anything.text.startswith("{")
        if anything.finish_reason == "stop":
            assert isinstance(json.loads(anything.text), dict)
        assert [c.token_ids[-1] for c in (query, choice)] == [EOS, EOS]


def test_without_any_whitespace_json_has_one_form(llm: LLM) -> None:
    for completion in outputs(llm, [ask({"json": PERSON, "disable_any_whitespace": True}, seed=i) for i in range(8)]):
        value = json.loads(completion.text)
        assert completion.text == json.dumps(value, ensure_ascii=False)


def test_end_tokens_come_where_the_grammar_may_end_and_only_there(llm: LLM) -> None:
    bias = {EOS: 100.0}
    assert outputs(llm, ask({"regex": "b{3,9}"}, logit_bias=bias))[0].text == "bbb"
    assert outputs(llm, ask({"regex": "a*"}, logit_bias=bias))[0].token_ids == [EOS]
    assert outputs(llm, ask({"regex": "a{3}"}, logit_bias={EOS: -100.0}))[0].text == "aaa"


# The same in any company


def mixed_params() -> list[SamplingParams]:
    return [
        ask({"json": PERSON}),
        DRAWN,
        ask({"json": SCHEMAS[7]}, n=2, logprobs=2),
        ask({"regex": "([a-z]{3} ){2,5}"}, top_p=0.9, repetition_penalty=1.2),
        replace(DRAWN, temperature=0, logits_processors=[rotate], max_tokens=20),
        ask({"choice": ["left", "right"]}, temperature=0, prompt_logprobs=1),
        ask({"json": PERSON}, logits_processors=[rotate], stop=['"']),
    ]


def rotate(token_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    """Each token's logit goes to another, how far depends on what came before."""
    assert logits_V.shape == (300,) and logits_V.dtype == torch.float32
    return logits_V.roll(7 * len(token_ids) + sum(token_ids[-1:]))


def all_tokens(llm: LLM) -> Any:
    prompts = [random_prompt(length, seed=8) for length in (3, 17, 40, 33, 5, 64, 20)]
    found = llm.generate(prompts, mixed_params(), use_tqdm=False)
    return [[(c.token_ids, c.finish_reason) for c in output.outputs] for output in found]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_the_same_overlapped_chunked_preempted_and_alone(
    model: TinyModel, llm: LLM, settings: dict[str, Any], overlap: bool
) -> None:
    expected = all_tokens(llm)
    assert [len(choices) for choices in expected] == [1, 1, 2, 1, 1, 1, 1] and expected[2][0] != expected[2][1]
    others = (
        {"long_prefill_token_threshold": 7},
        {"num_kv_blocks": 8},
        {"enable_prefix_caching": False, "max_num_seqs": 1},
    )
    for other in ({}, *others):
        with model.llm(overlap=overlap, **settings | other) as again:
            assert all_tokens(again) == expected
            assert all_tokens(again) == expected  # from the prefix cache
            assert (again.get_stats().num_preemptions > 0) == ("num_kv_blocks" in other)


def test_three_ranks_give_the_tokens_of_one(model: TinyModel, llm: LLM, settings: dict[str, Any]) -> None:
    with model.llm(tensor_parallel_size=3, overlap=True, **settings) as other:
        assert all_tokens(other) == all_tokens(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_63_free_rows_keep_their_tokens_beside_a_grammar(
    model: TinyModel, settings: dict[str, Any], overlap: bool
) -> None:
    prompts = [random_prompt(5, seed=i) for i in range(64)]
    free = [replace(DRAWN, seed=i, max_tokens=24) for i in range(64)]
    with model.llm(max_num_seqs=64, num_kv_blocks=400, overlap=overlap, **settings) as llm:
        alone = outputs(llm, free, prompts)
        beside = outputs(llm, [ask({"json": PERSON}), *free[1:]], prompts)
    assert [c.token_ids for c in beside[1:]] == [c.token_ids for c in alone[1:]]
    assert beside[0].token_ids != alone[0].token_ids


# Processors


def test_processors_see_the_tokens_so_far_and_have_the_last_word(model: TinyModel, llm: LLM) -> None:
    seen: list[list[int]] = []

    def only(token_id: int) -> Any:
        def process(token_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
            seen.append(token_ids)
            return torch.full_like(logits_V, float("-inf")).index_fill(
                0, torch.tensor([token_id + len(token_ids)]), 0.0
            )

        return process

    processors = [lambda _, x: -x, only(40), lambda _, x: x.bfloat16()]
    found = outputs(llm, [replace(DRAWN, max_tokens=4, logits_processors=processors), DRAWN])
    assert found[0].token_ids == [40, 41, 42, 43] and seen == [[], [40], [40, 41], [40, 41, 42]]
    assert found[1].token_ids == outputs(llm, DRAWN)[0].token_ids


def test_raw_logprobs_are_of_what_no_processor_has_changed(llm: LLM) -> None:
    flipped = replace(DRAWN, temperature=0, max_tokens=1, logprobs=3, logits_processors=[lambda _, x: -x])
    (found,) = outputs(llm, flipped)
    (logits_V,) = llm.compute_logits([[5, 6, 7]])[0][-1:]
    (logprobs,) = found.logprobs
    assert found.token_ids == [int(logits_V.argmin())]
    for token_id, logprob in logprobs.items():
        assert logprob.logprob == pytest.approx(float(logits_V.log_softmax(-1)[token_id]), abs=1e-4)


def test_logits_that_leave_no_token_end_one_request(llm: LLM) -> None:
    nothing = replace(DRAWN, logits_processors=[lambda _, logits_V: logits_V - float("inf")])
    found = outputs(llm, [nothing, DRAWN, ask({"regex": "a{3}"}, bad_words=["a"])])
    assert [completion.finish_reason for completion in found] == ["error", found[1].finish_reason, "error"]
    assert "logits processors" in found[0].stop_reason and "other settings leave no token" in found[2].stop_reason
    assert found[1].token_ids == outputs(llm, DRAWN)[0].token_ids


def test_a_processor_that_fails_is_an_error_and_the_engine_goes_on(llm: LLM) -> None:
    def fails(token_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        outputs(llm, replace(DRAWN, logits_processors=[fails]))
    with pytest.raises(ValueError, match=r"shape \(300,\)"):
        outputs(llm, replace(DRAWN, logits_processors=[lambda _, logits_V: logits_V[:5]]))
    assert outputs(llm, ask({"choice": ["a"]}))[0].text == "a"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_processor_that_fails_ends_nobody_elses_request(model: TinyModel, overlap: bool) -> None:
    def fails_later(token_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        if len(token_ids) == 3:
            raise KeyError("mine")
        return logits_V

    with model.llm(overlap=overlap) as llm:
        expected = outputs(llm, DRAWN)[0].token_ids
        stream = llm.generate_stream([[5, 6, 7]], DRAWN)  # holds what another thread would
        next(stream)
        with pytest.raises(KeyError, match="mine"):
            outputs(llm, [replace(DRAWN, n=2, logits_processors=[fails_later]), DRAWN])
        *_, last = stream
        assert last.outputs[0].token_ids == expected
        assert llm.get_stats().num_running == 0


def test_a_processor_that_uses_its_own_llm_ends_its_request_only(llm: LLM) -> None:
    stream = llm.generate_stream([[9]], DRAWN)
    next(stream)
    uses = [lambda: llm.generate([[8]], DRAWN), lambda: list(stream), llm.reset_prefix_cache]
    expected = outputs(llm, DRAWN)[0].token_ids
    other = llm.generate_stream([[5, 6, 7]], DRAWN)
    next(other)
    for use in uses:
        with pytest.raises(RuntimeError, match="what an LLM calls"):
            outputs(llm, replace(DRAWN, logits_processors=[lambda _, logits_V, use=use: use() or logits_V]))
    *_, last = other
    assert last.outputs[0].token_ids == expected
    assert llm.get_stats().num_running == 0


# What is refused


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json": {"type": "stsring"}}, r"json: the schema.type must be one or a list of string, .* got 'stsring'"),
        ({"json": {"$ref": "#"}}, "json: Circular"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}}, "Circ"),
        ({"json": {"type": "array", "items": [{"type": "string"}]}}, "json: the schema.items must be one schema, got"),
        ({"json": nested(50)}, f"json: .* more than {MAX_DEPTH} levels deep"),
        ({"json": '{"items":' * 900 + "{}" + "}" * 900}, f"more than {MAX_DEPTH} levels deep"),
        ({"json": '{"type": "string"'}, "json: is not JSON"),
        ({"json": {**PERSON, "properties": {"x": {"$ref": "#"}}, "required": ["x"]}}, "json: accepts nothing"),
        ({"json": False}, "exactly one of json, regex"),
        ({"json": "false"}, "json: .*cannot accept any value"),
        ({"regex": "^(()"}, "regex: .*parenthesis is not closed"),
        ({"regex": "a(?=b)b"}, "regex: it has lookaround"),
        ({"grammar": 'root ::= "a" root'}, "grammar: accepts nothing"),
        ({"grammar": "root ::= thing"}, 'grammar: .*"thing" is not defined'),
        ({"choice": []}, "choice must name a string"),
        ({"grammar": ""}, 'grammar: .*name "root" is not found'),
        ({"choice": [""]}, "choice must be a non-empty string"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({}, "got none"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "regex may have 65536 characters, got 65537"),
        *(({kind: "\ud800"}, f"{kind} has half a surrogate pair at character 0")
          for kind in ("json", "regex", "choice", "grammar")),
        *(({"json": schema}, r"json: has half a surrogate pair, '\\ud800'")
          for schema in (r'{"properties": {"\ud800": {"not": {}}}}', {"enum": ["\ud800"]})),
        ({"regex": r"a\ud83d\ude00"}, r"regex: it has \\ud83d, half a surrogate pair"),
        ({"grammar": r'root ::= "\ud83d\ude00"'}, r"grammar: it has half a surrogate pair, \\ud83d: write the char"),
        ({"regexp": "a"}, "has no field 'regexp'"),
        ({"regex": 5}, "regex must be a string, got 5"),
        ("a", "must be StructuredOutputsParams"),
    ],
)  # fmt: skip
def test_what_can_not_be_kept_to_is_refused_at_once_by_name(llm: LLM, structure: Any, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"structured_outputs.*{message}"):
        outputs(llm, [DRAWN, replace(DRAWN, structured_outputs=structure)])
    assert time.monotonic() - start < 2
    assert outputs(llm, ask({"choice": ["a"]}))[0].text == "a"


@pytest.mark.parametrize("settings", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_a_grammar_alone_says_where_the_output_ends(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave out ignore_eos and min_tokens"):
        SamplingParams(structured_outputs={"json_object": True}, **settings)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_processor_that_fails_past_a_stop_string_fails_nobody(
    model: TinyModel, settings: dict[str, Any], overlap: bool
) -> None:
    with model.llm(overlap=overlap, **settings) as llm:
        word: list[int] = llm.tokenizer.encode("hello.")  # type: ignore[union-attr]

        def spell(ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
            return torch.full_like(logits_V, -torch.inf).index_fill(0, torch.tensor(word[len(ids)]), 0.0)

        spelled, other = outputs(llm, [replace(DRAWN, stop=".", logits_processors=[spell]), DRAWN])
        assert (spelled.text, spelled.finish_reason) == ("hello", "stop")
        assert other == outputs(llm, DRAWN)[0]


def test_it_needs_a_tokenizer_and_processors_need_functions(model: TinyModel) -> None:
    with model.llm() as llm, pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        outputs(llm, ask({"regex": "a"}))
    with pytest.raises(ValueError, match=r"logits_processors must be functions, got \['f'\]"):
        SamplingParams(logits_processors=["f"])
