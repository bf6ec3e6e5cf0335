"""accept.open: everybody is queued."""

from treadle import Accept, hookimpl


class Open:
    """Accept every request, however long the queue."""

    @hookimpl
    def accept(self) -> Accept:
        """Yes."""
        return Accept()
