"""What a stream tells about itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamStats:
    """What a stream has done so far, and what it holds now. Sizes in bytes, times in seconds."""

    active: bool  # something is read in every pass
    engine: str | None  # how it is read; None = nothing is
    passes: int  # that came to their end
    bytes_read: int  # from the file, resident blocks and what was read ahead included
    streamed_bytes: int  # of the streamed blocks that were handed out
    row_bytes: int  # read by rows()
    read_seconds: float  # in which there was something to read: with bytes_read the bandwidth
    wait_seconds: float  # for which a pass stood still
    resident_bytes: int
    slots: int
    slot_bytes: int  # of each
    peak_bytes: int  # most that resident blocks and slots took together
    reused: int  # how often a slot was filled again
    dropped: int  # blocks read in vain: a pass took another turn
    link: str | None  # how blocks get to a device: pinned, ring (of page-locked pieces), pageable; None = none does
    copied_bytes: int  # to the device
    pinned_bytes: int  # of the host, page-locked now
