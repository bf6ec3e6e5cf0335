"""order.fcfs: first come, first served."""

from treadle import Request
from treadle_plugins.order.waiting_queue import KeyedOrder


class Fcfs(KeyedOrder):
    """In the order of submission. Nobody is ever overtaken."""

    def key(self, request: Request) -> float:
        """The number of its submission."""
        return request.sequence
