"""The verify family as operations of torch.library, so that torch.compile takes each call as one node of its graph.

Eager calls go straight from the public functions to a backend; only while torch.compile or torch.export traces do the
public functions come here, to ``torch.ops.specdec.*``. Such an operation runs the public function, with all its checks;
what can be known without data (numbers of rows, devices) its fake checks while tracing. A schema can't say "a number or
a tensor", so such a parameter is two arguments, ``x`` for all requests and ``x_each``, which counts if it is there.
"""

import torch

import specdec_kernels as public

_SAMPLING = (
    "float temperature, Tensor? temperature_each, SymInt top_k, Tensor? top_k_each, float top_p, Tensor? top_p_each, "
    "float min_p, Tensor? min_p_each, Tensor? seed, Tensor? position"
)
_RULE = "str rule, float? theta, Tensor? theta_each, float[] typical"
_EITHER = ("temperature", "top_k", "top_p", "min_p", "theta", "index")  # a number or a tensor
_library = torch.library.Library("specdec", "DEF")


def call(name, *tensors, **options):
    """The arguments of a public function -> the outputs of its operation, with an empty tensor for logprobs = None."""
    return getattr(torch.ops.specdec, name)(*tensors, **arguments(options))


def arguments(options):
    """Keyword arguments of a public function as its schema has them."""
    result = dict(options)
    for name in _EITHER:
        if name in options:
            value = options[name]
            given = isinstance(value, torch.Tensor)
            result[name], result[name + "_each"] = (0, value) if given else (value, None)
    return result


def _options(arguments):
    """The way back."""
    return {
        name: value if arguments.get(name + "_each") is None else arguments[name + "_each"]
        for name, value in arguments.items()
        if not name.endswith("_each")
    }


def _define(schema, run, fake):
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specdec::{name}", fake, lib=_library)


def _logprobs(value, like):
    return like.new_empty((0,), dtype=torch.float32) if value is None else value


def _check(name, logits, rows, *others):
    torch._check(
        logits.dim() == 2 and logits.shape[0] == rows,
        lambda: f"{name}: expected [{rows}, V], got shape {list(logits.shape)}",
    )
    for other in others:
        torch._check(
            other.device == logits.device,
            lambda other=other: f"{name}: expected all tensors on {logits.device}, got one on {other.device}",
        )


def _width(name, value):
    """The width of the outputs can't depend on data while a graph is traced."""
    torch._check(value is not None, lambda: f"{name}: expected an integer under torch.compile, got None")
    return value


def _fake_verdict(like, requests, width, return_logprobs):
    """Tokens, num_accepted, logprobs, flags."""
    return (
        like.new_empty((requests, width), dtype=torch.int64),
        like.new_empty((requests,), dtype=torch.int32),
        like.new_empty((requests, width) if return_logprobs else (0,), dtype=torch.float32),
        like.new_empty((requests,), dtype=torch.int32),
    )


# ---- verify --------------------------------------------------------------------------------------


def _verify(*tensors, **arguments):
    tokens, num_accepted, logprobs, flags = public.verify(*tensors, **_options(arguments))
    return tokens, num_accepted, _logprobs(logprobs, tokens), flags


def _fake_verify(target_logits, draft_tokens, cu_drafts, *, max_drafts, return_logprobs, **_):
    requests, width = cu_drafts.shape[0] - 1, _width("max_drafts", max_drafts) + 1
    _check("target_logits", target_logits, draft_tokens.shape[0] + requests, draft_tokens, cu_drafts)
    return _fake_verdict(target_logits, requests, width, return_logprobs)


_define(
    "verify(Tensor target_logits, Tensor draft_tokens, Tensor cu_drafts, *, Tensor? draft_logits, Tensor? draft_probs, "
    f"Tensor? draft_ids, Tensor? draft_kind, {_SAMPLING}, SymInt? max_drafts, {_RULE}, bool return_logprobs) "
    "-> (Tensor tokens, Tensor num_accepted, Tensor logprobs, Tensor flags)",
    _verify,
    _fake_verify,
)

# ---- verify_tree ---------------------------------------------------------------------------------


def _verify_tree(*tensors, **arguments):
    path, tokens, num_accepted, logprobs, flags = public.verify_tree(*tensors, **_options(arguments))
    return path, tokens, num_accepted, _logprobs(logprobs, tokens), flags


def _fake_verify_tree(target_logits, tree_tokens, parents, cu_nodes, *, max_depth, return_logprobs, **_):
    requests, width = cu_nodes.shape[0] - 1, _width("max_depth", max_depth) + 1
    _check("target_logits", target_logits, tree_tokens.shape[0] + requests, tree_tokens, parents, cu_nodes)
    path = target_logits.new_empty((requests, max_depth), dtype=torch.int32)
    return path, *_fake_verdict(target_logits, requests, width, return_logprobs)


_define(
    "verify_tree(Tensor target_logits, Tensor tree_tokens, Tensor parents, Tensor cu_nodes, *, Tensor? draft_probs, "
    f"SymInt? max_depth, {_RULE}, {_SAMPLING}, bool return_logprobs) "
    "-> (Tensor path, Tensor tokens, Tensor num_accepted, Tensor logprobs, Tensor flags)",
    _verify_tree,
    _fake_verify_tree,
)

# ---- sample --------------------------------------------------------------------------------------


def _sample(logits, *, return_logprobs, **arguments):
    result = public.sample(logits, return_logprobs=return_logprobs, **_options(arguments))
    return result if return_logprobs else (result, _logprobs(None, result))


def _fake_sample(logits, *, return_logprobs, **_):
    requests = logits.shape[0]
    _check("logits", logits, requests)
    return (
        logits.new_empty((requests,), dtype=torch.int64),
        logits.new_empty((requests if return_logprobs else 0,), dtype=torch.float32),
    )


_define(
    f"sample(Tensor logits, *, {_SAMPLING}, int stream, SymInt index, Tensor? index_each, bool return_logprobs) "
    "-> (Tensor tokens, Tensor logprobs)",
    _sample,
    _fake_sample,
)
