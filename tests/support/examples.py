"""The examples of README and docs/ that a model answers. Their best tokens are far enough apart for rounding not to choose."""

from __future__ import annotations

from typing import NamedTuple


class Example(NamedTuple):
    """A prompt, and what the default model answers."""

    prompt: str
    answer: str
    num_tokens: int
    """Generated tokens, the one that ends the answer included."""
    chat: bool
    page: str
    """Where it stands."""


CLEAR = 0.4
"""What bfloat16 in the layers moves the difference of two logits by, on any processor that was met (up to 0.16), 2.5 times."""
QUESTION = "Name the capital of France."
EXAMPLES = (
    Example(QUESTION, "The capital of France is Paris.", 8, True, "README.md"),
    Example(QUESTION, "The capital of France is Paris.", 8, True, "docs/tutorial/first-run.md"),
    Example("The capital of France is", " Paris.", 2, False, "docs/tutorial/first-run.md"),
    Example("One, two, three,", " four, five,", 4, False, "docs/tutorial/first-run.md"),
    Example("Four, five, six,", " seven, eight,", 4, False, "docs/tutorial/first-run.md"),
)
