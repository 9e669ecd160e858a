"""Which JSON schemas can be kept to: what xgrammar would ignore, or get wrong, is refused by name.

A schema that passes only ever leads to valid JSON. It may lead to less than the schema allows: properties come in the
order of the schema, strings with a length or a pattern have no escapes, and a pattern is of the whole string.
"""

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from typing import Any

MAX_DEPTH = 32
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ALTERNATIVES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_OF_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": (*_BOUNDS, "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
}
_ABOUT_VALUES = ("type", *(name for names in _OF_TYPE.values() for name in names))
_UNSUPPORTED = (
    "not",
    "if",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
_FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uri-reference",
    "uri-template",
    "uuid",
    "json-pointer",
    "relative-json-pointer",
)
# An escape, a class, the start of lookaround, or a character.
_TOKEN = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c[A-Za-z]|.)|\[\^?(?:\\.|[^\\\]])*\]|\(\?<?[=!]|.",
    re.DOTALL,
)
_ESCAPED = "dDwWsSnrtfv0"  # letters and digits after a backslash; xgrammar would match others as they are
# Where a $ref may lead: to what is prepared as a schema, under the same name. (%2F is a / to xgrammar.)
_REFERENCE = re.compile(
    r"#(/(\$defs|definitions|properties)/([^/%]|%(?!2[fF]))*|/items|/additionalProperties|/(anyOf|prefixItems)/\d+)*"
)
# Ranges of characters, both ends included.
_SHORTHANDS = {"d": [(48, 57)], "w": [(48, 57), (65, 90), (95, 95), (97, 122)], "s": [(9, 13), (32, 32)]}
_JSON_ASCII = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E)]  # what a JSON string may hold as it is
# Gaps where UTF-8 gets longer: xgrammar would let the longer forms of shorter ones into a range across.
_BEYOND_ASCII = [(0x80, 0x7FE), (0x800, 0xD7FF), (0xE000, 0xFFFE), (0x10000, 0x10FFFF)]
_MAX_NUMBER = 2**53  # beyond, a float64 is not exact
_MAX_MULTIPLE = 1024  # beyond, xgrammar lets any integer through
_MAX_COMPARED = 2**20  # pairs of a oneOf's schemas, and their values: half a second


def prepare_schema(text: str) -> str:
    """The schema as xgrammar keeps to it. ValueError says where it is wrong, or not supported, and what to do."""
    try:
        schema = json.loads(text)
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has half a surrogate pair, {error.object[error.start]!a}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    return json.dumps(_prepare(schema, schema, "the schema", 0))


