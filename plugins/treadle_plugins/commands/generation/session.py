"""One run of `treadle generate`: from prompts to what is written."""

from __future__ import annotations

from treadle import Engine
from treadle.errors import TreadleError
from treadle_plugins.commands.generation.batches import Batch, Encoder, Result, stream, submit
from treadle_plugins.commands.generation.inputs import Inputs
from treadle_plugins.commands.generation.interrupts import Interrupt
from treadle_plugins.commands.generation.prompts import Ask
from treadle_plugins.commands.generation.results import Figures, Output, Progress, error_of, json_line, rows


class Session:
    """An engine, and where its answers go."""

    def __init__(self, engine: Engine, encoder: Encoder, interrupt: Interrupt, output: Output, figures: Figures) -> None:
        self._engine = engine
        self._encoder = encoder
        self._interrupt = interrupt
        self._output = output
        self._figures = figures

    def stream(self, ask: Ask) -> None:
        """Write one prompt's text as it comes. Raises TreadleError for what ended it early."""
        (handle,) = submit(self._engine, self._encoder, ask)
        last = ""
        for chunk in stream(self._engine, handle, self._interrupt):
            if chunk.text:
                self._output.write(chunk.text)
                last = chunk.text[-1]
        if last not in ("", "\n"):
            self._output.write("\n")
        completion = handle.completion()
        result = Result(ask, (completion,))
        self._figures.add(result)
        problem = error_of(result, completion)
        if problem is not None:
            raise TreadleError(problem) from completion.error

    def batch(self, inputs: Inputs, ahead: int, progress: Progress | None) -> None:
        """Write a line for each completion, in order."""
        batch = Batch(self._engine, self._encoder, self._interrupt, ahead)
        try:
            for result in batch.run(inputs.items(batch.wait_s)):
                self._output.write("".join(json_line(row) for row in rows(result)))
                self._figures.add(result)
                if progress:
                    progress.tick()
        finally:
            if progress:
                progress.finish()
