"""What a schema or regex lets through is checked against the jsonschema library and Python's re."""

import json
import re
import time
from typing import Any

import jsonschema
import pytest
import xgrammar

from nanollm.engine.grammars import _can_end, _parse
from nanollm.engine.json_schema import check_form, prepare_regex, prepare_schema
from nanollm.sampling_params import StructuredOutputsParams

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
_COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(
        [*(bytes([i]) for i in range(256)), b"end"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256]
    ),
    max_threads=1,
)


def accepts(grammar: xgrammar.Grammar, text: bytes) -> bool:
    """As an output: the whole text, and then the end."""
    matcher = xgrammar.GrammarMatcher(_COMPILER.compile_grammar(grammar))
    return matcher.accept_string(text) and matcher.is_completed()


def parse(schema: dict[str, Any]) -> xgrammar.Grammar:
    return _parse(StructuredOutputsParams(json=schema, disable_any_whitespace=True))


def accepted(schema: dict[str, Any], texts: list[str]) -> list[str]:
    grammar = parse(schema)
    return [text for text in texts if accepts(grammar, text.encode())]


def an_object(*required: str, **settings: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": [*required], **settings}


# xgrammar alone takes every one of these, and then lets through what the schema forbids.
IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "not": {"const": 3}}, "not is not supported"),
    (an_object("a", **{"if": {"required": ["a"]}, "then": {"required": ["b"]}}), "if is not supported"),
    ({"type": "array", "items": INTEGER, "contains": {"const": 3}}, "contains is not supported"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems may only be false, got True"),
    (an_object(dependentRequired={"a": ["b"]}), "dependentRequired is not supported"),
    (an_object(dependentSchemas={"a": {"required": ["b"]}}), "dependentSchemas is not supported"),
    (an_object("z"), "required has 'z', which is not in properties"),
    (an_object(["a"]), r"required has \['a'\], which is not in properties"),
    *(({"$ref": f"#/{where}", where: {"type": "string", "pattern": '"'}}, "ref must lead into this")
      for where in ("x", "then", "default")),
    *(({"items": {"$ref": f"#/$defs/x{slash}then"}, "$defs": {"x": {"then": {}}}}, "ref must lead into this")
      for slash in ("/", "%2F", "%2f")),
    (an_object(propertyNames={"pattern": "^a$"}), "propertyNames beside properties"),
    *((an_object(properties={name: INTEGER}, additionalProperties=more), "which can't be kept out of additionalProp")
      for name in ("é", 'q"t', "\n", "\\") for more in (True, {}, TEXT)),
    *(({"type": "object", "propertyNames": names, "maxProperties": 1}, "propertyNames must be of type string")
      for names in ({"enum": ["a", 1]}, {"const": 1}, {"anyOf": [INTEGER]}, {"$ref": "#"}, {"type": "null"})),
    (an_object(patternProperties={"^a": TEXT}), "patternProperties may have one pattern"),
    ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "patternProperties may have one pattern"),
    ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "minProperties is supported for known"),
    ({"type": "integer", "minimum": 6, "multipleOf": 5}, "multipleOf is supported for type integer without bounds"),
    ({"type": ["integer", "null"], "exclusiveMaximum": 6, "multipleOf": 5}, "multipleOf is .* integer without bounds"),
    *(({"type": "integer", "multipleOf": step}, f"multipleOf must be from 1 to 1024, got {step}")
      for step in (1025, 5000, 2**70, 0, -5)),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf is supported for type integer"),
    ({"type": "integer", "multipleOf": 1.5}, "multipleOf must be an integer"),
    ({"type": "number", "minimum": 1e-7}, "minimum must be a number of at most 6 decimals, got 1e-07"),
    *(({"type": kind, "maximum": float("inf")}, "maximum must be a finite number, got inf")
      for kind in ("number", "integer")),
    ({"const": [float("nan")]}, "const may have numbers up to"),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, "has no number of at most 6 decimals"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "only one of a length, pattern and format"),
    ({"type": "string", "format": "email", "maxLength": 5}, "only one of a length, pattern and format"),
    ({"type": "string", "format": "email", "pattern": "^z"}, "only one of a length, pattern and format"),
    ({"type": "string", "format": "phone"}, "format must be one of date, .* got 'phone'"),
    ({"type": "string", "pattern": "^(?=b)[ab]$"}, "pattern has lookaround"),
    ({"type": "string", "pattern": "^(?!a)b$"}, "pattern has lookaround"),
    ({"type": "string", "pattern": "a^b"}, r"pattern has \^ inside"),
    ({"type": "string", "pattern": "(a$)b?"}, r"pattern has \$ inside"),
    ({"type": "string", "pattern": 'a"b'}, 'pattern has ", which JSON escapes'),
    ({"type": "string", "pattern": r"a\\b"}, r"pattern has \\\\, which JSON escapes"),
    ({"type": "string", "pattern": r"a\tb"}, "which JSON escapes"),
    ({"type": "string", "pattern": r"a\x22b"}, "which JSON escapes"),
    ({"type": "string", "pattern": r"a\0b"}, "which JSON escapes"),
    ({"type": "string", "pattern": r"\u{22}"}, "which JSON escapes"),
    ({"type": "string", "pattern": r"[\u{22}]"}, "class without a character that may come"),
    *(({"type": "string", "pattern": f"a{end}"}, "pattern has .*not supported")
      for end in (r"\Z", r"\A", r"\G", r"\K", r"\Qb\E", r"\1", r"\b", r"\u12", "[[:alpha:]]", r"[\p{L}]", r"[+-\d]")),
    ({"type": "string", "pattern": '["]'}, "class without a character that may come"),
    ({"type": "string", "enum": ["a", 1]}, "enum has 1, which is not of type string"),
    ({"type": "integer", "const": True}, "const has True, which is not of type integer"),
    ({"enum": ["a", "bbb"], "maxLength": 1}, "maxLength beside enum is not supported"),
    ({"type": "string", "anyOf": [{"maxLength": 1, "type": "string"}]}, "type beside anyOf is not supported"),
    (an_object(anyOf=[{"required": ["a"]}]), "has required but|beside anyOf|required has 'a'"),
    ({"oneOf": [INTEGER, {"type": "number", "minimum": 0}]}, "oneOf has schemas that one value may fit both of"),
    ({"oneOf": [an_object("a"), an_object("b")]}, "oneOf has schemas"),
    *(({"allOf": [INTEGER, more]}, "allOf may have one schema only") for more in ({"minimum": 3}, {"required": ["a"]})),
    ({"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": INTEGER}}, "minimum beside .ref is not supported"),
    ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", **INTEGER}}}, "ref must lead into this schema"),
    ({"$ref": "https://example.com/x"}, "ref must lead into this schema"),
    ({"$dynamicRef": "#x"}, "dynamicRef is not supported"),
    ({"maxLength": 2}, "has maxLength but no type"),
    ({"minimum": 2}, "has minimum but no type"),
    ({"properties": {"a": {"minLength": 2}}}, "properties.a has minLength but no type"),
    ({"const": 2**60}, "numbers up to"),
    ({"type": []}, "type must be one or a list of"),
    ({"type": "any"}, "type must be one or a list of"),
    ({"type": "string", "minLength": -1}, "minLength must be from 0"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength must be at least minLength 3"),
    ({"type": "array", "minItems": "1"}, "minItems must be an integer"),
    ({"type": "object", "properties": [1]}, "properties must be an object"),
    ({"type": "object", "properties": {"a": 5}}, "properties.a must be an object or a boolean, got 5"),
    ({"anyOf": []}, "anyOf must not be empty"),
    ({"anyOf": {}}, "anyOf must be a list"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), IGNORED)