def check_form(schema: Any, at: str) -> None:
    """ValueError for a type or pattern that no JSON schema has, at any depth; for schemas that are only shown."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left.extend(part)
        if not isinstance(part, dict):
            continue
        types = part.get("type", [])
        types = [types] if isinstance(types, str) else types
        if isinstance(types, list) and any(kind not in _TYPES for kind in types):
            raise ValueError(f"{at} has type {part['type']!r:.100}: known are {', '.join(_TYPES)}")
        if isinstance(pattern := part.get("pattern"), str):
            try:  # what Python spells in another way made its own
                re.compile(re.sub(r"\(\?<(?![=!])", "(?P<", re.sub(r"\\[pP]\{[^{}]*\}", "x", pattern)))
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{at} has pattern {pattern!r:.100}: {error}") from None
        left.extend(value for name, value in part.items() if name not in ("const", "enum", "default", "examples"))


def _prepare(schema: Any, root: Any, at: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise ValueError(f"{at} must be an object or a boolean, got {schema!r:.100}")
    if depth > MAX_DEPTH:
        raise ValueError(f"{at:.200} is more than {MAX_DEPTH} levels deep: make it flatter, or use $defs")
    for name in _UNSUPPORTED:
        if name in schema:
            raise ValueError(f"{at}.{name} is not supported: leave it out")
    for name in ("uniqueItems", "unevaluatedItems", "unevaluatedProperties"):
        if schema.get(name):
            raise ValueError(f"{at}.{name} may only be false, got {schema[name]!r:.100}")
    prepared = {name: value for name, value in schema.items() if not name.startswith("uneval")}
    for name in ("items", "additionalProperties", "propertyNames"):
        if isinstance(schema.get(name), list):
            raise ValueError(f"{at}.{name} must be one schema, got a list: use prefixItems for a list of schemas")
        if name in schema:
            inner = schema[name]
            if name == "propertyNames" and isinstance(inner, dict):
                inner = _of_names(inner, f"{at}.{name}")
            prepared[name] = _prepare(inner, root, f"{at}.{name}", depth + 1)
    for name in ("$defs", "definitions", "properties", "patternProperties"):
        if name in schema:
            items = _need(schema, name, dict, "an object", at).items()
            prepared[name] = {key: _prepare(value, root, f"{at}.{name}.{key}", depth + 1) for key, value in items}
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if name in schema:
            values = _need(schema, name, list, "a list", at)
            if not values:
                raise ValueError(f"{at}.{name} must not be empty")
            if name == "allOf" and len(values) > 1:
                raise ValueError(f"{at}.allOf may have one schema only: merge them")
            prepared[name] = [_prepare(value, root, f"{at}.{name}[{i}]", depth + 1) for i, value in enumerate(values)]
    if alternatives := [name for name in _ALTERNATIVES if name in schema]:
        _check_alternatives(alternatives, schema, root, at)
        if "oneOf" in prepared:  # no two of which fit one value, so
            prepared["anyOf"] = prepared.pop("oneOf")
    else:
        _prepare_values(prepared, at)
    return prepared


def _need(schema: dict[str, Any], name: str, kind: type | tuple[type, ...], what: str, at: str) -> Any:
    value = schema[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{at}.{name} must be {what}, got {value!r:.100}")
    return value


def _check_alternatives(names: list[str], schema: dict[str, Any], root: Any, at: str) -> None:
    """Of a schema that gives its values, or other schemas for them."""
    name, *others = names
    is_list = name in ("const", "enum")
    others += [other for other in _ABOUT_VALUES if other in schema and not (is_list and other == "type")]
    if others:
        raise ValueError(f"{at}: {others[0]} beside {name} is not supported: put it inside, or leave one out")
    if name == "$ref" and not (isinstance(schema[name], str) and _REFERENCE.fullmatch(schema[name])):
        raise ValueError(f"{at}.$ref must lead into this schema, as #/$defs/name does, got {schema[name]!r:.100}")
    if name == "oneOf":
        try:
            _check_one_of(schema[name], root, at)
        except (TypeError, AttributeError):  # of a definition that was not looked at yet
            raise ValueError(f"{at}.oneOf leads to a definition that is no schema") from None
    if is_list:
        values = [schema["const"]] if name == "const" else _need(schema, name, list, "a list", at)
        types = _types(schema, at)
        for value in values:
            if not all(abs(number) <= _MAX_NUMBER for number in _numbers(value)):
                raise ValueError(f"{at}.{name} may have numbers up to 2**53, got {value!r:.100}")
            if not any(_has_type(value, kind) for kind in types):
                raise ValueError(f"{at}.{name} has {value!r:.100}, which is not of type {' or '.join(types)}")


def _prepare_values(schema: dict[str, Any], at: str) -> None:
    """Of a schema that says of which type its values are, and more about them."""
    for name in _COUNTS:
        if name in schema and not 0 <= _need(schema, name, int, "an integer", at) < 2**31:
            raise ValueError(f"{at}.{name} must be from 0 to 2**31 - 1, got {schema[name]}")
    for name in (*_BOUNDS, "multipleOf"):
        if name in schema and not abs(_need(schema, name, (int, float), "a number", at)) < math.inf:
            raise ValueError(f"{at}.{name} must be a finite number, got {schema[name]}")
    if "type" not in schema:
        found = [kind for kind, names in _OF_TYPE.items() if any(name in schema for name in names)]
        if not found:
            return
        if found not in (["array"], ["object"]):
            name = next(name for name in _ABOUT_VALUES if name in schema)
            raise ValueError(f"{at} has {name} but no type: say which it is of")
        schema["type"] = found[0]
    types = _types(schema, at)
    if "multipleOf" in schema:
        if "number" in types or any(name in schema for name in _BOUNDS):
            raise ValueError(f"{at}.multipleOf is supported for type integer without bounds only")
        if not 1 <= _need(schema, "multipleOf", int, "an integer", at) <= _MAX_MULTIPLE:
            raise ValueError(f"{at}.multipleOf must be from 1 to {_MAX_MULTIPLE}, got {schema['multipleOf']}")
    if "number" in types:
        _check_bounds(schema, at)
    if "string" in types:
        _prepare_string(schema, at)
    if "array" in types and not {"items", "prefixItems"} & schema.keys():
        schema["items"] = True
    if "object" in types:
        _prepare_object(schema, at)


def _of_names(schema: dict[str, Any], at: str) -> dict[str, Any]:
    """The schema of property names, which xgrammar would write as whatever it allows: numbers too."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    is_plain = not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"} and schema.get("type", "string") == "string"
    if not is_plain or not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{at} must be of type string, or an enum or const of strings")
    return schema if values else {"type": "string"} | schema


