"""Text that a target writes for its draft: what is kept, and that each shard is a function of settings and number."""

import functools
from collections import Counter

import pytest
import torch

from scripted import reading
from specloop.errors import ModelError, ModelFault, OptionError
from specloop.models.base import one_by_one
from specloop.pair import Pair
from specloop.text.prompt import encode_messages
from specloop.train import generate
from specloop.train.corpus import TOP, Shard, shard_numbers, shard_path
from specloop.train.generate import Settings, generate_corpus, repetition
from specloop.train.manifest import read_manifest
from specloop.train.prompt_ids import PromptIds
from specloop.train.seeds import CATEGORIES, seed_prompts
from specloop.versions import Version
from tiny_llama import CONFIG, build
from versions import Vocabulary

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A random toy is sure of itself, and falls into loops unless it is heated.
HOT = ((0.0, 0.2), (1.5, 0.4), (3.0, 0.4))
SETTINGS = Settings(seed=5, texts=10, answer_tokens=40, prompt_tokens=120, made_up=0.0, temperatures=HOT)


@pytest.fixture(autouse=True, scope="module")
def drawn_once():
    """The prompts take a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "seed_prompts", functools.cache(seed_prompts))
        yield


class Chatty(Vocabulary):
    """Its end of a turn is the end of a text, as in many models."""

    def __init__(self):
        super().__init__()
        self.pieces[2], self.pieces[1] = b"<|im_end|>", b"<|im_start|>"
        self.control_tokens = ("<|im_start|>", "<|im_end|>")

    def decode(self, ids):
        return b"".join(self.pieces[id] for id in ids).decode()


def target(dtype="f32", template=None, **options):
    return Version(build(dtype, **options), Chatty() if template else Vocabulary(), template, "tiny")


def likely_to_end():
    """A chatty target that ends what it says after some ten ids at T = 1."""
    found = target(template=TEMPLATE, tied=False)
    head = found.model.weights.head
    head[2] = head[torch.randperm(len(head), generator=torch.Generator().manual_seed(1))[:12]].sum(0) * 0.4
    return found


def read(folder, number, **options):
    return Shard(shard_path(folder, number), CONFIG.hidden, CONFIG.vocab, **options)


def all_texts(folder):
    shards = [read(folder, number) for number in shard_numbers(folder)]
    return [shard.text(i) for shard in shards for i in range(shard.count)]


def data(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three shards without interruption, and what was said of them."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, generate_corpus(target(), folder, shards=3, settings=SETTINGS)


def test_killed_and_resumed_is_the_same_byte_for_byte(whole, tmp_path):
    class Killed(Exception):
        pass

    def tell(fraction):
        if fraction > 0.7:
            raise Killed

    with pytest.raises(Killed):
        generate_corpus(target(), tmp_path, shards=3, settings=SETTINGS, at_once=2, progress=tell)
    kept = shard_numbers(tmp_path)
    assert kept and len(kept) < 3
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in data(tmp_path)}
    told = []
    report = generate_corpus(target(), tmp_path, shards=3, settings=SETTINGS, at_once=5, progress=told.append)
    assert data(tmp_path) == data(whole[0])  # with other texts beside each
    assert all((tmp_path / name).stat().st_mtime_ns == then for name, then in before.items())
    assert report.kept < whole[1].kept and told[0] == 0 and told[-1] == 1 and told == sorted(told)
    assert generate_corpus(target(), tmp_path, shards=3, settings=SETTINGS).kept == 0  # nothing is missing


def test_what_was_thought_is_what_the_model_says(whole):
    """p(v) from features and lse is the softmax of the logits; every row is there, that of the last id, too."""
    model = target().model
    for text in all_texts(whole[0]):
        ids, cache = text.ids.tolist(), model.new_cache(256, features=True)
        logits = model.forward(ids, cache, last=len(ids))[text.prompt - 1 : -1].clone()
        assert torch.equal(text.features, cache.features[: len(ids)])
        assert torch.allclose(text.lse, logits.logsumexp(-1), atol=1e-5)
        p = (text.features[text.prompt - 1 : -1].float() @ model.weights.head.T - text.lse[:, None]).exp()
        assert (p - logits.softmax(-1)).abs().max() < 0.02  # features are bfloat16
        assert torch.allclose(p.sum(1), torch.ones(len(p)), atol=0.02)
        best = logits.log_softmax(-1).topk(TOP)
        assert torch.equal(text.top_ids, best.indices.int())
        assert torch.allclose(text.top_log_p.float(), best.values, atol=5e-3)


def test_answers_are_the_targets_and_the_prompts_come_first(whole):
    prompts, ids = seed_prompts(SETTINGS.seed), PromptIds(target())
    texts = all_texts(whole[0])
    assert len(texts) == whole[1].kept == len({text.seed for text in texts})
    assert sum(len(text.ids) for text in texts) == whole[1].tokens
    assert sum(text.answer for text in texts) == whole[1].answers
    for text in texts:
        assert text.ids[: text.prompt].tolist() == ids.of(prompts[text.seed])
        answer = text.ids[text.prompt :].tolist()
        assert 2 not in answer[:-1] and (len(answer) == 40 or answer[-1] == 2) and repetition(answer) <= 0.3
    manifest = read_manifest(whole[0])
    assert manifest["feature_size"] == CONFIG.hidden and manifest["seed"] == 5 and manifest["settings"]["texts"] == 10
    assert read(whole[0], 0, target=manifest["target"]).count


def test_answers_are_what_plain_decoding_says(whole):
    """At every temperature, with the text's own seed."""
    writer = generate._Writer(target(), SETTINGS)
    with Pair(lambda: (build("f32"), Vocabulary(), None), draft="none") as pair:
        for text in all_texts(whole[0]):
            key = generate._Draft(text.seed, writer).key
            options = {"temperature": text.temperature, "seed": key, "max_new_tokens": 40}
            said = pair.generate(text.ids[: text.prompt].tolist(), **options)
            assert said.tokens == text.ids[text.prompt :].tolist()
    assert {text.temperature for text in all_texts(whole[0])} == {1.5, 3.0}


