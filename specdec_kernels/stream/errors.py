"""What streaming raises when it refuses something. Every message names the argument or the file, and says why."""


class BudgetError(ValueError):
    """A memory budget that can't be read or kept; the message names the smallest one that can."""


class PackError(ValueError):
    """A file that is malformed, truncated, or of a kind that is not read."""


class StreamError(RuntimeError):
    """Weights that can't be had any more: reading failed, the file changed, the stream was closed or forked."""
