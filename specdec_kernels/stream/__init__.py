"""Weights that stream: block by block from a file under a byte budget, each block read once per pass."""

from .errors import BudgetError, PackError, StreamError
from .mapping import map_pack
from .pack import Pack
from .sealed import seal
from .writer import PackWriter
from .limits import available_memory, memory_limit, parse_bytes
from .reader import Reader, Ticket, aligned_empty
from .plan import Plan, plan
from .stats import StreamStats
from .weight_stream import LoadedBlock, WeightStream
from .footprint import Footprint, footprint
