"""From a name to a model that can make text: in memory, or streamed from a pack under a byte budget."""

import torch

import specdec_kernels as sk

from .errors import ModelError, OptionError
from .formats.gguf_checkpoint import GGUFCheckpoint
from .formats.locate import find_model
from .models.blueprint import DTYPES, Blueprint, Filler
from .models.cache import DTYPES as CACHES
from .models.llama import Llama
from .models.weights import Layer, Resident


def load_model(name, *, dtype="int8", kv="int8", context=2048, device="cpu", progress=None):
    """Loads a GGUF of the llama architecture: returns (model, tokenizer, chat template or None).

    ``name``: "smollm2" or a path. ``dtype``: "int8" (group-wise codes), "bf16" or "f32". ``kv``: what the cache holds,
    "int8", "f16" or "f32". ``device``: "cpu", "cuda", or "auto" (a GPU if one can be used). ``progress(fraction)`` is
    called with 0 .. 1. Raises ModelError (unknown model, architecture, shapes), FormatError (malformed file),
    OptionError.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if kv not in CACHES:
        raise ModelError(f"kv: expected one of {', '.join(CACHES)}, got {kv!r}")
    device = choose_device(device)
    with GGUFCheckpoint(find_model(name)) as checkpoint:
        tokenizer = checkpoint.tokenizer()
        weights = resident_weights(checkpoint, dtype, progress)
        eos_ids = tokenizer.eos_ids
        model = Llama(checkpoint.config, weights, context=context, kv=kv, eos_ids=eos_ids, name=str(name))
        return model.to(device), tokenizer, checkpoint.chat_template


def resident_weights(checkpoint, dtype, progress=None):
    """All weights in memory.

    Every matrix is laid out before the first one is filled: temporaries among lasting allocations would leave holes
    between them, a tenth of the resident memory.
    """
    plan = Blueprint(checkpoint, dtype)
    filler, memory = Filler(plan, progress), sk.LargePages()  # one stretch, as a pass reads them
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
    return Resident(embedding, layers, plan.norm, head)


def choose_device(name):
    """ "cpu" or "cuda" for what the user asked for. Raises OptionError where a GPU is asked for that can't be used."""
    if name == "cpu":
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
