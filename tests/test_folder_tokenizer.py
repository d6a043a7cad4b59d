"""tokenizer.json: the ids are the library's, control tokens are parsed when asked for, texts come back."""

import json
import threading

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

import library_bpe
import tiny_folders
from specloop.errors import FormatError, ModelError, PromptError
from specloop.formats.gguf import GGUF
from specloop.text.folder_tokenizer import FolderTokenizer
from specloop.text.prompt import encode_messages
from specloop.text.tokenizer import StreamDecoder, Tokenizer

KINDS = {"byte level": tiny_folders.byte_level, "sentencepiece": tiny_folders.sentencepiece}
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\t\ttabs \n\n lines \r\n end  ",
    "Grüße — 日本語, мир, 👩‍👩‍👧 e\u0301",
    "\x00\x01\x7f 1234567890",
    "<|im_start|>user<|im_end|> <s>a</s> <tool>b",
    "<|im_start| > <unk> <0x41>",
]


def data(library, **more):
    return {"kind": "huggingface", "tokenizer": library.to_str(), "vocab_size": 512, **more}


@pytest.fixture(scope="module", params=KINDS)
def both(request):
    library = KINDS[request.param]()
    return library, FolderTokenizer.from_data(data(library))


def space(tokenizer):
    """What a text gets in front of it: SentencePiece's space, which decoding keeps."""
    return b" " if tokenizer.decode(tokenizer.encode("a")) == " a" else b""


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_librarys(both, text):
    library, tokenizer = both
    library.encode_special_tokens = False
    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
    library.encode_special_tokens = True
    assert tokenizer.encode(text, special=False) == library.encode(text, add_special_tokens=False).ids


@given(st.text(st.one_of(st.sampled_from("ab <|im_start|></s>\n"), st.characters(exclude_categories=["Cs"]))))
def test_texts_come_back(both, text):
    _, tokenizer = both
    for special in (True, False):
        ids = tokenizer.encode(text, special=special)
        decoder = StreamDecoder(tokenizer)
        streamed = "".join([decoder.push(id) for id in ids]) + decoder.flush()
        assert streamed == tokenizer.decode(ids)
        if not special:  # a control token takes the spaces next to it away in some files
            assert streamed == ((space(tokenizer).decode() if text else "") + text)


def test_every_id_stands_for_something_or_nothing(both):
    library, tokenizer = both
    known = library.get_vocab_size()
    assert 300 < known < tokenizer.vocab_size == 512
    assert all(tokenizer.token_bytes(id) for id in range(known))
    assert not any(tokenizer.token_bytes(id) for id in range(known, 512))
    with pytest.raises(ValueError, match="expected 0 <= id < 512"):
        tokenizer.token_bytes(512)


def test_control_tokens_are_parsed_when_asked_for():
    tokenizer = FolderTokenizer.from_data(data(tiny_folders.byte_level()))
    assert set(tokenizer.control_tokens) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    text = "<|im_start|>a<tool>"
    with_control, without = tokenizer.encode(text), tokenizer.encode(text, special=False)
    assert with_control[0] == 1 and 1 not in without and with_control[-1] == without[-1]  # <tool> always is one
    assert tokenizer.decode(without) == text == tokenizer.decode(with_control)
    assert tokenizer.decode(with_control, special=False) == "a<tool>"