def _check_bounds(schema: dict[str, Any], at: str) -> None:
    """xgrammar rounds them to millionths, and takes a range with none in it for nothing at all."""
    millionths = {}
    for name in _BOUNDS:
        if name in schema:
            value = schema[name]
            if (Fraction(repr(value)) * 10**6).denominator != 1:
                raise ValueError(f"{at}.{name} must be a number of at most 6 decimals, got {value!r}")
            millionths[name] = int(Fraction(repr(value)) * 10**6)
    low = max(millionths.get("minimum", -math.inf), millionths.get("exclusiveMinimum", -math.inf) + 1)
    high = min(millionths.get("maximum", math.inf), millionths.get("exclusiveMaximum", math.inf) - 1)
    if low > high:
        raise ValueError(f"{at} has no number of at most 6 decimals within its bounds")


def _prepare_string(schema: dict[str, Any], at: str) -> None:
    has_length = "minLength" in schema or "maxLength" in schema
    if has_length + ("pattern" in schema) + ("format" in schema) > 1:
        raise ValueError(f"{at}: only one of a length, pattern and format is supported: leave out the others")
    if "pattern" in schema:
        pattern = _need(schema, "pattern", str, "a string", at)
        schema["pattern"] = prepare_regex(pattern, f"{at}.pattern", in_json=True)
    if "format" in schema and schema["format"] not in _FORMATS:
        raise ValueError(f"{at}.format must be one of {', '.join(_FORMATS)}, got {schema['format']!r:.100}")
    if schema.get("maxLength", 2**31) < schema.get("minLength", 0):
        raise ValueError(f"{at}.maxLength must be at least minLength {schema['minLength']}, got {schema['maxLength']}")


def _prepare_object(schema: dict[str, Any], at: str) -> None:
    known = schema.get("properties", {})
    for name in _need(schema, "required", list, "a list", at) if "required" in schema else []:
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"{at}.required has {name!r:.100}, which is not in properties: describe it there")
    patterns = schema.get("patternProperties", {})
    if patterns and (len(patterns) > 1 or known or schema.get("additionalProperties") or "propertyNames" in schema):
        raise ValueError(f"{at}.patternProperties may have one pattern, and nothing else that says which names come")
    if patterns:
        ((pattern, value),) = patterns.items()
        schema["patternProperties"] = {prepare_regex(pattern, f"{at}.patternProperties", in_json=True): value}
    if known and "propertyNames" in schema:
        raise ValueError(f"{at}.propertyNames beside properties is not supported: leave it out")
    if schema.get("additionalProperties", False) is not False:
        for name in known:
            if json.dumps(name) != f'"{name}"':
                raise ValueError(
                    f"{at}.properties has {name!r:.100}, which can't be kept out of additionalProperties: leave these "
                    "out, or use names of ASCII characters without escapes"
                )
    is_open = not known or patterns or schema.get("additionalProperties")
    if schema.get("minProperties") and is_open:  # a name may come twice
        raise ValueError(f"{at}.minProperties is supported for known properties only: list them, or leave it out")


