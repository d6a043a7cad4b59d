"""Grammars: a cursor over a matcher, and both libraries behind it where they are installed."""

import gc
import json
import random
import weakref

import pytest
import torch

from scripted import ToyTokenizer
from specloop import grammar
from specloop.errors import OptionError
from specloop.grammar import Cursor, Guidance, XGrammar, make_matcher, parse
from specloop.options import check_request
from specloop.processors import NEVER, Allowed, Processor, make_processor

PIECES = ["", "0", "1", "2", "a", "b", "12", "x1", "<end>", "{", "}", '"', ":", " ", "}}"]
EOS, V, PROMPT = [0, 8], len(PIECES), [5, 5]


@pytest.mark.parametrize(
    "given, kind, text",
    [
        ("json", "json", '{"type": "object"}'),
        ({"type": "integer"}, "json", '{"type": "integer"}'),
        (' {"type": "integer"}', "json", '{"type": "integer"}'),
        ("regex:a:b", "regex", "a:b"),
        ("lark:start: /a/", "lark", "start: /a/"),
        ("ebnf:root ::= a", "ebnf", "root ::= a"),
    ],
)
def test_what_a_grammar_may_be(given, kind, text):
    assert parse(given) == (kind, text) and check_request(grammar=given).grammar == given


@pytest.mark.parametrize("given", ["", "a+", "regex:", "yaml:a", "{", {"a": {1}}, {"a": print}, 7, [], True])
def test_what_is_no_grammar(given):
    with pytest.raises(OptionError, match=r"^grammar: expected "):
        check_request(grammar=given)


# ---- the cursor ------------------------------------------------------------------------------------------------------


class Digits:
    """[0-2]{3}, strict: never asked at its end, never told more than it forbids, never taken back too far."""

    def __init__(self):
        self.taken, self.moves = [], 0

    def forward(self, token):
        self.moves += 1
        assert len(self.taken) < 3, "moved on behind the end"
        if token not in (1, 2, 3):
            return False
        self.taken.append(token)
        return True

    def back(self, count):
        assert 0 < count <= len(self.taken)
        del self.taken[len(self.taken) - count :]

    def mask(self):
        if len(self.taken) == 3:
            return None
        mask = torch.zeros(V, dtype=torch.bool)
        mask[1:4] = True
        return mask


def digits():
    matcher = Digits()
    return matcher, Processor([Allowed(Cursor(matcher, len(PROMPT), V, EOS).allowed, V, EOS, name="grammar")])


def permitted(processor, answer, drafts=(), parents=None):
    """By row, the ids that may follow; None for a row that was left as it is."""
    rows = torch.zeros(len(drafts) + 1, V)
    processor.rows(rows, PROMPT + list(answer), list(drafts), parents)
    return [None if (row == 0).all() else (row > NEVER).nonzero().flatten().tolist() for row in rows]


def test_three_digits_and_the_end():
    matcher, made = digits()
    some, end = [1, 2, 3], [0, 8]
    assert permitted(made, [], [4, 1]) == [some, None, None]  # a letter
    assert permitted(made, [], [1, 2, 3, 1, 2]) == [some, some, some, end, None, None]  # a fourth digit
    assert permitted(made, [1], [2, 3, 0, 1]) == [some, some, end, None, None]  # beyond the end
    assert permitted(made, [1], [0, 1]) == [some, None, None]  # an end too soon
    assert permitted(made, [1, 2, 3]) == [end]
    assert permitted(made, [2]) == [some]  # another text altogether
    assert matcher.taken == [2]


def test_a_tree_of_drafts():
    _, made = digits()
    found = permitted(made, [1], [2, 3, 1, 2, 8, 4], [-1, 0, -1, 2, 3, 1])
    assert found == [[1, 2, 3], [1, 2, 3], [0, 8], [1, 2, 3], [0, 8], None, None]


def test_it_moves_only_where_texts_part():
    matcher, made = digits()
    permitted(made, [], [1, 2, 3])
    assert matcher.moves == 3
    permitted(made, [1, 2], [1])  # two stay
    assert matcher.moves == 4 and matcher.taken == [1, 2, 1]


def test_an_answer_that_the_grammar_does_not_know():
    matcher, made = digits()
    with pytest.raises(OptionError, match="grammar: token 4 can't follow 1 others"):
        permitted(made, [1, 4, 1])
    assert permitted(made, [1, 1]) == [[1, 2, 3]] and matcher.taken == [1, 1]


def test_a_matcher_that_fails_is_named_in_one_line():
    matcher, made = digits()
    matcher.mask = lambda: (_ for _ in ()).throw(ValueError("NoExtensionBias\n<state>\nTokens:"))
    with pytest.raises(OptionError, match=r"grammar: nothing can follow 2 ids of this answer: NoExtensionBias$"):
        permitted(made, [1, 2])


# ---- the libraries ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[Guidance, XGrammar], ids=lambda kind: kind.library)
def library(request, monkeypatch):
    """Only this one is there."""
    pytest.importorskip(request.param.library, reason=f"tests {request.param.library}, which is not installed")
    monkeypatch.setattr(grammar, "MATCHERS", (request.param,))
    return request.param


def made_of(text):
    return make_processor(check_request(grammar=text), len(PROMPT), V, EOS, ToyTokenizer(PIECES, EOS))