def test_no_merge_makes_a_control_token():
    """A vocabulary whose merges spell a control token: a text that may not mean it does not."""
    vocab = {c: i for i, c in enumerate("<s>")} | {"<s": 3, "<s>": 4}
    library = tokenizers.Tokenizer(models.BPE(vocab, [("<", "s"), ("<s", ">")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<s>"])
    tokenizer = FolderTokenizer.from_data(data(library))
    assert tokenizer.encode("<s>") == [4]
    assert 4 not in tokenizer.encode("<s>", special=False)


def test_sentencepiece_bytes_and_bos():
    library = tiny_folders.sentencepiece()
    tokenizer = FolderTokenizer.from_data(data(library, bos_token="<s>", eos_token="</s>"))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, 2, {2}, True)
    assert not FolderTokenizer.from_data(data(library, bos_token="<s>", add_bos_token=False)).add_bos
    ids = tokenizer.encode("🎉")
    assert [tokenizer.token_bytes(id) for id in ids[-4:]] == [bytes([b]) for b in "🎉".encode()]
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(id) for id in ids[-4:]] == ["", "", "", "🎉"]
    decoder.push(ids[-4])
    assert decoder.flush() == "\ufffd"
    assert library.decode(tokenizer.encode("The dog")) == "The dog"
    assert tokenizer.decode(tokenizer.encode("The dog")) == " The dog"  # goes on where a text ended


def test_ends():
    library = tiny_folders.byte_level()
    ends = lambda **more: FolderTokenizer.from_data(data(library, **more)).eos_ids
    assert ends() == {0, 2}  # <|endoftext|> and <|im_end|>, by their names
    assert ends(eos_ids=[7, 9]) == {0, 2, 7, 9}
    assert ends(eos_ids=-1) == ends(eos_ids=[]) == {0, 2}
    assert ends(eos_id=[11, 12]) == {0, 2, 11}
    with pytest.raises(FormatError, match="eos_token_id: expected an id"):
        ends(eos_ids="2")


def test_the_fingerprint_is_of_what_ids_mean():
    library, other = tiny_folders.byte_level(), tiny_folders.byte_level(399)
    mine = FolderTokenizer.from_data(data(library)).fingerprint
    assert mine == FolderTokenizer.from_data(data(library) | {"vocab_size": 640}).fingerprint
    assert mine != FolderTokenizer.from_data(data(other)).fingerprint
    assert mine != FolderTokenizer.from_data(data(library, eos_ids=[5])).fingerprint


def test_equals_the_same_vocabulary_from_gguf(smollm2):
    """SmolLM2's vocabulary as a tokenizer.json: same ids, same bytes, interchangeable with the GGUF's."""
    with GGUF.open(smollm2) as g:
        metadata = dict(g.metadata)
    gguf = Tokenizer.from_gguf(metadata)
    told = json.loads(library_bpe.of_metadata(metadata).to_str())
    told["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    library = tokenizers.Tokenizer.from_str(json.dumps(told))
    controls = sorted(gguf.control_tokens, key=lambda token: gguf.encode(token)[0])
    told["added_tokens"] = [
        {
            "id": gguf.encode(token)[0], "content": token, "special": True, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False,
        }
        for token in controls
    ]  # fmt: skip
    told["model"]["vocab"] |= {entry["content"]: entry["id"] for entry in told["added_tokens"]}
    library = tokenizers.Tokenizer.from_str(json.dumps(told))
    folder = FolderTokenizer.from_data(
        data(library) | {"vocab_size": 49152, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_id": 2}
    )
    for text in [*TEXTS, *tiny_folders.CORPUS]:
        for special in (True, False):
            assert folder.encode(text, special=special) == gguf.encode(text, special=special)
    assert folder.fingerprint == gguf.fingerprint


def test_chat_prompts_are_those_of_transformers(both):
    transformers = pytest.importorskip("transformers", reason="it is the authority on chat templates")
    library, tokenizer = both
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, chat_template=tiny_folders.CHAT)
    library.encode_special_tokens = False
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4. Überraschung!"}]
    want = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert encode_messages(tiny_folders.CHAT, messages, tokenizer) == list(want)


def test_several_threads():
    """Whether control tokens are parsed is a property of a call, also while another thread asks for the opposite."""
    tokenizer = FolderTokenizer.from_data(data(tiny_folders.byte_level()))
    text = "<|im_start|>a<|im_end|>"
    want = {special: tokenizer.encode(text, special=special) for special in (True, False)}
    wrong = []

    def run(special):
        for _ in range(300):
            if tokenizer.encode(text, special=special) != want[special]:
                wrong.append(special)

    threads = [threading.Thread(target=run, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tokens_without_a_row_are_left_out():
    library = tiny_folders.byte_level()
    library.add_special_tokens(["<pad>"])
    rows = library.get_vocab_size() - 1
    tokenizer = FolderTokenizer.from_data(data(library, pad_token="<pad>") | {"vocab_size": rows})
    assert tokenizer.encode("a<pad>b") == tokenizer.encode("a") + tokenizer.encode("b")
    assert tokenizer.pad_id is None and "<pad>" not in tokenizer.control_tokens


def test_limits_of_a_stored_tokenizer_do_not_apply():
    library = tiny_folders.byte_level()
    library.enable_truncation(3)
    library.enable_padding(length=9)
    tokenizer = FolderTokenizer.from_data(data(library))
    assert tokenizer.decode(tokenizer.encode("The quick brown fox jumps")) == "The quick brown fox jumps"


def test_refusals():
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    plain = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    small = tiny_folders.byte_level()
    cases = [
        (ModelError, "WordLevel is not supported", data(words)),
        (ModelError, "decoder None is not supported", data(plain)),
        (ModelError, "at most 300 tokens", data(small) | {"vocab_size": 300}),
        (FormatError, "vocab_size", data(small) | {"vocab_size": None}),
        (FormatError, "tokenizer.json: ", data(small) | {"tokenizer": small.to_str()[:-9]}),
        (FormatError, "tokenizer.json: ", data(small) | {"tokenizer": "{}"}),
        (FormatError, "expected a text", data(small) | {"tokenizer": None}),
    ]
    for error, message, given_data in cases:
        with pytest.raises(error, match=message):
            FolderTokenizer.from_data(given_data)
    tokenizer = FolderTokenizer.from_data(data(small))
    for text in (b"a", None, "\ud800"):
        with pytest.raises(PromptError):
            tokenizer.encode(text)
