"""How many tokens to draft: the number that makes most tokens per second, by measured cost and measured acceptance.

A round of B requests with K_1..K_B drafts emits on average B + the sum of all drafts' survival (of draft j: r_1 .. r_j,
r_i being the acceptance of draft i given that those before it were accepted) and costs cost(B + K_1 + .. + K_B rows) +
the drafting. Survival falls along a draft, so the best n drafts are the n with the largest survival, and n is the
argmax of the ratio over *all* n: the cost has steps (a kernel that runs out of registers), on which climbing by one
gets stuck. One request is the case B = 1.

r_j is counted per *strength* s + j, s being the draft's own outlook (see drafts/base.py). A lookup that matched s ids
and sees j guesses accepted is a lookup that matched s + j ids: one row of counters serves all positions, and long
matches do not pay for short ones. A draft without strengths, a model, has plain counters per position: strength 0 is
its row, and the only one whose drafts cost time.

The decision uses only what is known before the tokens are drawn, so the output's law does not change. With costs given
it is also a function of the committed ids alone. Text that was drawn (temperature > 0) depends on K, so a request whose
seed has to make the same text again is ``steady``: its K comes from nominal costs, and from nobody else's drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .costs import CostCurve

K_MAX = 8
DECAY = 0.9  # of lookups: in play as good as 0.97 on even text, 5 % better on text that changes every 30 rounds
DECAY_BY_POSITION = 0.95  # of models, whose acceptance is the same all along: with a longer memory and a belief that
WEIGHT_BY_POSITION = 8.0  # weighs more, 5 % better in play at 0.4 per token, and half a percent worse at 0
SURPRISE = 0.002  # a run of equal outcomes that is less likely than this is another text's
MIN_SPEEDUP = 1.03  # below this, drafting is noise
FIRST_PAUSE, LONGEST_PAUSE = 8, 256  # rounds between probes while drafting does not pay
PROBE = 2
STREAK = 4  # rounds in which a match grew by an id each, without drafts: they would have been right
PRIOR_WEIGHT = 2.0
GOOD = 0.9  # acceptance per token of a draft that could hardly be better
CELLS = 12
SLOW, LEAST_SECONDS = 10, 1.0  # a pass is over its time limit at 10 times its cost, but not below a second


def cell(strength: int) -> int:
    """0..8 one by one, then by doublings: 9..15, 16..31, 32 and more."""
    return strength if strength < 9 else 9 if strength < 16 else 10 if strength < 32 else 11


def prior(strength: int) -> float:
    """A guess at acceptance before anything was counted: about what lookups of that length get in chat and code, and
    small models anywhere.
    """
    return strength / (strength + 1.5) if strength else 0.45


@dataclass(slots=True)
class Counter:
    """Acceptance as it was counted, the last 1 / (1 - ``decay``) or so, and as it is believed where there is little.

    ``most``: what the belief weighs in the beginning, in trials. What was counted before a run of hits, or of misses,
    that could hardly come of it is forgotten.
    """

    decay: float = DECAY
    most: float = PRIOR_WEIGHT
    hits: float = 0.0
    trials: float = 0.0
    weight: float = field(init=False)  # of the belief
    run: int = 0  # the last so many were hits; negative: misses

    def __post_init__(self):
        self.weight = self.most

    def observe(self, hit: bool) -> None:
        usual = (self.hits + 1) / (self.trials + 2)
        self.run = max(self.run, 0) + 1 if hit else min(self.run, 0) - 1
        if (usual if hit else 1 - usual) ** abs(self.run) < SURPRISE:
            self.hits, self.trials = max(self.run, 0), abs(self.run)
        else:
            self.hits = self.hits * self.decay + hit
            self.trials = self.trials * self.decay + 1
        self.weight *= self.decay  # or what never hits would be drafted forever

    def fade(self) -> None:
        """What was counted long ago weighs less than what is believed."""
        self.hits *= self.decay
        self.trials *= self.decay
        self.weight += (self.most - self.weight) * (1 - self.decay)

    def rate(self, belief: float) -> float:
        return (self.hits + self.weight * belief) / (self.trials + self.weight)


class TimeLimit:
    """Passes with drafts that take too long are followed by rounds without: 8, then 16, ... 256 of them.

    ``seconds``: the limit; None = 10 times what such a pass was measured to take (without measurements: the shortest
    pass so far), and at least one second.
    """

    def __init__(self, seconds: float | None, costs: CostCurve | None):
        self.limit, self.costs = seconds, costs
        self.shortest: float | None = None
        self.rest, self.pause = 0, FIRST_PAUSE
        self.reason: str | None = None

    def resting(self) -> bool:
        return self.rest > 0

    def observe(self, proposed: int, seconds: float | None, rows: int | None) -> None:
        if self.rest:
            self.rest -= 1
        if seconds is None or rows is None:
            return
        limit = self.limit
        if limit is None:
            usual = self.shortest if self.costs is None else self.costs.measured_seconds(rows)
            self.shortest = seconds if self.shortest is None else min(self.shortest, seconds)
            if usual is None:
                return
            limit = max(SLOW * usual, LEAST_SECONDS)
        if not proposed:
            return
        if seconds > limit:
            self.rest, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
            self.reason = f"a verification took {seconds:.2f} s, the limit is {limit:.2f} s"
        else:
            self.pause, self.reason = FIRST_PAUSE, None


class Fixed:
    """Always K, or as many as the draft has. ``timeout``: see :class:`TimeLimit`; ``why`` K is 0."""

    def __init__(self, k: int, *, timeout: float | None = None, why: str = "no draft"):
        self.k, self.why = k, why
        self.time = TimeLimit(timeout, None)

    def choose(self, outlook: tuple[int, int]) -> int:
        return 0 if self.time.resting() else min(self.k, outlook[1])

    def observe(self, outlook, proposed: int, accepted: int, seconds=None, rows=None) -> None:
        self.time.observe(proposed, seconds, rows)

    def off_reason(self) -> str | None:
        return self.time.reason if self.k else self.why


class Auto:
    """The K of one request.

    ``costs``: a :class:`~specloop.costs.CostCurve`, shared by all requests of a model, or seconds of a pass over 1, 2,
    ... rows, which then stay as they are. ``draft_cost``: seconds per draft without strength, or a CostCurve whose
    first entry that is and which the rounds keep fresh. ``steady``: nominal costs to decide by, in passes over one row,
    as ``draft_cost`` then is; None = by ``costs``. ``timeout``: see :class:`TimeLimit`. ``tree``: nodes of the trees
    that drafts without strength are, as many however deep (K).
    """

    def __init__(self, costs: Sequence[float], draft_cost=0.0, *, steady=None, timeout: float | None = None, tree=0):
        self.tree = tree
        self.live = CostCurve.given(costs)
        self.costs = self.live if steady is None else CostCurve.given(steady)
        self._draft_cost = draft_cost
        self.steady = steady is not None
        self.time = TimeLimit(timeout, self.live)
        self.counters = [Counter() for _ in range(CELLS)]  # by strength, then by position where there is none
        self.counters += [Counter(DECAY_BY_POSITION, WEIGHT_BY_POSITION) for _ in range(CELLS)]
        self.pause = FIRST_PAUSE
        self.skipped = 0  # rounds in which drafting did not pay, since the last probe
        self.probing = False
        self.strength, self.streak = 0, 0
        self.last_best: float | None = None

    @property
    def draft_cost(self) -> float:
        """Of a draft without strength, in passes over one row."""
        if isinstance(self._draft_cost, CostCurve):  # both as they are now
            return self._draft_cost[0] / self.costs[0]
        return self._draft_cost / self.costs.measured[0]

    def choose(self, outlook: tuple[int, int]) -> int:
        """K for this round as if it were alone; 0 also where drafting is not expected to pay, with a probe now and
        then."""
        return plan([self], [outlook])[0]

    def survival(self, outlook: tuple[int, int]) -> list[float]:
        """The chance of each draft to be accepted with all before it.

        Before it has been seen, a token deeper in the draft is believed to be as good as the one before it: otherwise
        a K that never was tried would never be.
        """
        strength, limit = outlook
        reach, rate, chances = 1.0, 0.0, []
        for j in range(limit):
            belief = prior(strength + j) if strength or not j else 0.0
            rate = self.counters[self.cell(strength, j)].rate(max(belief, rate))
            reach *= rate
            chances.append(reach)
        return chances

    @staticmethod
    def cell(strength: int, j: int) -> int:
        """Which counter is that of draft ``j`` of a proposal of that strength."""
        return cell(strength + j) if strength else CELLS + cell(j)

    def settle(self, outlook: tuple[int, int], k: int, speed: float) -> int:
        """What becomes of the planned K (0 = it does not pay), ``speed`` being expected of it, plain decoding 1."""
        strength, limit = outlook
        self.streak = self.streak + 1 if strength == self.strength + 1 else 0
        self.strength, self.last_best = strength, speed
        if k:
            self.probing = False
            return k
        self.skipped += 1
        self.probing = self.skipped >= self.pause or self.streak >= STREAK
        return min(PROBE, limit) if self.probing else 0

    def observe(self, outlook: tuple[int, int], proposed: int, accepted: int, seconds=None, rows=None) -> None:
        """The fate of a whole round: ``accepted`` of ``proposed`` drafts; its pass over ``rows`` rows, those of others
        with them, took ``seconds``. Rounds that were cut by a stop, the length limit or a fault must not come here.
        """
        self.time.observe(proposed, seconds, rows)
        if seconds is not None and rows is not None:
            self.live.observe(rows, seconds)
        if not proposed:
            return
        strength = outlook[0]
        expected = sum(self.survival((strength, proposed))) if self.probing else 0.0
        judged = [self.cell(strength, j) for j in range(min(accepted + 1, proposed))]
        for j, at in enumerate(judged):
            self.counters[at].observe(j < accepted)
        for at in {self.cell(strength, j) for j in range(len(judged), proposed)} - set(judged):
            self.counters[at].fade()
        if self.probing:
            surprise = accepted > expected + 0.5  # acceptance has moved
            self.pause = FIRST_PAUSE if surprise else min(self.pause * 2, LONGEST_PAUSE)
            self.skipped, self.streak, self.probing = 0, 0, False

    def off_reason(self) -> str | None:
        if self.time.reason is not None:
            return self.time.reason
        if self.last_best is None or self.last_best >= MIN_SPEEDUP:
            return None
        return f"drafting does not pay: {self.last_best:.2f}x expected at the measured acceptance and cost"


def plan(controllers: Sequence, outlooks: Sequence[tuple[int, int]]) -> list[int]:
    """K for each of the requests that share a round; ``outlooks``: (strength, limit) of their drafts.

    The drafts of requests that are fixed or steady are decided alone and given; those of the others are shared out
    among what they leave. All controllers of one call work with the same costs.
    """
    ks, free, alone = [0] * len(controllers), [], len(controllers) == 1
    for i, (controller, outlook) in enumerate(zip(controllers, outlooks, strict=True)):
        if not isinstance(controller, Auto) or (controller.steady and not alone):
            ks[i] = min(controller.choose(outlook), outlook[1])
        elif min(outlook[1], len(controller.costs) - 1) > 0 and not controller.time.resting():
            free.append(i)
    if free:
        limits = [min(outlooks[i][1], len(controllers[i].costs) - 1) for i in free]
        crew = [(controllers[i], (outlooks[i][0], limit)) for i, limit in zip(free, limits, strict=True)]
        for i, k in zip(free, _share(crew, len(controllers), sum(ks)), strict=True):
            ks[i] = k
    return ks


def _share(crew, requests, given):
    """The K of each (controller, outlook); ``requests`` take part in the pass, and ``given`` drafts are decided."""
    costs = crew[0][0].costs
    unit = costs.seconds(1)
    drafts = [(-a, i) for i, (auto, outlook) in enumerate(crew) for a in auto.survival(outlook)]
    drafts.sort()  # by survival; a request's own stay in order, for equal ones belong to it anyway
    rows, begun = requests + given, set()
    plain = requests / costs.seconds(rows)
    best, best_n, expected, drafting = 0.0, 0, float(requests), 0.0
    for n, (a, i) in enumerate(drafts, 1):
        expected -= a
        auto, (strength, _) = crew[i]
        new = 1 if strength or not auto.tree else 0 if i in begun else auto.tree
        begun.add(i)
        rows += new
        drafting += 0.0 if strength else new * auto.draft_cost * unit
        speed = expected / (costs.seconds(rows) + drafting)
        if speed > best:
            best, best_n = speed, n
    gain = best / plain
    ks = [0] * len(crew)
    if gain >= MIN_SPEEDUP:
        for _, i in drafts[:best_n]:
            ks[i] += 1
    unpaid = min(gain, 1.0) if any(ks) else gain  # others' drafts pay, and one more would not
    return [auto.settle(outlook, k, gain if k else unpaid) for (auto, outlook), k in zip(crew, ks, strict=True)]


def worth_drafting(max_new_tokens: int, costs: Sequence[float], draft_cost: float = 0.0, start: float = 0.0) -> bool:
    """Whether an answer of at most so many tokens can be expected to come sooner with drafts.

    ``costs``: seconds of a pass over 1, 2, ... rows; ``draft_cost``: seconds per draft; ``start``: seconds before the
    first draft can be made (a model that has to be loaded and to read the prompt). The draft is taken for a good one,
    9 of 10 tokens accepted; the best K of each round comes out of dynamic programming from the end. Labels, numbers and
    yes-or-no answers end here: nothing is gained that would pay for a draft.
    """
    costs, rate = CostCurve.given(costs), GOOD
    shown = min(max_new_tokens, 16)  # from there on each token saves as much as the one before
    times = [0.0, costs.seconds(1)]
    for n in range(2, shown + 1):
        ways = [costs.seconds(1) + times[n - 1]]
        for k in range(1, min(K_MAX, n - 1) + 1):
            rest = sum((1 - rate) * rate**j * times[n - 1 - j] for j in range(k)) + rate**k * times[n - 1 - k]
            ways.append(costs.seconds(k + 1) + k * draft_cost + rest)
        times.append(min(ways))
    if max_new_tokens < 2:
        return False
    plain, drafted = max_new_tokens * costs.seconds(1), times[shown] * max_new_tokens / shown + start
    return plain >= MIN_SPEEDUP * drafted


def worth_loading(max_new_tokens: int) -> bool:
    """Whether a draft model can be expected to win back the time that it takes to load, said before anything is known
    of the machine: about 0.1 s, with passes of 10 ms and a draft of a tenth of the target.
    """
    return worth_drafting(max_new_tokens, [0.01 + 0.0006 * n for n in range(K_MAX + 1)], 0.001, start=0.1)
