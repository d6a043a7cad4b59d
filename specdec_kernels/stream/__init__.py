"""Weights that stream: block by block from a file under a byte budget, each block read once per pass."""

from .errors import BudgetError, PackError, StreamError
from .pack import Pack
from .writer import PackWriter
