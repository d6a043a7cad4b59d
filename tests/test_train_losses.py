"""Losses of a draft: values by plain formulas over the whole vocabulary, gradients by finite differences."""

import pytest
import torch

from specloop.train import losses
from specloop.train.head_loss import UNKNOWN, HeadLoss, Teacher, append, compare, with_ones
from specloop.train.losses import LOSSES, Rows, mixed

CUT, ALL = 24, 30  # the draft says the first 24 of 30 ids


def rows(seed=0, n=6, logits=None):
    g = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, CUT, generator=g, dtype=torch.float64) if logits is None else logits
    whole = torch.log_softmax(2 * torch.randn(n, ALL, generator=g, dtype=torch.float64), 1)
    whole[0, -1] = 2  # an argmax that the draft can't say
    whole = torch.log_softmax(whole, 1)
    best = whole.argmax(1)
    return Rows(z, whole[:, :CUT], torch.where(best < CUT, best, -1)), z, whole


def plain(name, z, whole):
    """The definition with q = 0 on the ids that were cut; the forward KL over the others, weighted with their mass."""
    p, q = whole.exp(), torch.nn.functional.pad(z.softmax(1), (0, ALL - CUT))
    m = p[:, :CUT].sum(1)
    kl = lambda a, b: torch.where(a > 0, a * (a / b).log(), 0).sum(1)
    alpha = torch.minimum(p, q).sum(1)
    forward = m * kl(p[:, :CUT] / m[:, None], q[:, :CUT])
    share = (-3 * alpha).exp()
    best = p.argmax(1)
    known = best < CUT
    at_best = z.softmax(1).gather(1, best.clamp(max=CUT - 1)[:, None])[:, 0]
    wrong = z.softmax(1).scatter(1, best.clamp(max=CUT - 1)[:, None], 0).topk(losses.HARDEST, 1).values.sum(1)
    return {
        "kl": forward,
        "reverse_kl": kl(q, p),
        "jsd": (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
        "tv": (p - q).abs().sum(1) / 2,
        "lk": share * forward + (1 - share) * (1 - alpha),
        "ce": -at_best.log() * known,
        "contrastive": -(at_best / (at_best + wrong)).log() * known,
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_values_are_those_of_the_formula(name):
    found, z, whole = rows()
    assert 1 - found.mass[0] > 0.1 and (found.best == -1).any() and (found.best >= 0).any()
    torch.testing.assert_close(LOSSES[name](found)[0], plain(name, z, whole), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name):
    found, z, whole = rows(1)
    gradient, step = LOSSES[name](found)[1], 1e-6
    share = (-3 * found.alpha).exp()  # of lk, which is no variable
    values = (lambda x: share * plain("kl", x, whole) + (1 - share) * plain("tv", x, whole)) if name == "lk" else (
        lambda x: plain(name, x, whole)
    )  # fmt: skip
    for column in range(CUT):
        moved = torch.zeros_like(z)
        moved[:, column] = step
        slope = (values(z + moved) - values(z - moved)) / (2 * step)
        torch.testing.assert_close(gradient[:, column], slope, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_each_lowers_its_own_objective(name):
    """By gradient descent on the logits, to where it can get; alpha follows, for those that speak of all of p."""
    _, z, whole = rows(2)
    best = whole.argmax(1)
    best = torch.where(best < CUT, best, -1)
    began = Rows(z, whole[:, :CUT], best)
    for _ in range(300):
        z = z - 1.0 * LOSSES[name](Rows(z, whole[:, :CUT], best))[1]
    ended = Rows(z, whole[:, :CUT], best)
    before, after = (LOSSES[name](r)[0].sum() for r in (began, ended))
    assert after < before - 0.1 * before.abs()
    if name in ("kl", "reverse_kl", "jsd", "tv", "lk"):
        assert (ended.alpha[1:] > began.alpha[1:]).all() and (ended.alpha <= ended.mass + 1e-9).all()
    else:
        assert ended.agreed.sum() == (best >= 0).sum() > began.agreed.sum()


def test_alpha_is_what_verification_accepts():
    """The probability that a token drawn from q is taken: the sum over it of q min(1, p / q)."""
    found, z, whole = rows(3)
    q = z.softmax(1)
    torch.testing.assert_close(found.alpha, (q * (whole[:, :CUT].exp() / q).clamp(max=1)).sum(1))


def test_a_mixture_is_the_sum():
    found, *_ = rows(4)
    value, gradient = mixed(found, {"lk": 1.0, "ce": 0.25, "contrastive": 0.5})
    parts = [(w, LOSSES[name](found)) for name, w in (("lk", 1), ("ce", 0.25), ("contrastive", 0.5))]
    torch.testing.assert_close(value, sum(w * v for w, (v, _) in parts))
    torch.testing.assert_close(gradient, sum(w * g for w, (_, g) in parts))


def setting(n=600, d=16, depths=2):
    g = torch.Generator().manual_seed(5)
    numbers = lambda *shape: torch.randn(*shape, generator=g)
    target, features, lse = numbers(ALL, d), numbers(n, d), torch.empty(n)
    whole = features @ target.T
    lse = whole.logsumexp(1)
    best = whole.argmax(1)
    teacher = Teacher(with_ones(target[:CUT]), append(features, lse), torch.where(best < CUT, best, -1))
    states = numbers(depths, n, d).requires_grad_()
    head = numbers(CUT, d).requires_grad_()
    counted = torch.rand(depths, n, generator=g) < 0.8
    return teacher, states, head, counted, counted * torch.rand(depths, n, generator=g), whole - lse[:, None]


def test_the_head_in_chunks_is_the_head_at_once():
    """Loss and gradients of states and head against autograd through a plain formula on all logits."""
    teacher, states, head, counted, weights, whole = setting()
    loss, measured = HeadLoss.apply(states, head, teacher, counted, weights, {"kl": 1.0, "ce": 0.5}, torch.float32)
    loss.backward()
    found = states.grad, head.grad
    states.grad = head.grad = None
    log_q, p = (states @ head.T).log_softmax(2), whole[:, :CUT].exp()
    m = p.sum(1)
    kl = (p * (whole[:, :CUT] - log_q)).sum(2) - m * m.log()
    ce = -log_q.gather(2, teacher.best.clamp(min=0)[None, :, None].expand(2, -1, 1))[..., 0] * (teacher.best >= 0)
    plain = ((kl + 0.5 * ce) * weights).sum()
    plain.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(found[0], states.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1], head.grad, rtol=1e-4, atol=1e-5)
    alpha = torch.minimum(p, log_q.exp()).sum(2)
    torch.testing.assert_close(measured.alpha, alpha.detach(), rtol=1e-4, atol=1e-6)
    means, rows = measured.means()
    torch.testing.assert_close(means[1], torch.stack([alpha[i, counted[i]].mean() for i in (0, 1)]).detach().double())
    assert rows.tolist() == counted.sum(1).tolist()


def test_the_argmax_where_nobody_kept_it():
    teacher, states, head, counted, *_ = setting()
    known = compare(states.detach(), head.detach(), teacher, counted, {"ce": 1.0}, torch.float32)[0]
    teacher = teacher._replace(best=torch.full_like(teacher.best, UNKNOWN))
    found = compare(states.detach(), head.detach(), teacher, counted, {"ce": 1.0}, torch.float32)[0]
    # Where more was cut than the likeliest column has, the argmax counts as cut.
    same = (known.loss == found.loss)[0]
    assert same.float().mean() > 0.9 and (found.loss[0, ~same] == 0).all()


def test_the_target_in_bf16_stays_close():
    """A logit of 40 in bf16 is off by 0.1; with the lse in the product what is rounded is log p."""
    g = torch.Generator().manual_seed(6)
    target, features = torch.randn(ALL, 577, generator=g) / 8, torch.randn(200, 577, generator=g)
    target[:, -1], features[:, -1] = 40, 1
    target, features = target.bfloat16(), features.bfloat16()
    exact = features.double() @ target.double().T
    lse = exact.logsumexp(1)
    p = (exact - lse[:, None]).exp()
    made = Teacher(with_ones(target), append(features, lse.float()), None).log_p(0, 200)
    plain = (features @ target.T).float() - lse[:, None].float()
    off = lambda log_p: ((log_p.float().exp() - p).abs() / p)[p > 0.02].max().item()
    assert made.dtype is torch.bfloat16 and off(made) < 0.01 and off(plain) > 0.05