def test_what_would_not_be_kept_to_is_refused_by_name(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"the schema.*({message})"):
        prepare_schema(json.dumps(schema))


# Schema, texts that it must let through, texts that it must not.
KEPT: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "string", "maxLength": 3}, ['""', '"é😀"'], ['"\t"', '"\x01"', '"\\"', '"""', '"abcd"']),
    ({"type": "string", "minLength": 2}, ['"ab"'], ['"a"', '""']),
    ({"type": "string", "pattern": "^.{2}$"}, ['"ab"', '"é한"'], ['"a"', '"a\n"']),
    ({"type": "string", "pattern": r"^[^\W\d]\D\S$"}, ['"abc"'], ['"1bc"', '"a1c"', '"ab "', '"٣٣٣"']),
    ({"type": "string", "pattern": "^a$|^b$"}, ['"a"', '"b"'], ['"ab"', '"c"']),
    ({"type": "integer", "multipleOf": 5}, ["10", "0", "-5"], ["7"]),
    ({"type": "array", "minItems": 1}, ['["a"]'], ["[]"]),
    ({"type": "array", "prefixItems": [INTEGER, TEXT], "items": False}, ['[1, "a"]'], ['["a", 1]', '[1, "a", 2]']),
    ({"properties": {"a": INTEGER}, "required": ["a"]}, ['{"a": 1}'], ['{"a": "x"}', "{}"]),
    (an_object("a", additionalProperties=False), ['{"a": 1}'], ['{"a": 1, "c": 1}', '{"b": 1}']),
    (an_object(minProperties=1), ['{"a": 1}', '{"b": 1}'], ["{}"]),
    ({"type": ["string", "null"], "maxLength": 1}, ["null", '"a"'], ['"aa"', "1"]),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER}, "title": "x"}, ["1"], ['"a"']),
    (
        an_object("a", properties={"a": TEXT, "b": {"$ref": "#/properties/a"}}),
        ['{"a": "x", "b": "y"}'],
        ['{"a": "", "b": 1}'],
    ),
    ({"anyOf": [INTEGER, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]}, ["[1]"], ["[[1]]"]),
    (an_object("a", properties={"a": INTEGER, "not": TEXT}), ['{"a": 1, "not": "x"}'], ['{"a": 1, "not": 1}']),
    (
        an_object("a", properties={"a": INTEGER, "ab/c": INTEGER}, additionalProperties=TEXT),
        ['{"a": 1, "ab/c": 2, "b": "x"}', '{"a": 1, "ab": "x", "b\\u0061": "y", "abd\\n": "z"}', '{"a": 1, "é": "x"}'],
        ['{"a": 1, "a": "x"}', '{"a": 1, "\\u0061": "x"}', '{"a": 1, "ab\\/c": "x"}', '{"a": 1, "\\u0061b/c": "x"}'],
    ),
    ({"type": "integer", "maxLength": 1, "uniqueItems": False, "x-note": 1}, ["123"], ["1.5"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), KEPT)