def _types(schema: dict[str, Any], at: str) -> list[str]:
    """What type says, as a list; all of them if there is none."""
    types = schema.get("type", list(_TYPES))
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not types or any(kind not in _TYPES for kind in types):
        raise ValueError(f"{at}.type must be one or a list of {', '.join(_TYPES)}, got {schema['type']!r:.100}")
    return types


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == {str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def _check_one_of(schemas: list[Any], root: Any, at: str) -> None:
    """ValueError unless plainly no value fits two of them: by type, values, or a property that tells them apart."""
    overlap = ValueError(f"{at}.oneOf has schemas that one value may fit both of: use anyOf")
    listed: set[Any] = set()
    examples: dict[type, Any] = {}  # of what is listed
    branches: list[tuple[set[str], dict[str, set[Any]]]] = []  # others: their types, and values of required properties
    size = 0
    for schema in (_resolve(schema, root) for schema in schemas):
        if (values := _values(schema)) is not None:
            new = {_hashable(value) for value in values}
            if not listed.isdisjoint(new):
                raise overlap
            listed |= new
            examples |= {type(value): value for value in values}
            continue
        tags = {}
        for name in schema.get("required", ()):
            values = _values(_resolve(schema.get("properties", {}).get(name), root)) or []
            if values and not any(isinstance(value, list | dict) for value in values):
                tags[name] = set(values)
            size += 1 + len(values)
        branches.append((_kinds(schema, None), tags))
        if (size + len(branches)) * len(branches) > _MAX_COMPARED:
            raise ValueError(f"{at}.oneOf has {len(schemas)} schemas, which is too much to compare: use anyOf")
    branches.append((_kinds({}, [*examples.values()]), {}))
    for (kinds_a, tags_a), (kinds_b, tags_b) in combinations(branches, 2):
        common = kinds_a & kinds_b
        names = tags_a.keys() & tags_b.keys() if common == {"object"} else ()
        if common and not any(tags_a[name].isdisjoint(tags_b[name]) for name in names):
            raise overlap


def _hashable(value: Any) -> Any:
    """Equal for equal values."""
    if isinstance(value, dict):
        return frozenset((name, _hashable(item)) for name, item in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _resolve(schema: Any, root: Any) -> dict[str, Any]:
    """The schema behind references; an empty one, which fits everything, if it is not found."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        target = root
        for part in schema["$ref"].split("/")[1:]:
            target = target.get(part) if isinstance(target, dict) else None
        schema = target
    return schema if isinstance(schema, dict) else {}


def _values(schema: dict[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _kinds(schema: dict[str, Any], values: list[Any] | None) -> set[str]:
    """Types that a value may have, integer being number."""
    types = _types(schema, "a schema of oneOf")
    if values is not None:
        types = [kind for kind in types if any(_has_type(value, kind) for value in values)]
    return {"number" if kind == "integer" else kind for kind in types}


def prepare_regex(pattern: str, at: str, *, in_json: bool = False) -> str:
    """The regex as xgrammar keeps to it, for texts that it matches as a whole. ValueError for what it would ignore,
    anchors inside and lookaround, and in a JSON string for characters that have to be escaped there.

    Classes of characters are written out, since xgrammar's own complements are not always right.
    """
    tokens, depth, prepared = _TOKEN.findall(pattern), 0, []
    for i, token in enumerate(tokens):
        if token.startswith(("(?=", "(?!", "(?<")):
            raise ValueError(f"{at} has lookaround, which is not supported: {pattern!r:.100}")
        if token in ("(", ")"):
            depth += 1 if token == "(" else -1
        is_first, is_last = (j in (-1, len(tokens)) or (depth == 0 and tokens[j] == "|") for j in (i - 1, i + 1))
        if (token == "^" and not is_first) or (token == "$" and not is_last):
            raise ValueError(f"{at} has {token} inside, which is not supported: {pattern!r:.100}")
        if _is_unknown(token, _ESCAPED):
            raise ValueError(f"{at} has {token}, which is not supported: {pattern!r:.100}")
        if token == ".":
            token = r"[^\n\r]"
        elif token[0] == "\\" and token[1:].lower() in _SHORTHANDS:
            token = f"[{token}]"
        if len(token) > 1 and token[0] == "[":
            token = _written_out(token, at, in_json)
        elif 0xD800 <= (_code(token) or 0) < 0xE000:
            raise ValueError(f"{at} has {token}, half a surrogate pair: {pattern!r:.100}")
        elif in_json and _is_barred(token):
            raise ValueError(f"{at} has {token}, which JSON escapes and so can't be matched: {pattern!r:.100}")
        prepared.append(token)
    return "".join(prepared)


def _written_out(token: str, at: str, in_json: bool) -> str:
    """A class as ranges. With \\d, \\w or \\s in it it is of ASCII, since beyond that regex dialects differ."""
    is_negated = token[1] == "^"
    parts, ranges, is_ascii = _TOKEN.findall(token[1 + is_negated : -1])[::-1], [], False
    if wrong := [part for part in parts if part == "[" or _is_unknown(part, _ESCAPED + "b")]:  # [ as in [:alpha:]
        raise ValueError(f"{at} has {wrong[-1]} in a class, which is not supported: {token!r:.100}")
    while parts:
        part = parts.pop()
        if (some := _SHORTHANDS.get(part[1:].lower())) and part[0] == "\\":
            is_ascii = True
            ranges += some if part[1].islower() else _others(some)
            continue
        low = high = _code(part)
        if len(parts) > 1 and parts[-1] == "-":
            parts.pop()
            high = _code(parts.pop())
        if low is None or high is None or high < low:
            raise ValueError(f"{at} has a class that is not supported: {token!r:.100}")
        ranges.append((low, high))
    ranges = _others(ranges) if is_negated else _others(_others(ranges))
    found = _overlap(ranges, (_JSON_ASCII if in_json else [(0, 0x7E)]) + _BEYOND_ASCII * (not is_ascii))
    if not found:
        raise ValueError(f"{at} has a class without a character that may come: {token!r:.100}")
    if found[0][0] == ord("^"):  # which xgrammar takes for a negation where it comes first, escaped or not
        above = [(ord("^") + 1, found[0][1])] if found[0][1] > ord("^") else []
        found = [*above, *found[1:], (ord("^"), ord("^"))]
    if len(found) == 1 and found[0][0] == ord("^"):
        return "\\^"
    return "[" + "".join(f"{_spelled(low)}-{_spelled(high)}" for low, high in found) + "]"


def _is_unknown(token: str, known: str) -> bool:
    """Whether it is an escape by a letter or digit that is none of these."""
    return len(token) == 2 and token[0] == "\\" and token[1].isalnum() and token[1] not in known


def _is_barred(token: str) -> bool:
    """Whether it is a character, or an escape of one, that a JSON string can't hold as it is."""
    code = _code(token)
    return code is not None and not _overlap([(code, code)], _JSON_ASCII + _BEYOND_ASCII)


def _code(token: str) -> int | None:
    """Of the character that it is, or is an escape of; None if it isn't one."""
    if token[0] == "\\" and token[1:].lower() in _SHORTHANDS:
        return None
    if token[0] != "\\" or len(token) == 1:
        return ord(token) if len(token) == 1 else None
    if len(token) > 2:
        return ord(token[2]) % 32 if token[1] == "c" else int(token[2:].strip("{}"), 16)
    return ord({"b": "\b", "n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}.get(token[1], token[1]))


def _spelled(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else chr(code)


def _others(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """All other characters, in order."""
    found, start = [], 0
    for low, high in [*sorted(ranges), (0x110000, 0x110000)]:
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return found


def _overlap(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    pairs = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return [(low, high) for low, high in pairs if low <= high]
