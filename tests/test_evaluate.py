"""``specloop evaluate``: its numbers are those of the loop's statistics, counted again here, round by round."""

import json
import math
import random
import statistics
import time

import pytest

import specloop.pair
from loop_laws import rows
from scripted import Scripted, ToyTokenizer, law
from specloop import cells, cli, evaluate
from specloop.drafts.lookup import LookupDraft
from specloop.errors import ModelError, OptionError, OutOfMemory
from specloop.evaluation_table import table
from specloop.pair import Pair
from test_feature_draft import pair_with
from tiny_drafts import write
from tiny_llama import build
from versions import parts

PROMPTS = [
    {"category": "first", "turns": ["abcabcabcabc"]},
    {"category": "first", "turns": ["hello hello", "and again, hello"]},
    {"category": "second", "turns": ["x = x + 1\nx = x +"]},
]


@pytest.fixture
def model_draft(tmp_path):
    """A pair and the name of a draft model for it, which exists as a path and is built by a function."""
    name = tmp_path / "small"
    name.mkdir()
    with Pair(parts(1), draft="lookup", opened=lambda *_, **__: parts(4)()) as pair:
        yield pair, str(name)


def watch(pair, monkeypatch):
    """All (options, result) that the pair generates, in order; the first call of each side left out."""
    calls, generate = [], pair.generate

    def spied(prompt, **options):
        result = generate(prompt, **options)
        if options["max_new_tokens"] > 1:
            calls.append((prompt, options, result))
        return result

    monkeypatch.setattr(evaluate, "WARM_UP", 1)
    monkeypatch.setattr(pair, "generate", spied)
    return calls


def rounds(results):
    """(proposed, accepted) of each."""
    counts = [result.stats.speculation for result in results]
    return [pair for c in counts for pair in zip(c.k_history, c.accepted_history, strict=True)]


def by_hand(trios):
    """The figures of a cell; ``trios``: of lists of results."""
    rate = lambda side: sum(len(r.tokens) for r in side) / sum(r.stats.timing.decode_seconds for r in side)
    drafted = [result for trio in trios for result in trio[1]]
    happened, tokens = rounds(drafted), sum(len(r.tokens) for r in drafted)
    evaluated = [sum(k > j and a >= j for k, a in happened) for j in range(max(k for k, _ in happened))]
    accepted = [sum(a > j for _, a in happened) for j in range(len(evaluated))]
    evaluated = [n for n in evaluated if n]
    ms = lambda name: 1e3 * sum(getattr(r.stats.speculation, name) or 0.0 for r in drafted) / len(happened)
    plain = [result for trio in trios for result in trio[0]]
    return {
        "pairs": len(trios),
        "speedup": statistics.median(rate(trio[1]) / rate(trio[0]) for trio in trios),
        "noise": statistics.median(rate(trio[2]) / rate(trio[0]) for trio in trios),
        "speedup_of_sums": rate(drafted) / rate(plain),
        "plain_tokens_per_second": statistics.median(rate(trio[0]) for trio in trios),
        "tokens_per_second": statistics.median(rate(trio[1]) for trio in trios),
        "plain_ms_per_token": 1e3 / rate(plain),
        "round_ms": 1e3 * tokens / rate(drafted) / len(happened),
        "draft_ms": ms("draft_seconds"),
        "verify_ms": ms("verify_seconds"),
        "tokens_per_pass": tokens / len(happened),
        "acceptance_rate": sum(accepted) / sum(evaluated) if evaluated else None,
        "per_position": [a / n for a, n in zip(accepted, evaluated, strict=False)],
    }


