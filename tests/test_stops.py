"""Where a text ends: strings and regular expressions found in pieces of any size, against a search of the whole."""

import re
from collections.abc import Sequence

import regex
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jradix.stops import StopFinder


def end_of(text: str, strings: Sequence[str], expressions: Sequence[str], keep: bool) -> tuple[str, str | None]:
    """The oracle: reads the text letter by letter, and looks for everything in all that it has read."""
    for length in range(1, len(text) + 1):
        read = text[:length]
        found = [(length - len(stop), length, stop) for stop in strings if read.endswith(stop)]
        matches = [re.search(expression, read) for expression in expressions]
        found += [(match.start(), match.end(), match.re.pattern) for match in matches if match]
        if found:
            start, end, source = min(found)
            return read[: end if keep else start], source
    return text, None


def in_pieces(
    text: str, sizes: Sequence[int], strings: Sequence[str], expressions: Sequence[str], keep: bool
) -> tuple[str, str | None]:
    finder = StopFinder(strings, expressions, keep=keep)
    passed, position, turn = [], 0, 0
    while position < len(text) and finder.stopped is None:
        size = sizes[turn % len(sizes)]
        passed.append(finder.add(text[position : position + size]))
        position, turn = position + size, turn + 1
    passed.append(finder.finish())
    return "".join(passed), finder.stopped


LETTERS = st.text("abc\n語", max_size=24)
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=3)
STRINGS = st.lists(st.text("abc語", min_size=1, max_size=4), max_size=2)
ATOMS = ["a", "b", "c", "語", ".", "[ab]", "[^a]", r"\w", r"\s", "^", "$", r"\b", "(?m:^)", "(?<=a)", "(?<!b)", "(?=c)"]
ATOMS += ["(?!b)", "ab", "bc", "(?>a|ab)", "(?i:B)", r"\Z"]


@st.composite
def expressions(draw: st.DrawFn) -> str:
    """Concatenations and alternatives of atoms, some of them repeated, with anchors, looks around and a reference."""
    pieces = []
    for _ in range(draw(st.integers(1, 4))):
        atom = draw(st.sampled_from(ATOMS))
        is_assertion = atom[0] in "^$" or (atom.startswith("(?") and atom[2] in "=!<m") or atom in (r"\b", r"\Z")
        times = "" if is_assertion else draw(st.sampled_from(["", "", "+", "*", "?", "{2}", "+?", "*+"]))
        pieces.append(f"({atom}){times}" if draw(st.integers(0, 5)) == 0 else f"(?:{atom}){times}")
    expression = "".join(pieces)
    if draw(st.booleans()):
        expression = f"{expression}|{draw(st.sampled_from(['abc', 'ca', 'b語', '(a|b)c']))}"
    elif draw(st.integers(0, 3)) == 0:
        expression = rf"([abc]){expression}\1"
    return expression


@given(LETTERS, SIZES, STRINGS, st.lists(expressions(), max_size=2), st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_end_does_not_depend_on_the_pieces(
    text: str, sizes: list[int], strings: list[str], expressions: list[str], keep: bool
) -> None:
    assume(not any(re.search(expression, "") or regex.search(expression, "") for expression in expressions))
    assert in_pieces(text, sizes, strings, expressions, keep) == end_of(text, strings, expressions, keep)


def test_what_may_become_a_match_waits_and_comes_out_when_it_does_not() -> None:
    finder = StopFinder(expressions=[r"\n\d+\. "])
    assert [finder.add(piece) for piece in ("a", "\n", "1", "2", "x", "\n3")] == ["a", "", "", "", "\n12x", ""]
    assert (finder.finish(), finder.stopped) == ("\n3", None)


def test_the_match_that_is_complete_first_counts_and_not_the_one_that_begins_first() -> None:
    for sizes in ([1], [4]):
        assert in_pieces("xabc", sizes, [], ["abc|b"], False) == ("xa", "abc|b")
        assert in_pieces("xabc", sizes, ["abc"], ["b"], False) == ("xa", "b")
        assert in_pieces("xabc", sizes, ["abc"], ["bc"], False) == ("x", "abc")


def test_a_look_ahead_waits_for_what_it_looks_at() -> None:
    assert in_pieces("a foo bar foo!", [1], [], ["foo(?=!)"], False) == ("a foo bar ", "foo(?=!)")
    assert in_pieces("a foo bar foo!", [3], [], ["foo(?=!)"], True) == ("a foo bar foo", "foo(?=!)")


def test_what_stands_before_a_match_is_in_view_though_it_has_been_passed_on() -> None:
    assert in_pieces("bc abc", [1], [], ["(?<=ab)c"], False) == ("bc ab", "(?<=ab)c")
    assert in_pieces("b\nab", [1], [], ["^a"], False) == ("b\nab", None)


def test_an_expression_that_backtracks_without_end_is_given_up_and_the_text_goes_on() -> None:
    finder = StopFinder(["STOP"], ["(?:a|aa)+c"])
    passed = [finder.add(piece) for piece in ("x", "a" * 60, "b", "STOP", "c")]
    assert finder.error is not None
    assert "(?:a|aa)+c" in finder.error
    assert finder.stopped is None
    assert "".join(passed) + finder.finish() == "x" + "a" * 60 + "bSTOPc"


def test_long_texts_of_usual_expressions_never_spend_their_time() -> None:
    finder = StopFinder(expressions=[r"\nUser:", r"</?[a-z]+>", r"(?i)the end\b"])
    text = "".join(finder.add(f"word{number}, <b x and\nUs") for number in range(2000))
    assert finder.error is None
    assert text + finder.finish() == "".join(f"word{number}, <b x and\nUs" for number in range(2000))