def test_what_is_dropped(whole):
    """All that was begun is there or has a reason: a greedy toy falls into loops, and prompts may be too long."""
    report = whole[1]
    assert report.kept + sum(report.dropped.values()) == 30
    assert report.dropped["loop"] > 0 and report.dropped["prompt too long"] > 0
    prompts, ids = seed_prompts(SETTINGS.seed), PromptIds(target())
    kept = {text.seed for text in all_texts(whole[0])}
    for number in range(30):
        assert number not in kept or len(ids.of(prompts[number])) <= 120
    assert sum(len(ids.of(prompt)) > 120 for prompt in prompts[:30]) == report.dropped["prompt too long"]


def test_repetition():
    assert repetition([1, 2, 3]) == 0 and repetition(list(range(50))) == 0
    assert repetition([7] * 13) == pytest.approx(0.9)
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(0.2)  # of five grams the last is the first again


def test_temperatures_and_made_up_prompts_have_their_shares():
    writer = generate._Writer(target(template=TEMPLATE), Settings(made_up=0.25, answer_tokens=8))
    drafts = [generate._Draft(number, writer) for number in range(300)]
    found = Counter(draft._temperature for draft in drafts)
    for temperature, share in Settings.temperatures:
        assert found[temperature] / 300 == pytest.approx(share, abs=0.08)
    assert sum(draft.seed == -1 for draft in drafts) / 300 == pytest.approx(0.25, abs=0.08)
    assert len({draft.key for draft in drafts}) == 300


def test_prompts_that_the_target_makes_up(tmp_path):
    made = likely_to_end()
    greedy = ((0.0, 1.0),)  # answers
    settings = Settings(texts=24, answer_tokens=16, made_up=1.0, made_up_tokens=30, temperatures=greedy)
    report = generate_corpus(made, tmp_path, shards=1, settings=settings)
    opening, closing = (
        made.tokenizer.encode("<|im_start|>user\n"),
        made.tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n"),
    )
    assert report.kept >= 4
    for text in all_texts(tmp_path):
        prompt = text.ids[: text.prompt].tolist()
        assert text.seed == -1 and prompt[: len(opening)] == opening and prompt[-len(closing) :] == closing
        drawn = prompt[len(opening) : -len(closing)]
        assert 0 < len(drawn) <= 30 and 2 not in drawn
    firsts = [text.ids[len(opening)].item() for text in all_texts(tmp_path)]
    assert len(set(firsts)) > 1  # at temperature 1, whatever the answer's
    with pytest.raises(OptionError, match="made_up: expected 0 for a target without a chat template"):
        generate_corpus(target(), tmp_path / "plain", shards=1, settings=settings)


def test_prompts_in_a_template_are_what_messages_give():
    ids, tokenizer = PromptIds(target(template=TEMPLATE)), Chatty()
    prompts = seed_prompts()
    short = [prompt for prompt in prompts if sum(map(len, prompt.turns)) < 150]
    chosen = [next(p for p in short if p.category == category) for category in CATEGORIES[:4]]
    chosen.append(next(p for p in short if len(p.turns) == 3))
    for prompt in chosen:
        assert ids.of(prompt) == encode_messages(TEMPLATE, prompt.messages, tokenizer)
    doubling = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    ids = PromptIds(target(template=doubling))
    assert ids.of(chosen[0]) == encode_messages(doubling, chosen[0].messages, tokenizer)
    with pytest.raises(OptionError, match="made_up"):
        ids.check_made_up()


class Limited:
    """A model whose memory has room for so many caches."""

    def __init__(self, model, most):
        self._model, self._most, self.caches = model, most, []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def new_cache(self, *args, **options):
        import weakref

        self.caches = [cache for cache in self.caches if cache() is not None]
        if len(self.caches) >= self._most:
            raise MemoryError("no room")
        cache = self._model.new_cache(*args, **options)
        self.caches.append(weakref.ref(cache))
        return cache


