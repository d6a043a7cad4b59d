"""What specloop raises when it refuses something. Every message is one line that says what was wrong and where."""

import contextlib
import re


class SpecloopError(Exception):
    """The base of all of them: catch this to catch everything that specloop refuses on purpose."""


class ModelError(SpecloopError, ValueError):
    """The model can't be found, or it is one that specloop does not run."""


class FormatError(ModelError):
    """The model's file is malformed, truncated, or uses a feature that the reader does not know."""


class PromptError(SpecloopError, ValueError):
    """The prompt can't be used: not text, or too long for the context."""


class TemplateError(PromptError):
    """The chat template is malformed, refuses the messages, or takes too much time or room."""


class OptionError(SpecloopError, ValueError):
    """An option has a value that can't be used; the message names the option, what was expected and what came."""


class ModelFault(SpecloopError, RuntimeError):
    """The model's logits leave no token to emit (all NaN or -inf); whatever was emitted before stands."""


class BudgetError(OptionError):
    """A memory budget that can't be read or kept; the message names the smallest one that can."""


class WeightsError(SpecloopError, RuntimeError):
    """Weights that stream can't be had any more: the file changed or could not be read. What was emitted stands."""


class TrainingError(SpecloopError, RuntimeError):
    """A training can't go on: its loss is no number any more. The message names the place and the last good state."""


class LoadCancelled(SpecloopError, RuntimeError):
    """``Pair.cancel_load`` ended the loading, or the pair was closed meanwhile."""


class PairClosed(SpecloopError, RuntimeError):
    """The pair was closed: its models are gone. What running requests had emitted stands."""


class OutOfMemory(SpecloopError, MemoryError):
    """An allocation failed, and all was given back that can be. What was emitted stands."""


@contextlib.contextmanager
def translated():
    """What specdec_kernels.stream raises, as errors of specloop."""
    from specdec_kernels import stream

    try:
        yield
    except stream.PackError as error:
        raise FormatError(str(error)) from None
    except stream.BudgetError as error:
        # Here the option has this name; what it is called below is an argument that nobody here gave.
        raise BudgetError(re.sub(r"^budget\b", "memory_budget", str(error))) from None
    except stream.StreamError as error:
        raise WeightsError(str(error)) from None


def show(value):
    """Something that came from outside, as it may stand in a message: quoted, one line, not too long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        text = "an integer too long to write"
    return text if len(text) <= 80 else text[:77] + "..."