def test_every_figure_is_that_of_the_statistics(model_draft, monkeypatch):
    pair, name = model_draft
    calls = watch(pair, monkeypatch)
    given = {"drafts": [name, "lookup"], "ks": [2, "auto"], "temperatures": [0, 1], "repetition_penalties": [1, 1.3]}
    plan = evaluate.check_plan(**given, pairs=2, max_new_tokens=12, seed=5)
    report = evaluate.run(pair, PROMPTS, plan)
    found = {(c["draft"], c["k"], c["temperature"], c["repetition_penalty"], c["category"]): c for c in report["cells"]}
    assert len(found) == len(report["cells"]) == 2 * 2 * 2 * 2 * 3
    todo = iter(calls)
    for draft in (name, "lookup"):
        for temperature in (0, 1):
            for penalty in (1, 1.3):
                trios = {(k, c): [] for k in (2, "auto") for c in ("first", "second", "all")}
                for category, lengths in (("first", [1, 2]), ("second", [1, 1])):
                    for i, turns in enumerate(lengths):
                        said = {}
                        for side in (["plain", 2, "auto", "again"] * 2)[i : i + 4]:
                            said[side] = [next(todo) for _ in range(turns)]
                            for _, options, result in said[side]:
                                assert options["seed"] == 5 + i and options["max_new_tokens"] == 12
                                assert options["temperature"] == temperature
                                assert options["repetition_penalty"] == penalty
                                asked = {"draft": "none"} if side in ("plain", "again") else {"k": side}
                                assert asked.items() <= options.items() and ("k" in options) == ("k" in asked)
                                model = result.stats.speculation.by_source.get("model")
                                assert model is None or (draft == name and side in (2, "auto"))
                        for k in (2, "auto"):
                            three = [[call[2] for call in said[side]] for side in ("plain", k, "again")]
                            for where in (category, "all"):
                                trios[k, where].append(three)
                for (k, category), some in trios.items():
                    cell = found[draft, k, temperature, penalty, category]
                    for figure, value in by_hand(some).items():
                        assert cell[figure] == pytest.approx(value, rel=1e-9), figure
                    assert cell["same_tokens"] is (True if temperature == 0 else None)
                    assert cell["speedup_interval"][0] <= cell["speedup"] <= cell["speedup_interval"][1]
                    assert len(cell["speedups"]) == len(cell["noises"]) == len(some)
    assert next(todo, None) is None
    drafted = [c for c in report["cells"] if c["draft"] == name and c["k"] == 2]
    assert all(c["speculation"]["by_source"]["model"]["proposed"] and len(c["per_position"]) == 2 for c in drafted)
    assert [d["draft"] for d in report["drafts"]] == [name, "lookup"] == [d["loaded"] for d in report["drafts"]]
    assert report["drafts"][0]["ms_per_row"] > 0 and report["drafts"][1]["ms_per_row"] is None


def test_a_draft_that_reads_hidden_states(tmp_path, monkeypatch):
    monkeypatch.setattr(LookupDraft, "outlook", lambda self: (0, 0))
    head = str(tmp_path / "head.safetensors")
    write(head, build(seed=1))
    plan = evaluate.check_plan(drafts=[head, "none"], ks=[2], repetition_penalties=[1], pairs=1, max_new_tokens=12)
    with pair_with("lookup") as pair:
        report = evaluate.run(pair, PROMPTS, plan)
        share = report["drafts"][0]["share_of_target"]
        assert 0 < share == report["drafts"][0]["bytes"] / pair.model.weights_nbytes < 1
    assert [(d["loaded"], d["path"]) for d in report["drafts"]] == [(head, head), ("none", None)]
    for c in report["cells"]:
        assert set(c["speculation"]["by_source"]) == ({"feature"} if c["draft"] == head else set())
        assert c["same_tokens"] in ((True,) if c["temperature"] == 0 else (None,))
        assert len(c["per_position"]) == 0 if c["draft"] == "none" else c["draft_ms"] > 0
    (line,) = (line for line in table(report).splitlines() if line.startswith("draft /"))
    assert line.startswith(f"draft {head}: {head}, ") and line.endswith(f"{100 * share:.1f} % of the target's weights")


