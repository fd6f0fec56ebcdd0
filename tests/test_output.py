"""Tokens of one request become text, and the token that ends it is recognised."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jradix.grammar import Grammars
from jradix.output import Output
from jradix.request import FinishReason, Request
from jradix.sampling_params import SamplingParams
from jradix.tokenizer import Tokenizer
from tests.test_request import make_request

TOKENS = ["</s>", "a", "b", "c", "ab", "Ã", "©"]  # the last two are the bytes of é
EOS, A, B, C, AB, FIRST_HALF, SECOND_HALF = range(7)


def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE({token: i for i, token in enumerate(TOKENS)}, [("a", "b")]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, bos_id=None, eos_ids=[EOS])


def request(max_new_tokens: int = 8, **params) -> Request:
    made = make_request()
    made.params = SamplingParams(max_new_tokens=max_new_tokens, **params)
    made.max_new_tokens, made.stop_ids = max_new_tokens, frozenset({EOS})
    return made


def end(output: Output, reason: FinishReason | None) -> dict:
    assert reason is not None
    output.request.finish_reason = reason
    output.finish()
    return output.as_dict()


def test_a_character_in_two_tokens_appears_when_it_is_whole() -> None:
    output = Output(request(4), tokenizer())
    texts = []
    for token in (A, FIRST_HALF, SECOND_HALF):
        assert output.append(token) is None
        texts.append(output.as_dict()["text"])
    assert texts == ["a", "a", "aé"]
    assert end(output, output.append(A))["text"] == "aéa"


def test_growth_is_what_the_result_says_until_there_is_an_end_to_tell() -> None:
    output = Output(request(stop_token_ids=[B]), tokenizer())
    output.request.stop_ids = frozenset({B})
    for count, token in enumerate((A, FIRST_HALF, SECOND_HALF)):
        assert output.append(token) is None
        state = output.as_dict(count)
        assert output.growth(count) == (state["text"], state["output_ids"]) == (state["text"], [token])
    reason = output.append(B)
    assert output.growth(3) == ("aé", []), "whether it is shown is decided at the end"
    end(output, reason)
    assert output.growth(3) is None


def test_the_token_that_ends_a_request_is_not_shown_before_the_end() -> None:
    """Whoever reads between the two must not see the text of a stop token, which is then cut."""
    output = Output(request(stop_token_ids=[B]), tokenizer())
    output.request.stop_ids = frozenset({B})
    assert output.append(A) is None
    reason = output.append(B)
    between = output.as_dict()
    assert (between["text"], between["output_ids"], between["meta_info"]["finish_reason"]) == ("a", [A], None)
    ended = end(output, reason)
    assert (ended["text"], ended["output_ids"]) == ("a", [A, B])


def test_half_a_character_at_the_end_comes_out_once() -> None:
    output = Output(request(2), tokenizer())
    output.append(A)
    reason = output.append(FIRST_HALF)
    assert reason == FinishReason("length", length=2)
    assert end(output, reason)["text"] == "a\ufffd"
    assert output.as_dict()["text"] == "a\ufffd"


def test_a_stop_string_across_tokens_is_cut_and_ends_the_request() -> None:
    output = Output(request(stop=["bc", "never"]), tokenizer())
    assert output.append(AB) is None
    assert output.as_dict()["text"] == "a", "a part of what may become the stop string is out already"
    reason = output.append(C)
    assert reason == FinishReason("stop", matched="bc")
    result = end(output, reason)
    assert (result["text"], result["output_ids"]) == ("a", [AB, C])


def test_a_stop_string_that_does_not_complete_comes_out() -> None:
    output = Output(request(2, stop="bcc"), tokenizer())
    output.append(AB)
    reason = output.append(C)
    assert end(output, reason)["text"] == "abc"


@pytest.mark.parametrize("minimum", [0, 1, 2])
def test_stop_ids_count_after_the_minimum_only_and_are_no_text(minimum: int) -> None:
    output = Output(request(min_new_tokens=minimum), tokenizer())
    assert output.append(A) is None
    reason = output.append(EOS)
    if minimum == 2:
        assert reason is None
    else:
        assert reason == FinishReason("stop", matched=EOS)
        assert end(output, reason)["text"] == "a"


def test_a_regular_expression_ends_the_request_like_a_stop_string() -> None:
    output = Output(request(stop_regex=["b[cd]"]), tokenizer())
    assert output.append(AB) is None
    assert output.as_dict()["text"] == "a"
    reason = output.append(C)
    assert reason == FinishReason("stop", matched="b[cd]")
    assert end(output, reason)["text"] == "a"


@pytest.mark.parametrize(
    ("params", "trimmed"),
    [
        ({"stop": "bc"}, "a"),
        ({"stop_regex": "b[cd]"}, "a"),
        ({"stop_token_ids": [C]}, "ab"),
        ({"stop": "bc", "stop_token_ids": [C]}, "ab"),  # the token ends the request before the string is whole
    ],
)
def test_what_ends_a_request_may_stay_in_the_text(params: dict, trimmed: str) -> None:
    for keep in (True, False):
        made = request(no_stop_trim=keep, **params)
        made.stop_ids |= set(params.get("stop_token_ids", ()))
        output = Output(made, tokenizer())
        assert output.append(AB) is None
        assert end(output, output.append(C))["text"] == ("abc" if keep else trimmed)


@pytest.mark.parametrize(("skip", "text"), [(True, "a"), (False, "a</s>")])
def test_a_special_stop_token_stays_only_where_special_tokens_do(skip: bool, text: str) -> None:
    output = Output(request(no_stop_trim=True, skip_special_tokens=skip), tokenizer())
    output.append(A)
    assert end(output, output.append(EOS))["text"] == text


def test_an_expression_that_takes_too_long_ends_the_request_and_leaves_its_text() -> None:
    output = Output(request(100, stop_regex="(?:a|aa)+c"), tokenizer())
    reasons = [output.append(A) for _ in range(60)]
    while reasons[-1] is None:
        reasons.append(output.append(A))
    result = end(output, reasons[-1])
    assert reasons[-1].type == "abort"
    assert result["text"] == "a" * len(result["output_ids"])


def constrained(regex: str, **params) -> Request:
    made = request(**params)
    grammars = Grammars(*tokenizer().to_json_with_end(), len(TOKENS))
    made.constraint = grammars.compile(SamplingParams(regex=regex), made.stop_ids)
    return made


def test_a_request_ends_where_its_grammar_does_whatever_its_least_number_of_tokens() -> None:
    for minimum in (0, 5):
        output = Output(constrained("abc", min_new_tokens=minimum), tokenizer())
        assert output.append(AB) is None
        reason = output.append(C)
        assert reason == FinishReason("stop")
        assert end(output, reason)["text"] == "abc"


def test_eos_ends_a_request_whose_output_is_complete_and_could_go_on() -> None:
    output = Output(constrained("a+"), tokenizer())
    assert [output.append(A), output.append(A)] == [None, None]
    assert output.append(EOS) == FinishReason("stop", matched=EOS)


def test_a_grammar_that_the_vocabulary_cannot_complete_aborts_the_request() -> None:
    output = Output(constrained("aé|aè"), tokenizer())  # the vocabulary has the second byte of é alone
    assert output.append(A) is None
    assert output.append(FIRST_HALF) is None
    assert output.append(SECOND_HALF) == FinishReason("stop")
    output = Output(constrained("aè"), tokenizer())
    reason = output.append(A)
    while reason is None:
        reason = output.append(FIRST_HALF)
    assert reason.type == "abort"
    assert "cannot follow its grammar" in str(reason.message)


def test_an_aborted_request_keeps_its_text_and_says_why() -> None:
    output = Output(request(), tokenizer())
    output.append(AB)
    result = end(output, FinishReason("abort", message="why"))
    assert result["text"] == "ab"
    assert result["meta_info"]["finish_reason"] == {"type": "abort", "message": "why"}
    assert result["meta_info"]["completion_tokens"] == 1


def test_without_a_tokenizer_there_are_ids_alone() -> None:
    output = Output(request(1), None)
    reason = output.append(A)
    result = end(output, reason)
    assert (result["text"], result["output_ids"]) == ("", [A])


def test_a_result_is_a_copy() -> None:
    output = Output(request(), tokenizer())
    output.append(A)
    result = output.as_dict()
    output.append(B)
    assert result["output_ids"] == [A]