def test_digits_by_a_library(library):
    made = made_of("regex:[0-9]{3}")
    some, last, end = [1, 2, 3, 6], [1, 2, 3], [0, 8]
    assert permitted(made, [], [4, 1]) == [some, None, None]
    assert permitted(made, [], [1, 2, 3, 1, 2]) == [some, some, last, end, None, None]
    assert permitted(made, [1], [6, 0, 1]) == [some, end, None, None]
    assert permitted(made, [6, 1], [0]) == [end, None]
    assert permitted(made, [1], [2, 3, 6, 1, 8, 4], [-1, 0, -1, 2, 2, 1]) == [some, last, end, end, None, None, None]


def test_where_the_end_is_one_of_several_ways(library):
    made = made_of("regex:a(ba)*")
    assert permitted(made, [], [4, 5, 4, 0]) == [[4], [0, 5, 8], [4], [0, 5, 8], None]


def test_objects(library):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    made, answer = made_of(schema), []
    for seed in range(20):  # walks at random through what is allowed, and asks for nonsense on the way
        answer, chance = [], random.Random(seed)
        while len(answer) < 40:
            options = permitted(made, answer, [chance.randrange(V), chance.randrange(V)])[0]
            token = chance.choice([o for o in options if o not in EOS and PIECES[o] != " "] or EOS)
            if token in EOS:
                break
            answer.append(token)
        else:
            continue  # an integer of many digits
        found = json.loads("".join(PIECES[token] for token in answer))
        assert list(found) == ["a"] and isinstance(found["a"], int)
    assert answer


@pytest.mark.parametrize("text", ['ebnf:root ::= "a" ("b" | "1")', "lark:start: /a(b|1)/", "json"])
def test_other_kinds(library, text):
    if parse(text).kind not in library.kinds:
        with pytest.raises(OptionError, match="grammar: expected a library for 'lark'"):
            made_of(text)
    elif text == "json":
        assert permitted(made_of(text), []) == [[9]]
    else:
        assert permitted(made_of(text), [], [4, 5]) == [[4], [2, 5], [0, 8]]


@pytest.mark.parametrize("text", ["regex:[", {"type": "nonsense"}])
def test_what_a_library_refuses(library, text):
    with pytest.raises(OptionError, match=f"grammar: {library.library} refuses '.*': .*") as error:
        made_of(text)
    assert "\n" not in str(error.value)


def test_without_a_library(monkeypatch):
    monkeypatch.setattr(Guidance, "library", "no_such_module")
    monkeypatch.setattr(XGrammar, "library", "nor_this_one")
    with pytest.raises(
        OptionError, match=r"grammar: expected a library for 'regex' .*no no_such_module.*no nor_this_one"
    ):
        make_matcher("regex:a", V, EOS, ToyTokenizer(PIECES))


def test_a_model_without_an_end():
    with pytest.raises(OptionError, match="grammar: expected a model that can end a text"):
        make_matcher("json", V, [], ToyTokenizer(PIECES))


def test_a_tokenizer_that_nobody_has_any_more_goes(library):
    tokenizer = ToyTokenizer(PIECES, EOS)
    gone, size = weakref.ref(tokenizer), len(grammar._prepared)
    made = make_matcher("regex:a", V, EOS, tokenizer)
    assert made.mask().nonzero().flatten().tolist() == [4] and len(grammar._prepared) == size + 1
    del tokenizer, made
    gc.collect()
    assert gone() is None and len(grammar._prepared) <= size


def test_the_real_vocabulary(library, smollm2):
    from specloop.formats.gguf import GGUF
    from specloop.text.tokenizer import Tokenizer

    with GGUF.open(smollm2) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    size, eos = tokenizer.vocab_size, tokenizer.eos_ids
    made = make_processor(check_request(grammar="json"), 1, size, eos, tokenizer)
    text = tokenizer.encode('{"name": ["é🙂", 1.5e3, null]}', special=False)
    for cut in range(len(text)):
        row = torch.zeros(1, size)
        made.rows(row, [1, *text[:cut]], [])
        assert row[0, text[cut]] == 0 and 0 < (row == 0).sum() < size
        assert all(row[0, end] == NEVER for end in eos)
    row = torch.zeros(1, size)
    made.rows(row, [1, *text], [])
    assert all(row[0, end] == 0 for end in eos) and row[0, text[-2]] == NEVER


@pytest.mark.slow
def test_a_real_answer_is_what_it_is_without_drafts(library, smollm2):
    import specloop

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "legs": {"type": "integer", "maximum": 99}},
        "required": ["name", "legs"],
        "additionalProperties": False,
    }
    with specloop.load("smollm2", context=256) as pair:
        prompt = 'Describe a spider, like {"name": "horse", "legs": 4} and {"name": "duck", "legs": 2}.'
        options = {"grammar": schema, "max_new_tokens": 60, "repetition_penalty": 1.05}
        plain = pair.generate(prompt, draft="none", **options)
        assert set(json.loads(plain.text)) == {"name", "legs"} and plain.finish_reason == "stop"
        for k in (3, 8):
            found = pair.generate(prompt, draft="lookup", k=k, **options)
            assert found.tokens == plain.tokens and found.stats.speculation.accepted
