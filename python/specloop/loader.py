"""From a name to a model that can make text: in memory, or streamed from a pack under a byte budget."""

import functools
from dataclasses import fields

import torch

import specdec_kernels as sk
from specdec_kernels.stream import parse_bytes

from .checks import one_of
from .errors import FormatError, ModelError, OptionError, translated
from .fingerprint import digest
from .formats.locate import find_model, is_pack, open_checkpoint
from .heap import give_back
from .layout import check_layout
from .models.blueprint import DTYPES, Blueprint, Filler, nbytes
from .models.buffers import needs
from .models.config import LlamaConfig
from .models.llama import Llama
from .models.pool import DTYPES as CACHES
from .models.pool import PAGE
from .models.weights import Layer, Resident, Streamed, norms_of
from .options import DEVICES


def load_model(
    name,
    *,
    dtype="int8",
    kv="int8",
    context=2048,
    device="cpu",
    progress=None,
    memory_budget=None,
    reserved=None,
    share=None,
):
    """Loads a model of the llama family: returns (model, tokenizer, chat template or None).

    ``name``: "smollm2" or a path: a GGUF, a folder as Hugging Face has them, or a pack. ``dtype``: "int8" (group-wise
    codes), "bf16" or "f32". ``kv``: what the cache holds, "int8", "f16" or "f32". ``device``: "cpu", "cuda", or "auto"
    (a GPU if one can be used). ``progress(fraction)`` is called with 0 .. 1.

    ``memory_budget``: bytes, or "120MB", "120MiB", for weights, cache, workspace and logits together; what does not fit
    of the weights is read from a file in every pass. A model that is no pack is converted first, and its pack kept in
    the user's cache folder, but for a folder whose values are stored as ``dtype``. None: all weights in memory; a pack
    is mapped, and shared with other processes that do so.
    ``reserved``: {name: bytes} of the budget that something else needs: a draft. ``share(least)``: how many bytes of
    the budget are free now, ``least`` or more; the model takes the whole of it in ``model.grow()``.

    Raises ModelError (unknown model, architecture, shapes), FormatError (malformed file), BudgetError, OptionError.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if kv not in CACHES:
        raise ModelError(f"kv: expected one of {', '.join(CACHES)}, got {kv!r}")
    if memory_budget is not None:
        with translated():  # before a model is converted for it
            parse_bytes(memory_budget, "memory_budget")
    device, path = choose_device(device), find_model(name)
    options = {"kv": kv, "context": context, "name": str(name)}
    budgeted = {"device": device, "memory_budget": memory_budget, "reserved": reserved, "share": share}
    if is_pack(path):
        return load_pack(path, dtype=dtype, progress=progress, **budgeted, **options)
    with open_checkpoint(path) as checkpoint:
        if memory_budget is not None:
            from .convert import cached_pack
            from .in_place import folder_pack, streams_in_place

            text = checkpoint.tokenizer(), checkpoint.chat_template
            if streams_in_place(checkpoint, dtype):
                with translated():
                    pack = folder_pack(checkpoint, dtype)
                return streamed(pack, checkpoint.config, text, progress=progress, **budgeted, **options)
            path = cached_pack(checkpoint, dtype=dtype, progress=progress)
            return load_pack(path, dtype=dtype, text=text, progress=progress, **budgeted, **options)
        tokenizer = checkpoint.tokenizer()
        weights = resident_weights(checkpoint, dtype, progress)
        model = Llama(checkpoint.config, weights, eos_ids=tokenizer.eos_ids, **options)
        return model.to(device), tokenizer, checkpoint.chat_template


def resident_weights(checkpoint, dtype, progress=None):
    """All weights in memory.

    Every matrix is laid out before the first one is filled: temporaries among lasting allocations would leave holes
    between them, a tenth of the resident memory.
    """
    plan = Blueprint(checkpoint, dtype)
    parts = [*plan.layers, {"head": plan.head}, {} if plan.tied else {"embedding": plan.embedding}]
    sizes = [nbytes(part, dtype) + 128 for block in parts for part in block.values()]
    filler, memory = Filler(plan, progress), sk.LargePages(sum(sizes))  # one stretch, as a pass reads them
    made = {}  # a tied head is the embedding

    def lay_out(part):
        if id(part) not in made:
            made[id(part)] = part, filler.empty(part, memory)
        return made[id(part)][1]

    embedding = lay_out(plan.embedding)
    layers = [Layer(**{name: lay_out(part) for name, part in layer.items()}) for layer in plan.layers]
    head = lay_out(plan.head)
    for part, weight in made.values():
        filler.fill(part, weight)
    filler.finish()
    give_back()
    return Resident(embedding, layers, plan.norm, head)


def load_pack(path, *, dtype, text=None, **options):
    """A model over a pack; ``text``: its tokenizer and chat template, if they are known already. Else as `streamed`."""
    from specdec_kernels import stream

    from .text.stored import restored

    with translated():
        pack = stream.Pack.open(path)
    try:
        config, kind = model_config(pack)
        if kind != dtype:
            raise ModelError(f"dtype: the pack {path} holds {kind}, got {dtype!r}")
        check_layout(pack, config, dtype)
        text = text or restored(pack, path)
        give_back()
    except BaseException:
        pack.close()
        raise
    return streamed(pack, config, text, **options)


def streamed(
    pack,
    config,
    text,
    *,
    kv,
    context,
    device,
    memory_budget,
    name,
    progress=None,
    reserved=None,
    share=None,
    reader=None,
):
    """A model over an open pack, which it closes in the end: mapped if all of it may be in memory, else some blocks
    resident and the others streamed. ``reader``: options of :class:`specdec_kernels.stream.Reader` (engine, threads,
    limit, depth). ``share``: see `load_model`.
    """
    from specdec_kernels import stream

    tokenizer, template = text
    try:
        with translated():
            needed = needs(config, kv=kv, context=context) | (reserved or {})
            opened = functools.partial(stream.WeightStream, **(reader or {}))
            now = plan = stream.plan(pack, budget=memory_budget, device=device, reserved=needed)
            if share is not None:  # and a cache of one page, to try it out
                needed |= {"kv": needs(config, kv=kv, context=PAGE)["kv"]}
                least = stream.plan(pack, budget=memory_budget, device=device, reserved=needed).minimum
                now = stream.plan(pack, budget=share(least), device=device, reserved=needed)
            weights = Streamed(
                opened(pack, now, progress=progress),
                device,
                budget=None if memory_budget is None else plan.budget,
                whole=functools.partial(opened, plan=plan, verify=False),  # it was, when it was first read
            )
    except BaseException:
        pack.close()
        raise
    return Llama(config, weights, context=context, kv=kv, eos_ids=tokenizer.eos_ids, name=name), tokenizer, template


def model_config(pack):
    """(LlamaConfig, dtype) of a pack that ``specloop convert`` wrote."""
    from .convert import FORM

    told = pack.config if isinstance(pack.config, dict) else {}
    if told.get("form") != FORM:
        raise FormatError(f"{pack.path}: expected a pack of a model, form {FORM}, got form {told.get('form')!r}")
    known = {field.name for field in fields(LlamaConfig)}
    given = told.get("model")
    if not isinstance(given, dict) or not set(given) <= known or told.get("dtype") not in DTYPES:
        raise FormatError(f"{pack.path}: the description of the model is malformed")
    try:
        return LlamaConfig(**given), told["dtype"]
    except TypeError as error:
        raise FormatError(f"{pack.path}: the description of the model is malformed: {error}") from None


def size_in_memory(name, *, dtype, kv, context):
    """All that a model takes that is in memory as a whole, in bytes. Raises what opening it raises."""
    from specdec_kernels import stream

    from .convert import weights_nbytes

    path = find_model(name)
    with translated():
        if is_pack(path):
            with stream.Pack.open(path) as pack:
                config, weights = model_config(pack)[0], sum(pack.blocks[index].nbytes for index in pack.order)
        else:
            with open_checkpoint(path) as checkpoint:
                config, weights = checkpoint.config, weights_nbytes(checkpoint, dtype)
    return weights + sum(needs(config, kv=kv, context=context).values())


def fingerprint_of_file(name):
    """Of a model by its name (fingerprint.py), from its file: nothing but norms and vocabulary is read."""
    from specdec_kernels import stream

    from .text.stored import restored

    path = find_model(name)
    with translated():
        if is_pack(path):
            with stream.Pack.open(path) as pack:
                return digest(model_config(pack)[0], norms_of(pack), restored(pack, path)[0])
        with open_checkpoint(path) as checkpoint:
            return digest(checkpoint.config, checkpoint_norms(checkpoint), checkpoint.tokenizer())


def checkpoint_norms(checkpoint):
    """All RMS norms' vectors in the order of ``NORMS`` layer by layer, then the last one."""
    names = [f"{name}_layernorm" for name in ("input", "post_attention")]
    names += [f"self_attn.{name}_norm" for name in "qk"] if checkpoint.config.qk_norm else []
    for i in range(checkpoint.config.layers):
        yield from (checkpoint.read(f"model.layers.{i}.{name}.weight") for name in names)
    yield checkpoint.read("model.norm.weight")


def choose_device(name):
    """ "cpu" or "cuda" for what the user asked for. Raises OptionError where a GPU is asked for that can't be used, or
    something that is no device.
    """
    if one_of("device", name, DEVICES) == "cpu":
        return name
    reason = f"this torch ({torch.__version__}) sees none"
    if torch.cuda.is_available():
        status = {backend: sk.backends()[backend] for backend in ("cuda", "hip", "triton")}
        if any(state["usable"] for state in status.values()):
            return "cuda"
        reason = "; ".join(f"{backend}: {state['reason']}" for backend, state in status.items())
    if name == "cuda":
        raise OptionError(f"device: expected a GPU for 'cuda', but {reason}")
    return "cpu"
