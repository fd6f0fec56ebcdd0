"""Structured output: whatever is drawn among the allowed tokens is what the schema, expression or grammar describes."""

import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from jradix.grammar import Constraint, Grammars
from jradix.sampling_params import SamplingParams
from jradix.tokenizer import Tokenizer, load_tokenizer
from tests.test_tokenizer import as_tokenizer, sentencepiece_like, tiny_metadata

PADDING = 70
"""Rows that the model's embedding has beyond the tokenizer's ids."""


class Model:
    """A tokenizer, its grammars, and a sampler in place of a model: it likes all allowed tokens equally well."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.stop_ids = tokenizer, frozenset(tokenizer.eos_ids)
        self.vocab_size = tokenizer.vocab_size + PADDING
        self.grammars = Grammars(*tokenizer.to_json_with_end(), self.vocab_size)

    def compile(self, **fields: Any) -> Constraint:
        constraint = self.grammars.compile(SamplingParams(**fields), self.stop_ids)
        assert constraint is not None
        return constraint

    def allowed(self, constraint: Constraint) -> list[int]:
        row = np.full(-(-self.vocab_size // 32), 0xFFFFFFFF, np.uint32)
        constraint.fill(row)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()

    def sample(self, constraint: Constraint, rng: random.Random, most: int = 3000) -> list[int]:
        """Token ids up to the end of the output, without the token that ends it."""
        ids: list[int] = []
        while not constraint.finished:
            assert len(ids) < most, f"no end: {self.tokenizer.decode(ids)[:300]}"
            token_id = rng.choice(self.allowed(constraint))
            if token_id in self.stop_ids:
                return ids
            constraint.accept(token_id)
            ids.append(token_id)
        assert constraint.error is None
        return ids

    def text(self, constraint: Constraint, rng: random.Random) -> str:
        return self.tokenizer.decode(self.sample(constraint, rng), skip_special_tokens=False)

    def accepts(self, constraint: Constraint, text: str) -> bool:
        """Whether a text may be the output, in the tokens that the tokenizer makes of it."""
        for token_id in self.tokenizer.encode(text, add_special_tokens=False):
            if token_id not in self.allowed(constraint):
                return False
            constraint.accept(token_id)
        return constraint.finished or bool(self.stop_ids & set(self.allowed(constraint)))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Model:
    return Model(load_tokenizer(smollm2_path))


@pytest.fixture(scope="module")
def tiny(tiny_text_path: Path) -> Model:
    """Tokens of one or two small letters, and single bytes above 0x7F: most grammars leave it nothing to say."""
    return Model(load_tokenizer(tiny_text_path))


class Schemas:
    """Draws JSON schemas whose values cannot get long."""

    WORDS = ("a", "Größe", "日本", "👩‍🔬", 'quo"te', "back\\slash", "", "new\nline", "x y")
    PATTERNS = ("^[a-c]{1,4}$", "^(foo|bär|語)+$", "^\\d{2}-\\d{2}$", "^[A-Z][a-z]{0,5}$")
    FORMATS = ("date", "uuid", "ipv4", "ipv6")

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def draw(self) -> dict[str, Any]:
        schema = self.value(3)
        if self.rng.random() < 0.3:  # a list whose end is as likely as its going on
            node = self.object(
                {"value": self.value(1), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}
            )
            schema = self.object({"first": schema, "list": {"$ref": "#/$defs/node"}}) | {"$defs": {"node": node}}
        return schema

    def value(self, depth: int) -> dict[str, Any]:
        kinds = [self.string, self.integer, self.number, self.choice, self.plain]
        nested = [self.array, self.record, self.any_of]
        return self.rng.choice(nested)(depth - 1) if depth and self.rng.random() < 0.6 else self.rng.choice(kinds)()

    def string(self) -> dict[str, Any]:
        kind = self.rng.randrange(3)
        if kind == 0:
            return {"type": "string", "pattern": self.rng.choice(self.PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self.rng.choice(self.FORMATS)}
        shortest = self.rng.randrange(4)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + self.rng.randrange(6)}

    def integer(self) -> dict[str, Any]:
        low = self.rng.randint(-2000, 2000)
        schema = {"type": "integer", "minimum": low, "maximum": low + self.rng.randint(10, 10**4)}
        return schema | ({"multipleOf": self.rng.randint(2, 9)} if self.rng.random() < 0.3 else {})

    def number(self) -> dict[str, Any]:
        low = round(self.rng.uniform(-100, 100), 2)
        return {"type": "number", "exclusiveMinimum": low, "maximum": round(low + self.rng.uniform(0.5, 50), 2)}

    def choice(self) -> dict[str, Any]:
        values = [*self.WORDS, 3, -1.5, True, None, [1, "z"], {"k": "é"}]
        if self.rng.random() < 0.3:
            return {"const": self.rng.choice(values)}
        return {"enum": self.rng.sample(values, self.rng.randint(1, 4))}

    def plain(self) -> dict[str, Any]:
        return {"type": self.rng.choice(["boolean", "null", "number", "integer", ["null", "boolean"]])}

    def array(self, depth: int) -> dict[str, Any]:
        fewest = self.rng.randrange(3)
        schema = {"type": "array", "minItems": fewest, "maxItems": fewest + self.rng.randrange(3)}
        if self.rng.random() < 0.3:
            schema["prefixItems"] = [self.value(depth) for _ in range(self.rng.randint(1, 2))]
        return schema | {"items": self.value(depth)}

    def record(self, depth: int) -> dict[str, Any]:
        names = self.rng.sample([word for word in self.WORDS if word], self.rng.randint(0, 4))
        return self.object({name: self.value(depth) for name in names})

    def object(self, properties: dict[str, Any]) -> dict[str, Any]:
        required = [name for name in properties if self.rng.random() < 0.6]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.value(depth) for _ in range(self.rng.randint(2, 3))]}


def check_json(text: str, schema: Any) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def test_what_is_drawn_from_random_schemas_is_valid(smollm2: Model) -> None:
    schemas, rng = Schemas(0), random.Random(1)
    for _ in range(500):
        schema = schemas.draw()
        check_json(smollm2.text(smollm2.compile(json_schema=schema), rng), schema)


def test_a_vocabulary_of_letters_writes_the_json_that_it_can(tiny: Model) -> None:
    schema = {"enum": [None, True, False, 5, "text"]}
    texts = {tiny.text(tiny.compile(json_schema=schema), random.Random(seed)) for seed in range(20)}
    assert texts == {"null", "true", "false"}
    with pytest.raises(ValueError, match="json_schema allows no token of this model at the start"):
        tiny.compile(json_schema={"type": "object"})


def draw_regex(rng: random.Random, depth: int, letters: str) -> str:
    """A regular expression of finite matches in the syntax that Python and llguidance share."""
    if depth == 0 or rng.random() < 0.2:
        atoms = [rng.choice(letters), f"[{''.join(rng.sample(letters, 3))}]", "[a-f]", rng.choice(letters) * 2]
        return rng.choice(atoms)
    first, second = (draw_regex(rng, depth - 1, letters) for _ in range(2))
    forms = [
        f"{first}{second}",
        f"({first}|{second})",
        f"({first}){{1,3}}",
        f"({first})?{second}",
        f"(?:{first}){{1,4}}x",
    ]
    return rng.choice(forms)


@pytest.mark.parametrize(("model_name", "letters"), [("smollm2", "abz 07é日👩.,"), ("tiny", "abcdexyz")])
def test_what_is_drawn_from_random_expressions_matches_them_whole(
    model_name: str, letters: str, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(model_name)
    rng = random.Random(2)
    for _ in range(100):
        expression = draw_regex(rng, 4, letters.replace(".", ""))
        for _ in range(2):
            text = model.text(model.compile(regex=expression), rng)
            assert re.fullmatch(expression, text), (expression, text)


GRAMMARS = {
    "an arithmetic expression": (
        'root ::= term (("+" | "-") term)* # sums\nterm ::= [0-9]{1,3} | "(" root ")"',
        ["1", "12-(3+4)", "((7))"],
        ["", "1+", "()", "1234", "(1"],
    ),
    "a list": ('root ::= "[" (item (", " item)*)? "]"\nitem ::= "yes" | "no" | "é"', ["[]", "[yes, é]"], ["[yes,no]"]),
    "left recursion": ('root ::= root "a" | "b"', ["b", "baaa"], ["", "a", "ab"]),
    "repetition over lines": (
        'root ::= (\n  line "\\n"\n){2}\nline ::= [^\\n]{1,3}',
        ["ab\nc\n"],
        ["ab\n", "abcd\nc\n"],
    ),
    "Lark": ('start: WORD ("," WORD)*\nWORD: /[a-z]{1,4}/', ["ab,c"], ["ab,", "abcde"]),
    "Lark with JSON inside": ('start: "x=" value\nvalue: %json {"type": "boolean"}', ["x=true"], ["x=1", "true"]),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_take_their_language_and_nothing_else(smollm2: Model, name: str) -> None:
    grammar, right, wrong = GRAMMARS[name]
    assert [smollm2.accepts(smollm2.compile(ebnf=grammar), text) for text in right] == [True] * len(right)
    assert [smollm2.accepts(smollm2.compile(ebnf=grammar), text) for text in wrong] == [False] * len(wrong)


def test_what_is_drawn_from_a_grammar_is_of_it(smollm2: Model) -> None:
    rng = random.Random(3)
    for _ in range(20):
        text = smollm2.text(smollm2.compile(ebnf=GRAMMARS["an arithmetic expression"][0]), rng)
        assert re.fullmatch(r"[-+()0-9]+", text)
        eval(re.sub(r"\b0+(\d)", r"\1", text))


def test_a_tokenizer_with_byte_tokens_writes_characters_it_has_no_token_for() -> None:
    model = Model(sentencepiece_like())
    assert model.text(model.compile(regex="foo bar é[語字]"), random.Random(0))[:-1] == "foo bar é"


def test_text_that_the_tokenizer_would_normalize_is_written_as_it_stands() -> None:
    model = Model(as_tokenizer(tiny_metadata("qwen2")))  # makes one character of a letter and the accent behind it
    apart = "re\u0301sume\u0301"
    assert model.text(model.compile(regex=apart), random.Random(0)) == apart
    assert json.loads(model.text(model.compile(json_schema={"const": apart}), random.Random(0))) == apart


# Which tokens


def test_only_tokens_with_text_are_allowed_and_none_of_the_padding(smollm2: Model) -> None:
    allowed = set(smollm2.allowed(smollm2.compile(regex="(?s:.)*x")))
    assert len(allowed) > 48_000
    assert max(allowed) < smollm2.tokenizer.vocab_size
    assert not allowed & smollm2.tokenizer.special_ids


def test_a_row_of_the_model_s_size_is_filled_whatever_was_in_it(smollm2: Model) -> None:
    row = np.full(-(-smollm2.vocab_size // 32), 0x55555555, np.uint32)
    smollm2.compile(regex="a").fill(row)
    [bit] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    assert smollm2.tokenizer.decode([int(bit)]) == "a"


def test_tokens_that_end_the_request_may_follow_where_the_output_is_complete_and_nowhere_else(smollm2: Model) -> None:
    a = smollm2.tokenizer.encode("a")[0]
    constraint = smollm2.grammars.compile(SamplingParams(regex="a{2,3}"), {2, 5})
    assert constraint is not None
    assert not {2, 5} & set(smollm2.allowed(constraint))
    constraint.accept(a)
    constraint.accept(a)
    assert {2, 5, a} <= set(smollm2.allowed(constraint))
    assert not constraint.finished


def test_a_stop_token_with_text_is_not_a_part_of_the_output(smollm2: Model) -> None:
    a, b = (smollm2.tokenizer.encode(letter)[0] for letter in "ab")
    constraint = smollm2.grammars.compile(SamplingParams(regex="a[bc]?"), {b})
    assert constraint is not None
    constraint.accept(a)
    assert b in smollm2.allowed(constraint), "it ends the output, which is complete"
    constraint = smollm2.grammars.compile(SamplingParams(regex="a[bc]"), {b})
    assert constraint is not None
    constraint.accept(a)
    assert b not in smollm2.allowed(constraint), "it would leave the output incomplete"


def test_without_any_eos_an_output_ends_where_nothing_may_follow(smollm2: Model) -> None:
    constraint = smollm2.grammars.compile(SamplingParams(json_schema={"type": "boolean"}, ignore_eos=True), ())
    assert constraint is not None
    for token_id in smollm2.tokenizer.encode("true"):
        assert not constraint.finished
        constraint.accept(token_id)
    assert constraint.finished
    assert constraint.error is None
    assert smollm2.allowed(constraint) == []


def test_until_it_is_finished_there_is_a_token_that_ends_nothing(smollm2: Model) -> None:
    # so that min_new_tokens, which takes the ending ones away, always leaves one
    schemas, rng = Schemas(5), random.Random(5)
    for _ in range(40):
        constraint = smollm2.compile(json_schema=schemas.draw())
        for _ in range(100):
            if constraint.finished:
                break
            going_on = set(smollm2.allowed(constraint)) - smollm2.stop_ids
            assert going_on
            constraint.accept(rng.choice(sorted(going_on)))


def test_a_vocabulary_without_a_needed_byte_is_an_error_of_the_request(tiny: Model) -> None:
    constraint = tiny.compile(regex="aé")  # it has the first byte of é alone
    while not constraint.finished:
        constraint.accept(tiny.allowed(constraint)[0])
    assert constraint.error is not None
    assert "cannot follow its grammar any further: NoExtensionBias" in constraint.error


def test_stop_tokens_that_are_all_that_may_follow_an_incomplete_output_are_an_error_of_the_request(
    smollm2: Model,
) -> None:
    a, b, c = (smollm2.tokenizer.encode(letter)[0] for letter in "abc")
    constraint = smollm2.grammars.compile(SamplingParams(regex="a[bc]"), {b, c})
    assert constraint is not None
    assert constraint.error is None
    constraint.accept(a)
    assert constraint.finished
    assert str(constraint.error).endswith("no token that may follow is left")


def test_a_token_that_is_not_allowed_is_our_mistake(smollm2: Model) -> None:
    with pytest.raises(AssertionError, match="does not allow"):
        smollm2.compile(regex="a").accept(smollm2.tokenizer.encode("b")[0])


def test_forks_go_their_own_ways(smollm2: Model) -> None:
    constraint = smollm2.compile(regex="a(b|c)d")
    a, b, c, d = (smollm2.tokenizer.encode(letter)[0] for letter in "abcd")
    constraint.accept(a)
    fork = constraint.fork()
    constraint.accept(b)
    assert {b, c} <= set(smollm2.allowed(fork))
    fork.accept(c)
    assert smollm2.allowed(constraint) == smollm2.allowed(fork) == [d]
    constraint.accept(d)
    assert (constraint.finished, fork.finished) == (True, False)


def test_requests_with_equal_grammars_do_not_share_their_state(smollm2: Model) -> None:
    first, second = (smollm2.compile(regex="ab") for _ in range(2))
    first.accept(smollm2.allowed(first)[0])
    assert smollm2.allowed(second) != smollm2.allowed(first)


def test_grammars_compile_in_many_threads_at_once(smollm2: Model) -> None:
    texts: dict[int, str] = {}

    def work(seed: int) -> None:
        texts[seed] = smollm2.text(smollm2.compile(json_schema={"enum": [f"value {seed % 4}"]}), random.Random(seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {seed: f'"value {seed % 4}"' for seed in range(16)}


# JSON


@pytest.mark.parametrize("schema", ["{}", "true", {}])
def test_an_empty_schema_is_any_json(smollm2: Model, schema: Any) -> None:
    for value in (None, [1, {"é": -0.5e3}], {"a": {}}, "x", 7):
        assert smollm2.accepts(smollm2.compile(json_schema=schema), json.dumps(value, ensure_ascii=False))


def test_properties_come_in_the_order_of_the_schema(smollm2: Model) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}, "required": ["a", "b"]}
    assert smollm2.accepts(smollm2.compile(json_schema=schema), '{"b": null, "a": null}')
    assert not smollm2.accepts(smollm2.compile(json_schema=schema), '{"a": null, "b": null}')


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('{"a":[1,2]}', True),
        ('{"a": [1, 2]}', True),
        (json.dumps({"a": [{"b": [1]}]}, indent=8), True),
        ('{"a":  1}', False),
        ('{\n\n"a": 1}', False),
        ("{\n" + " " * 33 + "}", False),
        (" {}", False),
    ],
)
def test_whitespace_is_a_space_or_a_line_s_indentation(smollm2: Model, text: str, accepted: bool) -> None:
    assert smollm2.accepts(smollm2.compile(json_schema={"type": "object"}), text) == accepted


def test_a_schema_chooses_its_own_whitespace(smollm2: Model) -> None:
    compact = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    assert smollm2.accepts(smollm2.compile(json_schema=compact), '{"a":[1,2]}')
    assert not smollm2.accepts(smollm2.compile(json_schema=compact), '{"a": [1,2]}')


# What is refused


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"json_schema": {"type": "strin"}}, "json_schema is refused: Invalid type: strin"),
        ({"json_schema": {"uniqueItems": True, "type": "array"}}, "json_schema is refused: .*uniqueItems"),
        ({"json_schema": {"not": {}}}, "json_schema is refused: .*not"),
        ({"json_schema": {"type": "string", "format": "color"}}, "json_schema is refused: .*color"),
        ({"json_schema": {"$ref": "#/$defs/missing"}}, "json_schema is refused: .*missing"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "json_schema is refused: Unsatisfiable"),
        ({"json_schema": "false"}, "json_schema is refused: Unsatisfiable"),
        ({"json_schema": {"$ref": "#"}}, "json_schema allows no token"),
        ({"json_schema": '{"items":' * 500 + "true" + "}" * 500}, "json_schema is refused: .*recursion"),
        ({"json_schema": {"const": "\ud800"}}, r"json_schema is refused: .*hex escape"),
        ({"regex": "(a"}, "regex is refused: .*unclosed group"),
        ({"regex": r"(a)\1"}, "regex is refused: .*backreference"),
        ({"regex": "a(?=b)"}, "regex is refused: .*look-around"),
        ({"regex": "(?:)"}, "regex allows no token .*: the empty output is all that it allows"),
        ({"regex": r"[^\x00-\x{10FFFF}]"}, "regex allows no token"),
        ({"ebnf": 'root ::= "a'}, "ebnf is refused: it is no GBNF: Unexpected end"),
        ({"ebnf": "root ::= missing"}, "ebnf is refused: it is no GBNF: Rule 'missing' not found"),
        ({"ebnf": 'x ::= "a"'}, "ebnf is refused: it is no GBNF: No 'root' rule"),
        ({"ebnf": 'root ::= ""'}, "ebnf allows no token"),
        ({"ebnf": "hello"}, "ebnf is refused"),
        ({"ebnf": "start: missing"}, "ebnf is refused: .*missing"),
    ],
    ids=repr,
)
def test_what_cannot_be_followed_is_refused_by_the_name_of_its_field(
    smollm2: Model, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s)^{match}"):
        smollm2.compile(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": "(((((a*)*)*)*)*)*b"},
        {"regex": "(?:a?){200}a{200}"},
        {"json_schema": {"type": "array", "minItems": 10**9}},
        {"json_schema": {"type": "string", "pattern": "(a|b)*c{1,100000}"}},
    ],
    ids=repr,
)
def test_large_grammars_are_small_work(smollm2: Model, fields: dict[str, Any]) -> None:
    constraint = smollm2.compile(**fields)
    rng = random.Random(0)
    for _ in range(20):
        if not constraint.finished:
            constraint.accept(rng.choice(sorted(set(smollm2.allowed(constraint)) - smollm2.stop_ids)))
    assert constraint.error is None


def test_without_a_grammar_there_is_no_constraint(smollm2: Model) -> None:
    assert smollm2.grammars.compile(SamplingParams(), ()) is None


def test_a_tokenizer_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="structured output does not work with this model's tokenizer"):
        Grammars("{}", 5, 10)


def test_what_one_namespace_has_compiled_does_not_hasten_another(tiny: Model) -> None:
    def num_compiled(namespace: str | None) -> int:
        before = tiny.grammars._compiled.cache_info().misses
        tiny.grammars.compile(SamplingParams(regex="[ab]{7}"), tiny.stop_ids, namespace)
        return tiny.grammars._compiled.cache_info().misses - before

    assert [num_compiled(namespace) for namespace in ("a", "a", "b", None, "b")] == [1, 0, 1, 1, 0]
