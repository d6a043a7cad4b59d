"""The automatic draft length on texts of the real model, against every fixed one: within 5 % of the best of them.

SmolLM2's plain texts in five workloads (``bench/bench_controller.py --texts``) are played back: a lookup's guess is
accepted if it is what the text says, which for drafts without a distribution is the law at any temperature. Time is the
sum of given costs, so nothing here depends on the machine.
"""

import json
from pathlib import Path

import pytest

from specloop.controller import Auto, Fixed
from specloop.drafts.lookup import LookupDraft

TEXTS = json.loads((Path(__file__).parent / "data" / "draft_texts.json").read_text(encoding="ascii"))
COSTS = {
    "rows nearly free": [1.0, 1.06, 1.12, 1.18, 1.4, 1.5, 1.55, 1.6, 1.7],
    "rows dear": [1.0, 1.26, 1.32, 1.53, 1.58, 1.6, 1.74, 1.9, 1.93],
    "a dear second row": [1.0, 1.87, 1.9, 1.9, 1.95, 1.95, 2.0, 2.0, 2.0],  # general matrix products
    "long steps": [1.0, 1.02, 1.05, 1.08, 1.9, 1.9, 1.95, 2.0, 2.0],
}


def played(prompt, text, costs, controller):
    """What making the text costs."""
    draft, at, cost = LookupDraft(), 0, 0.0
    draft.begin(prompt)
    while at < len(text):
        strength, limit = draft.outlook()
        outlook = strength, min(limit, len(text) - at - 1)
        k = controller.choose(outlook)
        guesses = draft.propose(k) if k else []
        accepted = next((j for j in range(k) if guesses[j] != text[at + j]), k)
        controller.observe(outlook, k, accepted)
        draft.append(text[at : at + accepted + 1])
        at, cost = at + accepted + 1, cost + costs[k]
    return cost


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("workload", TEXTS)
def test_within_five_percent_of_the_best_fixed_length_and_of_plain(workload, costs):
    def total(controller):
        return sum(played(*text, costs, controller()) for text in TEXTS[workload])

    fixed = {k: total(lambda k=k: Fixed(k)) for k in (0, 1, 2, 3, 4, 6, 8)}
    automatic = total(lambda: Auto(costs))
    assert fixed[0] == sum(len(text) for _, text in TEXTS[workload])
    assert automatic <= 1.05 * min(fixed.values()), (automatic, fixed)
    assert fixed[0] >= 0.97 * automatic


def test_what_there_is_to_find():
    """The workloads are as different as they should be; otherwise the test above shows little."""
    costs = COSTS["rows nearly free"]
    speed = {
        name: sum(len(text) for _, text in texts) / sum(played(*text, costs, Fixed(4)) for text in texts)
        for name, texts in TEXTS.items()
    }
    assert speed["repeat and edit"] > 2.5 and 1.05 < speed["code"] < 1.5 and speed["random text"] < 1.02
