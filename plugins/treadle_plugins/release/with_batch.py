"""release.with_batch: blocks are held until the longest request of a batch is done, as static engines do."""

from treadle import Request, Step, hookimpl


class WithBatch:
    """A batch is what was admitted in one step."""

    @hookimpl
    def release(self, step: Step, request: Request) -> bool:
        """Once no other member runs."""
        return not any(other.batch == request.batch for other in step.running if other is not request)