def test_a_second_turn_is_told_of_the_first_answer(model_draft, monkeypatch):
    pair, _ = model_draft
    calls = watch(pair, monkeypatch)
    first, second = evaluate.converse(pair, ["ab", "cd"], max_new_tokens=6)
    assert first.tokens and [prompt for prompt, _, _ in calls] == ["ab", f"ab\n\n{first.text}\n\ncd"]
    assert second.stats.prompt_tokens > first.stats.prompt_tokens
    monkeypatch.setattr(type(pair), "chat_template", "{{ messages }}")
    monkeypatch.setattr(pair, "generate", lambda prompt, **_: said.append(list(prompt)) or first)
    said = []
    evaluate.converse(pair, ["ab", "cd"])
    told = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": first.text}]
    assert said == [told[:1], [*told, {"role": "user", "content": "cd"}]]


def test_acceptance_is_the_overlap_of_the_two_laws(monkeypatch):
    """At T = 1 a draft is accepted with probability sum_v min(p, q), by the models' rows before it."""
    monkeypatch.setattr(LookupDraft, "outlook", lambda self: (0, 0))
    letters, target, draft = [chr(97 + i) for i in range(8)], rows(1.0, 8), rows(1.3, 8)
    tokenizer = ToyTokenizer(letters)
    made = {row: (Scripted(row, 8), tokenizer, None) for row in (target, draft)}
    with Pair(lambda: made[target], draft=lambda: made[draft]) as pair:
        options = {"max_new_tokens": 300, "temperature": 1.0, "k": 2, "max_fallbacks": 300}
        results = [evaluate.converse(pair, ["aba"], **options, seed=seed) for seed in range(10)]
    answers = [cells.Answers(some) for some in results]
    found = cells.cell([cells.Trio(some, some, some) for some in answers], greedy=False)
    overlaps = [[], []]
    for (result,) in results:
        ids, at = tokenizer.encode("aba") + result.tokens, 3
        for k, accepted in rounds([result]):
            for j in range(min(accepted + 1, k)):
                p, q = (law(row(ids[: at + j])) for row in (target, draft))
                overlaps[j].append(sum(map(min, p, q)))
            at += accepted + 1
    assert found["speculation"]["evaluated_at"] == [len(some) for some in overlaps] and len(overlaps[0]) > 1500
    for acceptance, some in zip(found["per_position"], overlaps, strict=True):
        deviation = math.sqrt(sum(p * (1 - p) for p in some)) / len(some)
        assert abs(acceptance - statistics.fmean(some)) < 3 * deviation < 0.06


@pytest.mark.parametrize("more", [{"drafts": ["none"]}, {"ks": [0]}, {"max_new_tokens": 0}, {"max_new_tokens": 1}])
def test_what_is_not_known_is_null(model_draft, more, tmp_path):
    """No draft, K = 0, and texts of no or one token, in which nothing is ever proposed."""
    given = {"drafts": ["lookup"], "ks": ["auto"], "max_new_tokens": 5} | more
    plan = evaluate.check_plan(**given, temperatures=[0], repetition_penalties=[1], pairs=1)
    report = evaluate.run(model_draft[0], PROMPTS[:1], plan)
    (cell,) = json.loads(json.dumps(report, allow_nan=False))["cells"]
    counts = cell["speculation"]
    assert cell["acceptance_rate"] is None and cell["per_position"] == [] and counts["accepted_of_proposed"] is None
    assert counts["proposed"] == counts["evaluated"] == counts["accepted"] == 0 and cell["same_tokens"] is True
    if not plan.max_new_tokens:
        unknown = ("speedup", "speedup_interval", "speedup_of_sums", "noise", "noise_interval", "tokens_per_second")
        unknown += ("plain_tokens_per_second", "plain_ms_per_token", "round_ms", "verify_ms", "tokens_per_pass")
        assert {cell[name] for name in unknown} == {None} and counts["mean_draft_length"] is None
    else:
        assert cell["speedup"] > 0 and cell["verify_ms"] > 0 and cell["tokens_per_pass"] == 1.0
        assert counts["mean_draft_length"] == 0.0 and counts["rounds_without_draft"] == counts["rounds"]
    assert (cell["draft_ms"] is None) == ("drafts" in more or "ks" in more or not plan.max_new_tokens)
    assert cell["k"] == (0 if {"drafts", "ks"} & set(more) else "auto")
    row = table(report).splitlines()[-1].split()
    assert row[:6] == [cell["draft"], str(cell["k"]), "0", "1", "first", "1"] and row[-1] == "yes" and "-" in row
    if not plan.max_new_tokens:  # nothing to show at all
        pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
        from specloop.plot import plot_evaluation

        plot_evaluation(report, str(tmp_path / "chart.png"))
        assert (tmp_path / "chart.png").stat().st_size > 5000