def test_what_is_kept_to(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert accepted(schema, good + bad) == good
    assert all(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) for text in good)


@pytest.mark.parametrize("step", [1, 2, 7, 97, 768, 1023, 1024])
def test_multiples_are_told_by_all_their_digits(step: int) -> None:
    matches = _COMPILER.compile_grammar(parse({"type": "integer", "multipleOf": step}))
    for number in [*range(-100, 100), *(step * i + j for i in (10, 999, 10**9 + 1) for j in range(-3, 4))]:
        matcher = xgrammar.GrammarMatcher(matches)
        assert (matcher.accept_string(str(number)) and matcher.is_completed()) == (number % step == 0), number


def test_one_of_several_that_a_property_tells_apart_may_be_references() -> None:
    def kind(value: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": value, "size": INTEGER}, "required": ["kind"]}

    shapes = {"cat": kind({"const": "cat"}), "dog": kind({"$ref": "#/$defs/dogs"}), "dogs": {"enum": ["dog", "fox"]}}
    schema = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}], "$defs": shapes}
    good = ['{"kind": "cat"}', '{"kind": "fox", "size": 3}', "null"]
    assert accepted(schema, [*good, '{"kind": "cow"}']) == good
    shapes["dogs"]["enum"].append("cat")
    with pytest.raises(ValueError, match="use anyOf"):
        prepare_schema(json.dumps(schema))


def test_one_of_many_is_told_apart_in_no_time_or_refused() -> None:
    def kinds(count: int) -> list[dict[str, Any]]:
        return [an_object("kind", properties={"kind": {"enum": [i, f"{i}"]}}) for i in range(count)]

    start = time.monotonic()
    values = [{"const": [i]} if i % 2 else {"enum": [i, f"{i}"]} for i in range(2500)]
    prepare_schema(json.dumps({"oneOf": values}))
    prepare_schema(json.dumps({"oneOf": [*kinds(100), *values, {"const": None}]}))
    for last in ({"const": [1.0]}, {"enum": ["new", 0.0]}, INTEGER, {"type": "array"}):
        with pytest.raises(ValueError, match="one value may fit both of: use anyOf"):
            prepare_schema(json.dumps({"oneOf": [*values, last]}))
    with pytest.raises(ValueError, match="oneOf has 600 schemas, which is too much to compare: use anyOf"):
        prepare_schema(json.dumps({"oneOf": kinds(600)}))
    assert time.monotonic() - start < 2