def test_little_memory_takes_longer_and_changes_nothing(whole, tmp_path):
    little = target()
    little.model = Limited(little.model, 2)
    generate_corpus(little, tmp_path, shards=1, settings=SETTINGS)
    assert data(tmp_path)["shard-00000.safetensors"] == data(whole[0])["shard-00000.safetensors"]
    little.model = Limited(little.model, 0)
    with pytest.raises(MemoryError):
        generate_corpus(little, tmp_path, shards=2, settings=SETTINGS)


def test_a_model_that_takes_requests_one_by_one(whole, tmp_path):
    class Single(Limited):
        forward_parts = None

        def __init__(self, model):
            super().__init__(model, 10**6)
            self.forward_parts = lambda parts: one_by_one(model, parts)

    alone = target()
    alone.model = Single(alone.model)
    generate_corpus(alone, tmp_path, shards=1, settings=SETTINGS)
    assert data(tmp_path)["shard-00000.safetensors"] == data(whole[0])["shard-00000.safetensors"]


def test_int8_as_it_is_served(tmp_path):
    served = target("int8")
    settings = Settings(texts=6, answer_tokens=20, made_up=0.0, temperatures=((0.0, 1.0), (1.0, 1.0)))
    generate_corpus(served, tmp_path, shards=1, settings=settings)
    greedy = 0
    for text in all_texts(tmp_path):
        ids = text.ids.tolist()
        cache = served.model.new_cache(256, features=True)
        logits = served.model.forward(ids, cache, last=len(ids))[text.prompt - 1 : -1]
        assert torch.allclose(text.lse, logits.logsumexp(-1), atol=1e-5)
        assert torch.equal(text.features, cache.features[: len(ids)])
        if text.temperature == 0:
            greedy += 1
            assert torch.equal(text.ids[text.prompt :], logits.argmax(-1).int())
    assert 0 < greedy < 6


def test_targets_that_can_not(tmp_path):
    blind = Version(reading([1, 2], vocab_size=20), None, None)
    with pytest.raises(ModelError, match="expected a model that gives its hidden states, got scripted"):
        generate_corpus(blind, tmp_path, shards=1)
    unnamed = target()
    del unnamed.tokenizer.fingerprint
    with pytest.raises(ModelError, match="with fingerprints"):
        generate_corpus(unnamed, tmp_path, shards=1, settings=SETTINGS)
    broken = target()
    broken.model.weights.norm.fill_(torch.nan)
    with pytest.raises(ModelFault, match=r"text \d+: no id has a probability"):
        generate_corpus(broken, tmp_path, shards=1, settings=SETTINGS)
    assert shard_numbers(tmp_path) == []


def test_nothing_that_can_be_kept(tmp_path):
    with pytest.raises(ModelError, match=r"shard 0: none of 6 texts can be kept: 6 prompt too long"):
        generate_corpus(target(), tmp_path, shards=1, settings=Settings(texts=6, prompt_tokens=2, made_up=0.0))
    assert shard_numbers(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": 0}, "texts: expected an integer >= 1, got 0"),
        ({"made_up": 1.5}, "made_up: expected a number from 0 to 1"),
        ({"temperatures": ((-1.0, 1.0),)}, "temperatures: expected pairs"),
        ({"temperatures": ((1.0, 0.0),)}, "temperatures: expected pairs"),
        ({"answer_tokens": 256}, "answer_tokens: expected less than the target's context of 256"),
    ],
)
def test_settings_that_can_not_be(tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        generate_corpus(target(), tmp_path, shards=1, settings=Settings(**{"made_up": 0.0, **options}))
    with pytest.raises(OptionError, match="shards: expected an integer >= 1"):
        generate_corpus(target(), tmp_path, shards=0, settings=SETTINGS)


def test_training_has_a_corpus_written_where_shards_are_missing(tmp_path, monkeypatch):
    from specloop.train import run

    def loaded(name, **options):
        assert name == "tiny" and options["context"] == 160
        return build("f32", context=options["context"]), Vocabulary(), None

    monkeypatch.setattr(run, "load_model", loaded)
    monkeypatch.setattr(run, "SHARDS", 1)
    folder, write = tmp_path / "new", functools.partial(run.write_corpus, target="tiny", device="cpu")
    assert write(folder, SETTINGS, shards=None).kept and shard_numbers(folder) == [0]
    assert write(folder, SETTINGS, shards=None) is None and write(folder, SETTINGS, shards=1) is None
    assert write(folder, SETTINGS, shards=2).kept and shard_numbers(folder) == [0, 1]


def test_a_folder_with_another_corpus(whole):
    with pytest.raises(OptionError, match="holds another corpus: target"):
        generate_corpus(target(seed=1), whole[0], shards=3, settings=SETTINGS)
    with pytest.raises(OptionError, match=r"holds another corpus: settings.answer_tokens: it has 40, asked for 30"):
        generate_corpus(target(), whole[0], shards=3, settings=Settings(**{**vars(SETTINGS), "answer_tokens": 30}))