def test_a_draft_that_cant_be_loaded_is_told_of_at_once(model_draft, monkeypatch):
    pair, name = model_draft
    calls = watch(pair, monkeypatch)

    def broken(*_, **__):
        raise ModelError("draft: no model")

    monkeypatch.setattr(pair, "_opened", broken)
    with pytest.raises(ModelError, match="draft: no model"):
        evaluate.run(pair, PROMPTS, evaluate.check_plan(drafts=["lookup", name], pairs=1))
    assert calls == []


def test_a_draft_that_is_given_up_is_no_figure(model_draft, monkeypatch):
    pair, name = model_draft
    calls = watch(pair, monkeypatch)
    monkeypatch.setattr(evaluate, "cell", lambda *args, **more: pair._draft_is_gone() or cells.cell(*args, **more))
    plan = evaluate.check_plan(drafts=[name], ks=[2], temperatures=[0], repetition_penalties=[1], pairs=1)
    with pytest.raises(OutOfMemory, match="was given up for want of memory"):
        evaluate.run(pair, PROMPTS[:1], plan)
    assert calls


@pytest.mark.parametrize(
    "given, message",
    [
        ({"drafts": []}, "drafts: expected a list of at least one, got []"),
        ({"ks": "auto"}, "ks: expected a list of at least one, got 'auto'"),
        ({"drafts": ["no/such"]}, "draft: expected one of"),
        ({"ks": [3, -1]}, "k: expected 'auto' or an integer from 0"),
        ({"temperatures": [0, math.nan]}, "temperature: expected a finite number >= 0, got nan"),
        ({"repetition_penalties": [0]}, "repetition_penalty: expected a finite number > 0, got 0"),
        ({"pairs": 0}, "pairs: expected an integer >= 1, got 0"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected an integer >= 0, got -1"),
        ({"seed": 0.5}, "seed: expected an integer"),
        ({"seed": 2**63 - 3}, "seed: expected an integer"),
    ],
)
def test_a_plan_that_cant_be_is_refused(given, message):
    with pytest.raises(OptionError) as error:
        evaluate.check_plan(**given)
    assert str(error.value).startswith(message)


# ---- the command line ------------------------------------------------------------------------------------------------

PIECES = ["", "foo", " bar", "END", "a", "b", " ", "🙂"]
FEW = ("--temperature", "0", "--repetition-penalty", "1", "--max-new-tokens", "9")


def logits(ids):
    """Changes its mind every 7 ids; meanwhile it repeats itself."""
    chance = random.Random(f"{len(ids) // 7} {ids[-1]}")
    return [chance.gauss(0.0, 1.0) for _ in PIECES]


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs ``specloop evaluate`` on a scripted model: (exit code, stdout, stderr)."""
    loaded = []

    def load(target, draft="auto", progress=None, **settings):
        loaded.append((target, draft, settings))
        return Pair(lambda: (Scripted(logits, 8, context=4096), ToyTokenizer(PIECES), None), settings=settings)

    monkeypatch.setattr(specloop.pair, "load", load)

    def run(*arguments):
        code = cli.run(["evaluate", *arguments])
        return (code, *capsys.readouterr())

    run.loaded = loaded
    return run


CELL = {
    "draft", "k", "temperature", "repetition_penalty", "category", "pairs", "speedup", "speedup_interval",
    "speedup_of_sums", "noise", "noise_interval", "same_tokens", "plain_tokens_per_second", "tokens_per_second",
    "plain_ms_per_token", "round_ms", "draft_ms", "verify_ms", "tokens_per_pass", "acceptance_rate", "per_position",
    "speculation", "off_reasons", "speedups", "noises",
}  # fmt: skip


def test_json_is_one_object_of_a_known_form(command):
    code, out, err = command("--category", "chat", "--pairs", "2", "--max-new-tokens", "6", "--json", "--seed", "1")
    report = json.loads(out, parse_constant=pytest.fail)
    assert (code, err) == (0, "") and report["form"] == 1
    assert set(report) == {"form", "settings", "prompts", "backend", "row_costs_ms", "drafts", "cells"}
    settings = report["settings"]
    assert (settings["drafts"], settings["ks"], settings["pairs"], settings["seed"]) == (["auto"], ["auto", 3], 2, 1)
    assert report["prompts"] == {"chat": 15} and len(report["row_costs_ms"]) == 16
    wanted = [(k, t, p) for t in (0, 0.7, 1) for p in (1, 1.1) for k in ("auto", 3)]
    assert [(c["k"], c["temperature"], c["repetition_penalty"]) for c in report["cells"]] == wanted
    for cell in report["cells"]:
        assert set(cell) == CELL and cell["category"] == "chat" and cell["pairs"] == len(cell["speedups"]) == 2
        counts = cell["speculation"]
        assert counts["tokens"] == 6 * 3 == counts["rounds"] * cell["tokens_per_pass"]
        assert sum(counts["evaluated_at"]) == counts["evaluated"] and sum(counts["accepted_at"]) == counts["accepted"]
        assert cell["per_position"] == [a / n for a, n in zip(counts["accepted_at"], counts["evaluated_at"])]  # noqa: B905


def test_options_arrive(command):
    options = "--model x.gguf --dtype f32 --kv f16 --context 999 --threads 1 --memory-budget 90MB --device cpu"
    code, out, _ = command(*options.split(), *FEW, "--category", "code", "--pairs", "1", "--draft", "none", "--json")
    expected = {"dtype": "f32", "context": 999, "threads": 1, "kv": "f16", "device": "cpu", "memory_budget": "90MB"}
    assert code == 0 and command.loaded == [("x.gguf", "lookup", expected)]
    assert [(c["draft"], c["k"]) for c in json.loads(out)["cells"]] == [("none", 0)]


def test_quick_takes_three_prompts_of_each_category_once(command, monkeypatch):
    asked, converse = [], evaluate.converse

    def spied(pair, turns, **options):
        if options["max_new_tokens"] == 33:
            asked.append(tuple(turns))
        return converse(pair, turns, **options)

    monkeypatch.setattr(evaluate, "converse", spied)
    few = ("--temperature", "0", "--repetition-penalty", "1", "--max-new-tokens", "33")
    code, out, _ = command("--quick", "--k", "auto", *few)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 10 and "up to 33 tokens" in lines[0]
    assert "speed-up" in lines[1] and "by position" in lines[1]
    assert [line.split()[4:6] for line in lines[3:9]] == [[c, "3"] for c in evaluate_categories()]
    assert lines[-1].split()[4:6] == ["all", "18"] and lines[-1].endswith("yes")
    quick = [tuple(p["turns"]) for p in evaluate.evaluation_prompts(quick=True)]
    assert len(quick) == 18 and sorted(asked) == sorted(quick * 3)


def evaluate_categories():
    return list(dict.fromkeys(prompt["category"] for prompt in evaluate.evaluation_prompts()))


def test_other_ids_are_told_of(command, monkeypatch):
    """A decoder whose drafts change the text: in the table, on stderr, and in the exit code."""
    generate = Pair.generate

    def broken(pair, prompt, **options):
        result = generate(pair, prompt, **options)
        if options.get("draft") != "none":
            result.tokens[-1] ^= 1
        return result

    monkeypatch.setattr(Pair, "generate", broken)
    code, out, err = command(*FEW, "--category", "edit", "--category", "chat", "--pairs", "1", "--k", "2")
    assert code == 1 and [line.split()[-1] for line in out.splitlines()[3:]] == ["NO"] * 3
    assert (
        err
        == "specloop: greedy ids differ from plain decoding: auto, K 2, penalty 1, chat; auto, K 2, penalty 1, edit\n"
    )
    assert command("--temperature", "1", "--category", "chat", "--pairs", "1", "--max-new-tokens", "5")[0] == 0


def test_faults_are_counted(command, monkeypatch):
    def propose(self, k):
        raise RuntimeError("boom")

    monkeypatch.setattr(LookupDraft, "propose", propose)
    few = ("--category", "edit", "--category", "repeat", "--pairs", "1", "--k", "2", "--max-new-tokens", "20")
    code, out, _ = command(*FEW, *few, "--json")
    first, second, both = [c["speculation"]["fault_count"] for c in json.loads(out)["cells"]]
    assert code == 0 and first + second == both > 0
    assert command(*FEW, *few)[1].splitlines()[-1].startswith(f"{both} faults of drafts")


def test_a_slower_way_is_shown_like_any_other(command, monkeypatch):
    propose = LookupDraft.propose
    monkeypatch.setattr(LookupDraft, "propose", lambda self, k: time.sleep(0.01) or propose(self, k))
    code, out, _ = command(*FEW, "--category", "repeat", "--pairs", "3", "--k", "2", "--max-new-tokens", "30", "--json")
    (cell,) = json.loads(out)["cells"]
    assert code == 0 and 0 < cell["speedup"] < 0.9 and cell["draft_ms"] > 1 and cell["same_tokens"] is True
    assert cell["draft_ms"] + cell["verify_ms"] < cell["round_ms"]


@pytest.mark.parametrize("name", ["no/such/folder/chart.png", "chart.mp3"])
def test_a_chart_that_cant_be_written_is_refused_before_measuring(command, monkeypatch, tmp_path, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # as if matplotlib were installed
    code, out, err = command("--plot", str(tmp_path / name))
    assert code == 2 and out == "" and err.startswith("specloop: plot: expected") and not command.loaded


def test_the_chart(command, tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    few = ("--pairs", "1", "--max-new-tokens", "12", "--category", "edit", "--category", "chat", "--k", "2")
    drafts = ("--draft", "lookup", "--draft", "none")
    code, out, _ = command(*few, *drafts, "--repetition-penalty", "1", "--plot", str(tmp_path / "chart.svg"), "--json")
    drawn = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert code == 0 and len(json.loads(out)["cells"]) == 18
    for text in ("lookup, K 2", "none, K 0", "T 0.7, penalty 1", "tokens per pass", "edit", "chat"):
        assert f"<!-- {text} -->" in drawn, text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--draft", "no/such"],
        ["--k", "many"],
        ["--k", "3", "--k", "-1"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--temperature", "warm"],
        ["--repetition-penalty", "0"],
        ["--pairs", "0"],
        ["--pairs", "1.5"],
        ["--max-new-tokens", "-3"],
        ["--seed", "9223372036854775808"],
        ["--category", "poems"],
        ["chat"],
    ],
)
def test_errors_are_one_line_and_exit_code_2(command, arguments):
    code, out, err = command(*arguments)
    assert code == 2 and out == "" and err.startswith("specloop: ") and err.count("\n") == 1
    assert not command.loaded