BROKEN = [b"\xed\xa0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\x80"]


@pytest.mark.parametrize("pattern", [r".", r"[^a]", r"[^\s]", r"[^\d_-]", r"\W", r"\D", r"\S", r"[^\\\]]"])
def test_a_character_is_one_of_utf8_and_of_the_regex(pattern: str) -> None:
    grammar = xgrammar.Grammar.from_regex(prepare_regex(f"x{pattern}", "it"))
    schema = parse({"type": "string", "pattern": pattern})
    for char in [chr(i) for i in range(32, 127)] + ["é", "٣", "한", "😀", "\xa0"]:
        if accepts(grammar, f"x{char}".encode()):
            assert re.fullmatch(pattern, char)
        if accepts(schema, f'"{char}"'.encode()):
            assert re.fullmatch(pattern, json.loads(f'"{char}"'))
    assert accepts(grammar, b"x!") and accepts(schema, b'"!"')
    for broken in BROKEN:
        assert not accepts(grammar, b"x" + broken) and not accepts(schema, b'"' + broken + b'"')


@pytest.mark.parametrize("pattern", [r"[a^]", r"[x^y]", r"[_^]", r"[\^a]", r"[é^]", r"[\^-a]", r"[\^]", r"[^^]"])
def test_a_caret_in_a_class_is_a_character(pattern: str) -> None:
    grammar = xgrammar.Grammar.from_regex(prepare_regex(f"x{pattern}", "it"))
    schema = parse({"type": "string", "pattern": pattern})
    for char in [chr(i) for i in range(33, 127) if chr(i) not in '"\\'] + ["é"]:
        expected = re.fullmatch(pattern, char) is not None
        assert accepts(grammar, f"x{char}".encode()) == accepts(schema, f'"{char}"'.encode()) == expected, char


def test_code_points_in_braces_are_characters() -> None:
    grammar = parse({"type": "string", "pattern": r"^\u{41}[\u{1F600}-\u{1F602}]$"})
    assert accepts(grammar, '"A😁"'.encode()) and not accepts(grammar, '"A😃"'.encode())


@pytest.mark.parametrize(
    ("ebnf", "can_end"),
    [
        ('root ::= "a" root | "b"', True),
        ('root ::= "a" root', False),
        ("root ::= first second\nfirst ::= [a-z]*\nsecond ::= third\nthird ::= second", False),
        ("root ::= other{0,3}\nother ::= other", True),
        ("root ::= other{1,3}\nother ::= other", False),
        ('root ::= ""', True),
        ("\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(2000)) + '\nr2000 ::= "b"\nroot ::= r0', True),
    ],
)
def test_grammars_that_lead_nowhere_are_found(ebnf: str, can_end: bool) -> None:
    assert _can_end(json.loads(xgrammar.Grammar.from_ebnf(ebnf).serialize_json())) == can_end


def test_schemas_that_are_only_shown_may_have_any_keyword_but_no_unknown_type() -> None:
    fine = {
        "type": ["object"],
        "properties": {"type": {"enum": [{"type": "x"}]}, "p": {"pattern": r"(?<y>\p{L})(?<=a)(?<!b)"}},
    }
    check_form([fine, {"not": {}, "default": {"type": "x"}}], "it")
    start = time.monotonic()
    with pytest.raises(ValueError, match="it has pattern"):
        check_form({"pattern": r"\p{" * 20_000}, "it")
    assert time.monotonic() - start < 1
    for bad in ({"type": "stsring"}, {"items": [{"type": ["string", "x"]}]}, {"pattern": "(("}):
        with pytest.raises(ValueError, match=r"it has (type|pattern)"):
            check_form({"properties": {"a": bad}}, "it")


@pytest.mark.parametrize(
    "wrong", [{"required": 5}, {"required": [[1]]}, {"properties": 5, "required": ["a"]}, {"enum": 7}]
)
def test_a_one_of_that_leads_to_no_schema_says_so(wrong: dict[str, Any]) -> None:
    schema = {"$defs": {"a": {"oneOf": [{"$ref": "#/$defs/b"}, {"type": "string"}]}, "b": {"type": "object"} | wrong}}
    with pytest.raises(ValueError, match=r"oneOf leads to a definition that is no schema|must be"):
        prepare_schema(json.dumps(schema))
